package wggo

import (
	"bytes"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/datapath/internal/uapi"
	"github.com/warren-mesh/warren/datapath/key"
)

// greeting is the first handshake with a peer.
type greeting struct {
	step  int // an index of greetFirst and greetLast, or stepResend
	next  time.Time
	waits int // how often it was put off because the peer spoke
}

const (
	stepResend = -1 // the last initiation once more; stepAnew comes next
	stepAnew   = 1
)

// The times after its creation at which a peer is greeted, as long as no handshake was completed. Two
// nodes that learn of each other do so at different times, and what is said to one that knows nobody
// yet is lost; WireGuard would repeat it after 5 s (REKEY_TIMEOUT). The two do not speak at the same
// times, and leave an answer from the other end of the world the time to arrive.
var (
	greetFirst = [...]time.Duration{0, 250 * time.Millisecond, time.Second}
	greetLast  = [...]time.Duration{0, 500 * time.Millisecond, 2 * time.Second}
)

// GreetNew greets the peers that were put. A driver calls it when the rest of an Apply is done, so that what
// follows a handshake at once finds its route back.
func (n *WireGuard) GreetNew() {
	w, err := n.device()
	for _, k := range n.toGreet {
		if err == nil {
			n.greet(w, k)
		}
	}
	n.toGreet = nil
}

// greet starts handshakes with a peer until one is completed, or enough were tried; from then on
// WireGuard goes by its own timers.
func (n *WireGuard) greet(w *wireguard, k key.Public) {
	times := greetLast
	if w.public.Compare(k) < 0 {
		times = greetFirst
	}
	n.o.Mu.Lock()
	n.greets[k] = &greeting{step: stepAnew, next: time.Now().Add(times[stepAnew])}
	n.startObserving()
	n.o.Mu.Unlock()
	initiate(w, k, false)
}

// precedence is a peer whose key is greater than this node's, by its endpoint. When both begin a
// handshake at the same time each takes up the other's and forgets its own, so that both answers are
// for nobody; or, where the answer is already being worked on, wireguard-go makes one session of two
// halves, in which only one direction works. Therefore the node with the lesser key lets only one
// initiation live, whichever it saw first: while its own is on its way it drops the one that arrives,
// as the peer will answer; and with the peer's at hand it does not send its own.
//
// The one that lives may have come before the other node knew this one. So the same initiation is
// sent once more, which is harmless to a node that is answering the first: it has its time stamp in it.
//
// What counts as an initiation or a response here has the right size and MAC1, which takes knowing this
// node's public key (bind.meant), but not being the peer: that is found out by the device alone. So a
// member of the mesh that also forges a peer's address can put a handshake off, and the bounds below
// keep it from doing so for ever.
type precedence struct {
	key     key.Public
	sent    time.Time // the last initiation to it
	yielded time.Time // when this node last dropped its own
	msg     []byte    // and its text
}

const (
	// crossing is for how long an initiation counts as on its way: the round trip of any path on Earth,
	// and the time it may take two busy hosts to work on it.
	crossing = time.Second
	// answering is for how long one that arrived counts as being answered.
	answering = 300 * time.Millisecond
	// crossed is when, after a drop, there is another try. wireguard-go must have dealt with the
	// first by then, since it takes up the same one twice if it gets both at once.
	crossed = 100 * time.Millisecond
	// settling is how long a peer is left alone after a handshake message of it arrived. To begin anew
	// just then would end the session that comes of it before it was seen.
	settling = 250 * time.Millisecond
	// yielding is how long this node does not yield again: what it yielded to may have been forged.
	yielding = 3 * time.Second
	// maxWaits bounds how often a greeting is put off: what the peer seemed to say may have been forged.
	maxWaits = 3
	// maxHeard bounds what strangers can have remembered.
	maxHeard = 1024
)

// moveEndpoint notes where a peer is reached. mu is held.
func (n *WireGuard) moveEndpoint(w *wireguard, k key.Public, from, to netip.AddrPort) {
	if p := n.first[from]; p != nil && p.key == k && from != to {
		delete(n.first, from)
	}
	if to.IsValid() && w.public.Compare(k) < 0 {
		if p := n.first[to]; p == nil || p.key != k {
			n.first[to] = &precedence{key: k}
		}
	}
}

