// Package measure finds out what two nodes of one process carry from one to the other: how much, at what cost in
// processor time and memory, and how soon. It knows nothing of what the nodes are.
package measure

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Pair are two nodes, of which the first dials the second.
type Pair struct {
	Listen       func(port uint16) (net.Listener, error)
	Dial         func(port uint16) (net.Conn, error)
	ListenPacket func(port uint16) (net.PacketConn, error)
	DialPacket   func(port uint16) (net.Conn, error)
}

// Result is what was found out. What a measure is not about is zero.
type Result struct {
	Rate   float64 // bytes a second that arrived, packets a second for UDP, requests a second for latencies
	Sent   float64 // packets a second that were sent, for UDP
	CPU    float64 // CPU-seconds for 10^9 bytes that arrived, of the whole process: both nodes
	Memory float64 // bytes, the most that the process had in memory (VmHWM)
	Median float64 // seconds, from a request to its answer
	P99    float64 // seconds, that 99 of 100 requests take at most
	Err    string  // why there is nothing
}

// Kinds of measures.
const (
	TCP     = "tcp"     // streams in one direction, as fast as they go
	UDP     = "udp"     // datagrams as fast as the sender can, of a size: how many arrive
	Request = "request" // requests of a byte and their answers, so many at a time
	Loaded  = "loaded"  // requests one at a time beside a stream of TCP
)

// What is a measure.
type What struct {
	Kind string
	N    int           // streams, bytes of a datagram, or requests at a time
	For  time.Duration // how long, after as much as a quarter of that, at least half a second, to warm up
}

// AtEnd is called by Main before it ends the process; nil: nothing is.
var AtEnd func()

// Main has a child process do one measure, and print its Result.
func Main(open func() (Pair, error), w What) {
	var r Result
	p, err := open()
	if err == nil {
		r, err = Do(p, w)
	}
	if err != nil {
		r = Result{Err: err.Error()}
	}
	if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
		os.Exit(1)
	}
	if AtEnd != nil {
		AtEnd()
	}
	os.Exit(0) // whatever the nodes still do
}

// Do does one measure.
func Do(p Pair, w What) (Result, error) {
	switch w.Kind {
	case TCP:
		return tcp(p, w)
	case UDP:
		return udp(p, w)
	case Request, Loaded:
		return request(p, w)
	}
	return Result{}, fmt.Errorf("measure %q: none of tcp, udp, request and loaded", w.Kind)
}

func (w What) warmUp() time.Duration { return max(w.For/4, 500*time.Millisecond) }

// cpu is what this process has used so far.
func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// memory is the most that this process had in memory so far; 0 where that cannot be read.
func memory() float64 {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, _ := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			return kb * 1024
		}
	}
	return 0
}

// stream sends for ever over n connections, and counts what arrives.
func stream(p Pair, port uint16, n int) (arrived *atomic.Int64, err error) {
	arrived = new(atomic.Int64)
	l, err := p.Listen(port)
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				b := make([]byte, 256<<10)
				for {
					n, err := c.Read(b)
					arrived.Add(int64(n))
					if err != nil {
						return
					}
				}
			}()
		}
	}()
	for range n {
		c, err := p.Dial(port)
		if err != nil {
			return nil, err
		}
		go func() {
			b := make([]byte, 128<<10)
			for {
				if _, err := c.Write(b); err != nil {
					return
				}
			}
		}()
	}
	return arrived, nil
}

func tcp(p Pair, w What) (Result, error) {
	arrived, err := stream(p, 7001, w.N)
	if err != nil {
		return Result{}, err
	}
	time.Sleep(w.warmUp())
	n, used, start := arrived.Load(), cpu(), time.Now()
	time.Sleep(w.For)
	bytes, took := float64(arrived.Load()-n), time.Since(start).Seconds()
	if bytes == 0 {
		return Result{}, errors.New("nothing arrived")
	}
	return Result{Rate: bytes / took, CPU: (cpu() - used).Seconds() / bytes * 1e9, Memory: memory()}, nil
}

