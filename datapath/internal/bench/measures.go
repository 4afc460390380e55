package main

import (
	"slices"
	"strconv"
	"time"

	"github.com/warren-mesh/warren/datapath/internal/bench/load"
)

// measure is one kind of load, put on every contender in turn, round after round.
type measure struct {
	name  string // for -run
	title string
	// In process: what each contender does in a process of its own, by name.
	spec load.Spec
	in   []string
	// Between namespaces: what iperf3 is told, and the rigs by contender.
	iperf []string
	rigs  map[string]rigSpec
	order []string
	rows  []row
}

// row is a ratio that is taken from a measure: of Warren over another contender, in each round.
type row struct {
	figure string // of load.Result
	over   string // contender
	less   bool   // less is better
	must   float64
}

const (
	warrenNet = "Warren"
	theirNet  = "tun/netstack"
	tsnetName = "tsnet"
	floorName = "sealing alone"
)

// fullSize is the payload of a datagram that fills a packet of the default MTU of the contender.
func fullSize(contender string) int {
	if contender == tsnetName {
		return 1280 - 28
	}
	return 1420 - 28
}

var measures = []measure{
	{
		name: "tcp1", title: "TCP, one stream", spec: load.Spec{Kind: "tcp"},
		in: []string{warrenNet, theirNet, tsnetName, floorName},
		rows: []row{
			{"rate", theirNet, false, 5.2}, {"rate", tsnetName, false, 1.5}, {"cpu", theirNet, true, 0}, {"cpu", tsnetName, true, 0},
			{"cpu", floorName, true, 3.8}, {"mallocs", theirNet, true, 0},
		},
	},
	{
		name: "tcp4", title: "TCP, four streams", spec: load.Spec{Kind: "tcp", Streams: 4},
		in: []string{warrenNet, theirNet, tsnetName, floorName},
		rows: []row{
			{"rate", theirNet, false, 4.6}, {"rate", tsnetName, false, 1.5}, {"cpu", floorName, true, 0},
			{"peak", theirNet, true, 0.25}, {"peak", tsnetName, true, 0},
		},
	},
	{
		name: "tcp8920", title: "TCP, one stream, MTU 8920", spec: load.Spec{Kind: "tcp", MTU: 8920},
		in:   []string{warrenNet, theirNet, floorName},
		rows: []row{{"rate", theirNet, false, 0}, {"cpu", theirNet, true, 0}, {"cpu", floorName, true, 0}},
	},
	{
		name: "tcp80ms", title: "TCP, one stream, 80 ms of round trip", spec: load.Spec{Kind: "tcp", RTT: 80 * time.Millisecond, Warm: 3 * time.Second},
		in:   []string{warrenNet, theirNet},
		rows: []row{{"rate", theirNet, false, 2.5}},
	},
	{
		name: "tcploss", title: "TCP, one stream, 20 ms, 1 % lost each way", spec: load.Spec{Kind: "tcp", RTT: 20 * time.Millisecond, Loss: 0.01, Warm: 2 * time.Second, Duration: 4 * time.Second},
		in:   []string{warrenNet, theirNet},
		rows: []row{{"rate", theirNet, false, 1}},
	},
	{
		name: "udp64", title: "UDP, 64 bytes", spec: load.Spec{Kind: "udp", Size: 64},
		in:   []string{warrenNet, theirNet, tsnetName},
		rows: []row{{"packets", theirNet, false, 7.5}, {"packets", tsnetName, false, 0}, {"mallocs", theirNet, true, 0}},
	},
	{
		name: "udpfull", title: "UDP, full packets", spec: load.Spec{Kind: "udp", Size: -1},
		in:   []string{warrenNet, theirNet, tsnetName},
		rows: []row{{"packets", theirNet, false, 4.5}, {"packets", tsnetName, false, 0}},
	},
	{
		name: "ask1", title: "request and response, one at a time", spec: load.Spec{Kind: "ask"},
		in:   []string{warrenNet, theirNet, tsnetName},
		rows: []row{{"p50", theirNet, true, 0}, {"p50", tsnetName, true, 0}, {"p99", theirNet, true, 0}},
	},
	{
		name: "ask32", title: "request and response, 32 in parallel", spec: load.Spec{Kind: "ask", Streams: 32},
		in:   []string{warrenNet, theirNet, tsnetName},
		rows: []row{{"asks", theirNet, false, 0}, {"asks", tsnetName, false, 0}, {"p99", theirNet, true, 0}},
	},
	{
		name: "loaded", title: "request and response beside a TCP stream", spec: load.Spec{Kind: "loaded"},
		in:   []string{warrenNet, theirNet, tsnetName},
		rows: []row{{"p50", theirNet, true, 0}, {"p99", theirNet, true, 0}, {"p50", tsnetName, true, 0}, {"p99", tsnetName, true, 0}},
	},
	tunMeasure("tuntcp1", "TUN, TCP, one stream", nil, []row{
		{"rate", tunWG, false, 1.5}, {"rate", tunNebula, false, 5}, {"rate", tunTuned, false, 3}, {"rate", tunVeth, false, 0},
		{"rate", tunAll, false, 0}, {"rate", tunWGHalf, false, 0},
		{"cpu", tunWG, true, 0}, {"cpu", tunTuned, true, 0},
	}),
	tunMeasure("tuntcp4", "TUN, TCP, four streams", []string{"-P", "4"}, []row{
		{"rate", tunWG, false, 1.5}, {"rate", tunNebula, false, 5}, {"rate", tunTuned, false, 3}, {"rate", tunVeth, false, 0},
		{"rate", tunAll, false, 0}, {"rate", tunWGHalf, false, 0},
		{"peak", tunWG, true, 0}, {"peak", tunTuned, true, 0},
	}),
	tunMeasure("tunudp64", "TUN, UDP, 64 bytes", []string{"-u", "-b", "0", "-l", "64"}, []row{
		{"packets", tunWG, false, 0}, {"packets", tunNebula, false, 0}, {"packets", tunTuned, false, 0.95},
	}),
	tunMeasure("tunudp1200", "TUN, UDP, 1200 bytes", []string{"-u", "-b", "0", "-l", "1200"}, []row{
		{"packets", tunWG, false, 0}, {"packets", tunNebula, false, 0}, {"packets", tunTuned, false, 0.95},
	}),
	tunMTU(1280, 1500),
	tunMTU(8920, 9000),
	{
		name: "tununderlay", title: "TUN, TCP, underlay of 1280 bytes over 1500",
		rigs:  map[string]rigSpec{tunNarrow: {"warren", 0, 1280, true}, tunWarren: {"warren", 0, 1500, true}},
		order: []string{tunNarrow, tunWarren},
		rows:  []row{{"rate", tunWarren, false, 0.5}},
	},
}