// yields reports whether an initiation that is to be sent is dropped. It is called by the device.
func (n *WireGuard) yields(to netip.AddrPort, msg []byte) bool {
	n.o.Mu.Lock()
	defer n.o.Mu.Unlock()
	to = uapi.Unmap(to)
	p := n.first[to]
	if p == nil {
		return false
	}
	if time.Since(n.heard[to]) < answering && time.Since(p.yielded) > yielding {
		p.yielded = time.Now()
		delete(n.heard, to) // once, lest a lost answer is waited for
		n.greetAgain(p.key, stepAnew)
		return true
	}
	p.sent, p.msg = time.Now(), bytes.Clone(msg)
	return false
}

// answers notes that a handshake response arrived. It is called by the device.
func (n *WireGuard) answers(from netip.AddrPort) {
	n.o.Mu.Lock()
	defer n.o.Mu.Unlock()
	if len(n.greets) > 0 {
		n.speaks(uapi.Unmap(from))
	}
}

// crosses reports whether an initiation that arrived is dropped. It is called by the device.
func (n *WireGuard) crosses(from netip.AddrPort) bool {
	n.o.Mu.Lock()
	defer n.o.Mu.Unlock()
	from = uapi.Unmap(from)
	n.speaks(from)
	p := n.first[from]
	if p == nil || time.Since(p.sent) > crossing {
		if len(n.heard) >= maxHeard {
			clear(n.heard)
		}
		n.heard[from] = time.Now()
		return false
	}
	p.sent = time.Time{} // once, lest both wait for the other
	n.greetAgain(p.key, stepResend)
	return true
}

// speaks notes that a handshake message arrived from a peer. mu is held.
func (n *WireGuard) speaks(from netip.AddrPort) {
	if len(n.lively) >= maxHeard {
		clear(n.lively)
	}
	n.lively[from] = time.Now()
}

// greetAgain has another try soon, where there is no session yet. mu is held.
func (n *WireGuard) greetAgain(k key.Public, step int) {
	if p := n.peers[k]; p != nil && !p.shook {
		n.greets[k] = &greeting{step: step, next: time.Now().Add(crossed)}
		n.startObserving()
	}
}

// initiate sends a handshake initiation. Unless it is sent anew, WireGuard allows one in 5 s.
func initiate(w *wireguard, k key.Public, anew bool) {
	p := w.LookupPeer(k.Bytes())
	if p == nil {
		return
	}
	if anew {
		p.ExpireCurrentKeypairs() // there are none, but with them goes the time of the last attempt
	}
	_ = p.SendHandshakeInitiation(false) // wireguard-go logs why it could not
}

// Initiate sends a handshake initiation to a peer, beside the session there may be. WireGuard allows one in
// 5 s (REKEY_TIMEOUT).
func (n *WireGuard) Initiate(k key.Public) {
	if w, err := n.device(); err == nil {
		initiate(w, k, false)
	}
}

// greetDue carries out the greetings that are due.
func (n *WireGuard) greetDue(now time.Time) {
	type due struct {
		key key.Public
		to  netip.AddrPort
		msg []byte // to be sent once more; nil: a new one
	}
	var ks []due
	n.o.Mu.Lock()
	w := n.wg
	if w == nil {
		clear(n.greets)
	}
	for k, g := range n.greets {
		p := n.peers[k]
		if p == nil || p.shook {
			delete(n.greets, k)
			continue
		}
		if g.next.After(now) {
			continue
		}
		if now.Sub(n.lively[p.endpoint]) < settling && g.waits < maxWaits {
			g.waits++
			g.next = now.Add(settling)
			continue
		}
		if g.step == stepResend {
			if f := n.first[p.endpoint]; f != nil && f.msg != nil {
				ks = append(ks, due{k, p.endpoint, f.msg})
			}
			g.step, g.next = stepAnew, g.next.Add(greetFirst[stepAnew])
			continue
		}
		ks = append(ks, due{key: k})
		times := greetLast
		if w.public.Compare(k) < 0 {
			times = greetFirst
		}
		if g.step++; g.step == len(times) {
			delete(n.greets, k)
		} else {
			g.next = g.next.Add(times[g.step] - times[g.step-1])
		}
	}
	n.o.Mu.Unlock()
	for _, d := range ks {
		if d.msg != nil {
			w.bind.resend(d.msg, d.to)
		} else {
			initiate(w, d.key, true)
		}
	}
}
