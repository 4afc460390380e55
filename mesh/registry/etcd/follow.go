package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/warren-mesh/warren/mesh/registry"
)

// Pages are of so many entries, and grow while they are small and quick. With firstPage, one of the
// largest entries is below 64 MiB.
const (
	firstPage, mostPage = 64, 8192
	smallPage           = 2 << 20 // bytes
)

// smallKind is how many bytes a kind has at most whose entries are compared whole before a watch is
// resumed: about what the keys of 1,000 entries have.
const smallKind = 64 << 10

var (
	errGap       = errors.New("gap")
	errCompacted = errors.New("compacted")
)

// position is how far a watch has come, in which store.
type position struct {
	listed   bool   // the rest holds
	prefix   string // of the kind's keys
	cluster  uint64
	term     uint64 // of the last entry that was applied where a linearizable read was served: it only rises
	revision int64
	ignored  map[string]int64 // keys that are none of ours, with the revision that put them
}

// gap has the next attempt list anew.
func (w *watcher) gap(set *settings, why string) {
	w.at.listed = false
	set.log.Info("changes may have been missed, reading everything anew", "kind", w.kind, "reason", why)
}

// get asks for keys.
func get(ctx context.Context, c *conn, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	var resp *clientv3.GetResponse
	err := c.do(ctx, func(ctx context.Context) (err error) {
		resp, err = c.client.Get(ctx, key, opts...)
		return err
	})
	return resp, err
}

