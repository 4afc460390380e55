package main

import (
	"time"

	"github.com/warren-mesh/warren/datapath/internal/bench/measure"
)

// row is one comparison: Warren and others do the same measure, and one figure of theirs is compared.
type row struct {
	name   string
	what   measure.What
	path   path   // in one process
	tunnel tunnel // across namespaces; zero: in one process
	others []other
	figure figure
	short  bool // among the few of -short
}

// other is who Warren is compared with, and at least by how much it is to be better; 0: that is not said.
type other struct {
	name  string
	floor float64
	as    *tunnel // other than Warren's
	label string  // in place of the name
}

// figure is what is compared. Of a ratio, more is better for Warren.
type figure struct {
	name string
	of   func(measure.Result) float64
	less bool // less is better
}

var (
	rate   = figure{"rate", func(r measure.Result) float64 { return r.Rate }, false}
	cpu    = figure{"CPU a byte", func(r measure.Result) float64 { return r.CPU }, true}
	memory = figure{"peak memory", func(r measure.Result) float64 { return r.Memory }, true}
	median = figure{"latency, median", func(r measure.Result) float64 { return r.Median }, true}
	p99    = figure{"latency, 99 %", func(r measure.Result) float64 { return r.P99 }, true}
)

const (
	turn     = 2 * time.Second
	longTurn = 6 * time.Second // where a connection takes its time to speed up
)

func wg(floor float64) other { return other{name: "wireguard-go", floor: floor} }
func ts(floor float64) other { return other{name: "tsnet", floor: floor} }

var (
	usual = path{mtu: 1420}
	jumbo = path{mtu: 8920}
)

// rows are what there is to compare.
func rows() []row {
	tcp1, tcp4 := measure.What{Kind: measure.TCP, N: 1, For: turn}, measure.What{Kind: measure.TCP, N: 4, For: turn}
	long := measure.What{Kind: measure.TCP, N: 1, For: longTurn}
	udp := func(n int) measure.What { return measure.What{Kind: measure.UDP, N: n, For: turn} }
	ask := func(n int) measure.What { return measure.What{Kind: measure.Request, N: n, For: turn} }
	loaded := measure.What{Kind: measure.Loaded, N: 1, For: turn}
	t1420, t1280, t8920 := tunnel{mtu: 1420, underlay: 1500}, tunnel{mtu: 1280, underlay: 1500}, tunnel{mtu: 8920, underlay: 9000}
	tuned := tunnel{mtu: 1420, underlay: 1500, tuned: true}
	narrow := tunnel{mtu: 1280, underlay: 1280}
	return []row{
		{name: "netstack: TCP, 1 stream", what: tcp1, path: usual, figure: rate, others: []other{wg(5.2), ts(1.5)}, short: true},
		{name: "netstack: TCP, 4 streams", what: tcp4, path: usual, figure: rate, others: []other{wg(4.6), ts(1.5)}, short: true},
		{name: "netstack: TCP, 1 stream, CPU a byte", what: tcp1, path: usual, figure: cpu, others: []other{wg(0), ts(0), {name: "floor", floor: 1 / 3.8}}},
		{name: "netstack: TCP, 1 stream, MTU 8920, CPU a byte", what: tcp1, path: jumbo, figure: cpu, others: []other{wg(0), {name: "floor"}}},
		{name: "netstack: TCP, 4 streams, peak memory", what: tcp4, path: usual, figure: memory, others: []other{wg(4), ts(0)}},
		{name: "netstack: TCP, 1 stream, 80 ms of round trip", what: long, path: path{mtu: 1420, delay: 80 * time.Millisecond}, figure: rate, others: []other{wg(2.5)}},
		{name: "netstack: TCP, 1 stream, 20 ms, 1 % loss", what: long, path: path{mtu: 1420, delay: 20 * time.Millisecond, loss: 0.01}, figure: rate, others: []other{wg(1)}},
		{name: "netstack: TCP, 1 stream, MTU 8920", what: tcp1, path: jumbo, figure: rate, others: []other{wg(0)}},
		{name: "netstack: UDP, 64 bytes", what: udp(64), path: usual, figure: rate, others: []other{wg(7.5), ts(0)}, short: true},
		{name: "netstack: UDP, 1392 bytes", what: udp(1392), path: usual, figure: rate, others: []other{wg(4.5)}},
		{name: "netstack: UDP, 1252 bytes", what: udp(1252), path: usual, figure: rate, others: []other{wg(0), ts(0)}},
		{name: "netstack: request and answer", what: ask(1), path: usual, figure: median, others: []other{wg(0), ts(0)}},
		{name: "netstack: request and answer, 32 at a time", what: ask(32), path: usual, figure: rate, others: []other{wg(0), ts(0)}},
		{name: "netstack: request beside a stream", what: loaded, path: usual, figure: median, others: []other{wg(0), ts(0)}},
		{name: "netstack: request beside a stream, 99 %", what: loaded, path: usual, figure: p99, others: []other{wg(0), ts(0)}},

		{name: "tun: TCP, 1 stream", what: tcp1, tunnel: t1420, figure: rate, short: true, others: []other{wg(1.5), {name: "nebula", floor: 5, as: &tunnel{underlay: 1500}}, {name: "nebula", floor: 3, as: &tuned, label: "nebula, tuned"}, {name: "veth"}}},
		{name: "tun: TCP, 4 streams", what: tcp4, tunnel: t1420, figure: rate, others: []other{wg(1), {name: "nebula", as: &tunnel{underlay: 1500}}, {name: "nebula", as: &tuned, label: "nebula, tuned"}, {name: "veth"}}},
		{name: "tun: TCP, 1 stream, CPU a byte", what: tcp1, tunnel: t1420, figure: cpu, others: []other{wg(0), {name: "nebula", as: &tuned, label: "nebula, tuned"}}},
		{name: "tun: TCP, 1 stream, MTU 1280", what: tcp1, tunnel: t1280, figure: rate, others: []other{wg(1)}},
		{name: "tun: TCP, 1 stream, MTU 8920", what: tcp1, tunnel: t8920, figure: rate, others: []other{wg(1)}},
		{name: "tun: UDP, 1200 bytes", what: udp(1200), tunnel: t1420, figure: rate, others: []other{wg(0), {name: "nebula", floor: 0.95, as: &tuned, label: "nebula, tuned"}}},
		{name: "tun: TCP, 1 stream, underlay of 1280 against 1500", what: tcp1, tunnel: narrow, figure: rate, others: []other{{name: "warren", floor: 0.5, as: &t1420, label: "Warren over 1500"}}},
	}
}
