package wgconv

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

func private(name string) key.Private {
	sum := sha256.Sum256([]byte(name))
	k, err := key.PrivateFromBytes(sum[:])
	if err != nil {
		panic(err)
	}
	return k
}

func public(name string) key.Public { return private(name).Public() }

func preshared(name string) key.Preshared {
	sum := sha256.Sum256([]byte(name))
	k, err := key.PresharedFromBytes(sum[:])
	if err != nil {
		panic(err)
	}
	return k
}

// linux is a device that does what a message says, read with another program's decoder and slowly: it is
// what the messages are judged by.
type linux struct {
	port  uint16
	mark  uint32
	key   []byte
	peers []*linuxPeer
}

type linuxPeer struct {
	key, psk, endpoint []byte
	keepalive          uint16
	allowed            []netip.Prefix
}

func (l *linux) peer(k []byte) *linuxPeer {
	for _, p := range l.peers {
		if bytes.Equal(p.key, k) {
			return p
		}
	}
	return nil
}

func (l *linux) set(t testing.TB, data []byte) {
	t.Helper()
	ad, err := netlink.NewAttributeDecoder(data)
	if err != nil {
		t.Fatalf("a malformed message: %v", err)
	}
	for ad.Next() {
		switch ad.Type() {
		case deviceIfindex:
			if ad.Uint32() != 7 {
				t.Errorf("for device %d", ad.Uint32())
			}
		case devicePrivateKey:
			l.key = ad.Bytes()
		case deviceListenPort:
			l.port = ad.Uint16()
		case deviceFwmark:
			l.mark = ad.Uint32()
		case devicePeers:
			ad.Nested(func(list *netlink.AttributeDecoder) error {
				for list.Next() {
					list.Nested(func(a *netlink.AttributeDecoder) error { return l.setPeer(t, a) })
				}
				return nil
			})
		default:
			t.Errorf("device attribute %d", ad.Type())
		}
	}
	if err := ad.Err(); err != nil {
		t.Fatal(err)
	}
}

func (l *linux) setPeer(t testing.TB, a *netlink.AttributeDecoder) error {
	var p *linuxPeer
	var flags uint32
	create := func() {
		if p == nil {
			t.Fatal("a peer without a key")
		}
		if l.peer(p.key) == nil && flags&peerFlagUpdate == 0 {
			l.peers = append(l.peers, p)
		}
	}
	for a.Next() {
		switch a.Type() {
		case peerPublicKey:
			k := a.Bytes()
			if p = l.peer(k); p == nil {
				p = &linuxPeer{key: k, psk: make([]byte, 32)}
			}
			continue
		case peerFlags:
			flags = a.Uint32()
			if nobody := public("nobody").Bytes(); flags&peerFlagReplaceAllowedIPs != 0 && bytes.Equal(p.key, nobody[:]) {
				p.allowed = nil
			} else if flags&^(peerFlagRemove|peerFlagUpdate) != 0 {
				t.Errorf("flags %#x: something is replaced", flags)
			}
			continue
		}
		create()
		switch a.Type() {
		case peerPresharedKey:
			p.psk = a.Bytes()
		case peerEndpoint:
			p.endpoint = a.Bytes()
		case peerKeepalive:
			p.keepalive = a.Uint16()
		case peerAllowedIPs:
			a.Nested(func(list *netlink.AttributeDecoder) error {
				for list.Next() {
					list.Nested(func(a *netlink.AttributeDecoder) error { return l.setAllowed(t, p, a) })
				}
				return nil
			})
		default:
			t.Errorf("peer attribute %d", a.Type())
		}
	}
	create()
	if flags&peerFlagRemove != 0 {
		l.peers = slices.DeleteFunc(l.peers, func(q *linuxPeer) bool { return q == p })
	}
	return nil
}