// list reads everything, page by page at one revision.
func (w *watcher) list(ctx context.Context, c *conn) error {
	if n := len(w.view.items); n > 0 {
		// After a gap, all others have one too.
		most := min(c.set.timeout, 2*time.Millisecond*time.Duration(n))
		select {
		case <-time.After(rand.N(most)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	const most = 3
	for range most {
		err := w.read(ctx, c)
		if !errors.Is(err, rpctypes.ErrCompacted) {
			return err
		}
	}
	return fmt.Errorf("%w: the history ended %d times while everything was read", ErrServer, most)
}

// read is list at one revision. It returns an error that wraps rpctypes.ErrCompacted where that is gone
// before all is read.
func (w *watcher) read(ctx context.Context, c *conn) error {
	at := position{listed: true, prefix: c.set.prefix + w.kind + "/", ignored: make(map[string]int64)}
	items := make(map[string]item)
	revision, h, err := scan(ctx, c, at.prefix, 0, &w.page, func(kv *mvccpb.KeyValue) bool {
		id, why := idOf(c.set, kv)
		if why != "" {
			w.ignore(c.set, at.ignored, kv, why)
		} else {
			items[id] = item{owned(kv.Value), kv.ModRevision}
		}
		return true
	})
	if err != nil {
		return err
	}
	at.revision, at.cluster, at.term = revision, h.ClusterId, h.RaftTerm
	w.at = at
	w.view.replace(items, at.revision)
	return nil
}

// scan reads what is below a prefix at a revision, 0 for that of now, until take returns false. How many
// entries it asks for at a time is kept in page. It returns the revision, and what the last answer says of
// the store.
func scan(ctx context.Context, c *conn, prefix string, revision int64, page *int64, take func(*mvccpb.KeyValue) bool, opts ...clientv3.OpOption) (int64, *pb.ResponseHeader, error) {
	end := clientv3.GetPrefixRangeEnd(prefix)
	for key := prefix; ; {
		began := time.Now()
		resp, err := get(ctx, c, key, append(opts[:len(opts):len(opts)], clientv3.WithRange(end), clientv3.WithRev(revision), clientv3.WithLimit(*page))...)
		if errors.Is(err, ErrTimeout) {
			*page = max(1, *page/4) // it may have been too much
		}
		if err != nil {
			return 0, nil, err
		}
		if revision == 0 {
			revision = resp.Header.Revision
		}
		size := 0
		for _, kv := range resp.Kvs {
			size += len(kv.Key) + len(kv.Value)
			if !take(kv) {
				return revision, resp.Header, nil
			}
		}
		if size < smallPage && time.Since(began) < c.set.timeout/4 {
			*page = min(2**page, mostPage)
		} else if size > 4*smallPage {
			*page = max(1, *page/2)
		}
		if !resp.More || len(resp.Kvs) == 0 {
			return revision, resp.Header, nil
		}
		key = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}

// idOf returns the ID of a key of ours, or why it is none.
func idOf(set *settings, kv *mvccpb.KeyValue) (id, why string) {
	id = strings.TrimPrefix(string(kv.Key), set.prefix)
	if _, _, err := registry.ParseID(id); err != nil {
		return "", err.Error()
	}
	if len(kv.Value) > registry.MaxData {
		return "", fmt.Sprintf("it has %d bytes, at most %d are allowed", len(kv.Value), registry.MaxData)
	}
	return id, ""
}

// owned returns data that was decoded for us alone, and never nil.
func owned(data []byte) []byte {
	if data == nil {
		return []byte{}
	}
	return data
}

// ignore notes a key that is none of ours, and logs it unless it was seen at the last look.
func (w *watcher) ignore(set *settings, ignored map[string]int64, kv *mvccpb.KeyValue, why string) {
	key := string(kv.Key)
	_, now := ignored[key]
	_, before := w.at.ignored[key]
	ignored[key] = kv.ModRevision
	if !now && !before {
		set.log.Warn("a key is ignored", "key", fmt.Sprintf("%.300q", key), "reason", why)
	}
}

// verify finds out, before the watch is resumed, whether it may be: whether the store is the one that was
// watched before. If not, the next is a list.
func (w *watcher) verify(ctx context.Context, c *conn) error {
	prefix := c.set.prefix + w.kind + "/"
	if prefix != w.at.prefix {
		w.gap(c.set, "the prefix is another one")
		return nil
	}
	err := w.check(ctx, c, w.at.revision)
	switch {
	case errors.Is(err, rpctypes.ErrFutureRev):
		w.gap(c.set, "the store went back to an earlier revision")
		return nil
	case errors.Is(err, rpctypes.ErrCompacted):
		return w.bridge(ctx, c)
	}
	return err
}

// check compares what the view has with what the store had at a revision, 0 for that of now. Where they
// are the same, whatever the store did in between, a watch from the next revision on misses nothing, and
// w.at says so. Where they are not, it is a gap.
//
// A key that was put at the same revision has the same value, unless the store went back in between and
// its new history put that key just there again. So values are compared where they are few, and else that
// of the entry put last. Asking for the keys alone costs the server no more than asking for the last one
// in any other order than theirs, for which it reads all, and a tenth of what reading everything does in
// bytes.
func (w *watcher) check(ctx context.Context, c *conn, revision int64) error {
	items := w.view.items // only this goroutine changes them
	size, newest := 0, ""
	for id, i := range items {
		size += len(id) + len(i.data)
		if newest == "" || i.mod > items[newest].mod {
			newest = id
		}
	}
	first, page := int64(firstPage), &w.keys
	opts := []clientv3.OpOption{clientv3.WithKeysOnly()}
	whole := size <= smallKind
	if whole {
		newest, opts, page = "", nil, &first
	}
	same, left := true, len(items)+len(w.at.ignored)
	at, h, err := scan(ctx, c, w.at.prefix, revision, page, func(kv *mvccpb.KeyValue) bool {
		left--
		mod, ignored := w.at.ignored[string(kv.Key)]
		i, known := items[strings.TrimPrefix(string(kv.Key), c.set.prefix)]
		switch {
		case ignored:
			same = mod == kv.ModRevision
		case known:
			same = i.mod == kv.ModRevision && (!whole || bytes.Equal(i.data, kv.Value))
		default:
			same = false
		}
		return same
	}, opts...)
	if err != nil {
		return err
	}
	if !w.compare(c.set, h) {
		return nil
	}
	if same = same && left == 0; same && newest != "" {
		resp, err := get(ctx, c, c.set.prefix+newest, clientv3.WithRev(at))
		if err != nil {
			return err
		}
		same = len(resp.Kvs) == 1 && bytes.Equal(resp.Kvs[0].Value, items[newest].data)
	}
	switch {
	case same:
		w.at.revision = at
	case revision == 0:
		w.gap(c.set, fmt.Sprintf("the history after revision %d is compacted", w.at.revision))
	default:
		w.gap(c.set, "the store has another history")
	}
	return nil
}

// compare reports whether what a linearizable read says of the store can be said of the one that was
// watched.
func (w *watcher) compare(set *settings, h *pb.ResponseHeader) bool {
	switch {
	case h.ClusterId != w.at.cluster:
		w.gap(set, fmt.Sprintf("the cluster is another one: its ID is %x and was %x", h.ClusterId, w.at.cluster))
	case h.Revision < w.at.revision:
		w.gap(set, fmt.Sprintf("the store went back from revision %d to %d", w.at.revision, h.Revision))
	case h.RaftTerm < w.at.term:
		w.gap(set, fmt.Sprintf("the store was restored: its term is %d and was %d", h.RaftTerm, w.at.term))
	default:
		w.at.term = h.RaftTerm
		return true
	}
	return false
}

// bridge finds out, when the history the watch needs is compacted, whether there was any for it: if not,
// the watch goes on from now, so that a kind in which little happens is not listed anew whenever a
// connection breaks. Else the next is a list.
func (w *watcher) bridge(ctx context.Context, c *conn) error {
	const most = 3
	for range most {
		if err := w.check(ctx, c, 0); !errors.Is(err, rpctypes.ErrCompacted) {
			return err
		}
	}
	return fmt.Errorf("%w: the history ended %d times while it was compared", ErrServer, most)
}

// stream watches from the next revision until that fails.
func (w *watcher) stream(ctx context.Context, c *conn) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var sign lifeSign
	sign.set()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	start := make(chan pb.Watch_WatchClient, 1)
	wg.Go(func() { sign.watch(ctx, cancel, c.set.timeout, start) })

	err := func() error {
		asked, err := c.authorise(ctx)
		if err != nil {
			return err
		}
		s, err := c.watch.Watch(clientv3.WithRequireLeader(asked), grpc.MaxCallRecvMsgSize(math.MaxInt32))
		if err != nil {
			return err
		}
		// Should sending fail, receiving tells why.
		_ = s.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
			Key: []byte(w.at.prefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(w.at.prefix)),
			StartRevision: w.at.revision + 1, ProgressNotify: true, Fragment: true,
		}}})
		start <- s
		return w.receive(s, &sign, c)
	}()
	if errors.Is(err, errGap) || errors.Is(err, errCompacted) {
		return err
	}
	if stale(err) {
		_ = c.forget(ctx)
	}
	return classify(ctx, err)
}

