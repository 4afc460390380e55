package hostnet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath/internal/nft"
	"github.com/warren-mesh/warren/prefixes"
)

// filter is our table of nftables, opened when there is a use for it: a host that forwards nothing is not to
// load the module.
type filter struct {
	table *nft.Table
	wait  sync.WaitGroup
}

// tableOwner marks the table, whatever the protocol of the mesh.
func (h *Host) tableOwner() string { return aliasPrefix + h.o.Interface }

// openFilter opens the table.
func (h *Host) openFilter() (*nft.Table, error) {
	if h.filter.table != nil {
		return h.filter.table, nil
	}
	t, err := nft.Open(nft.Options{Interface: h.o.Interface, Owner: h.tableOwner(), Do: h.Do, Logger: h.o.Logger})
	if err != nil {
		return nil, err
	}
	h.filter.table = t
	h.filter.wait.Go(func() {
		for range t.Changed() {
			h.notify()
		}
	})
	return t, nil
}

func (h *Host) closeFilter() error {
	h.mu.Lock()
	t := h.filter.table
	h.mu.Unlock()
	if t == nil {
		return nil
	}
	err := t.Close()
	h.filter.wait.Wait()
	return err
}

// passing is what a host does with packets that are for others.
type passing struct {
	forwards     // as the kernel has it
	clamp    int // MTU to clamp by; 0: none
}

type forwards struct{ ipv4, ipv6 bool }

// filterUse reports whether a table is of use, or one may be there.
func (h *Host) filterUse(p passing) bool {
	return p.clamp != 0 || !h.o.SNAT.IsEmpty() || h.o.Forward || h.filter.table != nil
}

// pass is what is to be done with packets for others, where the link is l.
func (h *Host) pass(c netconf, l link) passing {
	p := passing{forwards: c.forwards}
	if l.Index != 0 && (c.ipv4 || c.ipv6 || h.o.Forward) {
		p.clamp = l.MTU
	}
	return p
}

// wantFilter is what the table is to be that is now r.
func (h *Host) wantFilter(p passing, r nft.Rules) nft.Rules {
	return nft.Rules{ClampMTU: p.clamp, SNAT: h.o.SNAT, Turned: r.Turned}
}

// filtered reports whether the table is as it is to be, and forwarding is on where that was asked for; or what
// keeps it from being so, which is no reason not to use the link.
func (h *Host) filtered(ctx context.Context, p passing) (ok bool, problem error) {
	if !h.filterUse(p) {
		return true, nil
	}
	t, err := h.openFilter()
	if err != nil {
		return true, err
	}
	r, exact, err := t.Read(ctx)
	if err != nil {
		return true, err
	}
	if h.o.Forward {
		f, err := nft.ReadForwarding(h.Do)
		if err != nil {
			return true, err
		}
		if off, notice := wantOn(f); len(off) > 0 || notice != nil {
			return len(off) == 0 || h.unfit != nil, errors.Join(notice, h.unfit)
		}
	} else if len(r.Turned) > 0 {
		return false, nil
	}
	if h.unfit != nil {
		return true, h.unfit
	}
	return exact && r.Equal(h.wantFilter(p, r)), nil
}

// wantOn is what Options.Forward turns on: not IPv6 where that costs the host its way out.
func wantOn(f nft.Forwarding) (off []string, notice error) {
	off = f.Off
	if f.Notice != nil {
		off = slices.DeleteFunc(slices.Clone(off), func(s string) bool { return s == nft.ForwardIPv6 })
	}
	return off, f.Notice
}

// setFilter makes the table, and has the host forward where that was asked for. What was turned on is noted first.
// What it cannot do is remembered, and reported with every reading until Up is called again.
func (h *Host) setFilter(ctx context.Context, p passing) {
	h.unfit = nil
	if !h.filterUse(p) {
		return
	}
	h.unfit = func() error {
		t, err := h.openFilter()
		if err != nil {
			return err
		}
		r, _, err := t.Read(ctx)
		if err != nil {
			return err
		}
		want := h.wantFilter(p, r)
		switch {
		case h.o.Forward:
			f, err := nft.ReadForwarding(h.Do)
			if err != nil {
				return err
			}
			off, _ := wantOn(f)
			want.Turned = union(r.Turned, off)
			if err := t.Set(ctx, want); err != nil {
				return err
			}
			turned, err := nft.TurnOn(h.Do, off)
			if len(turned) > 0 {
				h.o.Logger.Info("turned on", "sysctls", turned)
			}
			return err
		case len(r.Turned) > 0:
			if err := nft.TurnOff(h.Do, r.Turned); err != nil {
				return err
			}
			h.o.Logger.Info("turned off again", "sysctls", r.Turned)
			want.Turned = nil
		}
		return t.Set(ctx, want)
	}()
}

func union(a, b []string) []string {
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(a, b))))
}

// removeFilter removes the table, and turns off what the mesh turned on. A kernel without nftables has no table.
func (h *Host) removeFilter(ctx context.Context) error {
	t, err := h.openFilter()
	if errors.Is(err, errors.ErrUnsupported) || errors.Is(err, fs.ErrPermission) {
		return nil
	}
	if err != nil {
		return err
	}
	r, _, err := t.Read(ctx)
	if errors.As(err, new(*nft.ForeignError)) {
		return nil // not ours
	}
	if err != nil {
		return err
	}
	if err := nft.TurnOff(h.Do, r.Turned); err != nil {
		return err
	}
	return t.Set(ctx, nft.Rules{})
}

// filterProblem says what is not as it should be with packets for others.
func (h *Host) filterProblem(p passing, err error, ps *problems) {
	if err == nil {
		return
	}
	var lack []string
	if p.clamp != 0 {
		lack = append(lack, "the segments of forwarded TCP connections are not made to fit the mesh, so that some may stall")
	}
	if !h.o.SNAT.IsEmpty() {
		lack = append(lack, fmt.Sprintf("packets to %v keep the source addresses of the mesh", h.o.SNAT))
	}
	if h.o.Forward {
		lack = append(lack, "this host may not forward all that it should")
	}
	remedy := "see to what it says"
	if errors.Is(err, errors.ErrUnsupported) {
		remedy = "load the module (modprobe nf_tables), or have a kernel with CONFIG_NF_TABLES_INET and CONFIG_NFT_NAT"
	}
	ps.add("nftables", fmt.Sprintf("%v: %s", err, strings.Join(lack, ", and ")), remedy)
}

// unpassed reports what of the local prefixes of a mesh the kernel would not pass on, for want of forwarding: those
// that are not this host's own addresses.
func (h *Host) unpassed(ctx context.Context, conf netconf, local prefixes.Set, ps *problems) {
	if h.o.Forward { // Up says what it could not do
		return
	}
	checked := 0
	for p := range local.All() {
		is4 := p.Addr().Is4()
		if is4 && conf.ipv4 || !is4 && conf.ipv6 {
			continue
		}
		if checked++; checked > mostChecked {
			return
		}
		behind := slices.ContainsFunc(samples(p), func(a netip.Addr) bool {
			r, err := h.match(ctx, a)
			return err == nil && r.typ == unix.RTN_UNICAST
		})
		if !behind {
			continue
		}
		name, fam := nft.ForwardIPv4, 4
		if !is4 {
			name, fam = nft.ForwardIPv6, 6
		}
		ps.add(fmt.Sprintf("IPv%d forwarding", fam), fmt.Sprintf("this node announces %v, which is behind it, and the host forwards no IPv%d: packets that arrive for it are dropped", p, fam),
			fmt.Sprintf("set %s to 1, or have the mesh do it", name))
	}
}
