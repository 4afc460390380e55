package etcd_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
)

// fake is an etcd that says what the test wants. Of its history it has what was put before and is there
// still, and what the test gives it: what watches are told is the test's business.
type fake struct {
	pb.UnimplementedKVServer
	pb.UnimplementedWatchServer
	t       *testing.T
	addr    string
	watches chan *fakeWatch // one for each that begins

	mu       sync.Mutex
	header   pb.ResponseHeader
	kvs      []*mvccpb.KeyValue           // sorted
	past     map[int64][]*mvccpb.KeyValue // what there was at a revision, sorted
	compact  int64
	fail     func(*pb.RangeRequest) error
	refuse   error // what watches are answered
	requests []*pb.RangeRequest
}

type fakeWatch struct {
	s      pb.Watch_WatchServer
	create *pb.WatchCreateRequest
	end    chan error
}

func newFake(t *testing.T) *fake {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{t: t, addr: l.Addr().String(), watches: make(chan *fakeWatch, 100)}
	f.header = pb.ResponseHeader{ClusterId: 1, MemberId: 2, Revision: 10, RaftTerm: 3}
	s := grpc.NewServer()
	pb.RegisterKVServer(s, f)
	pb.RegisterWatchServer(s, f)
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(l) })
	t.Cleanup(func() { s.Stop(); wg.Wait() })
	return f
}

func (f *fake) open() *etcd.Registry {
	return open(f.t, etcd.Config{Endpoints: []string{f.addr}, Prefix: "/p"})
}

func kv(id, data string, mod int64) *mvccpb.KeyValue {
	return &mvccpb.KeyValue{Key: []byte("/p/" + id), Value: []byte(data), ModRevision: mod, CreateRevision: mod, Version: 1}
}

// set changes what reads see.
func (f *fake) set(revision int64, kvs ...*mvccpb.KeyValue) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.header.Revision, f.kvs = revision, sorted(kvs)
}

// was changes what reads at a revision see.
func (f *fake) was(revision int64, kvs ...*mvccpb.KeyValue) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.past == nil {
		f.past = make(map[int64][]*mvccpb.KeyValue)
	}
	f.past[revision] = sorted(kvs)
}

func sorted(kvs []*mvccpb.KeyValue) []*mvccpb.KeyValue {
	return slices.SortedFunc(slices.Values(kvs), func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.Key, b.Key) })
}

// at returns what there was.
func (f *fake) at(revision int64) ([]*mvccpb.KeyValue, error) {
	if revision == 0 {
		return f.kvs, nil
	}
	if revision > f.header.Revision {
		return nil, rpctypes.ErrGRPCFutureRev
	}
	if revision < f.compact {
		return nil, rpctypes.ErrGRPCCompacted
	}
	if kvs, ok := f.past[revision]; ok {
		return kvs, nil
	}
	later := func(kv *mvccpb.KeyValue) bool { return kv.ModRevision > revision }
	return slices.DeleteFunc(slices.Clone(f.kvs), later), nil
}

func (f *fake) Range(_ context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, req)
	if req.Serializable {
		f.t.Errorf("a read is not linearizable: %v", req)
	}
	if f.fail != nil {
		if err := f.fail(req); err != nil {
			return nil, err
		}
	}
	kvs, err := f.at(req.Revision)
	if err != nil {
		return nil, err
	}
	resp := &pb.RangeResponse{Header: f.head()}
	for _, kv := range kvs {
		if bytes.Equal(kv.Key, req.Key) || len(req.RangeEnd) > 0 && bytes.Compare(kv.Key, req.Key) >= 0 && bytes.Compare(kv.Key, req.RangeEnd) < 0 {
			resp.Kvs = append(resp.Kvs, kv)
		}
	}
	resp.Count = int64(len(resp.Kvs))
	if n := int(req.Limit); n > 0 && len(resp.Kvs) > n {
		resp.Kvs, resp.More = resp.Kvs[:n], true
	}
	if req.KeysOnly {
		for i, kv := range resp.Kvs {
			resp.Kvs[i] = &mvccpb.KeyValue{Key: kv.Key, ModRevision: kv.ModRevision}
		}
	}
	return resp, nil
}

