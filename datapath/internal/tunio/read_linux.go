package tunio

import (
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath/internal/offload"
)

// reader reads packets. Of a large one the first part is read to where it shall be, and the others to large, from
// where they are copied once.
type reader struct {
	d        *Device
	vnet     [offload.HeaderLen]byte
	vectors  [3]unix.Iovec
	splitter offload.Splitter // of what is in large
	large    []byte           // twice the largest packet: what was read is in the second half

	// Of one Read.
	bufs   [][]byte
	sizes  []int
	offset int
	n      int // packets there are
	errno  syscall.Errno
	some   func(fd uintptr) (done bool) // read, in one piece for all times
}

const (
	maxPacket = 65535
	minMTU    = 1280 // of IPv6, and more than any headers
)

func (r *reader) init(d *Device) {
	r.d = d
	r.some = r.read
	if d.vnet {
		r.large = make([]byte, 2*maxPacket)
	}
}

// Read waits for a packet, and reads as many as there are without waiting for more. It implements tun.Device.
func (d *Device) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	d.reading.Lock()
	defer d.reading.Unlock()
	r := &d.reader
	r.bufs, r.sizes, r.offset, r.n, r.errno = bufs, sizes, offset, 0, 0
	defer func() { r.bufs, r.sizes = nil, nil }()
	if r.split(); r.n == len(bufs) {
		return r.n, nil
	}
	if err := d.raw.Read(r.some); err != nil && r.n == 0 {
		return 0, os.ErrClosed // it is of the file, not of reading it
	}
	if r.errno != 0 && r.n == 0 {
		return 0, ended(r.errno)
	}
	return r.n, nil
}

// read reads until there is no room, or nothing to be read. It says whether there are packets, or an error; where
// there are, the error comes again.
func (r *reader) read(fd uintptr) (done bool) {
	for r.n < len(r.bufs) {
		var n int
		if r.d.vnet {
			n, r.errno = r.readLarge(fd)
		} else {
			b := r.bufs[r.n][r.offset:]
			n, r.errno = sysRead(fd, b)
			r.sizes[r.n] = n
		}
		switch {
		case r.errno == unix.EINTR:
			continue
		case r.errno == unix.EAGAIN:
			r.errno = 0
			return r.n > 0
		case r.errno != 0:
			return true
		}
		if !r.d.vnet && n > 0 {
			r.n++
		} else if r.d.vnet {
			r.take(n)
		}
	}
	return true
}

// readLarge reads a header, and a packet: what fits the MTU of it to its place, the rest to large, where there is
// room before it.
func (r *reader) readLarge(fd uintptr) (int, syscall.Errno) {
	to := r.bufs[r.n][r.offset:]
	vector(&r.vectors[0], r.vnet[:])
	vector(&r.vectors[1], to[:min(max(r.d.options.MTU(), minMTU), len(to))])
	vector(&r.vectors[2], r.large[maxPacket:])
	return sysVector(unix.SYS_READV, fd, r.vectors[:])
}

// take makes packets of what was read. What nobody can make sense of is dropped, as it would be by any router.
func (r *reader) take(n int) {
	n -= offload.HeaderLen
	if n <= 0 {
		return
	}
	var h offload.Header
	h.Decode(r.vnet[:])
	to := r.bufs[r.n][r.offset:]
	first := int(r.vectors[1].Len) // bytes that are in their place
	rest := r.large[maxPacket : maxPacket+max(0, n-first)]
	if h.Type == offload.None {
		if n > len(to) {
			return
		}
		copy(to[min(n, first):], rest) // the MTU was another one
		if h.Complete(to[:n]) == nil {
			r.sizes[r.n] = n
			r.n++
		}
		return
	}
	begin := to[:min(n, first)]
	if whole := r.d.options.Whole; whole != nil {
		r.splitter.Most = whole()
	}
	size, err := r.splitter.Start(&h, begin, n)
	if err != nil || size > len(to) {
		r.splitter.Drop()
		return
	}
	if size < len(begin) {
		at := maxPacket - (len(begin) - size)
		copy(r.large[at:], begin[size:])
		rest = r.large[at : maxPacket+len(rest)]
	} else {
		rest = rest[copy(to[len(begin):size], rest):]
	}
	r.splitter.Rest(rest)
	r.split()
}

// split makes packets of what is left of a large one, as far as there is room.
func (r *reader) split() {
	for r.n < len(r.bufs) {
		n := r.splitter.Len()
		if n == 0 {
			return
		}
		to := r.bufs[r.n][r.offset:]
		if n > len(to) {
			r.splitter.Drop()
			return
		}
		r.sizes[r.n] = r.splitter.Next(to)
		r.n++
	}
}

// The system calls are raw: none of them waits, as the file is non-blocking, so that there is no need to have the
// scheduler look for other work meanwhile. That saves some 5 % of all processor time.

func sysRead(fd uintptr, b []byte) (int, syscall.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), errno
}

func sysVector(call, fd uintptr, v []unix.Iovec) (int, syscall.Errno) {
	n, _, errno := unix.RawSyscall(call, fd, uintptr(unsafe.Pointer(unsafe.SliceData(v))), uintptr(len(v)))
	return int(n), errno
}
