package tun

import (
	"errors"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/warren-mesh/warren/datapath"
)

// offload is a tun.Device whose packets arrive although Linux does not take those that are handed to it
// together.
//
// wireguard-go makes one large packet of TCP segments, or UDP datagrams, that follow each other, and says in a header
// before it how Linux is to take it apart (struct virtio_net_hdr in linux/virtio_net.h). Some versions of Linux
// refuse that as invalid, which shows only once there is such a packet. What was refused is then written packet by
// packet, and so is all that comes later.
type offload struct {
	tun.Device
	fellBack func(error) // told once

	alone     atomic.Bool   // packets are written one by one
	fallbacks atomic.Uint64 // how often that was begun

	mu    sync.Mutex // held while packets are written together; guards saved
	saved []saved
}

// saved is a packet before it was written.
type saved struct {
	buf  []byte
	head [headLen]byte // its first bytes
}

const (
	// headLen is more than what is changed of a packet that others are appended to: the 40 bytes of an IPv6 header,
	// and 18 of a TCP header, up to its checksum.
	headLen = 64
	// vnetLen is the size of a virtio_net_hdr, which is put right before a packet. Its first byte are flags, and
	// the second says of what type a large packet is.
	vnetLen = 10
	// untouched are the flags in a header that was not made, as the packet was appended to another one.
	untouched = 0xff
)

func newOffload(d tun.Device, fellBack func(error)) *offload {
	return &offload{Device: d, fellBack: fellBack}
}

// Write writes each packet once, or says why it could not. It returns how many were written.
func (o *offload) Write(bufs [][]byte, offset int) (int, error) {
	if len(bufs) < 2 || o.alone.Load() {
		return o.each(bufs, offset)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.alone.Load() {
		return o.each(bufs, offset)
	}
	o.save(bufs, offset)
	defer o.forget()
	n, err := o.Device.Write(bufs, offset)
	if err == nil {
		return len(bufs), nil
	}
	left := o.left(bufs, offset, n, err)
	if len(left) == 0 {
		return n, err
	}
	o.alone.Store(true)
	o.fallbacks.Add(1)
	_, first := refusals(err)
	o.fellBack(first)
	n, err = o.each(left, offset)
	return len(bufs) - len(left) + n, err
}

// each writes packets one by one. One that is refused keeps no other from being written.
func (o *offload) each(bufs [][]byte, offset int) (written int, errs error) {
	for i := range bufs {
		_, err := o.Device.Write(bufs[i:i+1], offset)
		switch {
		case err == nil:
			written++
		case errors.Is(err, os.ErrClosed):
			return written, err
		case errs == nil:
			errs = err
		}
	}
	return written, errs
}

func (o *offload) save(bufs [][]byte, offset int) {
	o.saved = slices.Grow(o.saved[:0], len(bufs))[:len(bufs)]
	for i, b := range bufs {
		o.saved[i].buf = b
		copy(o.saved[i].head[:], b[offset:])
		for j := max(0, offset-vnetLen); j < offset; j++ {
			b[j] = untouched
		}
	}
}

// forget lets go of the packets, whose buffers are others' now.
func (o *offload) forget() {
	for i := range o.saved {
		o.saved[i].buf = nil
	}
}

// left returns the packets that were refused because they were handed over together, as they were before.
// written and err are what the device answered.
//
// What became of each is in the headers. Of the packets that wireguard-go made of them it tells how many bytes Linux
// took, and each error, but not which belongs to which. A Linux that does not take large packets of one protocol
// takes none of it: so the ones refused are those of the protocols by which the bytes and the number of errors
// come out right. If none do, it is all large packets: better one twice than one never.
func (o *offload) left(bufs [][]byte, offset, written int, err error) [][]byte {
	refusals, _ := refusals(err)
	if refusals == 0 {
		return nil
	}
	var large [protocols]struct{ packets, bytes int }
	bytes, all, told := 0, 0, false
	for _, b := range bufs {
		typ, made := vnetType(b, offset)
		if !made {
			continue
		}
		told = true
		n := len(b) - offset + vnetLen
		bytes += n
		if typ != unix.VIRTIO_NET_HDR_GSO_NONE {
			p := protocolOf(b[offset:])
			all |= 1 << p
			large[p].packets++
			large[p].bytes += n
		}
	}
	if !told { // a device that makes no such headers, and counts packets
		return o.restore(offset, func(i int) bool { return i >= written })
	}
	refused := 0
	for some := all; some > 0; some = (some - 1) & all { // each part of all
		packets, took := 0, bytes
		for p, l := range large {
			if some>>p&1 == 1 {
				packets += l.packets
				took -= l.bytes
			}
		}
		if packets == refusals && took == written {
			refused |= some
		}
	}
	if refused == 0 {
		refused = all
	}
	return o.restore(offset, func(i int) bool {
		b := o.saved[i].buf
		typ, made := vnetType(b, offset)
		if made && typ == unix.VIRTIO_NET_HDR_GSO_NONE {
			return false
		}
		return refused>>protocolOf(b[offset:])&1 == 1
	})
}

// restore returns the saved packets that want names, as they were.
func (o *offload) restore(offset int, want func(i int) bool) (bufs [][]byte) {
	for i := range o.saved {
		if want(i) {
			s := &o.saved[i]
			copy(s.buf[offset:], s.head[:])
			bufs = append(bufs, s.buf)
		}
	}
	return bufs
}

// vnetType returns the type in the header of a packet; false: none was made, as the packet is part of another one.
func vnetType(b []byte, offset int) (typ byte, made bool) {
	if offset < vnetLen || b[offset-vnetLen] == untouched {
		return 0, false
	}
	return b[offset-vnetLen+1], true
}

// protocols is how many protocolOf tells apart.
const protocols = 4

// protocolOf tells TCP from UDP, and IPv4 from IPv6, of a packet that is large or part of a large one. One of several
// protocols is never made.
func protocolOf(p []byte) (n int) {
	at := 9
	if p[0]>>4 == 6 {
		at, n = 6, 2
	}
	if p[at] == unix.IPPROTO_UDP {
		n++
	}
	return n
}

// refusals counts the errors in err that say Linux did not understand what it was given, and returns the first. EIO
// is not among them: it is what Linux says while the interface is down.
func refusals(err error) (n int, first error) {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range several.Unwrap() {
			m, one := refusals(err)
			n += m
			if first == nil {
				first = one
			}
		}
		return n, first
	}
	for _, refused := range []error{unix.EINVAL, unix.EMSGSIZE, unix.EOPNOTSUPP} {
		if errors.Is(err, refused) {
			return 1, err
		}
	}
	return 0, nil
}

// fellBack is what to do once Linux refuses packets that are handed to it together; nil: they never are.
func (t *TUN) fellBack() func(error) {
	if t.opts.NoOffload {
		return nil
	}
	return func(err error) {
		t.log.Warn("Linux refused packets that were handed to it together, and is given them one by one from now on", "interface", t.opts.Interface, "reason", err)
		t.notify()
	}
}

// problems is what an operator may want to know of a link.
func (l *link) problems() []datapath.Problem {
	o, ok := l.Device.(*offload)
	if !ok || o.fallbacks.Load() == 0 {
		return nil
	}
	return []datapath.Problem{{
		Subject: "offload",
		Message: "Linux refused packets that were handed to it together, and is given them one by one: none is lost, but it costs throughput",
		Remedy:  "run another version of Linux; a program that embeds the mesh may set NoOffload, with which packets are never handed over together",
	}}
}