func (f *fake) head() *pb.ResponseHeader {
	return &pb.ResponseHeader{ClusterId: f.header.ClusterId, MemberId: f.header.MemberId, Revision: f.header.Revision, RaftTerm: f.header.RaftTerm}
}

// Watch answers a request for progress as versions before 3.4.25 do: with the revision of the store, be
// there events under way or not.
func (f *fake) Watch(s pb.Watch_WatchServer) error {
	req, err := s.Recv()
	if err != nil {
		return err
	}
	f.mu.Lock()
	refuse := f.refuse
	f.mu.Unlock()
	if refuse != nil {
		return refuse
	}
	w := &fakeWatch{s: s, create: req.GetCreateRequest(), end: make(chan error, 1)}
	if w.create == nil {
		return errors.New("the first request creates nothing")
	}
	w.send(f, &pb.WatchResponse{Created: true})
	f.watches <- w
	go func() { // ends with the stream, which ends when this returns
		for {
			if req, err := s.Recv(); err != nil {
				select {
				case w.end <- err:
				default:
				}
				return
			} else if req.GetProgressRequest() != nil {
				w.send(f, &pb.WatchResponse{WatchId: -1})
			}
		}
	}()
	return <-w.end
}

var sending sync.Mutex // of all fakes: a stream takes one at a time

func (w *fakeWatch) send(f *fake, resp *pb.WatchResponse) {
	if resp.Header == nil {
		f.mu.Lock()
		resp.Header = f.head()
		f.mu.Unlock()
	}
	sending.Lock()
	defer sending.Unlock()
	_ = w.s.Send(resp)
}

func (f *fake) next() *fakeWatch {
	f.t.Helper()
	select {
	case w := <-f.watches:
		return w
	case <-time.After(patience):
		f.t.Fatal("no watch begins")
		return nil
	}
}

func putEvent(kv *mvccpb.KeyValue) *mvccpb.Event {
	return &mvccpb.Event{Type: mvccpb.Event_PUT, Kv: kv}
}

func deleteEvent(id string, mod int64) *mvccpb.Event {
	return &mvccpb.Event{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: []byte("/p/" + id), ModRevision: mod}}
}

// One response with many events on one key is one batch with the last. An unchanged value, and the
// deletion of what is not there, are none.
func TestOneResponseManyEvents(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	w := follow(t, f.open(), "node")
	s := f.next()
	if s.create.StartRevision != 11 || !s.create.Fragment || !s.create.ProgressNotify {
		t.Errorf("the watch is %v, want one from revision 11 with fragments and progress", s.create)
	}
	s.send(f, &pb.WatchResponse{Events: []*mvccpb.Event{
		putEvent(kv("node/a", "1", 11)), putEvent(kv("node/a", "2", 12)), deleteEvent("node/a", 13), putEvent(kv("node/a", "3", 14)),
	}})
	if now := w.has("node/a", "3"); now.batches != 2 || now.deleted != 0 || now.Revision != 14 {
		t.Errorf("%d batches, %d deletions, revision %d, want 2, 0, 14", now.batches, now.deleted, now.Revision)
	}
	s.send(f, &pb.WatchResponse{Events: []*mvccpb.Event{putEvent(kv("node/a", "3", 15))}})
	s.send(f, &pb.WatchResponse{Events: []*mvccpb.Event{deleteEvent("node/x", 16)}})
	s.send(f, &pb.WatchResponse{Events: []*mvccpb.Event{putEvent(kv("node/b", "1", 17))}})
	if now := w.has("node/b", "1"); now.batches != 3 {
		t.Errorf("%d batches, want 3", now.batches)
	}
}

