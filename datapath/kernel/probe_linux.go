package kernel

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/wgconv"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// ability is whether Linux can take a single prefix from a peer: a matter of the kernel that runs, so that
// one probe serves a process.
var ability struct {
	sync.Mutex
	known, direct bool
}

// RemovesPrefixes reports whether this kernel takes single prefixes from a peer (Linux 6.16). Where it does
// not, a prefix is put on a peer made for that, which other programs see on the device for a second or two.
// It is found out on a device made for that
// once in a process, when first needed.
func (k *Kernel) RemovesPrefixes(ctx context.Context) (bool, error) {
	k.op.Lock()
	defer k.op.Unlock()
	if k.closed {
		return false, errClosed
	}
	return k.removes(ctx)
}

func (k *Kernel) removes(ctx context.Context) (bool, error) {
	if k.fallback {
		return false, nil
	}
	ability.Lock()
	defer ability.Unlock()
	if ability.known {
		return ability.direct, nil
	}
	direct, err := k.probe(ctx)
	if err != nil {
		// The other way works everywhere.
		k.log.Warn("could not find out how prefixes are removed", "error", err)
		return false, ctx.Err()
	}
	ability.known, ability.direct = true, direct
	k.log.Info("how this kernel removes a prefix of a peer", "directly", direct)
	return direct, nil
}

// probeName is the name of the device on which something is tried out. It is always the same for a device, so that one which
// was left by a process that was killed is found.
func probeName(device string) string {
	sum := sha256.Sum256([]byte("warren probe " + device))
	return "wrn" + hex.EncodeToString(sum[:6])
}

// probe makes a device, has it take a prefix from a peer, and removes it.
func (k *Kernel) probe(ctx context.Context) (direct bool, err error) {
	name := probeName(k.opts.Interface)
	var h *netlink.Handle
	if err := k.host.Do(func() (err error) {
		h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	}); err != nil {
		return false, err
	}
	defer h.Close()
	if err := removeProbe(h, name); err != nil {
		return false, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	link := &netlink.Wireguard{LinkAttrs: attrs}
	if err := h.LinkAdd(link); err != nil {
		return false, fmt.Errorf("making %s: %w", name, err)
	}
	defer func() { err = errors.Join(err, removeProbe(h, name)) }()
	l, err := h.LinkByName(name)
	if err != nil {
		return false, fmt.Errorf("finding %s: %w", name, err)
	}
	if err := h.LinkSetAlias(l, probeAlias); err != nil {
		return false, fmt.Errorf("marking %s: %w", name, err)
	}
	return tryRemoval(ctx, k.conn, l.Attrs().Index)
}

const probeAlias = "warren probe: removed in a moment"

// removeProbe removes the device that an earlier probe left. It was never up.
func removeProbe(h *netlink.Handle, name string) error {
	l, err := h.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("finding %s: %w", name, err)
	}
	if a := l.Attrs(); l.Type() != kind || a.Alias != "" && a.Alias != probeAlias || a.Flags&1 != 0 {
		return fmt.Errorf("link %s is not ours: kind %q, alias %q", name, l.Type(), a.Alias)
	}
	if err := h.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing %s: %w", name, err)
	}
	return nil
}

// tryRemoval reports whether a device takes one of two prefixes from a peer.
func tryRemoval(ctx context.Context, c *conn, index int) (bool, error) {
	somebody, err := key.NewPrivate()
	if err != nil {
		return false, err
	}
	public := somebody.Public()
	both, one := prefixes.MustParse("192.0.2.0/25", "2001:db8::/64"), prefixes.MustParse("192.0.2.0/25")
	say := func(change wgconv.Change) error {
		return c.set(wgconv.Batch(index, 0, change)[0].Data)[0]
	}
	if err := say(wgconv.Change{Key: public, Prefixes: both}); err != nil {
		return false, fmt.Errorf("putting a peer: %w", err)
	}
	switch err := say(wgconv.Change{Key: public, Without: true, Prefixes: one}); {
	case errors.Is(err, unix.EINVAL): // the attribute is unknown
		return false, nil
	case err != nil:
		return false, fmt.Errorf("removing a prefix: %w", err)
	}
	d, err := c.dump(ctx, index)
	if err != nil {
		return false, err
	}
	return removed(d.State(), public, both.Minus(one)), nil
}

// removed reports whether a device is as one that removed a prefix: older ones pass over what they do not
// know, and leave the peer as it was.
func removed(s datapath.State, peer key.Public, left prefixes.Set) bool {
	return s.Peers[peer].Prefixes == left
}

// cleanup removes what is left of a probe, and then what hostnet knows of.
func cleanup(ctx context.Context, o Options) error {
	h, err := hostnet.Open(o.host())
	if err != nil {
		return err
	}
	defer h.Close()
	held, err := h.Hold()
	if err != nil {
		return err
	}
	defer held.Close()
	err = h.Do(func() error {
		nh, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer nh.Close()
		return removeProbe(nh, probeName(o.Interface))
	})
	return errors.Join(err, h.Remove(ctx))
}
