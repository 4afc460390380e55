package hostnet

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/datapath"
)

func TestRightMTU(t *testing.T) {
	four, six := datapath.Host{IPv4: true}, datapath.Host{IPv4: true, IPv6: true}
	under := func(h datapath.Host, mtu int) datapath.Host { h.UnderlayMTU = mtu; return h }
	for _, c := range []struct {
		name   string
		m      MTU
		h      datapath.Host
		have   int
		want   int
		remark string // in the problem; "" is none
	}{
		{"Ethernet", MTU{}, under(six, 1500), 0, 1420, ""},
		{"Ethernet without IPv6", MTU{}, under(four, 1500), 0, 1440, ""},
		{"IPv6 alone", MTU{}, under(datapath.Host{IPv6: true}, 1500), 0, 1420, ""},
		{"nothing known", MTU{}, six, 0, 1420, ""},
		{"nothing known, and one there", MTU{}, six, 1300, 1300, ""},
		{"1420", MTU{}, under(six, 1420), 0, 1340, ""},
		{"1380", MTU{}, under(six, 1380), 0, 1300, ""},
		{"just so", MTU{}, under(six, 1360), 0, 1280, ""},
		{"1300", MTU{}, under(six, 1300), 0, 1280, "the underlay carries 1300"},
		{"1280 without IPv6", MTU{}, under(four, 1280), 0, 1280, "least that IPv6 allows"},
		{"huge", MTU{}, under(six, 1<<20), 0, MaxMTU, ""},
		{"shrunk", MTU{follows: true}, under(six, 1400), 1420, 1320, ""},
		{"grown", MTU{follows: true}, under(six, 9000), 1420, 8920, ""},
		{"grown since an earlier process", MTU{}, under(six, 9000), 1420, 1420, ""},
		{"shrunk since an earlier process", MTU{}, under(six, 1400), 1420, 1320, ""},
		{"asked for", MTU{asked: 1300}, under(six, 1500), 1420, 1300, ""},
		{"asked for too much", MTU{asked: 1420}, under(six, 1400), 1320, 1420, "or ask for an MTU of 1320"},
		{"by option", MTU{Option: 1400}, under(six, 1500), 0, 1400, ""},
		{"by option, and made another", MTU{Option: 1400, follows: true}, under(six, 1500), 1300, 1400, ""},
		{"asked for beside the option", MTU{Option: 1400, asked: 1300}, under(six, 1500), 1400, 1300, ""},
		{"by option, raised since an earlier process", MTU{Option: 1400}, under(six, 1500), 1300, 1400, ""},
		{"by option, and lowered", MTU{Option: 1300}, under(six, 1500), 1400, 1300, ""},
		{"by option, and nothing known", MTU{Option: 1400}, six, 1300, 1400, ""},
		{"too small", MTU{}, six, 1000, 1420, ""},
		{"too small over 1400", MTU{}, under(six, 1400), 1000, 1320, ""},
		{"too large", MTU{}, six, 80000, MaxMTU, ""},
		{"too large over 1400", MTU{}, under(six, 1400), 80000, 1320, ""},
	} {
		got := c.m.Right(c.h, c.have)
		p, bad := mtuProblem(c.h, got)
		if got != c.want || bad != (c.remark != "") || !strings.Contains(p.Message+p.Remedy, c.remark) {
			t.Errorf("%s: %d with %+v, want %d with %q", c.name, got, p, c.want, c.remark)
		}
	}
}

// Once right, it stays, and what was chosen here is within bounds.
func TestRightMTUSettles(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := MTU{Option: rapid.SampledFrom([]int{0, 0, 1280, 1400}).Draw(t, "option")}
		have := rapid.SampledFrom([]int{0, 1000, 1280, 1420, 1500, 80000}).Draw(t, "have")
		for range 5 {
			h := datapath.Host{IPv4: rapid.Bool().Draw(t, "4"), IPv6: rapid.Bool().Draw(t, "6"), UnderlayMTU: rapid.IntRange(0, 70000).Draw(t, "underlay")}
			if rapid.Bool().Draw(t, "ask") {
				m.Ask(rapid.SampledFrom([]int{0, 1280, 1300}).Draw(t, "asked"), rapid.Bool().Draw(t, "new"))
			}
			got := m.Right(h, have)
			if got < MinMTU || got > MaxMTU || m.Right(h, got) != got {
				t.Fatalf("%+v over %+v with %d: %d, then %d", m, h, have, got, m.Right(h, got))
			}
			if p, bad := mtuProblem(h, got); bad && got == fitting(h) && !strings.Contains(p.Message, "IPv6 allows") {
				t.Fatalf("chosen %d over %+v: %+v", got, h, p)
			}
			if m.Option != 0 && m.asked == 0 && got != m.Option {
				t.Fatalf("%+v over %+v with %d: %d", m, h, have, got)
			}
			have = got
		}
	})
}
