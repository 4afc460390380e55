package part

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
)

// Part is something that runs.
type Part struct {
	// Name is what errors and logs call it.
	Name string
	// Run runs until ctx ends. What it returns then does not matter. An earlier end is a failure, also with nil, unless
	// the error is, or wraps, ErrDone, and one made by Fatal is not tried again. A part that is done is run again if one
	// that runs with it fails.
	Run func(ctx context.Context) error
	// Signals: Run calls Ready with its context, and the part is not healthy before. Else it is once Run was called.
	Signals bool
	// Probe returns nil if the part does what it is there for. It is asked until it does, and then now and then. It
	// is to return soon after ctx ends. nil: nobody asks.
	Probe func(ctx context.Context) error
}

// Ready says that the part is ready whose Run was given ctx, or one made from it. Once more is harmless, and so is a ctx
// of no part.
func Ready(ctx context.Context) {
	if s, ok := ctx.Value(signalsKey{}).(signals); ok {
		s.ready()
	}
}

// Ending says that the part is about to end, with an error, whose Run was given ctx, or one made from it: it, and those
// that run with it, are stopped, even if what remains to be done by it takes its time. What Run returns then does not
// matter. An error that is nil, or ErrDone, is for Run to return.
func Ending(ctx context.Context, err error) {
	if s, ok := ctx.Value(signalsKey{}).(signals); ok && err != nil && !errors.Is(err, ErrDone) {
		s.ending(err)
	}
}

type signalsKey struct{}

// signals are what a part says before it returns.
type signals struct {
	ready  func()
	ending func(error)
}

var (
	// ErrDone is what a part returns that has nothing more to do, and is not to be run again.
	ErrDone = errors.New("done")
	// ErrEnded is the failure of a part that returned nil though nobody asked it to end.
	ErrEnded = errors.New("ended without being asked to")
)

// Fatal returns err as one that another attempt would meet again: the part is not run any more. nil stays nil.
func Fatal(err error) error {
	if err == nil {
		return nil
	}
	return &fatal{err}
}

// IsFatal reports whether err was made by Fatal, or wraps such a one.
func IsFatal(err error) bool {
	_, ok := errors.AsType[*fatal](err)
	return ok
}

type fatal struct{ error }

func (f *fatal) Unwrap() error { return f.error }

// PanicError is the error of a part that panicked.
type PanicError struct {
	Value any
	Stack []byte // of the goroutine
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Unwrap returns the error that the part panicked with, if it was one.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// errGoexit is the error of a part that called runtime.Goexit, as a test's FailNow does.
var errGoexit = errors.New("its goroutine exited (runtime.Goexit)")

// guard runs f and calls end once with its error, however it ends.
func guard(f func() error, end func(error)) {
	err := errGoexit
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{v, debug.Stack()}
		}
		end(sound(err))
	}()
	err = f()
}

// sound returns err as one that can be asked: some, as a nil pointer of a type that has fields, panic when they are.
func sound(err error) (out error) {
	if err == nil {
		return nil
	}
	defer func() {
		if v := recover(); v != nil {
			out = fmt.Errorf("an error of type %T that panics when it is looked at: %v", err, v)
		}
	}()
	_ = err.Error()
	_ = errors.Is(err, errGoexit)
	_, _ = errors.AsType[*PanicError](err)
	return err
}

// Call returns what f returns, and of a panic of it a *PanicError.
func Call(f func() error) (err error) {
	done := make(chan struct{})
	go func() { // one of its own, which runtime.Goexit may end
		defer close(done)
		guard(f, func(e error) { err = e })
	}()
	<-done
	return err
}

// Group is goroutines that begin and end together: the first that fails has all others cancelled. Unlike those of
// errgroup, a panic of one is its error.
type Group struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	all    sync.WaitGroup

	mu  sync.Mutex
	err error // of the first that failed
}

// NewGroup returns a Group whose goroutines are cancelled when ctx ends. Wait is to be called.
func NewGroup(ctx context.Context) *Group {
	g := new(Group)
	g.ctx, g.cancel = context.WithCancelCause(ctx)
	return g
}

// Context ends with that of NewGroup, and when one of the goroutines failed.
func (g *Group) Context() context.Context { return g.ctx }

// Go runs f in a goroutine of its own. An error or a panic of it, named after it, cancels the others; nil does not. It
// may be called while Wait waits for another one, and not after it.
func (g *Group) Go(name string, f func(context.Context) error) {
	g.all.Go(func() {
		guard(func() error { return f(g.ctx) }, func(err error) {
			if err != nil {
				g.fail(fmt.Errorf("%s: %w", name, err))
			}
		})
	})
}

// fail takes err for that of the group, if it is the first, and none that the end of the context made.
func (g *Group) fail(err error) {
	g.mu.Lock()
	if g.err == nil && g.ctx.Err() == nil {
		g.err = err
	}
	g.mu.Unlock()
	g.cancel(err)
}

// Cancel cancels all goroutines, which is no failure of them.
func (g *Group) Cancel() { g.cancel(context.Canceled) }

// Wait waits for all goroutines, and returns the error of the first that failed before all were cancelled.
func (g *Group) Wait() error {
	g.all.Wait()
	g.cancel(context.Canceled)
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.err
}