// A response in fragments is taken in whole: when it breaks off, the watch is resumed before it.
func TestFragments(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	w := follow(t, f.open(), "node")
	s := f.next()
	s.send(f, &pb.WatchResponse{Events: []*mvccpb.Event{putEvent(kv("node/a", "1", 11))}})
	s.send(f, &pb.WatchResponse{Fragment: true, Events: []*mvccpb.Event{putEvent(kv("node/a", "2", 12))}})
	w.has("node/a", "1")
	f.set(12, kv("node/a", "2", 12), kv("node/b", "2", 12))
	s.end <- rpctypes.ErrGRPCNoLeader
	// What was put last is there in the history.
	f.mu.Lock()
	f.kvs[0] = kv("node/a", "1", 11)
	f.mu.Unlock()
	s = f.next()
	if s.create.StartRevision != 12 {
		t.Errorf("the watch is resumed from revision %d, want 12", s.create.StartRevision)
	}
	s.send(f, &pb.WatchResponse{Fragment: true, Events: []*mvccpb.Event{putEvent(kv("node/a", "2", 12))}})
	s.send(f, &pb.WatchResponse{Events: []*mvccpb.Event{putEvent(kv("node/b", "2", 12))}})
	w.has("node/b", "2")
	if now := w.has("node/a", "2"); now.resets != 1 || now.batches != 3 {
		t.Errorf("%d resets, %d batches, want 1, 3", now.resets, now.batches)
	}
}

// Only what the server says in the watch's own order counts as progress.
func TestProgress(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	w := follow(t, f.open(), "node")
	s := f.next()
	f.set(20)
	s.send(f, &pb.WatchResponse{WatchId: -1}) // events up to 20 may be under way
	s.send(f, &pb.WatchResponse{Events: []*mvccpb.Event{putEvent(kv("node/a", "1", 11))}, Header: &pb.ResponseHeader{ClusterId: 1, Revision: 20}})
	w.has("node/a", "1")
	f.set(20, kv("node/a", "1", 11))
	s.end <- rpctypes.ErrGRPCNoLeader
	if s = f.next(); s.create.StartRevision != 12 {
		t.Errorf("the watch is resumed from revision %d, want 12", s.create.StartRevision)
	}
	s.send(f, &pb.WatchResponse{WatchId: 0})
	time.Sleep(100 * time.Millisecond) // until it is taken in
	s.end <- rpctypes.ErrGRPCNoLeader
	if s = f.next(); s.create.StartRevision != 21 {
		t.Errorf("the watch is resumed from revision %d, want 21", s.create.StartRevision)
	}
	if now, _ := w.now(); now.resets != 1 {
		t.Errorf("%d resets, want 1", now.resets)
	}
}

