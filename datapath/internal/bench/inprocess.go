package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/crypto/chacha20poly1305"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	theirs "golang.zx2c4.com/wireguard/tun/netstack"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/bench/measure"
	"github.com/warren-mesh/warren/datapath/internal/sockets"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/prefixes"
)

// path is what is between the two nodes.
type path struct {
	mtu   int
	delay time.Duration // there and back
	loss  float64
}

// impair has a Bind send over the path.
func (p path) impair(b conn.Bind, seed uint64) conn.Bind {
	if p.delay == 0 && p.loss == 0 {
		return b
	}
	return sockets.Impair(b, sockets.Impairment{Delay: p.delay / 2, Loss: p.loss, Seed: seed})
}

// Addresses of the two nodes.
var first, second = netip.AddrFrom4([4]byte{10, 99, 0, 1}), netip.AddrFrom4([4]byte{10, 99, 0, 2})

const patience = 30 * time.Second

// warren are two nodes of ours.
func warren(p path) (measure.Pair, error) {
	ctx := context.Background()
	var nets [2]*netstack.Net
	var states [2]datapath.State
	for i, addr := range []netip.Addr{first, second} {
		o := netstack.Options{MTU: p.mtu}
		if p.delay != 0 || p.loss != 0 {
			o.Bind = func() conn.Bind { return p.impair(sockets.New(sockets.Options{}), uint64(i)) }
		}
		n, err := netstack.New(o)
		if err != nil {
			return measure.Pair{}, err
		}
		k, err := key.NewPrivate()
		if err != nil {
			return measure.Pair{}, err
		}
		states[i] = datapath.State{Device: datapath.Device{Key: k}, Addrs: prefixes.Must(prefixes.Host(addr)), Peers: map[key.Public]datapath.Peer{}, Routes: map[netip.Prefix]netip.Addr{}}
		if err := datapath.Sync(ctx, n, states[i]); err != nil {
			return measure.Pair{}, err
		}
		nets[i] = n
	}
	for i, n := range nets {
		o := 1 - i
		there, err := nets[o].Read(ctx)
		if err != nil {
			return measure.Pair{}, err
		}
		for p := range states[o].Addrs.All() {
			states[i].Routes[p] = netip.Addr{}
		}
		states[i].Peers[states[o].Device.Key.Public()] = datapath.Peer{Endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), there.Device.ListenPort), Prefixes: states[o].Addrs}
		if err := datapath.Sync(ctx, n, states[i]); err != nil {
			return measure.Pair{}, err
		}
		n.Settle()
	}
	dial := func(network string) func(uint16) (net.Conn, error) {
		return func(port uint16) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			return nets[0].DialContext(ctx, network, netip.AddrPortFrom(second, port).String())
		}
	}
	return measure.Pair{
		Listen: func(port uint16) (net.Listener, error) { return nets[1].Listen("tcp", fmt.Sprintf(":%d", port)) },
		Dial:   dial("tcp"),
		ListenPacket: func(port uint16) (net.PacketConn, error) {
			return nets[1].ListenPacket("udp", fmt.Sprintf(":%d", port))
		},
		DialPacket: dial("udp"),
	}, nil
}

// wireguardGo are two nodes of wireguard-go's own netstack, with its default sockets.
func wireguardGo(p path) (measure.Pair, error) {
	var devs [2]*device.Device
	var nets [2]*theirs.Net
	var keys [2]key.Private
	var ports [2]uint16
	for i, addr := range []netip.Addr{first, second} {
		t, n, err := theirs.CreateNetTUN([]netip.Addr{addr}, nil, p.mtu)
		if err != nil {
			return measure.Pair{}, err
		}
		if keys[i], err = key.NewPrivate(); err != nil {
			return measure.Pair{}, err
		}
		c, err := net.ListenPacket("udp", ":0") // the device does not say which port it chose
		if err != nil {
			return measure.Pair{}, err
		}
		ports[i] = c.LocalAddr().(*net.UDPAddr).AddrPort().Port()
		c.Close()
		devs[i], nets[i] = device.NewDevice(t, p.impair(conn.NewDefaultBind(), uint64(i)), device.NewLogger(device.LogLevelSilent, "")), n
		k := keys[i].Bytes()
		if err := devs[i].IpcSet(fmt.Sprintf("private_key=%s\nlisten_port=%d\n", hex.EncodeToString(k[:]), ports[i])); err != nil {
			return measure.Pair{}, err
		}
		if err := devs[i].Up(); err != nil {
			return measure.Pair{}, err
		}
	}
	for i, addr := range []netip.Addr{second, first} {
		k := keys[1-i].Public().Bytes()
		if err := devs[i].IpcSet(fmt.Sprintf("public_key=%s\nendpoint=127.0.0.1:%d\nallowed_ip=%v/32\n", hex.EncodeToString(k[:]), ports[1-i], addr)); err != nil {
			return measure.Pair{}, err
		}
	}
	return measure.Pair{
		Listen: func(port uint16) (net.Listener, error) { return nets[1].ListenTCP(&net.TCPAddr{Port: int(port)}) },
		Dial: func(port uint16) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			return nets[0].DialContextTCPAddrPort(ctx, netip.AddrPortFrom(second, port))
		},
		ListenPacket: func(port uint16) (net.PacketConn, error) { return nets[1].ListenUDP(&net.UDPAddr{Port: int(port)}) },
		DialPacket: func(port uint16) (net.Conn, error) {
			return nets[0].DialUDPAddrPort(netip.AddrPort{}, netip.AddrPortFrom(second, port))
		},
	}, nil
}

// floor seals and opens packets of 1420 bytes, as both ends of a tunnel have to, with the same library, and does nothing
// else: the processor time of that is what no implementation on it can do without.
func floor(d time.Duration) (measure.Result, error) {
	aead, err := chacha20poly1305.New(make([]byte, chacha20poly1305.KeySize))
	if err != nil {
		return measure.Result{}, err
	}
	const size = 1420
	packet, sealed, opened := make([]byte, size), make([]byte, 0, size+aead.Overhead()), make([]byte, 0, size)
	var nonce [chacha20poly1305.NonceSize]byte
	n := 0
	for start := time.Now(); time.Since(start) < d; n++ {
		sealed = aead.Seal(sealed[:0], nonce[:], packet, nil)
		if opened, err = aead.Open(opened[:0], nonce[:], sealed, nil); err != nil {
			return measure.Result{}, err
		}
	}
	return measure.Result{Rate: float64(n*size) / d.Seconds(), CPU: d.Seconds() / float64(n*size) * 1e9}, nil
}
