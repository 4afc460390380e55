package netstack_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/prefixes"
)

// TestCloseWhileDialling closes 30 devices with 20 dials each, at peers that do not answer, and at
// one that does no longer.
func TestCloseWhileDialling(t *testing.T) {
	gone := newNode(t, "gone", netstack.Options{}, "10.77.0.1")
	var nodes []*node
	for i := range 30 {
		a := newNode(t, fmt.Sprint("a", i), netstack.Options{}, fmt.Sprintf("10.0.0.%d", i+1))
		withDeadPeer(t, a)
		if i%3 == 0 {
			connect(a, gone)
			if _, err := a.Ping(within(t, timeout), netip.MustParseAddr("10.77.0.1")); err != nil {
				t.Fatal(err)
			}
		}
		nodes = append(nodes, a)
	}
	gone.Close()
	before := runtime.NumGoroutine()
	results := make(chan error, 2*20*len(nodes))
	dials := 0
	for i, a := range nodes {
		for j := range 20 {
			dial := func(network, address string) {
				dials++
				go func() {
					c, err := a.DialContext(context.Background(), network, address)
					if err == nil {
						c.Close()
					}
					results <- err
				}()
			}
			dial([]string{"tcp", "udp"}[j%2], fmt.Sprintf("10.66.0.%d:80", j))
			if i%3 == 0 {
				dial("tcp", "10.77.0.1:80")
			}
		}
	}
	time.Sleep(20 * time.Millisecond)
	start := time.Now()
	var all sync.WaitGroup
	for _, a := range nodes {
		all.Go(func() { a.Close() })
	}
	all.Wait()
	for range dials {
		if err := <-results; !errors.Is(err, net.ErrClosed) {
			t.Fatalf("a dial ended with %v, want net.ErrClosed", err)
		}
	}
	limit := time.Second
	if raceEnabled {
		limit = 5 * time.Second
	}
	if took := time.Since(start); took > limit {
		t.Errorf("closing took %v", took)
	}
	for end := time.Now().Add(4 * time.Second); runtime.NumGoroutine() >= before && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if after := runtime.NumGoroutine(); after > before {
		t.Errorf("%d goroutines before, %d after", before, after)
	}
}

// TestCloseUnderFlood closes a node that is being sent to as fast as can be.
func TestCloseUnderFlood(t *testing.T) {
	rounds := 200
	if testing.Short() {
		rounds = 30
	}
	floods, size := 2, 1200
	if raceEnabled { // which makes cryptography some thirty times slower
		floods, size = 1, 16
	}
	b := newNode(t, "b", netstack.Options{}, "10.0.0.2")
	stop := make(chan struct{})
	var flooding sync.WaitGroup
	defer flooding.Wait()
	defer close(stop)
	c, err := b.ListenPacket("udp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	for range floods {
		flooding.Go(func() {
			p := make([]byte, size)
			for {
				select {
				case <-stop:
					return
				default:
					c.WriteTo(p, &net.UDPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 9})
				}
			}
		})
	}
	for i := range rounds {
		a := newNode(t, "a", netstack.Options{}, "10.0.0.1")
		a.peer(b)
		b.peer(a)
		l, err := a.ListenPacket("udp", "10.0.0.1:9")
		if err != nil {
			t.Fatal(err)
		}
		l.SetReadDeadline(time.Now().Add(timeout))
		if _, _, err := l.ReadFrom(make([]byte, 1500)); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		if i%2 == 0 {
			l.Close() // the rest is answered with ICMP
		}
		time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond)
		var twice sync.WaitGroup
		twice.Go(func() { a.Close() })
		twice.Go(func() { a.Apply(context.Background(), datapath.RemovePeer{Key: b.public()}) })
		a.Close()
		twice.Wait()
		b.apply(datapath.RemovePeer{Key: a.public()})
		delete(b.want.Peers, a.public())
	}
}