func (l *linux) setAllowed(t testing.TB, p *linuxPeer, a *netlink.AttributeDecoder) error {
	var addr netip.Addr
	var family uint16
	var bits int
	var flags uint32
	for a.Next() {
		switch a.Type() {
		case allowedFamily:
			family = a.Uint16()
		case allowedAddr:
			addr, _ = netip.AddrFromSlice(a.Bytes())
		case allowedBits:
			bits = int(a.Uint8())
		case allowedFlags:
			flags = a.Uint32()
		default:
			t.Errorf("allowed IP attribute %d", a.Type())
		}
	}
	if addr.Is4() != (family == afInet) || addr.Is6() != (family == afInet6) {
		t.Errorf("%v has family %d", addr, family)
	}
	q := netip.PrefixFrom(addr, bits)
	has := func(r netip.Prefix) bool { return r == q }
	if flags&allowedFlagRemove != 0 {
		p.allowed = slices.DeleteFunc(p.allowed, has)
		return nil
	}
	for _, o := range l.peers {
		o.allowed = slices.DeleteFunc(o.allowed, has)
	}
	p.allowed = append(p.allowed, q)
	return nil
}

// dump writes the device as Linux would: in messages of at most size bytes, a peer going on in the next.
func (l *linux) dump(size int) [][]byte {
	var msgs [][]byte
	first := append16(append32(append32(nil, deviceIfindex, 7), deviceFwmark, l.mark), deviceListenPort, l.port)
	if l.key != nil {
		first = appendAttr(first, devicePrivateKey, l.key...)
		first = appendAttr(first, 4, make([]byte, 32)...)
	}
	first = appendAttr(first, 2, []byte("wg0\x00")...)
	b, list := begin(first, devicePeers)
	flush := func() {
		end(b, list)
		msgs = append(msgs, b)
		b, list = begin(append32(nil, deviceIfindex, 7), devicePeers)
	}
	for _, p := range l.peers {
		allowed := p.allowed
		for whole := true; whole || len(allowed) > 0; whole = false {
			if len(b) > size {
				flush()
			}
			var peer, ips int
			b, peer = begin(b, 0)
			b = appendAttr(b, peerPublicKey, p.key...)
			if whole {
				b = appendAttr(b, peerPresharedKey, p.psk...)
				b = append16(b, peerKeepalive, p.keepalive)
				b = appendAttr(b, peerHandshake, make([]byte, 16)...)
				b = appendAttr(b, peerSent, binary.NativeEndian.AppendUint64(nil, 3)...)
				b = appendAttr(b, peerReceived, binary.NativeEndian.AppendUint64(nil, 4)...)
				b = append32(b, 10, 1)
				if p.endpoint != nil {
					b = appendAttr(b, peerEndpoint, p.endpoint...)
				}
			}
			b, ips = begin(b, peerAllowedIPs)
			for len(allowed) > 0 && len(b) <= size {
				b = appendAllowed(b, allowed[0], false)
				allowed = allowed[1:]
			}
			end(b, ips)
			end(b, peer)
		}
	}
	flush()
	return msgs
}

func read(t testing.TB, msgs ...[]byte) datapath.State {
	t.Helper()
	var d Dump
	for _, m := range msgs {
		if err := d.Add(m); err != nil {
			t.Fatal(err)
		}
	}
	return d.State()
}

var pool = prefixes.MustParse("10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "10.1.2.3/32", "10.2.0.0/16", "0.0.0.0/0",
	"fd00::/16", "fd00:1::/32", "fd00:1::1/128", "::/0")

// drawPrefixes draws a few prefixes, sometimes so many that they fill several messages.
func drawPrefixes(t *rapid.T) prefixes.Set {
	var ps []netip.Prefix
	for p := range pool.All() {
		if rapid.Bool().Draw(t, p.String()) {
			ps = append(ps, p)
		}
	}
	for i := range rapid.SampledFrom([]int{0, 0, 0, 50, 2000}).Draw(t, "more") {
		ps = append(ps, netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i)}), 24))
	}
	return prefixes.Must(ps...)
}

