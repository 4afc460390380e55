package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/wgconv"
)

const (
	// replyTimeout bounds the wait for Linux, which answers before the request's system call returns.
	replyTimeout = 10 * time.Second
	// window is how many messages are sent before their acknowledgements are read: those of more would
	// not all fit the socket's receive buffer.
	window = 32
	// maxDumps bounds how often an interrupted dump is read again.
	maxDumps = 100
)

var (
	errInterrupted = errors.New("it changed each time while it was read")
	errNoModule    = fmt.Errorf("this kernel has no WireGuard: it needs Linux 5.6 and its module (modprobe wireguard): %w", errors.ErrUnsupported)
	errPermission  = errors.New("this process may not configure networks: it needs CAP_NET_ADMIN")
)

// conn is a generic netlink socket for the family wireguard. It is for one goroutine at a time.
type conn struct {
	in     func(func() error) error // runs a function in the namespace
	sock   *nl.NetlinkSocket        // nil: to be opened
	family uint16
	seq    uint32

	// What tests count, and what they have called before each change of a device.
	written, changes, interrupted, opened int
	before                                func() error
}

func dial(in func(func() error) error) (*conn, error) {
	c := &conn{in: in}
	return c, c.open()
}

func (c *conn) open() error {
	if c.sock != nil {
		return nil
	}
	err := c.in(func() (err error) {
		c.sock, err = nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_GENERIC)
		return err
	})
	if err != nil {
		c.sock = nil
		return fmt.Errorf("netlink socket: %w", err)
	}
	c.opened++
	tv := unix.NsecToTimeval(int64(replyTimeout))
	if err := errors.Join(c.sock.SetSendTimeout(&tv), c.sock.SetReceiveTimeout(&tv)); err != nil {
		c.close()
		return fmt.Errorf("netlink socket: %w", err)
	}
	if c.family, err = c.lookup(wgconv.Family); err != nil {
		c.close()
		if errors.Is(err, unix.ENOENT) {
			return errNoModule
		}
		return fmt.Errorf("netlink family: %w", err)
	}
	return nil
}

func (c *conn) close() {
	if c.sock != nil {
		c.sock.Close()
		c.sock = nil
	}
}

// lookup asks for the number of a family.
func (c *conn) lookup(name string) (uint16, error) {
	attr := nl.NewRtAttr(unix.CTRL_ATTR_FAMILY_NAME, nl.ZeroTerminated(name)).Serialize()
	seq, err := c.send(unix.GENL_ID_CTRL, 0, unix.CTRL_CMD_GETFAMILY, 1, attr)
	if err != nil {
		return 0, err
	}
	var id uint16
	_, err = c.receive(seq, func(m syscall.NetlinkMessage) (bool, error) {
		if m.Header.Type != unix.GENL_ID_CTRL || len(m.Data) < 4 {
			return true, unix.EBADMSG
		}
		as, err := nl.ParseRouteAttr(m.Data[4:])
		if err != nil {
			return true, err
		}
		for _, a := range as {
			if a.Attr.Type == unix.CTRL_ATTR_FAMILY_ID && len(a.Value) == 2 {
				id = binary.NativeEndian.Uint16(a.Value)
			}
		}
		return true, nil
	})
	if err == nil && id == 0 {
		err = unix.ENOENT
	}
	return id, err
}

func (c *conn) send(typ, flags uint16, cmd, version uint8, attrs []byte) (seq uint32, err error) {
	c.seq++
	r := nl.NetlinkRequest{NlMsghdr: unix.NlMsghdr{Type: typ, Flags: unix.NLM_F_REQUEST | flags, Seq: c.seq}}
	r.AddRawData(append([]byte{cmd, version, 0, 0}, attrs...))
	if err := c.sock.Send(&r); err != nil {
		c.close() // an answer may or may not come
		return 0, err
	}
	return c.seq, nil
}