const (
	tunWarren = "Warren tun"
	tunNarrow = "Warren tun, 1280"
	tunWG     = "wireguard-go program"
	tunNebula = "nebula as it comes"
	tunTuned  = "nebula tuned"
	tunVeth   = "veth, no tunnel"
	tunAll    = "Warren tun, all processors"
	tunWGHalf = "wireguard-go program, half the processors"
)

func tunMeasure(name, title string, iperf []string, rows []row) measure {
	order := []string{tunWarren, tunWG, tunNebula, tunTuned, tunVeth}
	for _, r := range rows {
		if !slices.Contains(order, r.over) {
			order = append(order, r.over)
		}
	}
	return measure{
		name: name, title: title, iperf: iperf, rows: rows,
		order: order,
		rigs: map[string]rigSpec{
			tunWarren: {"warren", 0, 1500, true}, tunAll: {"warren", 0, 1500, false},
			tunWG: {"wireguard-go", 1420, 1500, false}, tunWGHalf: {"wireguard-go", 1420, 1500, true},
			tunNebula: {"nebula", 0, 1500, false}, tunTuned: {"nebula tuned", 1420, 1500, false}, tunVeth: {"veth", 0, 1500, false},
		},
	}
}

func tunMTU(mtu, underlay int) measure {
	n := strconv.Itoa(mtu)
	return measure{
		name: "tunmtu" + n, title: "TUN, TCP, one stream, MTU " + n,
		order: []string{tunWarren, tunWG},
		rigs:  map[string]rigSpec{tunWarren: {"warren", mtu, underlay, true}, tunWG: {"wireguard-go", mtu, underlay, false}},
		rows:  []row{{"rate", tunWG, false, 1}, {"cpu", tunWG, true, 0}},
	}
}

// contenders of m, Warren first.
func (m measure) contenders() []string {
	if m.rigs != nil {
		return m.order
	}
	return m.in
}