// Whatever is put and dropped, in messages of whatever size, and read from messages of whatever size, is
// what the model has.
func TestChangesAgainstModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := datapath.NewModel(datapath.State{})
		var l linux
		me := datapath.SetDevice{Device: datapath.Device{
			Key: private("me"), ListenPort: rapid.Uint16().Draw(rt, "port"), Mark: rapid.Uint32().Draw(rt, "mark"),
		}}
		if err := m.Do(me); err != nil {
			rt.Fatal(err)
		}
		l.set(t, Device(7, me.Device))
		budget := rapid.SampledFrom([]int{0, 1, 512, 1000, 4096, 1 << 20}).Draw(rt, "budget")
		var changes []Change
		for range rapid.IntRange(1, 12).Draw(rt, "changes") {
			k := public(rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(rt, "peer"))
			switch rapid.IntRange(0, 4).Draw(rt, "what") {
			case 4:
				set, keep, n := drawPrefixes(rt), drawPrefixes(rt), public("nobody")
				changes = append(changes, Change{Key: n, Prefixes: set}, Change{Key: n, Empty: true, Prefixes: keep})
				_ = m.Do(datapath.PutPeer{Key: n, Peer: datapath.Peer{Prefixes: set}})
				_ = m.Do(datapath.DropPrefixes{Key: n, Prefixes: m.State().Peers[n].Prefixes})
				_ = m.Do(datapath.PutPeer{Key: n, Peer: datapath.Peer{Prefixes: keep}})
			case 0:
				changes = append(changes, Change{Key: k, Remove: true})
				_ = m.Do(datapath.RemovePeer{Key: k})
			case 1:
				set := drawPrefixes(rt)
				changes = append(changes, Change{Key: k, Without: true, Prefixes: set})
				_ = m.Do(datapath.DropPrefixes{Key: k, Prefixes: set})
			default:
				o := datapath.PutPeer{Key: k, Peer: datapath.Peer{
					Endpoint: rapid.SampledFrom([]netip.AddrPort{{}, netip.MustParseAddrPort("192.0.2.1:51820"),
						netip.MustParseAddrPort("[2001:db8::1]:1")}).Draw(rt, "endpoint"),
					Keepalive: rapid.SampledFrom([]time.Duration{0, time.Second, datapath.MaxKeepalive}).Draw(rt, "keepalive"),
					Prefixes:  drawPrefixes(rt),
				}}
				if rapid.Bool().Draw(rt, "psk") {
					o.Peer.Preshared = preshared("x")
				}
				c, err := Put(o)
				if err != nil {
					rt.Fatal(err)
				}
				changes = append(changes, c)
				if err := m.Do(o); err != nil {
					rt.Fatal(err)
				}
			}
		}
		msgs := Batch(7, budget, changes...)
		n := 0
		for i, m := range msgs {
			most := min(max(budget, minBudget), 65531)
			if budget == 0 {
				most = Budget
			}
			if len(m.Data) > most {
				rt.Errorf("message %d of %d has %d bytes, more than %d", i, len(msgs), len(m.Data), most)
			}
			n += m.Count
			l.set(t, m.Data)
		}
		if n != len(changes) {
			rt.Errorf("%d changes counted, want %d", n, len(changes))
		}
		got := read(t, l.dump(rapid.SampledFrom([]int{300, 3000, 30000}).Draw(rt, "part"))...)
		want := m.State()
		if got.Device != want.Device {
			rt.Errorf("device: got %+v, want %+v", got.Device, want.Device)
		}
		if !maps.Equal(got.Peers, want.Peers) {
			rt.Errorf("peers: got %+v\nwant %+v", got.Peers, want.Peers)
		}
		for k, s := range got.Stats {
			if s != (datapath.Stats{Sent: 3, Received: 4}) {
				rt.Errorf("stats of %v: %+v", k, s)
			}
		}
	})
}

