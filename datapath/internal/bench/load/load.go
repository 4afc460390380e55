// Package load puts load on two nodes of one process and says what it cost. Each contender of the comparison gives
// the nodes, and everything else is the same for all. A process carries one measure and ends, so that the processor
// time, the peak of memory and the garbage collector are of that contender alone.
package load

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Spec is what one process is to do.
type Spec struct {
	Kind     string        // "tcp", "udp", "ask" or "loaded"; see Run
	Streams  int           // connections at once of tcp and ask; 1 where it is 0
	Size     int           // bytes of payload of a datagram
	MTU      int           // of the tunnel; 0 is the contender's own
	RTT      time.Duration // round trip that the underlay adds
	Loss     float64       // share of packets that the underlay loses, each way
	Seed     uint64        // of the loss
	Warm     time.Duration // before anything is counted
	Duration time.Duration // what is counted
}

// Impaired reports whether the underlay delays or loses packets.
func (s Spec) Impaired() bool { return s.RTT != 0 || s.Loss != 0 }

// Result has the figures of a process by name:
//
//	rate    bytes a second of TCP payload that were read at the far end
//	packets datagrams a second that were read at the far end
//	asks    requests a second that were answered
//	p50,p99 seconds from a request to its answer
//	cpu     seconds of processor time, user and system, of both ends, a 10^9 bytes of payload read
//	peak    bytes of memory that were resident at most, over the whole life of the process, both ends
//	mallocs allocations a 1420 bytes of payload, or a datagram, both ends
type Result struct {
	Values map[string]float64
	Note   string // about the path, such as "direct"
	Error  string // why there are no values
}

// Node is one end.
type Node struct {
	Addr         string // in the mesh
	Listen       func(network, address string) (net.Listener, error)
	ListenPacket func(network, address string) (net.PacketConn, error)
	Dial         func(ctx context.Context, network, address string) (net.Conn, error)
}

// Pair are two nodes that can reach each other.
type Pair struct {
	A, B Node
	Note string
}

const setup = 30 * time.Second

// Main does what the JSON of a Spec asks for with the nodes that open makes, and writes the Result to standard output.
func Main(spec string, open func(Spec) (Pair, func(), error)) {
	var s Spec
	r := Result{}
	err := json.Unmarshal([]byte(spec), &s)
	if err == nil {
		var p Pair
		var end func()
		if p, end, err = open(s); err == nil {
			r.Note = p.Note
			r.Values, err = Run(p, s)
			end()
		}
	}
	Print(r, err)
}

// Print writes a Result, or why there is none, to standard output.
func Print(r Result, err error) {
	if err != nil {
		r = Result{Error: err.Error()}
	}
	json.NewEncoder(os.Stdout).Encode(r)
}

// Run puts load on a pair:
//
//	tcp    connections from A to B, over which A sends as fast as it can
//	udp    A sends datagrams as fast as it can, and what B reads is counted
//	ask    connections over each of which A sends 8 bytes and waits for them to come back, again and again
//	loaded one connection of ask beside one of tcp
func Run(p Pair, s Spec) (map[string]float64, error) {
	s.Streams = max(1, s.Streams)
	v := make(map[string]float64)
	var err error
	switch s.Kind {
	case "tcp":
		err = transfer(p, s, v, nil)
	case "udp":
		err = datagrams(p, s, v)
	case "ask":
		var a *asker
		if a, err = newAsker(p, s.Streams); err == nil {
			err = a.run(s, v)
		}
	case "loaded":
		var a *asker
		if a, err = newAsker(p, 1); err == nil {
			err = transfer(p, s, v, a)
		}
	default:
		err = fmt.Errorf("kind %q: unknown", s.Kind)
	}
	if err != nil {
		return nil, err
	}
	v["peak"] = peak()
	return v, nil
}

// meter says what was used since it was made.
type meter struct {
	at      time.Time
	cpu     time.Duration
	mallocs uint64
}

func newMeter() meter {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return meter{time.Now(), CPU(), m.Mallocs}
}

func (m meter) read(v map[string]float64, bytes, units float64) {
	n := newMeter()
	v["cpu"] = (n.cpu - m.cpu).Seconds() / bytes * 1e9
	v["mallocs"] = float64(n.mallocs-m.mallocs) / units
}

// CPU is the processor time that this process has used.
func CPU() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// peak is VmHWM, which unlike ru_maxrss does not begin with that of the process before exec. 0: not known.
func peak() float64 {
	b, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmHWM:" {
			kb, _ := strconv.ParseFloat(f[1], 64)
			return kb * 1024
		}
	}
	return 0
}

// connect returns n connections from A to B.
func connect(p Pair, n int, port string) (from, to []net.Conn, err error) {
	l, err := p.B.Listen("tcp", net.JoinHostPort(p.B.Addr, port))
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), setup)
	defer cancel()
	for range n {
		c, err := p.A.Dial(ctx, "tcp", net.JoinHostPort(p.B.Addr, port))
		if err != nil {
			return nil, nil, err
		}
		r, err := l.Accept()
		if err != nil {
			return nil, nil, err
		}
		from, to = append(from, c), append(to, r)
	}
	return from, to, nil
}

