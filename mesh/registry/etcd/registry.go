package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/warren-mesh/warren/mesh/registry"
)

// Registry is a registry on an etcd. It implements [registry.Registry], [registry.Swapper] and
// [registry.Rejoiner]. All methods may be called at the same time from any goroutine.
type Registry struct {
	mu       sync.Mutex
	set      *settings
	order    []string // the endpoints, shuffled
	first    int      // which of them to begin with
	conn     *conn    // the current one; nil: none yet
	conns    map[*conn]struct{}
	reloaded chan struct{} // closed by the next Reload
	closed   chan struct{} // closed by Close
}

var (
	_ registry.Registry = (*Registry)(nil)
	_ registry.Swapper  = (*Registry)(nil)
	_ registry.Rejoiner = (*Registry)(nil)
)

// New checks c and returns a registry. It does not wait, reads no file, and asks nothing of the network:
// what is wrong there is found by Watch, Put, Delete and Swap. The registry has to be closed.
func New(c Config) (*Registry, error) {
	set, err := c.check()
	if err != nil {
		return nil, err
	}
	r := &Registry{conns: make(map[*conn]struct{}), closed: make(chan struct{}), reloaded: make(chan struct{})}
	r.use(set)
	return r, nil
}

// use is for New and Reload.
func (r *Registry) use(set *settings) {
	r.set, r.first = set, 0
	r.order = append([]string(nil), set.endpoints...)
	rand.Shuffle(len(r.order), func(i, j int) { r.order[i], r.order[j] = r.order[j], r.order[i] })
}

// Reload replaces the whole Config, or with the same one, reads the files and asks the names of the
// endpoints again. It does not wait. Calls that are under way end with the old one. Every running Watch
// moves over at once and goes on where it was: it sees a Reset only if the prefix is another one, or the
// cluster. If c is refused, nothing changes.
func (r *Registry) Reload(c Config) error {
	set, err := c.check()
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.isClosed() {
		return fmt.Errorf("etcd: reload: %w", ErrClosed)
	}
	r.use(set)
	if r.conn != nil {
		r.drop(r.conn)
	}
	close(r.reloaded)
	r.reloaded = make(chan struct{})
	return nil
}

// Close closes the connections, and does not wait for anyone. Calls that are under way, and later ones,
// return an error that wraps ErrClosed. A Watch yields one such error and is then silent: it ends, as the
// contract has it, when its context does or its consumer breaks. Closing twice is harmless.
func (r *Registry) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.isClosed() {
		return nil
	}
	close(r.closed)
	for c := range r.conns {
		go c.close() // it waits for its connections to be gone
	}
	clear(r.conns)
	r.conn = nil
	return nil
}

// isClosed is for who holds the lock, or does not care.
func (r *Registry) isClosed() bool {
	select {
	case <-r.closed:
		return true
	default:
		return false
	}
}

// String says where the registry is.
func (r *Registry) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return "etcd registry at " + r.set.urls()
}

// Rejoin implements [registry.Rejoiner]: four times Config.Timeout, that of the last Reload, for watchers with
// the same Config. One that has not noticed yet that its server was away does so within one Timeout, and
// tries again within another; before it reads everything anew it waits for up to a third, and has a fourth
// to read. A server that answers with errors, or refuses the credentials, is not back.
func (r *Registry) Rejoin() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return 4 * r.set.timeout
}

// acquire returns the current conn, to be released. It is a new one where the last one is no good.
func (r *Registry) acquire() (*conn, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.isClosed() {
		return nil, ErrClosed
	}
	if r.conn != nil && r.conn.broken() {
		r.drop(r.conn)
	}
	if r.conn == nil {
		n := r.first % len(r.order)
		c, err := dial(r.set, append(append([]string(nil), r.order[n:]...), r.order[:n]...))
		if err != nil {
			return nil, err
		}
		r.conn = c
		r.conns[c] = struct{}{}
	}
	r.conn.users++
	return r.conn, nil
}

// release gives back what acquire returned.
func (r *Registry) release(c *conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c.users--
	r.sweep(c)
}

// retire has c be used by nobody new. Who uses it may go on.
func (r *Registry) retire(c *conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drop(c)
}

// drop is retire for who holds the lock.
func (r *Registry) drop(c *conn) {
	c.retired = true
	if r.conn == c {
		r.conn = nil
		r.first++
	}
	r.sweep(c)
}

