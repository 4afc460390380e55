package main

import (
	"context"
	"crypto/cipher"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/crypto/chacha20poly1305"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/netstack"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/bench/load"
	"github.com/warren-mesh/warren/datapath/internal/sockets"
	"github.com/warren-mesh/warren/datapath/key"
	warren "github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/prefixes"
)

const addrA, addrB = "10.0.0.1", "10.0.0.2"

// binds returns what makes the Bind of the given node, 0 or 1: nil where the contender's own is left as it is.
func binds(s load.Spec, node int, own func() conn.Bind) func() conn.Bind {
	if !s.Impaired() {
		return nil
	}
	return func() conn.Bind {
		return newImpaired(own(), s.RTT/2, s.Loss, s.Seed<<1+uint64(node))
	}
}

// ours is the Bind that Warren has where it is given none.
func ours() conn.Bind { return sockets.New(sockets.Options{}) }

// openWarren makes two netstack.Nets as an embedder does.
func openWarren(s load.Spec) (load.Pair, func(), error) {
	var nets [2]*warren.Net
	var ends [2]datapath.State
	end := func() {
		for _, n := range nets {
			if n != nil {
				n.Close()
			}
		}
	}
	fail := func(err error) (load.Pair, func(), error) { end(); return load.Pair{}, nil, err }
	for i := range nets {
		private, err := key.NewPrivate()
		if err != nil {
			return fail(err)
		}
		if nets[i], err = warren.New(warren.Options{MTU: s.MTU, Bind: binds(s, i, ours)}); err != nil {
			return fail(err)
		}
		ends[i] = datapath.State{
			Device: datapath.Device{Key: private},
			Addrs:  prefixes.MustParse([]string{addrA, addrB}[i] + "/32"),
		}
		if err := datapath.Sync(context.Background(), nets[i], ends[i]); err != nil {
			return fail(err)
		}
		nets[i].Settle()
	}
	var ports [2]uint16
	for i, n := range nets {
		o, err := n.Read(context.Background())
		if err != nil {
			return fail(err)
		}
		ports[i] = o.Device.ListenPort
	}
	for i, n := range nets {
		other := ends[1-i]
		ends[i].Routes = map[netip.Prefix]netip.Addr{}
		for p := range other.Addrs.All() {
			ends[i].Routes[p] = netip.Addr{}
		}
		ends[i].Peers = map[key.Public]datapath.Peer{other.Device.Key.Public(): {
			Endpoint: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), ports[1-i]), Prefixes: other.Addrs,
		}}
		if err := datapath.Sync(context.Background(), n, ends[i]); err != nil {
			return fail(err)
		}
	}
	node := func(i int) load.Node {
		return load.Node{Addr: []string{addrA, addrB}[i], Listen: nets[i].Listen, ListenPacket: nets[i].ListenPacket, Dial: nets[i].DialContext}
	}
	return load.Pair{A: node(0), B: node(1)}, end, nil
}

// openTheirs makes two devices of wireguard-go with its own netstack and Bind, as its example does.
func openTheirs(s load.Spec) (load.Pair, func(), error) {
	mtu := s.MTU
	if mtu == 0 {
		mtu = 1420
	}
	var devs [2]*device.Device
	var nets [2]*netstack.Net
	var keys [2]key.Private
	var ports [2]uint16
	end := func() {
		for _, d := range devs {
			if d != nil {
				d.Close()
			}
		}
	}
	fail := func(err error) (load.Pair, func(), error) { end(); return load.Pair{}, nil, err }
	for i := range devs {
		tun, n, err := netstack.CreateNetTUN([]netip.Addr{netip.MustParseAddr([]string{addrA, addrB}[i])}, nil, mtu)
		if err != nil {
			return fail(err)
		}
		if keys[i], err = key.NewPrivate(); err != nil {
			return fail(err)
		}
		bind := conn.NewDefaultBind()
		if b := binds(s, i, conn.NewDefaultBind); b != nil {
			bind = b()
		}
		devs[i], nets[i] = device.NewDevice(tun, bind, device.NewLogger(device.LogLevelSilent, "")), n
		if ports[i], err = freePort(); err != nil {
			return fail(err)
		}
		if err := devs[i].IpcSet(fmt.Sprintf("private_key=%s\nlisten_port=%d\n", privateHex(keys[i]), ports[i])); err != nil {
			return fail(err)
		}
		if err := devs[i].Up(); err != nil {
			return fail(err)
		}
	}
	for i := range devs {
		if err := devs[i].IpcSet(peerUAPI(keys[1-i].Public(), fmt.Sprintf("127.0.0.1:%d", ports[1-i]), []string{addrA, addrB}[1-i])); err != nil {
			return fail(err)
		}
	}
	node := func(i int) load.Node {
		n := nets[i]
		return load.Node{
			Addr: []string{addrA, addrB}[i],
			Listen: func(_, a string) (net.Listener, error) {
				ap, err := netip.ParseAddrPort(a)
				if err != nil {
					return nil, err
				}
				return n.ListenTCPAddrPort(ap)
			},
			ListenPacket: func(_, a string) (net.PacketConn, error) {
				ap, err := netip.ParseAddrPort(a)
				if err != nil {
					return nil, err
				}
				return n.ListenUDPAddrPort(ap)
			},
			Dial: n.DialContext,
		}
	}
	return load.Pair{A: node(0), B: node(1)}, end, nil
}

func peerUAPI(k key.Public, endpoint, addr string) string {
	b := k.Bytes()
	return fmt.Sprintf("public_key=%s\nendpoint=%s\nallowed_ip=%s/32\n", hex.EncodeToString(b[:]), endpoint, addr)
}

func privateHex(k key.Private) string {
	b := k.Bytes()
	return hex.EncodeToString(b[:])
}

func freePort() (uint16, error) {
	c, err := net.ListenUDP("udp", nil)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	return uint16(c.LocalAddr().(*net.UDPAddr).Port), nil
}

// floor seals and opens packets of 1420 bytes, one after the other: the least that two ends can spend on a byte with
// this cipher, whatever else they do. Its value is cpu, as of load.Result.
func floor(d time.Duration) (load.Result, error) {
	var aead [2]cipher.AEAD
	for i := range aead {
		var err error
		if aead[i], err = chacha20poly1305.New(make([]byte, chacha20poly1305.KeySize)); err != nil {
			return load.Result{}, err
		}
	}
	plain, sealed := make([]byte, 1420), make([]byte, 0, 1500)
	nonce := make([]byte, chacha20poly1305.NonceSize)
	var bytes float64
	before := load.CPU()
	for end := time.Now().Add(d); time.Now().Before(end); {
		for range 64 {
			nonce[4]++
			sealed = aead[0].Seal(sealed[:0], nonce, plain, nil)
			if _, err := aead[1].Open(plain[:0], nonce, sealed, nil); err != nil {
				return load.Result{}, err
			}
			bytes += 1420
		}
	}
	return load.Result{Values: map[string]float64{"cpu": (load.CPU() - before).Seconds() / bytes * 1e9}}, nil
}
