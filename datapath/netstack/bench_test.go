package netstack_test

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	theirs "golang.zx2c4.com/wireguard/tun/netstack"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
)

// BenchmarkTCP compares with wireguard-go's own netstack: two devices over loopback each, which take
// turns, so that whatever else the machine does hits both.
//
//	go test -run '^$' -bench TCP -benchtime 10x ./datapath/netstack/
func BenchmarkTCP(b *testing.B) {
	for _, streams := range []int{1, 4} {
		b.Run(fmt.Sprintf("streams=%d", streams), func(b *testing.B) {
			const size = 64 << 20 // bytes of one turn
			x, y := pair(b)
			p, q := theirPair(b, conn.NewDefaultBind)
			compare(b, streams, size, x, y, p, q)
		})
	}
}

// compare has two pairs take turns at sending size bytes.
func compare(b *testing.B, streams int, size int64, x, y *node, p, q *theirs.Net) {
	ours := newStreams(b, streams, func() (net.Listener, error) { return y.Listen("tcp", "10.0.0.2:80") }, x.DialContext)
	other := newStreams(b, streams, func() (net.Listener, error) {
		return q.ListenTCP(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 2), Port: 80})
	}, p.DialContext)
	ours.send(b, size/8)
	other.send(b, size/8)
	var u1, u2 usage
	b.SetBytes(size)
	b.ResetTimer()
	for range b.N {
		u1.measure(func() { ours.send(b, size) })
		b.StopTimer()
		u2.measure(func() { other.send(b, size) })
		b.StartTimer()
	}
	b.ReportMetric(0, "ns/op")
	report(b, u1, u2, float64(b.N)*float64(size))
}

// usage is what something took.
type usage struct {
	wall, cpu     time.Duration
	allocs, bytes uint64
}

func (u *usage) measure(do func()) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu, start := cpuTime(), time.Now()
	do()
	u.wall += time.Since(start)
	u.cpu += cpuTime() - cpu
	runtime.ReadMemStats(&after)
	u.allocs += after.Mallocs - before.Mallocs
	u.bytes += after.TotalAlloc - before.TotalAlloc
}

// report compares what it took to send so many bytes.
func report(b *testing.B, ours, theirs usage, size float64) {
	for name, u := range map[string]usage{"ours": ours, "theirs": theirs} {
		b.ReportMetric(size/1e6/u.wall.Seconds(), name+"-MB/s")
		b.ReportMetric(u.cpu.Seconds()/size*1e9, name+"-cpu-s/GB")
		b.ReportMetric(float64(u.allocs)/size*1e6, name+"-allocs/MB")
	}
	b.ReportMetric(theirs.wall.Seconds()/ours.wall.Seconds(), "ratio")
	b.ReportMetric(theirs.cpu.Seconds()/ours.cpu.Seconds(), "cpu-ratio")
}

// BenchmarkPath is BenchmarkTCP with one stream over paths that take time and lose packets.
//
//	go test -run '^$' -bench Path -benchtime 5x ./datapath/netstack/
func BenchmarkPath(b *testing.B) {
	for _, test := range []struct {
		name string
		path path
		size int64
	}{
		{"20ms", path{delay: 10 * time.Millisecond}, 64 << 20},
		{"80ms", path{delay: 40 * time.Millisecond}, 128 << 20},
		{"20ms,loss=1%", path{delay: 10 * time.Millisecond, loss: 0.01}, 4 << 20},
	} {
		b.Run(test.name, func(b *testing.B) {
			bind := func() conn.Bind { return over(test.path, conn.NewDefaultBind()) }
			x := newNode(b, "x", netstack.Options{Bind: bind}, "10.0.0.1")
			y := newNode(b, "y", netstack.Options{Bind: bind}, "10.0.0.2")
			connect(x, y)
			p, q := theirPair(b, bind)
			compare(b, 1, test.size, x, y, p, q)
		})
	}
}

// BenchmarkPeakMemory compares how much memory a process has had after it sent 512 MiB in four streams.
//
//	go test -run '^$' -bench PeakMemory -benchtime 3x ./datapath/netstack/
func BenchmarkPeakMemory(b *testing.B) {
	const which = "WARREN_PEAK_MEMORY"
	const size = 512 << 20
	if of := os.Getenv(which); of != "" { // the process to be measured
		var s *streams
		if of == "ours" {
			x, y := pair(b)
			s = newStreams(b, 4, func() (net.Listener, error) { return y.Listen("tcp", "10.0.0.2:80") }, x.DialContext)
		} else {
			p, q := theirPair(b, conn.NewDefaultBind)
			s = newStreams(b, 4, func() (net.Listener, error) {
				return q.ListenTCP(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 2), Port: 80})
			}, p.DialContext)
		}
		s.send(b, size)
		return
	}
	peaks := make(map[string][]float64)
	for range b.N {
		for _, of := range []string{"ours", "theirs"} {
			cmd := exec.Command(os.Args[0], "-test.run", "^$", "-test.bench", "^BenchmarkPeakMemory$", "-test.benchtime", "1x")
			cmd.Env = append(os.Environ(), which+"="+of)
			if out, err := cmd.CombinedOutput(); err != nil {
				b.Fatalf("%v\n%s", err, out)
			}
			peaks[of] = append(peaks[of], float64(peakMemory(cmd.ProcessState))/1e6)
		}
	}
	ours, theirs := median(peaks["ours"]), median(peaks["theirs"])
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ours, "ours-MB")
	b.ReportMetric(theirs, "theirs-MB")
	b.ReportMetric(ours/theirs, "ratio")
}

