package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/warren-mesh/warren/mesh"
)

// A reading that fails is no news, and one that finds nothing is believed when the next agrees.
func TestWatchHost(t *testing.T) {
	a := []mesh.Endpoint{{Addr: netip.MustParseAddr("192.0.2.1")}}
	b := []mesh.Endpoint{{Addr: netip.MustParseAddr("192.0.2.2")}}
	scarce, other := errors.New("too many open files"), errors.New("something else")
	type reading struct {
		es  []mesh.Endpoint
		err error
	}
	for _, test := range []struct {
		name     string
		readings []reading
		want     string // what is published, one after the other
		logged   int
	}{
		{"the same", []reading{{a, nil}, {a, nil}}, "", 0},
		{"another", []reading{{b, nil}, {b, nil}, {a, nil}}, "b a ", 2},
		{"failing", []reading{{nil, scarce}, {nil, scarce}, {nil, other}, {nil, other}, {a, nil}, {b, nil}}, "b ", 4},
		{"nothing for a moment", []reading{{nil, nil}, {a, nil}, {nil, nil}, {b, nil}}, "b ", 1},
		{"nothing", []reading{{nil, nil}, {nil, nil}, {nil, nil}, {a, nil}}, "- a ", 2},
		{"nothing, and a failure between", []reading{{nil, nil}, {nil, scarce}, {nil, nil}}, "- ", 3},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var got strings.Builder
			var log bytes.Buffer
			n := 0
			w := hostWatch{published: a}
			read := func() ([]mesh.Endpoint, error) {
				r := test.readings[n]
				if n++; n == len(test.readings) {
					cancel()
				}
				return r.es, r.err
			}
			publish := func(es ...mesh.Endpoint) error {
				name := "-"
				if len(es) > 0 {
					name = map[mesh.Endpoint]string{a[0]: "a", b[0]: "b"}[es[0]]
				}
				fmt.Fprint(&got, name+" ")
				return nil
			}
			if err := w.watchHost(ctx, read, publish, slog.New(slog.NewTextHandler(&log, nil))); err != nil {
				t.Error(err)
			}
			if lines := strings.Count(log.String(), "\n"); got.String() != test.want || lines != test.logged {
				t.Errorf("%s: published %q, want %q; %d lines, want %d:\n%s", test.name, got.String(), test.want, lines, test.logged, log.String())
			}
		})
	}
}