// What ends the certainty that nothing was missed is a Reset; what does not, is none.
func TestWhatIsAGap(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		does  func(f *fake, s *fakeWatch)
		reset bool
	}{
		{"no leader", func(_ *fake, s *fakeWatch) { s.end <- rpctypes.ErrGRPCNoLeader }, false},
		{"the stream ends in order", func(_ *fake, s *fakeWatch) { s.end <- nil }, false},
		{"a member that lags", func(f *fake, s *fakeWatch) {
			s.send(f, &pb.WatchResponse{WatchId: 0, Header: &pb.ResponseHeader{ClusterId: 1, Revision: 5}})
			s.end <- rpctypes.ErrGRPCNoLeader
		}, false},
		{"cancelled, and no reason", func(f *fake, s *fakeWatch) { s.send(f, &pb.WatchResponse{Canceled: true}) }, true},
		{"cancelled, and a reason", func(f *fake, s *fakeWatch) {
			s.send(f, &pb.WatchResponse{Canceled: true, CancelReason: "because"})
		}, true},
		{"not authorised any more", func(f *fake, s *fakeWatch) {
			s.send(f, &pb.WatchResponse{Canceled: true, CancelReason: rpctypes.ErrGRPCPermissionDenied.Error()})
		}, false},
		{"compacted, and nothing happened", func(f *fake, s *fakeWatch) {
			f.set(30, kv("node/a", "1", 10))
			s.send(f, &pb.WatchResponse{Canceled: true, CompactRevision: 20})
		}, false},
		{"compacted, and something came", func(f *fake, s *fakeWatch) {
			f.set(30, kv("node/a", "1", 10), kv("node/b", "1", 15))
			s.send(f, &pb.WatchResponse{Canceled: true, CompactRevision: 20})
		}, true},
		{"compacted, and something went", func(f *fake, s *fakeWatch) {
			f.set(30)
			s.send(f, &pb.WatchResponse{Canceled: true, CompactRevision: 20})
		}, true},
		{"compacted, and something went and something came", func(f *fake, s *fakeWatch) {
			f.set(30, kv("node/b", "1", 15))
			s.send(f, &pb.WatchResponse{Canceled: true, CompactRevision: 20})
		}, true},
		{"compacted by a restore that counts on from far ahead", func(f *fake, s *fakeWatch) {
			f.set(1_000_000_000, kv("node/a", "0", 5))
			s.send(f, &pb.WatchResponse{Canceled: true, CompactRevision: 999_999_999})
		}, true},
		{"another cluster", func(f *fake, s *fakeWatch) {
			f.mu.Lock()
			f.header.ClusterId = 7
			f.mu.Unlock()
			s.end <- rpctypes.ErrGRPCNoLeader
		}, true},
		{"another cluster behind the same stream", func(f *fake, s *fakeWatch) {
			f.mu.Lock()
			f.header.ClusterId = 7
			f.mu.Unlock()
			s.send(f, &pb.WatchResponse{WatchId: -1})
		}, true},
		{"an earlier revision", func(f *fake, s *fakeWatch) {
			f.set(9, kv("node/a", "1", 10))
			s.end <- rpctypes.ErrGRPCNoLeader
		}, true},
		{"an earlier term", func(f *fake, s *fakeWatch) {
			f.mu.Lock()
			f.header.RaftTerm = 2
			f.mu.Unlock()
			s.end <- rpctypes.ErrGRPCNoLeader
		}, true},
		{"another history", func(f *fake, s *fakeWatch) {
			f.set(30, kv("node/a", "2", 10))
			s.end <- rpctypes.ErrGRPCNoLeader
		}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			f.set(10, kv("node/a", "1", 10))
			w := follow(t, f.open(), "node")
			s := f.next()
			w.has("node/a", "1")
			test.does(f, s)
			s = f.next()
			s.send(f, &pb.WatchResponse{Events: []*mvccpb.Event{putEvent(kv("node/z", "last", 2_000_000_000))}})
			now := w.has("node/z", "last")
			if want := 1; test.reset && now.resets != want+1 || !test.reset && now.resets != want {
				t.Errorf("%d resets, a gap is %t", now.resets, test.reset)
			}
		})
	}
}

