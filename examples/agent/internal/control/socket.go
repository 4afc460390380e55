package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// maxPath is how long the path of a unix socket may be: 104 bytes with the final zero on BSD and macOS,
// 108 on Linux and Windows (sun_path in sys/un.h). The shorter one is kept to everywhere.
const maxPath = 103

// ErrNotRunning says that nobody is at a socket.
var ErrNotRunning = errors.New("no agent is running")

// ErrInUse says that another agent has the socket.
var ErrInUse = errors.New("another agent listens there")

// Listen listens at path, with mode 0600 from the first moment on. What a killed agent left there, or
// while it was about to listen there, is replaced; where one still listens the error is ErrInUse. Two that
// begin at the same moment are not told apart: that is for a lock of the caller's. The listener's Close
// removes the socket.
func Listen(ctx context.Context, path string) (net.Listener, error) {
	if runtime.GOOS == "windows" { // which renames no sockets, and whose folder guards it
		if err := free(ctx, path); err != nil {
			return nil, err
		}
		_ = os.Remove(path)
		return listen(path)
	}
	if err := free(ctx, path); err != nil {
		return nil, err
	}
	// It is made in a folder that nobody else can look into, and gets its place once it is private.
	temporaries := "." + filepath.Base(path) + "-"
	sweep(filepath.Dir(path), temporaries)
	dir, err := os.MkdirTemp(filepath.Dir(path), temporaries)
	if err != nil {
		return nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	defer os.RemoveAll(dir)
	temporary := filepath.Join(dir, "s")
	short, done, err := shorten(temporary)
	if err != nil {
		return nil, err
	}
	defer done()
	l, err := listen(short)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(os.Chmod(temporary, 0o600), os.Rename(temporary, path)); err != nil {
		return nil, errors.Join(fmt.Errorf("control socket %s: %w", path, err), l.Close())
	}
	info, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("control socket %s: %w", path, err), l.Close())
	}
	return &listener{UnixListener: l, path: path, made: info}, nil
}

// sweep removes what os.MkdirTemp has made of prefix in dir, for a process that did not get to remove it.
func sweep(dir, prefix string) {
	es, _ := os.ReadDir(dir) // what cannot be seen can stay
	for _, e := range es {
		if n, ok := strings.CutPrefix(e.Name(), prefix); ok && e.IsDir() && n != "" && strings.Trim(n, "0123456789") == "" {
			_ = os.RemoveAll(filepath.Join(dir, e.Name()))
		}
	}
}

func listen(path string) (*net.UnixListener, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	l.SetUnlinkOnClose(runtime.GOOS == "windows")
	return l, nil
}

// free says why path cannot be taken.
func free(ctx context.Context, path string) error {
	switch info, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("control socket: %w", err)
	case runtime.GOOS != "windows" && info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("control socket %s: there is something that is no socket; remove it, or choose another path with --socket", path)
	}
	c, err := dial(ctx, path)
	if err == nil {
		_ = c.Close()
		return fmt.Errorf("control socket %s: %w", path, ErrInUse)
	}
	return nil
}

type listener struct {
	*net.UnixListener
	path string
	made fs.FileInfo
}

// Close removes the socket, unless another one has taken its place.
func (l *listener) Close() error {
	if info, err := os.Lstat(l.path); err == nil && os.SameFile(info, l.made) {
		_ = os.Remove(l.path)
	}
	return l.UnixListener.Close()
}

// dial connects to the socket at path. Nobody there is ErrNotRunning.
func dial(ctx context.Context, path string) (net.Conn, error) {
	short, done, err := shorten(path)
	if err != nil {
		return nil, err
	}
	defer done()
	d := net.Dialer{Timeout: 5 * time.Second}
	c, err := d.DialContext(ctx, "unix", short)
	switch {
	case err == nil:
		return c, nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, wsaConnRefused):
		return nil, fmt.Errorf("%w: nobody listens at %s", ErrNotRunning, path)
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("the agent's socket %s is another user's: run this command as the user that the agent runs as", path)
	}
	return nil, fmt.Errorf("control socket %s: %w", path, err)
}

// wsaConnRefused is what Windows has in place of ECONNREFUSED.
const wsaConnRefused = syscall.Errno(10061)

// shorten returns a path to the same file that fits into the address of a socket: through a symbolic link
// to its folder where it has to. done removes the link.
func shorten(path string) (short string, done func(), err error) {
	if len(path) <= maxPath {
		return path, func() {}, nil
	}
	tooLong := func(err error) (string, func(), error) {
		return "", nil, fmt.Errorf("control socket %s: its path has %d bytes, at most %d are possible; choose a shorter one with --socket (%w)", path, len(path), maxPath, err)
	}
	dir, err := filepath.Abs(filepath.Dir(path))
	if err != nil {
		return tooLong(err)
	}
	tmp, err := os.MkdirTemp("", "warren-")
	if err != nil {
		return tooLong(err)
	}
	done = func() { _ = os.RemoveAll(tmp) }
	link := filepath.Join(tmp, "d")
	if err := os.Symlink(dir, link); err != nil {
		done()
		return tooLong(err)
	}
	if short = filepath.Join(link, filepath.Base(path)); len(short) > maxPath {
		done()
		return tooLong(fmt.Errorf("so has %s", short))
	}
	return short, done, nil
}

// Remove removes what an agent that is gone left at path, and returns whether there was anything. Where one
// listens the error is ErrInUse, and what is no socket is left alone.
func Remove(ctx context.Context, path string) (bool, error) {
	if err := free(ctx, path); err != nil {
		return false, err
	}
	sweep(filepath.Dir(path), "."+filepath.Base(path)+"-")
	switch err := os.Remove(path); {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("control socket: %w", err)
	}
	return true, nil
}
