package tun

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/device"
)

// socket is where other programs see and change the device, as wireguard-go's package ipc has it. That one
// holds the device up for as long as a client takes to say what it wants, and sets the umask of the whole
// process.
type socket struct {
	path    string
	l       *net.UnixListener
	id      fileID
	device  speaker
	changed func() // called after a change was asked for
	tasks   sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]struct{}
}

// speaker is a device that speaks the protocol.
type speaker interface {
	Get() (string, error)
	Set(text string) error
}

// fileID tells a file from one that took its place.
type fileID struct{ dev, ino uint64 }

func idOf(path string) (fileID, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return fileID{}, err
	}
	st := fi.Sys().(*syscall.Stat_t)
	return fileID{uint64(st.Dev), st.Ino}, nil
}

func socketPath(folder, name string) string { return filepath.Join(folder, name+".sock") }

// listen makes the socket, for its owner alone.
func listen(path, group string, dev speaker, changed func()) (*socket, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("folder of the socket: %w", err)
	}
	if err := removeDead(path); err != nil {
		return nil, err
	}
	// Linux gives the file the mode that the socket has when it is bound.
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); cerr != nil {
			return cerr
		}
		return err
	}}
	nl, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		if errors.Is(err, unix.EINVAL) && len(path) > 107 {
			err = fmt.Errorf("%w: its path has %d bytes, and Linux takes 107", err, len(path))
		}
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	l := nl.(*net.UnixListener)
	l.SetUnlinkOnClose(false) // it may be another's by then
	id, err := idOf(path)
	if err == nil {
		err = share(path, group)
	}
	if err != nil {
		l.Close()
		return nil, errors.Join(fmt.Errorf("socket: %w", err), removeDead(path))
	}
	s := &socket{path: path, l: l, id: id, device: dev, changed: changed, conns: make(map[net.Conn]struct{})}
	s.tasks.Go(s.accept)
	return s, nil
}

// share gives a socket to a group, before its members may use it.
func share(path, group string) error {
	gid, err := groupID(group)
	if err != nil || gid < 0 {
		return err
	}
	if err := os.Lchown(path, -1, gid); err != nil {
		return fmt.Errorf("for group %s: %w", group, err)
	}
	return os.Chmod(path, 0o660)
}

// removeDead removes a socket that nobody listens on any more. One that somebody does is an error that
// names the process.
func removeDead(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s is no socket; move it away, or choose another folder", path)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	switch {
	case err == nil:
		defer c.Close()
		return fmt.Errorf("socket %s is in use by %s; end it, or choose another folder or interface name", path, peerOf(c))
	case errors.Is(err, unix.ECONNREFUSED):
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("a socket that nobody listens on: %w", err)
		}
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return fmt.Errorf("a socket is in the way: %w", err)
}

// peerOf names the process that listens on a socket.
func peerOf(c net.Conn) string {
	var cred *unix.Ucred
	if raw, err := c.(*net.UnixConn).SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { cred, _ = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	}
	switch {
	case cred == nil || cred.Pid == 0:
		return "a process that cannot be seen from here"
	case int(cred.Pid) == os.Getpid():
		return "another device of this process"
	}
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", cred.Pid))
	return fmt.Sprintf("process %d (%s)", cred.Pid, strings.TrimSpace(string(comm)))
}

// there reports whether the file is still the one that was made.
func (s *socket) there() bool {
	id, err := idOf(s.path)
	return err == nil && id == s.id
}

// close ends the socket and those who use it, and removes the file if it is still the one that was made.
func (s *socket) close() {
	if s == nil {
		return
	}
	if s.there() {
		_ = os.Remove(s.path)
	}
	s.l.Close()
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.tasks.Wait()
}

func (s *socket) accept() {
	for {
		c, err := s.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // such as too many open files
			time.Sleep(50 * time.Millisecond)
			continue
		}
		s.mu.Lock()
		if s.closed {
			c.Close()
		} else {
			s.conns[c] = struct{}{}
			s.tasks.Go(func() { s.serve(c) })
		}
		s.mu.Unlock()
	}
}

func (s *socket) serve(c net.Conn) {
	defer func() {
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
		c.Close()
	}()
	r := bufio.NewReader(c)
	for {
		op, err := r.ReadString('\n')
		if err != nil {
			return
		}
		text, err := paragraph(r)
		if err != nil {
			return
		}
		answer := ""
		switch {
		case op == "get=1\n" && text == "":
			answer, err = s.device.Get()
		case op == "set=1\n":
			err = s.device.Set(text)
			s.changed()
		default:
			return
		}
		errno := int64(0)
		if status := (*device.IPCError)(nil); errors.As(err, &status) {
			errno = status.ErrorCode()
		} else if err != nil {
			errno = -int64(unix.EIO)
		}
		if _, err := fmt.Fprintf(c, "%serrno=%d\n\n", answer, errno); err != nil {
			return
		}
	}
}

// paragraph reads lines until an empty one, all before anything is done: a client that stops in the middle
// holds up nobody but itself.
func paragraph(r *bufio.Reader) (string, error) {
	const most = 64 << 20 // more than all that any device has
	var b strings.Builder
	for b.Len() < most {
		line, err := r.ReadString('\n')
		if err != nil {
			return "", err
		}
		if line == "\n" {
			return b.String(), nil
		}
		b.WriteString(line)
	}
	return "", io.ErrShortBuffer
}