// receive takes in what the stream says.
func (w *watcher) receive(s pb.Watch_WatchClient, sign *lifeSign, c *conn) error {
	var events []*mvccpb.Event // of a response that comes in fragments
	for {
		resp, err := s.Recv()
		if err != nil {
			return err
		}
		sign.set()
		if h := resp.Header; h != nil && h.ClusterId != w.at.cluster {
			return fmt.Errorf("%w: the cluster is another one: its ID is %x and was %x", errGap, h.ClusterId, w.at.cluster)
		}
		switch {
		case resp.CompactRevision != 0:
			return errCompacted
		case resp.Canceled:
			err := errors.New(resp.CancelReason)
			if unauthorised(err) {
				return err
			}
			return fmt.Errorf("%w: the server cancelled the watch: %q", errGap, resp.CancelReason)
		case resp.Created:
			w.established(c.set)
		case len(resp.Events) > 0:
			if events = append(events, resp.Events...); !resp.Fragment {
				w.apply(c.set, events)
				events = nil
			}
		case resp.WatchId >= 0 && resp.Header != nil && events == nil:
			// The server says of itself, in the watch's own order, that it has come so far. (What it answers
			// when asked is not in that order before 3.4.25 and 3.5.8, and is a sign of life only.)
			w.at.revision = max(w.at.revision, resp.Header.Revision)
		}
	}
}

// apply takes in all events of some revisions.
func (w *watcher) apply(set *settings, events []*mvccpb.Event) {
	changes := make([]change, 0, len(events))
	for _, e := range events {
		key := string(e.Kv.Key)
		id, why := idOf(set, e.Kv)
		deleted := e.Type == mvccpb.Event_DELETE
		delete := func() { delete(w.at.ignored, key) }
		switch {
		case deleted:
			delete()
		case why != "":
			w.ignore(set, w.at.ignored, e.Kv, why)
			id, deleted = strings.TrimPrefix(key, set.prefix), true // if it was one of ours, it is none now
		default:
			delete()
		}
		changes = append(changes, change{id, owned(e.Kv.Value), e.Kv.ModRevision, deleted})
	}
	w.at.revision = max(w.at.revision, events[len(events)-1].Kv.ModRevision)
	w.view.apply(changes, w.at.revision)
}

// lifeSign is when the server last said anything.
type lifeSign struct{ last atomic.Int64 }

var epoch = time.Now() // for the monotonic clock

func (l *lifeSign) set() { l.last.Store(int64(time.Since(epoch))) }

func (l *lifeSign) age() time.Duration { return time.Since(epoch) - time.Duration(l.last.Load()) }

// watch asks for a sign of life before there has been none for too long, and cancels when there is none
// after all. The stream to ask comes when it is there.
func (l *lifeSign) watch(ctx context.Context, cancel context.CancelCauseFunc, timeout time.Duration, start <-chan pb.Watch_WatchClient) {
	var s pb.Watch_WatchClient
	var asked int64 = -1 // the sign after which was asked
	interval := func() time.Duration { return timeout*3/8 + rand.N(timeout/8) }
	ask := interval()
	timer := time.NewTimer(ask)
	defer timer.Stop()
	for {
		select {
		case s = <-start:
			continue
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		last, age := l.last.Load(), l.age()
		next := timeout - age
		switch {
		case age >= timeout && (s == nil || asked == last):
			cancel(ErrTimeout)
			return
		case age < ask:
			next = ask - age
		case s != nil && asked != last:
			// Should this process have stood still, the server gets the chance to answer.
			asked, ask = last, interval()
			next = max(next, timeout/8)
			if s.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}}) != nil {
				return // Recv knows why
			}
		}
		timer.Reset(next)
	}
}
