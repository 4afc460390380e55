package tunio

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath/internal/offload"
)

// Options are what a Device is made with.
type Options struct {
	// MTU is that of the interface, which larger packets than that are said to have been taken apart for. It is
	// asked for with each packet.
	MTU func() int

	// Whole is the size of the largest packet that is not going to be fragmented, if TCP shall be in no larger ones where it
	// is up to the Device; 0 or nil: it shall be as Linux has it.
	Whole func() int

	// Refused is told once that Linux refused packets which were handed to it together, though it took them one by one.
	// May be nil.
	Refused func(error)
}

// Device is the packets of a TUN interface. One goroutine reads at a time, any number write.
type Device struct {
	file    *os.File
	raw     syscall.RawConn
	options Options
	vnet    bool // packets have a virtio_net_hdr before them

	reading sync.Mutex
	reader  reader

	can   offload.Kinds
	alone atomic.Uint32 // offload.Kinds that Linux refuses
	told  atomic.Bool

	writev func(fd uintptr, v []unix.Iovec) (int, syscall.Errno)

	mu      sync.Mutex // guards writers
	writers []*writer  // that are not in use
}

// batch is how many packets a Device likes to be asked for.
const batch = 128

// New returns the Device of a file that speaks for an interface (TUNSETIFF), which it closes with itself, or at
// once where it fails. Whether packets are handed over together is up to the file: they are, if it has
// IFF_VNET_HDR.
func New(fd int, o Options) (*Device, error) {
	d := &Device{options: o}
	d.writev = func(fd uintptr, v []unix.Iovec) (int, syscall.Errno) { return sysVector(unix.SYS_WRITEV, fd, v) }
	if err := d.open(fd); err != nil {
		if d.file != nil {
			d.file.Close()
		} else {
			unix.Close(fd)
		}
		return nil, err
	}
	d.reader.init(d)
	return d, nil
}

func (d *Device) open(fd int) error {
	ifr, err := unix.NewIfreq("")
	if err == nil {
		err = unix.IoctlIfreq(fd, unix.TUNGETIFF, ifr)
	}
	if err != nil {
		return fmt.Errorf("flags of the interface: %w", err)
	}
	if d.vnet = ifr.Uint16()&unix.IFF_VNET_HDR != 0; d.vnet {
		if err := d.offer(fd); err != nil {
			return fmt.Errorf("packets that are handed over together: %w", err)
		}
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return err
	}
	d.file = os.NewFile(uintptr(fd), "/dev/net/tun")
	d.raw, err = d.file.SyscallConn()
	return err
}

// offer tells Linux what it may hand over whole. It knows UDP since version 6.2, and takes it from then on.
func (d *Device) offer(fd int) error {
	const tcp = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6 | unix.TUN_F_TSO_ECN
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, tcp|unix.TUN_F_USO4|unix.TUN_F_USO6); err == nil {
		d.can = offload.KindsTCP | offload.KindsUDP
		return nil
	}
	d.can = offload.KindsTCP
	return unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, tcp)
}

// File returns the file of the interface.
func (d *Device) File() *os.File { return d.file }

// BatchSize is how many packets are read or written together at best.
func (d *Device) BatchSize() int { return batch }

// Alone reports whether Linux refused packets that were handed to it together, so that some are written one by one.
func (d *Device) Alone() bool { return d.alone.Load() != 0 }

// Close has Read and Write return os.ErrClosed. The interface goes with the file, unless it was made to stay.
func (d *Device) Close() error { return d.file.Close() }

// ended makes of an error of a file that is closed, or whose interface is gone, os.ErrClosed.
func ended(errno syscall.Errno) error {
	if errno == unix.EBADFD || errno == unix.EBADF {
		return os.ErrClosed
	}
	return os.NewSyscallError("/dev/net/tun", errno)
}

// refuses reports whether Linux may say so of packets that it does not take together. EIO is what it says of any
// while the interface is down.
func refuses(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.EOPNOTSUPP)
}

func vector(v *unix.Iovec, b []byte) {
	v.Base = unsafe.SliceData(b)
	v.SetLen(len(b))
}