// One change of one peer among thousands is one short message.
func TestOneChangeIsShort(t *testing.T) {
	c, err := Put(datapath.PutPeer{Key: public("a"), Peer: datapath.Peer{Prefixes: prefixes.MustParse("10.0.0.0/24")}})
	if err != nil {
		t.Fatal(err)
	}
	msgs := Batch(7, 0, c)
	if len(msgs) != 1 || len(msgs[0].Data) > 200 {
		t.Errorf("%d messages, the first of %d bytes", len(msgs), len(msgs[0].Data))
	}
}

func TestBatchFillsMessages(t *testing.T) {
	var changes []Change
	for i := range 5000 {
		c, err := Put(datapath.PutPeer{Key: public(fmt.Sprint(i)), Peer: datapath.Peer{
			Endpoint: netip.MustParseAddrPort("192.0.2.1:51820"), Prefixes: prefixes.Must(
				netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i)}), 24),
				netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, byte(i >> 8), byte(i)}), 64)),
		}})
		if err != nil {
			t.Fatal(err)
		}
		changes = append(changes, c)
	}
	msgs := Batch(7, 0, changes...)
	bytes := 0
	for _, m := range msgs {
		bytes += len(m.Data)
	}
	t.Logf("5000 peers with 2 prefixes each: %d messages, %d bytes", len(msgs), bytes)
	if most := bytes/Budget*11/10 + 2; len(msgs) > most {
		t.Errorf("%d messages for %d bytes, want at most %d", len(msgs), bytes, most)
	}
	if len(Batch(7, 0)) != 0 {
		t.Error("no changes make a message")
	}
}

func TestPutRefuses(t *testing.T) {
	for _, d := range []time.Duration{500 * time.Millisecond, 1500 * time.Millisecond, 65536 * time.Second, 70000 * time.Second, -time.Second} {
		if _, err := Put(datapath.PutPeer{Key: public("a"), Peer: datapath.Peer{Keepalive: d}}); err == nil {
			t.Errorf("keepalive %v was taken", d)
		}
	}
	if _, err := Put(datapath.PutPeer{}); err == nil {
		t.Error("a peer with no key was taken")
	}
}

// What others put on a device does not keep the rest of it from being read.
func TestForeignThings(t *testing.T) {
	l := linux{key: bytes.Repeat([]byte{0xff}, 32), peers: []*linuxPeer{
		{key: make([]byte, 32), psk: make([]byte, 32), allowed: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}},
		{key: slices.Repeat([]byte{0xff}, 32), psk: make([]byte, 32)},
		{key: func() []byte { k := public("a").Bytes(); return k[:] }(), psk: make([]byte, 32), allowed: []netip.Prefix{
			netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("::ffff:10.0.0.0/104"),
		}},
	}}
	var d Dump
	for _, m := range l.dump(100) {
		if err := d.Add(append32(m, 999, 1)); err != nil {
			t.Fatal(err)
		}
	}
	s := d.State()
	if len(s.Peers) != 1 || s.Peers[public("a")].Prefixes != prefixes.MustParse("10.1.0.0/24") {
		t.Errorf("peers are %+v", s.Peers)
	}
	if d.Refused() == 0 {
		t.Error("nothing was counted as refused")
	}
	ff, err := key.PrivateFromBytes(bytes.Repeat([]byte{0xff}, 32))
	if err != nil || s.Device.Key != ff {
		t.Error("a key that is not clamped is another one")
	}
}

func TestNoDevice(t *testing.T) {
	if s := read(t, append16(nil, deviceListenPort, 0)); s.Device.Exists() || s.Peers == nil || s.Stats == nil {
		t.Errorf("a device without a key reads as %+v", s)
	}
	if s := read(t, appendAttr(nil, devicePrivateKey, make([]byte, 32)...)); s.Device.Exists() {
		t.Error("32 zero bytes are a key")
	}
}