func udp(p Pair, w What) (Result, error) {
	l, err := p.ListenPacket(7002)
	if err != nil {
		return Result{}, err
	}
	c, err := p.DialPacket(7002)
	if err != nil {
		return Result{}, err
	}
	var arrived, sent atomic.Int64
	go func() {
		b := make([]byte, 65536)
		read := func() error { _, _, err := l.ReadFrom(b); return err }
		if r, ok := l.(io.Reader); ok { // which makes no address
			read = func() error { _, err := r.Read(b); return err }
		}
		for {
			if err := read(); err != nil {
				return
			}
			arrived.Add(1)
		}
	}()
	go func() {
		b := make([]byte, w.N)
		for {
			if _, err := c.Write(b); err == nil {
				sent.Add(1)
			} else if errors.Is(err, net.ErrClosed) {
				return
			}
		}
	}()
	time.Sleep(w.warmUp())
	n, s, used, start := arrived.Load(), sent.Load(), cpu(), time.Now()
	time.Sleep(w.For)
	got, took := float64(arrived.Load()-n), time.Since(start).Seconds()
	if got == 0 {
		return Result{}, errors.New("nothing arrived")
	}
	return Result{Rate: got / took, Sent: float64(sent.Load()-s) / took, CPU: (cpu() - used).Seconds() / got / float64(w.N) * 1e9, Memory: memory()}, nil
}

func request(p Pair, w What) (Result, error) {
	l, err := p.Listen(7003)
	if err != nil {
		return Result{}, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				b := make([]byte, 1)
				for {
					if _, err := io.ReadFull(c, b); err != nil {
						return
					}
					if _, err := c.Write(b); err != nil {
						return
					}
				}
			}()
		}
	}()
	if w.Kind == Loaded {
		if _, err := stream(p, 7001, 1); err != nil {
			return Result{}, err
		}
	}
	var conns []net.Conn
	for range w.N {
		c, err := p.Dial(7003)
		if err != nil {
			return Result{}, err
		}
		conns = append(conns, c)
	}
	begin := time.Now().Add(w.warmUp())
	end := begin.Add(w.For)
	var mu sync.Mutex
	var all []time.Duration
	var failed error
	var asking sync.WaitGroup
	for _, c := range conns {
		asking.Go(func() {
			var took []time.Duration
			var err error
			b := make([]byte, 1)
			for at := time.Now(); at.Before(end) && err == nil; at = time.Now() {
				if _, err = c.Write(b); err == nil {
					_, err = io.ReadFull(c, b)
				}
				if err == nil && at.After(begin) {
					took = append(took, time.Since(at))
				}
			}
			mu.Lock()
			defer mu.Unlock()
			all, failed = append(all, took...), errors.Join(failed, err)
		})
	}
	asking.Wait()
	if failed != nil || len(all) == 0 {
		return Result{}, errors.Join(errors.New("requests without an answer"), failed)
	}
	slices.Sort(all)
	return Result{
		Rate: float64(len(all)) / w.For.Seconds(), Memory: memory(),
		Median: all[len(all)/2].Seconds(), P99: all[min(len(all)-1, len(all)*99/100)].Seconds(),
	}, nil
}

// Parse is What from a text such as tcp,4,2s, and String makes one of it.
func Parse(s string) (w What, err error) {
	parts := strings.Split(s, ",")
	if len(parts) != 3 {
		return w, fmt.Errorf("measure %q: not a kind, a number and a time", s)
	}
	w.Kind = parts[0]
	if w.N, err = strconv.Atoi(parts[1]); err == nil && w.N < 1 {
		err = fmt.Errorf("%d: below 1", w.N)
	}
	if err == nil {
		w.For, err = time.ParseDuration(parts[2])
	}
	if err != nil {
		return w, fmt.Errorf("measure %q: %w", s, err)
	}
	return w, nil
}

func (w What) String() string { return fmt.Sprintf("%s,%d,%v", w.Kind, w.N, w.For) }