// sweep closes c if nobody uses it or will.
func (r *Registry) sweep(c *conn) {
	if _, ok := r.conns[c]; ok && c.retired && c.users == 0 {
		delete(r.conns, c)
		go c.close()
	}
}

// failed looks at why a call to etcd failed, and retires c where another member may do better.
func (r *Registry) failed(c *conn, err error) error {
	if r.isClosed() {
		return ErrClosed
	}
	if kind := kindOf(err); kind == ErrTimeout || kind == ErrNoLeader || kind == ErrUnreachable && c.broken() {
		r.retire(c)
	}
	return err
}

// answered notes that a call on c was.
func (r *Registry) answered(c *conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c.silence = silence{}
}

// unanswered notes that a call on c waited in vain for as long as its caller let it. Where c was silent for
// the timeout in all the calls since its last answer, another member may do better, as if one call had
// waited for so long.
func (r *Registry) unanswered(c *conn, began, ended time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.silence.add(began, ended); c.silence.sum >= c.set.timeout && !c.retired {
		r.drop(c)
	}
}

// call has f ask etcd for what Put, Delete and Swap want.
func (r *Registry) call(ctx context.Context, what string, f func(context.Context, *conn) error) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("etcd: %s: %w", what, err)
	}
	c, err := r.acquire()
	if err != nil {
		return fmt.Errorf("etcd: %s: %w", what, err)
	}
	defer r.release(c)
	began := time.Now()
	if err = c.do(ctx, func(ctx context.Context) error { return f(ctx, c) }); err == nil {
		r.answered(c)
		return nil
	}
	if ending(ctx, c.set, err) {
		<-ctx.Done()
	}
	if ctx.Err() != nil {
		r.unanswered(c, began, time.Now())
		return fmt.Errorf("etcd: %s: %w", what, ctx.Err())
	}
	if kind := kindOf(err); kind == ErrServer || kind == ErrUnauthorised {
		r.answered(c)
	}
	return c.set.at(what, r.failed(c, err))
}

// ending reports whether err is the end of ctx, which is about to come: the server knows the deadline too,
// and may be the first to notice.
func ending(ctx context.Context, set *settings, err error) bool {
	end, ok := ctx.Deadline()
	return ok && errors.Is(err, ErrTimeout) && time.Until(end) < set.timeout/10
}

// Put implements [registry.Registry].
func (r *Registry) Put(ctx context.Context, e registry.Entry) error {
	if err := registry.CheckEntry(e); err != nil {
		return err
	}
	return r.call(ctx, "put "+e.ID, func(ctx context.Context, c *conn) error {
		_, err := c.client.Put(ctx, c.set.prefix+e.ID, string(e.Data))
		return err
	})
}

// Delete implements [registry.Registry].
func (r *Registry) Delete(ctx context.Context, id string) error {
	if _, _, err := registry.ParseID(id); err != nil {
		return err
	}
	return r.call(ctx, "delete "+id, func(ctx context.Context, c *conn) error {
		_, err := c.client.Delete(ctx, c.set.prefix+id)
		return err
	})
}

// Swap implements [registry.Swapper], by one transaction. It is not tried again after an answer may have
// been lost.
func (r *Registry) Swap(ctx context.Context, id string, old, new []byte) (current []byte, ok bool, err error) {
	if err := registry.CheckEntry(registry.Entry{ID: id, Data: new}); err != nil {
		return nil, false, err
	}
	var resp *clientv3.TxnResponse
	err = r.call(ctx, "swap "+id, func(ctx context.Context, c *conn) error {
		key := c.set.prefix + id
		is := clientv3.Compare(clientv3.Value(key), "=", string(old)) // never so for a key that is absent
		if old == nil {
			is = clientv3.Compare(clientv3.CreateRevision(key), "=", 0)
		}
		txn := c.client.Txn(ctx).If(is)
		switch {
		case new != nil:
			txn = txn.Then(clientv3.OpPut(key, string(new)))
		case old != nil:
			txn = txn.Then(clientv3.OpDelete(key))
		}
		var err error
		resp, err = txn.Else(clientv3.OpGet(key)).Commit()
		return err
	})
	if err != nil {
		return nil, false, err
	}
	if resp.Succeeded {
		if new == nil {
			return nil, true, nil
		}
		return append([]byte{}, new...), true, nil
	}
	if kvs := resp.Responses[0].GetResponseRange().GetKvs(); len(kvs) > 0 {
		return append([]byte{}, kvs[0].Value...), false, nil
	}
	return nil, false, nil
}