func TestMalformed(t *testing.T) {
	secret := bytes.Repeat([]byte("k"), 31)
	k := public("a").Bytes()
	nest := func(typ uint16, data []byte) []byte { return appendAttr(nil, typ|nested, data...) }
	peer := func(as ...[]byte) []byte {
		return nest(devicePeers, nest(0, append(appendAttr(nil, peerPublicKey, k[:]...), bytes.Join(as, nil)...)))
	}
	for name, data := range map[string][]byte{
		"too short":          {1, 0},
		"longer than it is":  append16(nil, deviceListenPort, 1)[:5],
		"length 0":           {0, 0, 1, 0},
		"short private key":  appendAttr(nil, devicePrivateKey, secret...),
		"long port":          append32(nil, deviceListenPort, 1),
		"short mark":         append16(nil, deviceFwmark, 1),
		"peer without key":   nest(devicePeers, nest(0, append16(nil, peerKeepalive, 1))),
		"empty peer":         nest(devicePeers, nest(0, nil)),
		"short public key":   nest(devicePeers, nest(0, appendAttr(nil, peerPublicKey, secret...))),
		"short preshared":    peer(appendAttr(nil, peerPresharedKey, secret...)),
		"endpoint of 8":      peer(appendAttr(nil, peerEndpoint, make([]byte, 8)...)),
		"endpoint of no net": peer(appendAttr(nil, peerEndpoint, make([]byte, 16)...)),
		"short handshake":    peer(appendAttr(nil, peerHandshake, make([]byte, 8)...)),
		"short counter":      peer(append32(nil, peerSent, 1)),
		"33 bits":            peer(nest(peerAllowedIPs, nest(0, append(appendAttr(nil, allowedAddr, 10, 0, 0, 0), appendAttr(nil, allowedBits, 33)...)))),
		"no bits":            peer(nest(peerAllowedIPs, nest(0, appendAttr(nil, allowedAddr, 10, 0, 0, 0)))),
		"no address":         peer(nest(peerAllowedIPs, nest(0, appendAttr(nil, allowedBits, 8)))),
		"long bits":          peer(nest(peerAllowedIPs, nest(0, append16(nil, allowedBits, 8)))),
	} {
		var d Dump
		err := d.Add(data)
		if err == nil {
			t.Errorf("%s: read without an error", name)
			continue
		}
		if strings.Contains(err.Error(), "kkkk") || strings.Contains(err.Error(), "6b6b") {
			t.Errorf("%s: the error has a secret in it: %v", name, err)
		}
		if strings.HasPrefix(name, "short p") && !errors.Is(err, errSize) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// No bytes make it panic, and what it reads can be written and read again.
func FuzzDump(f *testing.F) {
	l := linux{key: bytes.Repeat([]byte{1}, 32)}
	c, err := Put(datapath.PutPeer{Key: public("a"), Peer: datapath.Peer{
		Endpoint: netip.MustParseAddrPort("[2001:db8::1]:1"), Preshared: preshared("x"), Keepalive: time.Second, Prefixes: pool,
	}})
	if err != nil {
		f.Fatal(err)
	}
	for _, m := range Batch(7, 0, c, Change{Key: public("b"), Without: true, Prefixes: pool}) {
		l.set(f, m.Data)
		f.Add(m.Data)
	}
	for _, m := range l.dump(200) {
		f.Add(m)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var d Dump
		if d.Add(data) != nil {
			return
		}
		s := d.State()
		again := linux{}
		again.set(t, Device(7, s.Device))
		var changes []Change
		for k, p := range s.Peers {
			c, err := Put(datapath.PutPeer{Key: k, Peer: p})
			if err != nil {
				t.Fatal(err)
			}
			changes = append(changes, c)
		}
		taken := prefixes.Set{}
		for _, p := range s.Peers {
			if taken.Intersect(p.Prefixes).Len() > 0 {
				return // no device has a prefix twice
			}
			taken = taken.Union(p.Prefixes)
		}
		for _, m := range Batch(7, 600, changes...) {
			again.set(t, m.Data)
		}
		if got := read(t, again.dump(600)...); got.Device != s.Device || !maps.Equal(got.Peers, s.Peers) {
			t.Errorf("got %+v\nwant %+v", got, s)
		}
	})
}