func TestClosed(t *testing.T) {
	a, b := pair(t)
	l, err := a.Listen("tcp", ":80")
	if err != nil {
		t.Fatal(err)
	}
	p, err := a.ListenPacket("udp", ":80")
	if err != nil {
		t.Fatal(err)
	}
	out, err := b.DialContext(within(t, timeout), "tcp", "10.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	results := make(chan error, 4)
	go func() { _, err := l.Accept(); results <- err }()
	go func() { _, _, err := p.ReadFrom(make([]byte, 1)); results <- err }()
	go func() { _, err := in.Read(make([]byte, 1)); results <- err }()
	go func() {
		for {
			if _, err := in.Write(make([]byte, 1<<16)); err != nil {
				results <- err
				return
			}
		}
	}()
	time.Sleep(20 * time.Millisecond)
	if err := errors.Join(a.Close(), a.Close()); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if err := <-results; !errors.Is(err, net.ErrClosed) {
			t.Errorf("%v, want net.ErrClosed", err)
		}
	}
	ctx := context.Background()
	_, readErr := a.Read(ctx)
	_, dialErr := a.DialContext(ctx, "tcp", "10.0.0.2:80")
	_, listenErr := a.Listen("tcp", ":81")
	_, packetErr := a.ListenPacket("udp", ":81")
	_, pingErr := a.Ping(ctx, netip.MustParseAddr("10.0.0.2"))
	_, toErr := p.WriteTo([]byte("x"), &net.UDPAddr{IP: net.IPv4(10, 0, 0, 2), Port: 80})
	for what, err := range map[string]error{
		"Apply": a.Apply(ctx, datapath.RemoveDevice{}), "Read": readErr, "Dial": dialErr, "Listen": listenErr,
		"ListenPacket": packetErr, "Ping": pingErr, "WriteTo": toErr,
	} {
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s after Close: %v, want net.ErrClosed", what, err)
		}
	}
}

// onlyV4 is a Bind without IPv6, that reports its port as conn.StdNetBind does there.
type onlyV4 struct {
	conn.Bind
	mu sync.Mutex
	c  *net.UDPConn
}

func (b *onlyV4) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	c, err := net.ListenUDP("udp4", &net.UDPAddr{Port: int(port)})
	if err != nil {
		return nil, 0, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.c = c
	return []conn.ReceiveFunc{b.makeReceiveIPv4(c)}, 0, nil
}

func (b *onlyV4) makeReceiveIPv4(c *net.UDPConn) conn.ReceiveFunc {
	return func(packets [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
		n, from, err := c.ReadFromUDPAddrPort(packets[0])
		if err != nil {
			return 0, err
		}
		sizes[0], eps[0] = n, &conn.StdNetEndpoint{AddrPort: from}
		return 1, nil
	}
}

func (b *onlyV4) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.c != nil {
		b.c.Close()
		b.c = nil
	}
	return nil
}

func (b *onlyV4) Send(bufs [][]byte, ep conn.Endpoint) error {
	b.mu.Lock()
	c := b.c
	b.mu.Unlock()
	if c == nil {
		return net.ErrClosed
	}
	for _, p := range bufs {
		if _, err := c.WriteToUDPAddrPort(p, ep.(*conn.StdNetEndpoint).AddrPort); err != nil {
			return err
		}
	}
	return nil
}

func (b *onlyV4) SetMark(uint32) error { return nil }
func (b *onlyV4) BatchSize() int       { return 1 }

func TestPortWithoutIPv6(t *testing.T) {
	o := netstack.Options{Bind: func() conn.Bind { return &onlyV4{Bind: conn.NewStdNetBind()} }}
	a := newNode(t, "a", o, "10.0.0.1")
	b := newNode(t, "b", netstack.Options{}, "10.0.0.2")
	chosen := a.read()
	if chosen.Device.ListenPort == 0 || !chosen.Host.IPv4 || chosen.Host.IPv6 {
		t.Errorf("port %d, host %+v", chosen.Device.ListenPort, chosen.Host)
	}
	connect(a, b)
	a.want.Device.ListenPort = freePort(t)
	a.sync()
	for range 10 {
		if ops := datapath.Plan(a.want, a.read()); len(ops) > 0 {
			t.Fatalf("a device in its wanted state is to be changed: %v", ops)
		}
	}
	b.peer(a)
	if _, err := b.Ping(within(t, timeout), netip.MustParseAddr("10.0.0.1")); err != nil {
		t.Fatal(err)
	}
}