// A store that is ahead of where the watch was is taken for the one that was watched where it had the same
// then, entry by entry, and only there: it may have been restored from a backup, and have been written to.
func TestAnotherHistory(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("x", 1000)
	known := []*mvccpb.KeyValue{kv("node/a", "a", 1), kv("node/b", "b", 3), kv("node/c", "c", 5)}
	with := func(more ...*mvccpb.KeyValue) []*mvccpb.KeyValue { return append(slices.Clone(known), more...) }
	many := func(more ...*mvccpb.KeyValue) (kvs []*mvccpb.KeyValue) {
		for i := range 200 {
			kvs = append(kvs, kv(fmt.Sprintf("node/n%03d", i), large, int64(100+i)))
		}
		for _, m := range more {
			kvs = slices.DeleteFunc(kvs, func(kv *mvccpb.KeyValue) bool { return bytes.Equal(kv.Key, m.Key) })
		}
		return append(kvs, more...)
	}
	strange := kv("node/UPPER", "", 4)
	const then = 1000
	for _, test := range []struct {
		name      string
		had, has  []*mvccpb.KeyValue // at revision then
		now       []*mvccpb.KeyValue // nil: the same
		compacted bool
		reset     bool
	}{
		{name: "the same", had: known, has: known, now: with(kv("node/d", "d", then+1))},
		{name: "nothing", had: nil, has: nil},
		{name: "something, and was nothing", had: nil, has: known, reset: true},
		{name: "nothing, and was something", had: known, has: nil, reset: true},
		{name: "what was deleted", had: known, has: with(kv("node/x", "x", 2)), reset: true},
		{name: "another one deleted", had: known, has: []*mvccpb.KeyValue{known[0], kv("node/x", "x", 2), known[2]}, reset: true},
		{name: "put before what was put last", had: known, has: []*mvccpb.KeyValue{kv("node/a", "a", 4), known[1], known[2]}, reset: true},
		{name: "put by the same revision", had: known, has: []*mvccpb.KeyValue{kv("node/a", "other", 1), known[1], known[2]}, reset: true},
		{name: "the same with keys of others", had: with(strange), has: with(strange)},
		{name: "a key of others is gone", had: with(strange), has: known, reset: true},
		{name: "a key of others is new", had: known, has: with(strange), reset: true},
		{name: "a key of others changed", had: with(strange), has: with(kv("node/UPPER", "", 6)), reset: true},
		{name: "the same of many", had: many(), has: many(), now: many(kv("node/n007", "new", then+1))},
		{name: "another one deleted of many", had: many(), has: many()[:199], reset: true},
		{name: "another put of many", had: many(), has: many(kv("node/n100", large, 99)), reset: true},
		{name: "another value put last of many", had: many(), has: many(kv("node/n199", "other", 299)), reset: true},
		{name: "compacted", had: known, now: known, compacted: true},
		{name: "compacted, with keys of others", had: with(strange), now: with(strange), compacted: true},
		{name: "compacted, of many", had: many(), now: many(), compacted: true},
		{name: "compacted, and put since", had: known, now: []*mvccpb.KeyValue{known[0], kv("node/b", "b", then+1), known[2]}, compacted: true, reset: true},
		{name: "compacted, and put before", had: known, now: []*mvccpb.KeyValue{known[0], kv("node/b", "b", 4), known[2]}, compacted: true, reset: true},
		{name: "compacted, of many, and another deleted", had: many(), now: many(kv("node/x", large, 90))[1:], compacted: true, reset: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			f.set(then, test.had...)
			w := follow(t, f.open(), "node")
			s := f.next()
			w.await("a Reset", func(s seen) bool { return s.Known })
			if test.now == nil {
				test.now = test.has
			}
			f.set(then+60, test.now...)
			f.was(then, test.has...)
			f.mu.Lock()
			if test.compacted {
				f.compact = then + 30
			}
			listed := len(f.requests)
			f.mu.Unlock()
			s.end <- rpctypes.ErrGRPCNoLeader
			s = f.next()
			from := int64(then + 1)
			if test.compacted || test.reset {
				from = then + 61
			}
			if s.create.StartRevision != from {
				t.Errorf("the watch is resumed from revision %d, want %d", s.create.StartRevision, from)
			}
			s.send(f, &pb.WatchResponse{Events: []*mvccpb.Event{putEvent(kv("node/z", "last", 2_000_000_000))}})
			if now := w.has("node/z", "last"); (now.resets == 2) != test.reset {
				t.Errorf("%d resets, a gap is %t", now.resets, test.reset)
			}
			if len(test.had) > 100 && !test.reset {
				f.mu.Lock()
				defer f.mu.Unlock()
				for _, req := range f.requests[listed:] {
					if len(req.RangeEnd) > 0 && !req.KeysOnly {
						t.Errorf("the values of many are read to compare them: %v", req)
					}
				}
			}
		})
	}
}

