package watch

import (
	"context"
	"sync"
)

// Value is the newest value of something, or none yet. The zero Value has none yet and is ready for
// use. All methods may be called at the same time from any goroutine. A Value starts no goroutine and
// keeps nothing but the newest value, so it needs no closing. It must not be copied once used.
type Value[T any] struct {
	mu    sync.Mutex
	value T
	ok    bool
	stale chan struct{} // nil until someone asks: a Value nobody watches allocates nothing per Set
}

// Set makes value the newest and closes the channel of every earlier Get, also when value is equal to
// the one before: T need not be comparable, and whoever sets knows best whether anything changed.
// Set never blocks on a reader.
//
// What value refers to is shared with all readers and must not be changed afterwards.
func (v *Value[T]) Set(value T) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.set(value)
}

// Update makes the result of f the newest value. Between the value f is given (the zero T if there is
// none yet) and its result becoming the newest, no other Set or Update can come, so none is lost. f
// runs while every other method waits: it must be quick and must not call back into v. If f panics, the
// value stays as it was.
func (v *Value[T]) Update(f func(T) T) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.set(f(v.value))
}

func (v *Value[T]) set(value T) {
	v.value, v.ok = value, true
	if v.stale != nil {
		close(v.stale)
		v.stale = nil
	}
}

// Get returns the newest value and a channel that closes when there is a newer one. Before the first
// Set, ok is false, value is the zero T, and the channel closes at the first Set. The channel is never
// nil and is never sent on; it may be dropped unread.
func (v *Value[T]) Get() (value T, ok bool, stale <-chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.stale == nil {
		v.stale = make(chan struct{})
	}
	return v.value, v.ok, v.stale
}

// Wait returns the newest value, and waits for the first if there is none yet. It returns the zero T
// and the cause of ctx's end if that comes first. A value that is there is returned even when ctx has
// ended.
func (v *Value[T]) Wait(ctx context.Context) (T, error) {
	for {
		value, ok, stale := v.Get()
		if ok {
			return value, nil
		}
		select {
		case <-stale:
		case <-ctx.Done():
			return value, context.Cause(ctx)
		}
	}
}
