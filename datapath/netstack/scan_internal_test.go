package netstack

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/warren-mesh/warren/datapath/key"
)

// held is what one peer has of a table, in no order.
type held struct {
	key      key.Public
	prefixes []netip.Prefix
}

// scan returns the length of the longest prefix that contains a, and who has it; -1: nobody.
func scan(peers []held, a netip.Addr) (best int, who key.Public) {
	best = -1
	for _, p := range peers {
		for _, q := range p.prefixes {
			if q.Bits() > best && q.Contains(a) {
				best, who = q.Bits(), p.key
			}
		}
	}
	return best, who
}

// nested returns a prefix that likely lies in, or around, those it returned before.
func nested(r *rand.Rand) netip.Prefix {
	if r.IntN(2) == 0 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(r.IntN(2)) << 7, byte(r.IntN(4)) << 6, byte(r.IntN(8))}), r.IntN(33)).Masked()
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 7: byte(r.IntN(2)) << 7, 8: byte(r.IntN(4)) << 6, 15: byte(r.IntN(8))}), r.IntN(129)).Masked()
}

// TestTableAfterRemovals has peers with nested prefixes come and go in a table, and compares it with a search of
// all they have, at every step.
func TestTableAfterRemovals(t *testing.T) {
	steps := 100_000
	if testing.Short() {
		steps = 10_000
	}
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	tab := newTable()
	peers := make([]held, 10)
	for i := range peers {
		peers[i].key = newPublic(t)
	}
	give := func(e *edit, p *held, q netip.Prefix) {
		e.peers = e.peers.InsertPersist(q, p.key)
		e.hop(q, func(h *hop) { h.route = true })
		p.prefixes = append(p.prefixes, q)
	}
	take := func(e *edit, p *held, i int) {
		q := p.prefixes[i]
		e.peers = e.peers.DeletePersist(q)
		e.hop(q, func(h *hop) { h.route = false })
		p.prefixes[i] = p.prefixes[len(p.prefixes)-1]
		p.prefixes = p.prefixes[:len(p.prefixes)-1]
	}
	for step := range steps {
		e := edit{*tab}
		p := &peers[r.IntN(len(peers))]
		switch n := r.IntN(10); {
		case n < 7:
			q := nested(r)
			for i := range peers { // the one that had it loses it
				for j := range peers[i].prefixes {
					if peers[i].prefixes[j] == q {
						take(&e, &peers[i], j)
						break
					}
				}
			}
			give(&e, p, q)
		case n < 9 && len(p.prefixes) > 0:
			take(&e, p, r.IntN(len(p.prefixes)))
		default: // the peer is removed
			for len(p.prefixes) > 0 {
				take(&e, p, 0)
			}
		}
		tab = &e.table
		for range 4 {
			a := nested(r).Addr()
			best, who := scan(peers, a)
			got, ok := tab.peers.Lookup(a)
			if ok != (best >= 0) || got != who {
				t.Fatalf("seed %d, step %d: %v is %v's, want %v's, by a prefix of %d bits", seed, step, a, got.Short(), who.Short(), best)
			}
			if v, _ := tab.send(a); (v == outside) != (best >= 0) {
				t.Fatalf("seed %d, step %d: verdict %d of %v, with a prefix of %d bits", seed, step, v, a, best)
			}
		}
	}
}