// Many keys are compared page by page, at one revision, and less at a time where the server is too slow.
func TestComparingPages(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	var kvs []*mvccpb.KeyValue
	for i := range 9000 {
		kvs = append(kvs, kv(fmt.Sprintf("node/n%04d", i), "0123456789", int64(i+1)))
	}
	f.set(10_000, kvs...)
	w := follow(t, f.open(), "node")
	s := f.next()
	w.await("a Reset", func(s seen) bool { return s.Known })
	slow := errors.New("nothing is compared")
	f.mu.Lock()
	listed := len(f.requests)
	f.header.Revision = 20_000
	f.fail = func(req *pb.RangeRequest) error {
		if slow != nil {
			slow = nil
			return rpctypes.ErrGRPCTimeout
		}
		return nil
	}
	f.mu.Unlock()
	s.end <- rpctypes.ErrGRPCNoLeader
	if s = f.next(); s.create.StartRevision != 10_001 {
		t.Errorf("the watch is resumed from revision %d, want 10,001", s.create.StartRevision)
	}
	if slow != nil {
		t.Error(slow)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, req := range f.requests[listed:] {
		if req.Revision != 10_000 || i == 1 && req.Limit >= f.requests[listed].Limit {
			t.Errorf("request %d is %v", i, req)
		}
	}
}

// A compaction while a list is read page by page begins it anew: no list is of two revisions.
func TestCompactedWhileListing(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	const n = 3000
	fill := func(revision int64, data string) {
		var kvs []*mvccpb.KeyValue
		for i := range n {
			kvs = append(kvs, kv(fmt.Sprintf("node/n%04d", i), data, revision))
		}
		f.kvs, f.header.Revision = kvs, revision
	}
	fill(10, "old")
	pages, compactions := 0, 0
	f.fail = func(req *pb.RangeRequest) error {
		if req.Revision == 0 {
			return nil
		}
		if pages++; pages == 2 && compactions < 2 {
			compactions++
			pages = 0
			fill(f.header.Revision+10, fmt.Sprint("new", compactions))
			return rpctypes.ErrGRPCCompacted
		}
		if req.Revision != f.header.Revision {
			t.Errorf("a page is asked for at revision %d, and the first was at %d", req.Revision, f.header.Revision)
		}
		return nil
	}
	w := follow(t, f.open(), "node")
	s := f.next()
	if s.create.StartRevision != 31 {
		t.Errorf("the watch begins at revision %d, want 31", s.create.StartRevision)
	}
	now := w.has("node/n0000", "new2")
	if len(now.Entries) != n || now.batches != 1 || now.Revision != 30 || len(now.errs) != 0 {
		t.Errorf("%d entries, %d batches, revision %d, errors %v", len(now.Entries), now.batches, now.Revision, now.errs)
	}
	for id, e := range now.Entries {
		if string(e.Data) != "new2" {
			t.Errorf("%s is of another revision: %q", id, e.Data)
		}
	}
}

// Keys that are none of ours are never delivered, do no harm, and are logged once.
func TestForeignKeys(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	long := strings.Repeat("x", registry.MaxData+1)
	f.set(10, kv("node/a", "1", 1), kv("node/../x", "", 2), kv("node/UPPER", "", 3), kv("node/a/b", "", 4), kv("node/", "", 5),
		kv("node/\xff\x00", "", 6), kv("node/long", long, 7), kv("node/ok", "1", 8))
	var log lockedBuffer
	r := open(t, etcd.Config{Endpoints: []string{f.addr}, Prefix: "/p", Logger: log.logger()})
	w := follow(t, r, "node")
	s := f.next()
	now := w.has("node/ok", "1")
	if ids := now.IDs(); !slices.Equal(ids, []string{"node/a", "node/ok"}) {
		t.Errorf("%q are delivered", ids)
	}
	s.send(f, &pb.WatchResponse{Events: []*mvccpb.Event{
		putEvent(kv("node/UPPER", "again", 11)), deleteEvent("node/../x", 12), putEvent(kv("node/a", long, 13)), putEvent(kv("node/new/er", "", 14)),
	}})
	w.hasNot("node/a")
	s.send(f, &pb.WatchResponse{Events: []*mvccpb.Event{putEvent(kv("node/a", "short again", 15)), putEvent(kv("node/long", "short now", 16))}})
	w.has("node/long", "short now")
	w.has("node/a", "short again")
	if n := strings.Count(log.String(), "a key is ignored"); n != 8 { // six at first, then node/a and node/new/er
		t.Errorf("logged %d times, want 8:\n%.3000s", n, log.String())
	}
}

// A server that answers with errors is told of once, and asked less and less often.
func TestServerErrors(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.fail = func(*pb.RangeRequest) error { return rpctypes.ErrGRPCNoSpace }
	w := follow(t, f.open(), "node")
	w.await("an error", func(s seen) bool { return len(s.errs) > 0 })
	time.Sleep(5 * short)
	now, _ := w.now()
	if len(now.errs) > 1 || !errors.Is(now.errs[0], etcd.ErrServer) || !errors.Is(now.errs[0], rpctypes.ErrNoSpace) {
		t.Errorf("told as %v, want ErrServer once", now.errs)
	}
	f.mu.Lock()
	n := len(f.requests)
	f.fail = nil
	f.mu.Unlock()
	if n > 30 {
		t.Errorf("%d requests in 5 s", n)
	}
	f.next()
	w.await("a Reset", func(s seen) bool { return s.Known })
}

// When watching works again after an error, an empty batch says so, once, whatever else was done meanwhile.
func TestRecoveryIsSaid(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name     string
		meantime func(*testing.T, *etcd.Registry, etcd.Config)
	}{
		{"nothing", func(*testing.T, *etcd.Registry, etcd.Config) {}},
		{"reload", func(t *testing.T, r *etcd.Registry, cfg etcd.Config) {
			for range 3 {
				if err := r.Reload(cfg); err != nil {
					t.Error(err)
				}
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			cfg := etcd.Config{Endpoints: []string{f.addr}, Prefix: "/p", Timeout: short}
			r := open(t, cfg)
			w := follow(t, r, "node")
			s := f.next()
			w.await("a Reset", func(s seen) bool { return s.Known })
			f.mu.Lock()
			f.fail = func(*pb.RangeRequest) error { return rpctypes.ErrGRPCNoSpace }
			f.mu.Unlock()
			s.end <- rpctypes.ErrGRPCNoLeader
			w.await("an error", func(s seen) bool { return len(s.errs) > 0 })
			test.meantime(t, r, cfg)
			f.mu.Lock()
			f.fail = nil
			f.mu.Unlock()
			test.meantime(t, r, cfg)
			w.await("a batch", func(s seen) bool { return s.batches == 2 })
			if err := r.Reload(cfg); err != nil { // all is well, and nothing is said
				t.Error(err)
			}
			time.Sleep(short / 2)
			if s, _ := w.now(); s.batches != 2 || s.resets != 1 || s.Revision != 10 {
				t.Errorf("%d batches, %d resets, revision %d, want 2, 1, 10", s.batches, s.resets, s.Revision)
			}
			if err := r.Close(); err != nil {
				t.Error(err)
			}
			w.await("ErrClosed", func(s seen) bool { return errors.Is(s.errs[len(s.errs)-1], etcd.ErrClosed) })
			if s, _ := w.now(); s.batches != 2 {
				t.Errorf("%d batches, want 2", s.batches)
			}
		})
	}
}

// A Reset says that watching works: where it does not after all, that is told, though it was before.
func TestListsAndDoesNotWatch(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.fail = func(*pb.RangeRequest) error { return rpctypes.ErrGRPCNoSpace }
	f.refuse = rpctypes.ErrGRPCNoSpace
	w := follow(t, f.open(), "node")
	w.await("an error", func(s seen) bool { return len(s.errs) > 0 })
	f.mu.Lock()
	f.fail = nil
	f.mu.Unlock()
	n := len(w.await("a Reset", func(s seen) bool { return s.Known }).errs)
	began := time.Now()
	w.await("one more error", func(s seen) bool { return len(s.errs) > n })
	if took := time.Since(began); took > 4*short {
		t.Errorf("it was told after %v", took)
	}
	f.mu.Lock()
	f.refuse = nil
	f.mu.Unlock()
	if s := w.await("a batch", func(s seen) bool { return s.batches == 2 }); s.resets != 1 {
		t.Errorf("%d resets, want 1", s.resets)
	}
}

// A deadline of who watches is not told as trouble of the server, which knows it too.
func TestDeadlineOfAWatch(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.fail = func(*pb.RangeRequest) error { return rpctypes.ErrGRPCTimeout } // at once: it is the first to notice
	r := f.open()
	ctx, cancel := context.WithTimeout(t.Context(), short/20)
	defer cancel()
	for b, err := range r.Watch(ctx, "node") {
		t.Error("yielded before the end:", b, err)
	}
	if ctx.Err() == nil {
		t.Error("it ended before its context")
	}
}
