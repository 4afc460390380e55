package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// Serve accepts connections and has handle deal with each in a goroutine of its own. A connection that
// comes while there are max of them is closed at once. handle must return when its ctx ends, and
// need not close the connection.
//
// Serve returns nil when ctx ends, else net.ErrClosed when l was closed by someone else. Before, it
// closes l, ends the ctx of all handles and waits for them. Other errors of Accept, such as too many
// open files, are waited out.
func Serve(ctx context.Context, l net.Listener, max int, log *slog.Logger, handle func(context.Context, net.Conn)) error {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	release := OnEnd(ctx, func() { l.Close() })
	defer release()
	defer all.Wait()
	defer cancel()

	slots := make(chan struct{}, max)
	var full, failing Throttle
	retry := NewBackoff()
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			failing.Log(log, slog.LevelWarn, "accepting connections fails, is tried again", "address", l.Addr().String(), "error", err)
			if !Sleep(ctx, retry.NextBackOff()) {
				return nil
			}
			continue
		}
		retry.Reset()
		select {
		case slots <- struct{}{}:
		default:
			full.Log(log, slog.LevelWarn, "connection refused, there are too many", "address", l.Addr().String(), "limit", max)
			Reset(c)
			continue
		}
		all.Go(func() {
			defer func() { <-slots }()
			defer c.Close()
			defer Recover(log)
			handle(ctx, c)
		})
	}
}

// Recover is for a deferred call: it turns a panic into an error in the log, so that one connection's
// does not take the process along.
func Recover(log *slog.Logger) {
	if r := recover(); r != nil {
		log.Error("panic", "value", fmt.Sprint(r), "stack", string(debug.Stack()))
	}
}

// NewBackoff returns delays between attempts from 50 ms to 5 s, without end.
func NewBackoff() *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval = 50*time.Millisecond, 5*time.Second
	b.Reset()
	return b
}

// Sleep returns false if ctx ended before d passed.
func Sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// logEvery is how often a Throttle lets a line through.
const logEvery = 10 * time.Second

// Throttle keeps whoever can cause log lines from filling the log: it lets one through in 10 s, with
// the number of those left out since the one before. The zero Throttle is ready for use.
type Throttle struct {
	mu   sync.Mutex
	next time.Time
	left int
}

// Log logs, or leaves out.
func (t *Throttle) Log(log *slog.Logger, level slog.Level, msg string, args ...any) {
	t.mu.Lock()
	now := time.Now()
	if now.Before(t.next) {
		t.left++
		t.mu.Unlock()
		return
	}
	left := t.left
	t.next, t.left = now.Add(logEvery), 0
	t.mu.Unlock()
	if left > 0 {
		args = append(args, "left out", left)
	}
	log.Log(context.Background(), level, msg, args...)
}