// receive hands what answers seq to f, until f says that it was all, or Linux does. What answers an
// earlier request is passed over. interrupted says that what a list was about changed meanwhile.
func (c *conn) receive(seq uint32, f func(syscall.NetlinkMessage) (bool, error)) (interrupted bool, err error) {
	for {
		msgs, from, err := c.sock.Receive()
		if err != nil {
			c.close()
			return false, err
		}
		if from.Pid != 0 {
			continue // not from the kernel
		}
		for _, m := range msgs {
			if m.Header.Seq != seq {
				continue
			}
			interrupted = interrupted || m.Header.Flags&unix.NLM_F_DUMP_INTR != 0
			if t := m.Header.Type; t == unix.NLMSG_DONE || t == unix.NLMSG_ERROR {
				if len(m.Data) >= 4 {
					if code := int32(binary.NativeEndian.Uint32(m.Data)); code != 0 {
						return interrupted, syscall.Errno(-code)
					}
				}
				return interrupted, nil
			}
			if done, err := f(m); done || err != nil {
				if !done {
					c.close() // the rest would be read later
				}
				return interrupted, err
			}
		}
	}
}

// dump reads a device, as often as it takes for nothing to change meanwhile.
func (c *conn) dump(ctx context.Context, index int) (*wgconv.Dump, error) {
	var err error
	for n := range maxDumps {
		if n > 0 {
			select {
			case <-ctx.Done():
			case <-time.After(min(time.Duration(n)*time.Millisecond, 50*time.Millisecond)):
			}
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		var d *wgconv.Dump
		d, err = c.dumpOnce(index)
		switch {
		case err == nil:
			return d, nil
		case errors.Is(err, errInterrupted):
			c.interrupted++
		case errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.EINTR):
		default:
			return nil, wrap("reading the device", err)
		}
	}
	return nil, wrap("reading the device", err)
}

func (c *conn) dumpOnce(index int) (*wgconv.Dump, error) {
	if err := c.open(); err != nil {
		return nil, err
	}
	seq, err := c.send(c.family, unix.NLM_F_DUMP, wgconv.CmdGetDevice, wgconv.Version, wgconv.Get(index))
	if err != nil {
		return nil, err
	}
	var d wgconv.Dump
	interrupted, err := c.receive(seq, func(m syscall.NetlinkMessage) (bool, error) {
		if m.Header.Type != c.family || len(m.Data) < 4 {
			return false, unix.EBADMSG
		}
		return false, d.Add(m.Data[4:])
	})
	if err == nil && interrupted {
		err = errInterrupted
	}
	return &d, err
}

// set sends messages that set a device, and returns what became of each.
func (c *conn) set(msgs ...[]byte) []error {
	errs := make([]error, len(msgs))
	seqs := make([]uint32, len(msgs))
	read := 0
	settle := func(upto int) {
		for ; read < upto; read++ {
			if errs[read] == nil {
				_, errs[read] = c.await(seqs[read])
			}
		}
	}
	for i, m := range msgs {
		if err := c.open(); err != nil {
			errs[i] = err
			continue
		}
		if c.before != nil {
			if errs[i] = c.before(); errs[i] != nil {
				continue
			}
		}
		seqs[i], errs[i] = c.send(c.family, unix.NLM_F_ACK, wgconv.CmdSetDevice, wgconv.Version, m)
		c.written++
		if i+1-read >= window {
			settle(i + 1)
		}
	}
	settle(len(msgs))
	return errs
}

func (c *conn) await(seq uint32) (bool, error) {
	if c.sock == nil {
		return false, unix.ENOTCONN // it broke with an earlier one
	}
	return c.receive(seq, func(syscall.NetlinkMessage) (bool, error) { return false, unix.EBADMSG })
}

// wrap names what failed, in terms that do not depend on Linux.
func wrap(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENODEV), errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("%s: %w: %w", what, datapath.ErrNoDevice, err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%s: %w: %w", what, errPermission, err)
	case errors.Is(err, unix.EADDRINUSE):
		return fmt.Errorf("%s: %w: %w", what, datapath.ErrPortInUse, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// admitted reports why this process may not configure devices in the namespace.
func (c *conn) admitted() error {
	// The loopback interface is no WireGuard device, which is said only to those who may ask.
	if _, err := c.dumpOnce(1); errors.Is(err, unix.EPERM) {
		return wrap("asking for devices", err)
	}
	return nil
}