func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

// BenchmarkManyAddresses sends beside idle connections to as many addresses of Local, which should not
// make it slower.
//
//	go test -run '^$' -bench ManyAddresses -benchtime 5x ./datapath/netstack/
func BenchmarkManyAddresses(b *testing.B) {
	for _, idle := range []int{0, 1000, 4000} {
		b.Run(fmt.Sprintf("idle=%d", idle), func(b *testing.B) {
			const size = 64 << 20
			x := newNode(b, "x", netstack.Options{}, "10.0.0.1")
			y := newNode(b, "y", netstack.Options{}, "10.0.0.2")
			y.want.Local = set("10.9.0.0/16")
			connect(x, y)
			l, err := y.Listen("tcp", ":81")
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			go echoTCP(l)
			for i := range idle {
				c, err := x.DialContext(within(b, timeout), "tcp", fmt.Sprintf("10.9.%d.%d:81", i>>8, i&255))
				if err != nil {
					b.Fatal(err)
				}
				defer c.Close()
			}
			s := newStreams(b, 1, func() (net.Listener, error) { return y.Listen("tcp", "10.0.0.2:80") }, x.DialContext)
			s.send(b, size/8)
			b.SetBytes(size)
			for b.Loop() {
				s.send(b, size)
			}
		})
	}
}

// streams are connections with someone who reads all that is sent.
type streams struct {
	conns []net.Conn
	acks  []chan int64 // what the reader of each got so far
}

func newStreams(b *testing.B, n int, listen func() (net.Listener, error), dial func(context.Context, string, string) (net.Conn, error)) *streams {
	b.Helper()
	l, err := listen()
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	s := &streams{}
	for range n {
		c, err := dial(within(b, timeout), "tcp", "10.0.0.2:80")
		if err != nil {
			b.Fatal(err)
		}
		r, err := l.Accept()
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { c.Close(); r.Close() })
		ack := make(chan int64, 1024)
		s.conns, s.acks = append(s.conns, c), append(s.acks, ack)
		go func() {
			defer close(ack)
			buf := make([]byte, 256<<10)
			for {
				n, err := r.Read(buf)
				if n > 0 {
					ack <- int64(n)
				}
				if err != nil {
					return
				}
			}
		}()
	}
	return s
}

// send sends size bytes over all connections and returns how long it took until they were read.
func (s *streams) send(b *testing.B, size int64) time.Duration {
	b.Helper()
	start := time.Now()
	var all sync.WaitGroup
	for i, c := range s.conns {
		all.Go(func() {
			if _, err := io.CopyN(c, zeros{}, size/int64(len(s.conns))); err != nil {
				b.Error(err)
			}
		})
		all.Go(func() {
			for left := size / int64(len(s.conns)); left > 0; {
				n, ok := <-s.acks[i]
				if !ok {
					b.Error("the reader ended early")
					return
				}
				left -= n
			}
		})
	}
	all.Wait()
	return time.Since(start)
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// theirPair is pair with wireguard-go's netstack.
func theirPair(b *testing.B, bind func() conn.Bind) (x, y *theirs.Net) {
	b.Helper()
	keys := [2]key.Private{newKey(b), newKey(b)}
	var devs [2]*device.Device
	var nets [2]*theirs.Net
	var ports [2]uint16
	for i := range devs {
		tun, n, err := theirs.CreateNetTUN([]netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})}, nil, 1420)
		if err != nil {
			b.Fatal(err)
		}
		devs[i], nets[i] = device.NewDevice(tun, bind(), device.NewLogger(device.LogLevelSilent, "")), n
		b.Cleanup(devs[i].Close)
		c, err := net.ListenUDP("udp", nil)
		if err != nil {
			b.Fatal(err)
		}
		ports[i] = uint16(c.LocalAddr().(*net.UDPAddr).Port)
		c.Close()
		k := keys[i].Bytes()
		if err := devs[i].IpcSet(fmt.Sprintf("private_key=%s\nlisten_port=%d\n", hex.EncodeToString(k[:]), ports[i])); err != nil {
			b.Fatal(err)
		}
		if err := devs[i].Up(); err != nil {
			b.Fatal(err)
		}
	}
	for i := range devs {
		k := keys[1-i].Public().Bytes()
		if err := devs[i].IpcSet(fmt.Sprintf("public_key=%s\nendpoint=127.0.0.1:%d\nallowed_ip=10.0.0.%d/32\n",
			hex.EncodeToString(k[:]), ports[1-i], 2-i)); err != nil {
			b.Fatal(err)
		}
	}
	return nets[0], nets[1]
}