func transfer(p Pair, s Spec, v map[string]float64, beside *asker) error {
	from, to, err := connect(p, s.Streams, "5001")
	if err != nil {
		return err
	}
	var got atomic.Int64
	for i := range from {
		go func() {
			b := make([]byte, 256<<10)
			for {
				if _, err := from[i].Write(b); err != nil {
					return
				}
			}
		}()
		go func() {
			b := make([]byte, 256<<10)
			for {
				n, err := to[i].Read(b)
				got.Add(int64(n))
				if err != nil {
					return
				}
			}
		}()
	}
	defer func() {
		for i := range from {
			from[i].Close()
			to[i].Close()
		}
	}()
	time.Sleep(s.Warm)
	m, before := newMeter(), got.Load()
	if beside != nil {
		if err := beside.run(Spec{Duration: s.Duration}, v); err != nil {
			return err
		}
	} else {
		time.Sleep(s.Duration)
	}
	bytes := float64(got.Load() - before)
	v["rate"] = bytes / time.Since(m.at).Seconds()
	if bytes == 0 {
		return errors.New("nothing arrived")
	}
	m.read(v, bytes, bytes/1420)
	return nil
}

func datagrams(p Pair, s Spec, v map[string]float64) error {
	to := net.JoinHostPort(p.B.Addr, "5002")
	l, err := p.B.ListenPacket("udp", to)
	if err != nil {
		return err
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(context.Background(), setup)
	defer cancel()
	c, err := p.A.Dial(ctx, "udp", to)
	if err != nil {
		return err
	}
	defer c.Close()
	var got atomic.Int64
	first := make(chan struct{})
	go func() {
		b := make([]byte, 64<<10)
		for {
			if _, _, err := l.ReadFrom(b); err != nil {
				return
			}
			if got.Add(1) == 1 {
				close(first)
			}
		}
	}()
	b := make([]byte, s.Size)
	for end := time.Now().Add(setup); ; {
		if _, err := c.Write(b); err != nil {
			return err
		}
		select {
		case <-first:
		case <-time.After(50 * time.Millisecond):
			if time.Now().After(end) {
				return errors.New("no datagram arrived")
			}
			continue
		}
		break
	}
	// A full queue is an error of some stacks and none of others: the packet is lost, and what arrives counts.
	var enough atomic.Bool
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for !enough.Load() {
			if _, err := c.Write(b); errors.Is(err, net.ErrClosed) || errors.Is(err, io.ErrClosedPipe) {
				return
			}
		}
	}()
	defer func() { // before the nodes end: not every stack bears to be written to then
		enough.Store(true)
		select {
		case <-sent:
		case <-time.After(time.Second):
		}
	}()
	time.Sleep(s.Warm)
	m, before := newMeter(), got.Load()
	time.Sleep(s.Duration)
	n := float64(got.Load() - before)
	v["packets"] = n / time.Since(m.at).Seconds()
	if n == 0 {
		return errors.New("nothing arrived")
	}
	m.read(v, n*float64(s.Size), n)
	return nil
}

type asker struct{ conns []net.Conn }

func newAsker(p Pair, n int) (*asker, error) {
	from, to, err := connect(p, n, "5003")
	if err != nil {
		return nil, err
	}
	for _, c := range to {
		go io.Copy(struct{ io.Writer }{c}, c)
	}
	return &asker{from}, nil
}

func (a *asker) run(s Spec, v map[string]float64) error {
	var mu sync.Mutex
	var all []time.Duration
	var failed error
	var tasks sync.WaitGroup
	begin := time.Now().Add(s.Warm)
	end := begin.Add(s.Duration)
	for _, c := range a.conns {
		tasks.Go(func() {
			var took []time.Duration
			var err error
			c.SetDeadline(end.Add(10 * time.Second))
			for b := make([]byte, 8); ; {
				at := time.Now()
				if at.After(end) {
					break
				}
				binary.LittleEndian.PutUint64(b, uint64(len(took)))
				if _, err = c.Write(b); err != nil {
					break
				}
				if _, err = io.ReadFull(c, b); err != nil {
					break
				}
				if at.After(begin) {
					took = append(took, time.Since(at))
				}
			}
			mu.Lock()
			defer mu.Unlock()
			all, failed = append(all, took...), errors.Join(failed, err)
		})
	}
	tasks.Wait()
	if failed != nil {
		return failed
	}
	if len(all) == 0 {
		return errors.New("no request was answered")
	}
	slices.Sort(all)
	v["asks"] = float64(len(all)) / s.Duration.Seconds()
	v["p50"] = all[len(all)/2].Seconds()
	v["p99"] = all[len(all)*99/100].Seconds()
	return nil
}
