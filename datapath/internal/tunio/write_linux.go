package tunio

import (
	"errors"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath/internal/offload"
)

// writer writes the packets of one Write.
type writer struct {
	d       *Device
	merger  offload.Merger
	packets [][]byte
	vectors []unix.Iovec
	head    [offload.MaxHeads]byte

	// Of one Write.
	bufs    [][]byte
	offset  int
	written int
	err     error
	ended   bool
	all     func(fd uintptr) // write, in one piece for all times
}

// Write writes each packet, alone or as part of a large one, or says why it could not. It returns how many were
// written. One that is refused keeps no other from being written. It implements tun.Device, and changes the bytes
// before offset.
func (d *Device) Write(bufs [][]byte, offset int) (int, error) {
	w := d.writer()
	defer d.put(w)
	w.bufs, w.offset, w.written, w.err, w.ended = bufs, offset, 0, nil, false
	if d.vnet && offset < offload.HeaderLen {
		return 0, errors.New("no room before the packets")
	}
	// Writing does not wait: the interface takes what it is given (TUNSETSNDBUF was not asked for).
	if err := d.raw.Control(w.all); err != nil {
		return 0, os.ErrClosed
	}
	return w.written, w.err
}

// writer returns one that nobody uses.
func (d *Device) writer() *writer {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.writers); n > 0 {
		w := d.writers[n-1]
		d.writers = d.writers[:n-1]
		return w
	}
	w := &writer{d: d}
	w.all = w.write
	return w
}

func (d *Device) put(w *writer) {
	w.merger.Forget()
	clear(w.packets)
	clear(w.vectors)
	w.bufs, w.err = nil, nil
	d.mu.Lock()
	defer d.mu.Unlock()
	d.writers = append(d.writers, w)
}

func (w *writer) write(fd uintptr) {
	kinds := w.d.can &^ offload.Kinds(w.d.alone.Load())
	if !w.d.vnet || len(w.bufs) == 1 || kinds == 0 {
		for i := range w.bufs {
			w.one(fd, i)
		}
		return
	}
	w.packets = w.packets[:0]
	for _, b := range w.bufs {
		w.packets = append(w.packets, b[w.offset:])
	}
	runs := w.merger.Runs(w.packets, kinds)
	for i := range runs {
		switch r := &runs[i]; {
		case w.ended:
			return
		case r.Count == 1:
			w.one(fd, r.First)
		default:
			w.run(fd, r)
		}
	}
}

// run writes several packets as one or, where Linux does not take them so, one by one.
func (w *writer) run(fd uintptr, r *offload.Run) {
	if w.d.alone.Load()&uint32(r.Kind) == 0 {
		err := w.together(fd, r)
		if err == nil {
			w.written += r.Count
			return
		}
		if !refuses(err) {
			w.fail(err)
			return
		}
		before := w.written
		w.each(fd, r)
		if w.written > before {
			w.d.refused(r.Kind, err)
		}
		return
	}
	w.each(fd, r)
}

func (w *writer) each(fd uintptr, r *offload.Run) {
	for i, n := r.First, r.Count; n > 0; n-- {
		w.one(fd, i)
		i = w.merger.Next(i)
	}
}

func (w *writer) together(fd uintptr, r *offload.Run) error {
	n, payload := w.merger.Head(w.head[:], r)
	v := w.vectors[:0]
	v = append(v, unix.Iovec{})
	vector(&v[0], w.head[:n])
	for i, n := r.First, r.Count; n > 0; n-- {
		v = append(v, unix.Iovec{})
		vector(&v[len(v)-1], w.packets[i][payload:])
		i = w.merger.Next(i)
	}
	w.vectors = v
	for {
		switch _, errno := w.d.writev(fd, v); errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return ended(errno)
		}
	}
}

// one writes a packet by itself.
func (w *writer) one(fd uintptr, i int) {
	if w.ended {
		return
	}
	b := w.bufs[i][w.offset:]
	if w.d.vnet {
		b = w.bufs[i][w.offset-offload.HeaderLen:]
		clear(b[:offload.HeaderLen])
	}
	for {
		switch errno := sysWrite(fd, b); errno {
		case 0:
			w.written++
		case unix.EINTR:
			continue
		default:
			w.fail(ended(errno))
		}
		return
	}
}

// fail keeps the first error, of which the others will be more.
func (w *writer) fail(err error) {
	if w.ended = w.ended || errors.Is(err, os.ErrClosed); w.ended {
		w.err = os.ErrClosed
	} else if w.err == nil {
		w.err = err
	}
}

// refused has packets of a kind be written one by one from now on.
func (d *Device) refused(k offload.Kinds, err error) {
	d.alone.Or(uint32(k))
	if d.told.CompareAndSwap(false, true) && d.options.Refused != nil {
		d.options.Refused(err)
	}
}

func sysWrite(fd uintptr, b []byte) syscall.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return errno
}