func freePort(t testing.TB) uint16 {
	t.Helper()
	c, err := net.ListenUDP("udp", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return uint16(c.LocalAddr().(*net.UDPAddr).Port)
}

func TestPortInUse(t *testing.T) {
	for name, o := range map[string]netstack.Options{
		"default": {},
		"bind":    {Bind: conn.NewDefaultBind}, // nothing can be tried beforehand
	} {
		t.Run(name, func(t *testing.T) {
			c, err := net.ListenUDP("udp", nil)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			taken := uint16(c.LocalAddr().(*net.UDPAddr).Port)
			check := func(err error) {
				t.Helper()
				says := []string{fmt.Sprint(taken)}
				if runtime.GOOS == "linux" {
					says = append(says, fmt.Sprintf("process %d", os.Getpid()))
				}
				for _, s := range says {
					if !errors.Is(err, datapath.ErrPortInUse) || !strings.Contains(err.Error(), s) {
						t.Errorf("%v: want ErrPortInUse that says %q", err, s)
					}
				}
			}
			n, err := netstack.New(o)
			if err != nil {
				t.Fatal(err)
			}
			defer n.Close()
			err = n.Apply(context.Background(), datapath.SetDevice{Device: datapath.Device{Key: newKey(t), ListenPort: taken}},
				datapath.AddAddrs{Addrs: set("10.0.0.1")})
			check(err)
			if !errors.Is(err, datapath.ErrNoDevice) {
				t.Errorf("%v: not ErrNoDevice, of a new device", err)
			}
			if s, err := n.Read(context.Background()); err != nil || s.Device.Exists() || s.Addrs.Len() > 0 {
				t.Errorf("read %+v, %v, want no device", s, err)
			}

			a := newNode(t, "a", o, "10.0.0.1")
			b := newNode(t, "b", netstack.Options{}, "10.0.0.2")
			connect(a, b)
			if _, err := b.Ping(within(t, timeout), netip.MustParseAddr("10.0.0.1")); err != nil {
				t.Fatal(err)
			}
			before := a.read()
			err = a.Apply(context.Background(), datapath.SetDevice{Device: datapath.Device{ListenPort: taken}})
			check(err)
			if errors.Is(err, datapath.ErrNoDevice) {
				t.Errorf("%v: ErrNoDevice, of a device that is there", err)
			}
			after := a.read()
			if !after.Equal(before) {
				t.Errorf("was %+v, is %+v", before, after)
			}
			if _, err := b.Ping(within(t, timeout), netip.MustParseAddr("10.0.0.1")); err != nil {
				t.Error(err)
			}
			if h := a.read().Stats[b.public()].LastHandshake; !h.Equal(before.Stats[b.public()].LastHandshake) {
				t.Error("another handshake was needed")
			}
		})
	}
}

func TestKeyChange(t *testing.T) {
	a, b := pair(t)
	ping := func() error {
		_, err := a.Ping(within(t, 20*time.Second), netip.MustParseAddr("10.0.0.2"))
		return err
	}
	if err := ping(); err != nil {
		t.Fatal(err)
	}
	old := a.public()
	port := a.read().Device.ListenPort
	a.want.Device.Key = newKey(t)
	a.sync()
	if s := a.read(); s.Device.ListenPort != port || len(s.Peers) != 1 || s.Peers[b.public()].Prefixes != a.want.Peers[b.public()].Prefixes {
		t.Errorf("after a change of key: %+v", s)
	}
	b.want.Peers[a.public()] = b.want.Peers[old]
	delete(b.want.Peers, old)
	b.sync()
	if err := ping(); err != nil {
		t.Fatal(err)
	}

	// A key that a peer has.
	k := newKey(t)
	a.want.Peers[k.Public()] = datapath.Peer{Prefixes: set("10.9.0.0/16")}
	a.want.Routes[netip.MustParsePrefix("10.9.0.0/16")] = netip.Addr{}
	a.sync()
	a.want.Device.Key = k
	delete(a.want.Peers, k.Public())
	delete(a.want.Routes, netip.MustParsePrefix("10.9.0.0/16"))
	a.sync()
	err := a.Apply(context.Background(), datapath.PutPeer{Key: k.Public()})
	if err == nil || !strings.Contains(err.Error(), "own key") {
		t.Errorf("a peer with the device's own key: %v", err)
	}
}

func TestRecreate(t *testing.T) {
	a, b := pair(t)
	l, err := a.Listen("tcp", "10.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go echoTCP(l)
	a.want.Device.ListenPort = a.read().Device.ListenPort
	for range 3 {
		c, err := b.DialContext(within(t, timeout), "tcp", "10.0.0.1:80")
		if err != nil {
			t.Fatal(err)
		}
		ask(t, c, "hello")
		c.Close()
		a.apply(datapath.RemoveDevice{}, datapath.RemoveDevice{})
		if s := a.read(); s.Device.Exists() || len(s.Peers)+len(s.Routes)+s.Addrs.Len()+s.Local.Len() > 0 {
			t.Fatalf("after RemoveDevice: %+v", s)
		}
		err = a.Apply(context.Background(), datapath.AddAddrs{Addrs: set("10.0.0.1")})
		if !errors.Is(err, datapath.ErrNoDevice) {
			t.Fatalf("an op without a device: %v", err)
		}
		a.sync()
	}
	select {
	case <-a.Changed():
		t.Error("Changed although nobody else touched the device")
	default:
	}
}

// TestGarbage sends to the port what is no WireGuard, and what looks like it.
func TestGarbage(t *testing.T) {
	a, b := pair(t)
	c, err := net.Dial("udp", a.endpoint().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	src := rand.NewChaCha8([32]byte{})
	for i := range 5000 {
		p := make([]byte, []int{0, 1, 4, 16, 32, 64, 92, 148, 1400}[i%9])
		src.Read(p)
		if len(p) >= 4 && i%2 == 0 {
			copy(p, []byte{byte(i % 6), 0, 0, 0})
		}
		c.Write(p)
	}
	if _, err := b.Ping(within(t, timeout), netip.MustParseAddr("10.0.0.1")); err != nil {
		t.Fatal(err)
	}
}

func TestNew(t *testing.T) {
	for _, mtu := range []int{-1, 1, 1279, 65476} {
		if _, err := netstack.New(netstack.Options{MTU: mtu}); err == nil || !strings.Contains(err.Error(), fmt.Sprint(mtu)) {
			t.Errorf("MTU %d: %v", mtu, err)
		}
	}
	n, err := netstack.New(netstack.Options{MTU: 1300})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(n.Close(), n.Close()); err != nil {
		t.Error(err)
	}
}

// TestBig has 1,000 peers with four prefixes each, and one with 5,000.
func TestBig(t *testing.T) {
	a, b := pair(t)
	to := dead(t)
	for i := range 1000 {
		var ps []netip.Prefix
		for j := range 4 {
			ps = append(ps, netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), byte(j)}), 32))
		}
		a.want.Peers[newKey(t).Public()] = datapath.Peer{Endpoint: to, Prefixes: prefixes.Must(ps...)}
		for _, p := range ps {
			a.want.Routes[p] = netip.Addr{}
		}
	}
	var many []netip.Prefix
	for i := range 5000 {
		many = append(many, netip.PrefixFrom(netip.AddrFrom4([4]byte{12, byte(i >> 8), byte(i), 0}), 24))
		a.want.Routes[many[i]] = netip.Addr{}
	}
	a.want.Peers[newKey(t).Public()] = datapath.Peer{Prefixes: prefixes.Must(many...)}
	start := time.Now()
	a.sync()
	t.Logf("set in %v", time.Since(start))
	if ops := datapath.Plan(a.want, a.read()); len(ops) > 0 {
		t.Fatalf("%d ops left, the first %v", len(ops), ops[0])
	}
	start = time.Now()
	if _, err := a.Ping(within(t, timeout), netip.MustParseAddr("10.0.0.2")); err != nil {
		t.Fatal(err)
	}
	t.Logf("pinged after %v", time.Since(start))
	for k, p := range a.want.Peers {
		if k != b.public() && p.Prefixes.Len() < 5000 {
			delete(a.want.Peers, k)
			for q := range p.Prefixes.All() {
				delete(a.want.Routes, q)
			}
		}
	}
	a.sync()
}
