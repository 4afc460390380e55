package tun

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
	wgtun "golang.zx2c4.com/wireguard/tun"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
)

// Apply implements datapath.Datapath.
func (t *TUN) Apply(ctx context.Context, ops ...datapath.Op) error {
	t.op.Lock()
	defer t.op.Unlock()
	defer t.wg.GreetNew()
	return hostnet.Split(datapath.Each(ctx, ops, t.do))
}

// do carries out one op. op is held.
func (t *TUN) do(ctx context.Context, op datapath.Op) error {
	if t.closed {
		return errClosed
	}
	switch o := op.(type) {
	case datapath.SetDevice:
		return t.setDevice(ctx, o.Device)
	case datapath.RemoveDevice:
		return t.removeDevice(ctx)
	}
	if !t.exists() {
		return datapath.ErrNoDevice
	}
	switch o := op.(type) {
	case datapath.AddAddrs:
		return t.host.AddAddrs(ctx, o.Addrs)
	case datapath.RemoveAddrs:
		return t.host.RemoveAddrs(ctx, o.Addrs)
	case datapath.AddLocal:
		t.local = t.local.Union(o.Prefixes)
	case datapath.RemoveLocal:
		t.local = t.local.Minus(o.Prefixes)
	case datapath.AddRoutes:
		return t.host.AddRoutes(ctx, o.Routes)
	case datapath.RemoveRoutes:
		return t.host.RemoveRoutes(ctx, o.Prefixes)
	case datapath.PutPeer:
		return t.wg.PutPeer(o)
	case datapath.DropPrefixes:
		return t.wg.DropPrefixes(o)
	case datapath.RemovePeer:
		return t.wg.RemovePeer(o.Key)
	default:
		return fmt.Errorf("op %T: %w", op, errors.ErrUnsupported)
	}
	return nil
}

// none says that an error left no device.
func none(err error) error {
	if errors.Is(err, datapath.ErrNoDevice) {
		return err
	}
	return fmt.Errorf("%w: %w", datapath.ErrNoDevice, err)
}

func (t *TUN) setDevice(ctx context.Context, d datapath.Device) error {
	l, err := t.host.Link(ctx)
	foreign := errors.As(err, new(*hostnet.ForeignError))
	switch {
	case err == nil || errors.Is(err, hostnet.ErrNoLink) || foreign && t.index != 0: // ours may have lost its mark
	case t.exists():
		return err
	default:
		return none(err)
	}
	there := t.present(l) == nil
	if d.MTU != 0 {
		if err := hostnet.CheckMTU(d.MTU); err != nil && there {
			return err
		} else if err != nil {
			return none(err)
		}
	}
	if !there {
		if d.Key.IsZero() {
			return datapath.ErrNoDevice
		}
		return t.newDevice(ctx, d)
	}
	if d.Mark != 0 {
		if _, err := t.host.Mark(d.Mark); err != nil {
			return err
		}
	}
	if err := t.wg.Change(d); err != nil {
		return err
	}
	t.mtu.Ask(d.MTU, false)
	if d.MTU != 0 && d.MTU != l.MTU {
		if err := t.host.Up(ctx, d.MTU); err != nil {
			return fmt.Errorf("MTU %d: %w", d.MTU, err)
		}
		t.link.setMTU(d.MTU)
	}
	return nil
}

// newDevice makes the interface and the device on it. It leaves both or neither.
func (t *TUN) newDevice(ctx context.Context, d datapath.Device) error {
	var err error
	if d.Mark, err = t.host.Mark(d.Mark); err != nil {
		return none(err)
	}
	t.mtu.Ask(d.MTU, true)
	t.sockets().Encrypted(d.Mark)
	hs, err := t.sockets().Read(ctx)
	if err != nil {
		return none(err)
	}
	if d.MTU == 0 {
		d.MTU = t.mtu.Right(hs.Host, 0)
	}
	unmarked := t.wg.Create(d, func() (wgtun.Device, error) { return t.newLink(ctx, d.MTU) })
	if errors.Is(unmarked, datapath.ErrNoDevice) {
		t.index = 0
		t.letGo()
		return unmarked
	}
	if unmarked != nil && t.host.Apart(d.Mark) { // packets would go round and round
		t.drop()
		return none(unmarked)
	}
	err = t.host.Up(ctx, d.MTU)
	if err != nil {
		err = fmt.Errorf("bringing interface %s up: %w", t.opts.Interface, err)
	} else if path := t.opts.socket(); path != "" {
		err = t.listen(path)
		if err != nil && t.opts.Socket == "" {
			t.log.Warn("other programs will not see the device", "interface", t.opts.Interface, "reason", err)
			err = nil
		}
	}
	if err != nil {
		t.drop()
		return none(err)
	}
	t.link.whole.Store(int64(hostnet.Whole(hs.Host)))
	t.log.Info("WireGuard device created", "interface", t.opts.Interface, "key", d.Key.Public().Short(), "mtu", d.MTU)
	return unmarked
}

// newLink makes the interface.
func (t *TUN) newLink(ctx context.Context, mtu int) (*link, error) {
	inUse, left, err := stillHeld(ctx, t.host)
	switch {
	case inUse:
		err = taken(t.opts.Interface)
	case left:
		err = t.host.Remove(ctx)
	}
	if t.letGo(); err == nil {
		t.held, err = t.host.Hold() // against one of another kind
	}
	if err != nil {
		return nil, err
	}
	var made *link
	l, _, err := t.host.Adopt(ctx, kind, func(name string) error {
		return t.host.Do(func() (err error) {
			made, err = newLink(name, t.fellBack())
			return err
		})
	})
	if err == nil && made == nil { // somebody else was faster
		err = taken(t.opts.Interface)
	}
	if err != nil {
		if made != nil {
			made.Close()
		}
		t.letGo()
		return nil, err
	}
	made.mtu.Store(int64(mtu))
	t.link, t.index = made, l.Index
	return made, nil
}

// taken is the error of an interface that is marked as ours and held by somebody else.
func taken(name string) error {
	return &hostnet.ForeignError{
		What: "interface " + name, Owner: "a mesh with the same settings has it, in " + holders(name),
		Remedy: "end that one first, or choose another interface name",
	}
}

// held reports whether another process, or another TUN of this one, has the interface that is marked as ours;
// and whether there is one that nobody has, which takes somebody who made it persistent.
func held(ctx context.Context, h *hostnet.Host) (held, left bool, err error) {
	l, err := h.Link(ctx)
	if errors.As(err, new(*hostnet.ForeignError)) || errors.Is(err, hostnet.ErrNoLink) || err == nil && l.Kind != kind {
		return false, false, nil // Adopt says what is in the way, and removes ours of another kind
	}
	if err != nil {
		return false, false, err
	}
	err = h.Do(func() error {
		fd, err := attach(l.Name, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	})
	if errors.Is(err, unix.EBUSY) {
		return true, false, nil
	}
	return false, err == nil, err
}

func (t *TUN) removeDevice(ctx context.Context) error {
	t.drop()
	if inUse, _, err := stillHeld(ctx, t.host); err != nil || inUse {
		return err // what another process has is not this one's to remove
	}
	if err := t.host.Remove(ctx); err != nil && !errors.Is(err, datapath.ErrNoDevice) {
		return fmt.Errorf("removing interface %s: %w", t.opts.Interface, err)
	}
	return nil
}
