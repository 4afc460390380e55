package identity_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func someRecord(t testing.TB, id string) record.Record {
	t.Helper()
	k, err := key.ParsePublic("hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=")
	if err != nil {
		t.Fatal(err)
	}
	return record.Record{
		Version:   record.Version,
		ID:        id,
		Key:       k,
		Endpoints: []record.Endpoint{{Addr: netip.MustParseAddr("192.0.2.1"), Port: 51820}},
		Prefixes:  prefixes.MustParse("10.1.0.0/16"),
		Addresses: prefixes.MustParse("10.9.0.1"),
		Roles:     []string{"dns"},
		Labels:    map[string]string{"site": "here"},
		Instance:  "0123",
		Epoch:     1,
	}
}

// testTrust is what every Trust keeps to, the one given sealing for the node called id.
func testTrust(t *testing.T, trust identity.Trust, id string, now time.Time) {
	r := someRecord(t, id)
	open := func(t *testing.T, id string, data []byte) (identity.Opened, error) {
		t.Helper()
		was := slices.Clone(data)
		o, err := trust.Open(id, data, now)
		if !slices.Equal(data, was) {
			t.Fatal("Open changed the data")
		}
		if err != nil && !record.Equal(o.Record, record.Record{}) {
			t.Fatalf("the error %v came with %+v", err, o)
		}
		return o, err
	}
	sealed, err := trust.Seal(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("what is sealed opens", func(t *testing.T) {
		if err := registry.CheckEntry(registry.Entry{ID: registry.NodeID(id), Data: sealed}); err != nil {
			t.Fatal(err)
		}
		data := slices.Clone(sealed)
		o, err := open(t, registry.NodeID(id), data)
		if err != nil || !record.Equal(o.Record, r) || !o.ValidAt(now) {
			t.Fatalf("opened %+v, %v", o, err)
		}
		clear(data)
		if !record.Equal(o.Record, r) {
			t.Fatal("the record refers to the data")
		}
		if again, err := open(t, registry.NodeID(id), sealed); err != nil || !record.Equal(again.Record, r) {
			t.Fatalf("opened again %+v, %v", again, err)
		}
	})
	t.Run("only under its own name", func(t *testing.T) {
		for _, other := range []string{"node/other", "node/" + id + "-2", "trust/" + id, "nodes/" + id, id, "", "node/", "node/" + strings.ToUpper(id)} {
			if o, err := open(t, other, sealed); err == nil {
				t.Errorf("opened under %q: %+v", other, o)
			} else if errors.Is(err, identity.ErrRevoked) {
				t.Errorf("under %q: %v, which would remove a node", other, err)
			}
		}
	})
	t.Run("garbage is an error", func(t *testing.T) {
		for n := range len(sealed) {
			if _, err := open(t, registry.NodeID(id), sealed[:n]); err == nil || errors.Is(err, identity.ErrRevoked) {
				t.Fatalf("cut to %d bytes: %v", n, err)
			}
		}
		for _, data := range []string{"", "null", "{}", "\x00", strings.Repeat("[", 1<<20)} {
			if _, err := open(t, registry.NodeID(id), []byte(data)); err == nil || errors.Is(err, identity.ErrRevoked) {
				t.Errorf("%.20q: %v", data, err)
			}
		}
	})
	t.Run("what would not open is not sealed", func(t *testing.T) {
		for i, spoil := range []func(*record.Record){
			func(r *record.Record) { r.ID = "" },
			func(r *record.Record) { r.ID = "A" },
			func(r *record.Record) { r.Version = 0 },
			func(r *record.Record) { r.Key = key.Public{} },
			func(r *record.Record) { r.Roles = []string{"\n"} },
		} {
			bad := r.Clone()
			spoil(&bad)
			if data, err := trust.Seal(bad); err == nil {
				t.Errorf("spoilt by %d: sealed %s", i, data)
			}
		}
	})
	t.Run("by many at once", func(t *testing.T) {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 20 {
					data, err := trust.Seal(r)
					if err != nil {
						t.Error(err)
						return
					}
					if _, err := trust.Open(registry.NodeID(id), data, now); err != nil {
						t.Error(err)
						return
					}
					_ = trust.Changed()
				}
			})
		}
		wg.Wait()
	})
}

func TestPlain(t *testing.T) {
	testTrust(t, identity.Plain(), "a", time.Unix(0, 0))
	if identity.Plain().Changed() != nil {
		t.Error("plain trust says that it may change")
	}
}

func TestPlainSealsReadably(t *testing.T) {
	data, err := identity.Plain().Seal(someRecord(t, "a"))
	if err != nil || !strings.HasPrefix(string(data), `{"version":1,"id":"a",`) {
		t.Errorf("%s, %v", data, err)
	}
}

// The cause stays reachable, for conditions that name the field.
func TestPlainErrors(t *testing.T) {
	good, err := identity.Plain().Seal(someRecord(t, "a"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = identity.Plain().Open("node/b", good, time.Time{})
	if want := `open node/b: record: id "a": is not the name it is stored under`; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	_, err = identity.Plain().Open("node/a", []byte(`{"version":1,"id":"a","key":"x"}`), time.Time{})
	if e, ok := errors.AsType[*record.FieldError](err); !ok || e.Field != "key" {
		t.Error(err)
	}
	_, err = identity.Plain().Open("node/a", []byte(`{"version":9}`), time.Time{})
	if !errors.Is(err, record.ErrVersion) {
		t.Error(err)
	}
	_, err = identity.Plain().Open("node/A", good, time.Time{})
	if !errors.Is(err, registry.ErrInvalidID) {
		t.Error(err)
	}
}

func TestValidAt(t *testing.T) {
	at := func(s int64) time.Time { return time.Unix(s, 0) }
	for _, c := range []struct {
		from, to, t time.Time
		want        bool
	}{
		{time.Time{}, time.Time{}, at(5), true},
		{at(5), time.Time{}, at(4), false},
		{at(5), time.Time{}, at(5), true},
		{time.Time{}, at(5), at(5), true},
		{time.Time{}, at(5), at(6), false},
		{at(4), at(6), at(5), true},
	} {
		if have := (identity.Opened{NotBefore: c.from, NotAfter: c.to}).ValidAt(c.t); have != c.want {
			t.Errorf("%v..%v at %v: %t", c.from, c.to, c.t, have)
		}
	}
}

func ExamplePlain() {
	trust := identity.Plain()
	data := []byte(`{"version": 1, "id": "a", "key": "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo="}`)

	opened, err := trust.Open("node/a", data, time.Now())
	fmt.Println(opened.Record.ID, err)

	_, err = trust.Open("node/b", data, time.Now())
	fmt.Println(err)
	// Output:
	// a <nil>
	// open node/b: record: id "a": is not the name it is stored under
}
