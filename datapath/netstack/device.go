package netstack

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"

	"golang.zx2c4.com/wireguard/tun"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/world"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// exists reports whether there is a device.
func (n *Net) exists() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.wg.Exists()
}

// Read implements datapath.Datapath. A device that came to an end by itself is none.
func (n *Net) Read(ctx context.Context) (datapath.State, error) {
	n.op.Lock()
	defer n.op.Unlock()
	if n.isClosed() {
		return datapath.State{}, errClosed
	}
	if err := ctx.Err(); err != nil {
		return datapath.State{}, err
	}
	s, err := n.wg.Read()
	if errors.Is(err, datapath.ErrNoDevice) {
		return datapath.State{Host: n.host(false)}, nil
	}
	if err != nil {
		return datapath.State{}, err
	}
	s.Device.MTU = int(n.link.MTU())
	s.Host = n.host(true)
	n.mu.Lock()
	defer n.mu.Unlock()
	s.Addrs, s.Local, s.Routes = n.addrs, n.local, maps.Clone(n.routes)
	return s, nil
}

// host returns what is around a device; of one that does not exist yet, what it will find.
func (n *Net) host(exists bool) datapath.Host {
	h := datapath.Host{Underlay: datapath.UnderlaySeparate, UnderlayMTU: underlayMTU(), Driver: "netstack"}
	switch {
	case exists:
		h.IPv4, h.IPv6 = n.wg.Families()
	case n.opts.Bind != nil:
		h.IPv4, h.IPv6 = true, true
	default:
		h.IPv4, h.IPv6 = canBind("udp4"), canBind("udp6")
	}
	return h
}

func canBind(network string) bool {
	c, err := net.ListenUDP(network, nil)
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// underlayMTU returns the MTU of the interface that leads to most of the rest of the world; 0 where none does. A kernel
// may tell of less on the way to some, which is not seen here.
func underlayMTU() int {
	from := make(map[netip.Addr]int)
	for _, to := range world.Addrs {
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 9))) // sends nothing, but has the host choose a source address
		if err != nil {
			continue
		}
		from[c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()]++
		c.Close()
	}
	ifs, err := net.Interfaces()
	if err != nil || len(from) == 0 {
		return 0
	}
	mtu, most := 0, 0
	for _, i := range ifs {
		takes := 0
		as, _ := i.Addrs()
		for _, a := range as {
			if p, ok := a.(*net.IPNet); ok {
				ip, _ := netip.AddrFromSlice(p.IP)
				takes += from[ip.Unmap()]
			}
		}
		if takes > most {
			mtu, most = i.MTU, takes
		}
	}
	return mtu
}

func (n *Net) setDevice(d datapath.Device) error {
	if d.MTU != 0 {
		if err := checkMTU(d.MTU); err != nil {
			return err
		}
	}
	if !n.exists() {
		if d.Key.IsZero() {
			return datapath.ErrNoDevice
		}
		return n.newDevice(d)
	}
	if err := n.wg.Change(d); err != nil {
		return err
	}
	if d.MTU != 0 && d.MTU != int(n.link.MTU()) {
		n.link.SetMTU(uint32(d.MTU))
		n.tun.mtuChanged()
	}
	return nil
}

func (n *Net) newDevice(d datapath.Device) error {
	err := n.wg.Create(d, func() (tun.Device, error) {
		if d.MTU == 0 {
			d.MTU = n.opts.MTU
		}
		n.link.SetMTU(uint32(d.MTU))
		n.tun = newTUN(n.link)
		return n.tun, nil
	})
	n.mu.Lock()
	defer n.mu.Unlock()
	n.announce()
	return err
}

// ended cleans up after a device that nobody meant to end. mu is held.
func (n *Net) ended() {
	n.forget()
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// removeDevice ends the device, if there is one, and with it what Settle said of it. n.op is held.
func (n *Net) removeDevice() {
	n.wg.Remove()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.settled = false
	n.forget()
}

func (n *Net) putPeer(o datapath.PutPeer) error {
	if err := n.wg.PutPeer(o); err != nil {
		return err
	}
	n.edit(func(e *edit) {
		mine := n.peers[o.Key]
		if mine == nil {
			mine = make(map[netip.Prefix]struct{})
			n.peers[o.Key] = mine
		}
		for r := range o.Peer.Prefixes.All() {
			if old, ok := e.peers.Get(r); ok && old != o.Key {
				delete(n.peers[old], r)
			}
			e.peers = e.peers.InsertPersist(r, o.Key)
			mine[r] = struct{}{}
		}
	})
	return nil
}

func (n *Net) dropPrefixes(o datapath.DropPrefixes) error {
	if err := n.wg.DropPrefixes(o); err != nil {
		return err
	}
	n.edit(func(e *edit) { n.disown(e, o.Key, o.Prefixes) })
	return nil
}

// removed takes a peer that the device has no longer out of the table. mu is held.
func (n *Net) removed(k key.Public) {
	n.editHeld(func(e *edit) {
		for r := range n.peers[k] {
			e.peers = e.peers.DeletePersist(r)
		}
		delete(n.peers, k)
	})
}

// disown takes prefixes from a peer in the table.
func (n *Net) disown(e *edit, k key.Public, set prefixes.Set) {
	for r := range set.All() {
		if _, ok := n.peers[k][r]; ok {
			delete(n.peers[k], r)
			e.peers = e.peers.DeletePersist(r)
		}
	}
}
