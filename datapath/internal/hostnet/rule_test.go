//go:build linux

package hostnet

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

var ruled = Options{Table: 7777, Policy: true, Mark: 51820}

// rulesOf are the rules of a namespace as ip shows them, but for Linux's own.
func (s *space) rulesOf() (lines []string) {
	s.t.Helper()
	for _, fam := range []string{"-4", "-6"} {
		for line := range strings.Lines(s.show(fam + " -d rule")) {
			line = strings.Join(strings.Fields(line), " ")
			if !strings.HasSuffix(line, "proto kernel") {
				lines = append(lines, fam+" "+line)
			}
		}
	}
	return lines
}

// Rules with our number that are of a form that ours never has are somebody else's.
func TestForeignRules(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{{}, ruled} {
		s := newSpace(t)
		made := 0
		for i, r := range []string{
			"from 10.0.0.0/8 lookup 7777", "to 10.0.0.0/8 lookup 7777", "iif lo lookup 7777", "oif lo lookup 7777", "tos 0x10 lookup 7777",
			"fwmark 5 lookup 7777", "fwmark 5/7 lookup 7777", "fwmark 0/0xff lookup 7777", "not fwmark 0/7 lookup 7777", "not lookup 7777", "lookup 7777",
			"not fwmark 5 lookup main", "not fwmark 5 lookup main suppress_prefixlength 1", "lookup main suppress_prefixlength 0", "not fwmark 5 lookup 7777 suppress_prefixlength 0",
			"ipproto udp lookup 7777", "sport 53 lookup 7777", "dport 53-54 lookup 7777", "uidrange 7-9 lookup 7777", "tun_id 7 lookup 7777",
			"realms 3/4 lookup 7777", "suppress_prefixlength 0 lookup 7777", "suppress_ifgroup 5 lookup 7777", "l3mdev",
			"lookup main", "lookup local", "lookup default", "blackhole", "prohibit", "goto 32766", "nop",
		} {
			for _, fam := range []string{"-4", "-6"} {
				if fam == "-6" {
					if strings.HasPrefix(r, "realms") {
						continue // IPv6 has none, and makes a rule without
					}
					r = strings.Replace(r, "10.0.0.0/8", "fd00::/8", 1)
				}
				if out, err := s.run("", "ip", append([]string{fam, "rule", "add", "priority", fmt.Sprint(1000 + i), "protocol", "87"}, strings.Fields(r)...)...); err != nil {
					t.Logf("%s %s: %v %s", fam, r, err, out) // as the kernel is built
				} else {
					made++
				}
			}
		}
		if made < 40 {
			t.Errorf("%d rules: too few to tell", made)
		}
		before := s.rulesOf()
		h := s.up(o)
		st := s.read(h)
		if !st.Ready {
			t.Errorf("rule %t: not ready", o.Policy)
		}
		ours := 0
		if o.Policy {
			ours = 6
		}
		if now := s.rulesOf(); len(now) != len(before)+ours {
			t.Errorf("rule %t: had\n%s\nnow\n%s", o.Policy, strings.Join(before, "\n"), strings.Join(now, "\n"))
		}
		must(t, one.reach(s.ctx(), h))
		must(t, h.Remove(s.ctx()))
		if now := s.rulesOf(); !slices.Equal(now, before) {
			t.Errorf("rule %t: had\n%s\nnow\n%s", o.Policy, strings.Join(before, "\n"), strings.Join(now, "\n"))
		}
	}
}

// What is of our form and not wanted goes, and nothing in its stead.
func TestRemoveRules(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(ruled)
	want := s.rulesOf()
	if len(want) != 6 {
		t.Fatalf("got %v", want)
	}
	up := func(what string, rules ...string) {
		t.Helper()
		for _, r := range rules {
			if six, ok := strings.CutPrefix(r, "-6 "); ok {
				s.ip6(six)
			} else {
				s.ip(r)
			}
		}
		if len(rules) > 0 && s.read(h).Ready {
			t.Errorf("%s: ready", what)
		}
		h.Intercept(func(change string) error {
			now := s.rulesOf()
			for _, r := range want {
				if !slices.Contains(now, r) {
					t.Errorf("%s: before %q the rule that is wanted is not there: %v", what, change, now)
				}
			}
			return nil
		})
		must(t, h.Up(s.ctx(), 0))
		h.Intercept(nil)
		if now := s.rulesOf(); !slices.Equal(now, want) || !s.read(h).Ready {
			t.Errorf("%s: now %v, want %v", what, now, want)
		}
	}
	up("nothing")
	up("others", "rule add not fwmark 9 lookup 200 priority 2000 protocol 87", "rule add not fwmark 7 lookup 7777 priority 32500 protocol 87",
		"rule add not fwmark 51820 lookup 7778 priority 32501 protocol 87", "rule add not fwmark 51820/0xffff lookup 7777 priority 32501 protocol 87",
		"rule add not fwmark 51820 lookup main suppress_prefixlength 0 priority 32501 protocol 87",
		"-6 rule add not fwmark 9 lookup 200 priority 2000 protocol 87", "-6 rule add not fwmark 9 lookup main suppress_prefixlength 0 priority 2000 protocol 87")
	// As after a start with another mark that was killed.
	for n := 0; ; n++ {
		s.ip("rule add not fwmark 7 lookup 7777 priority 32501 protocol 87", "rule add not fwmark 7 lookup main suppress_prefixlength 0 priority 32500 protocol 87")
		cut, err := until(h, n, func(h *Host) error { return h.Up(s.ctx(), 0) })
		must(t, err)
		h.Close()
		h = s.open(ruled)
		_, _, err = h.Adopt(s.ctx(), kind, nil)
		must(t, err)
		up("killed")
		if !cut {
			break
		}
	}

	// Behind somebody else's that Linux takes for it, it cannot be meant: both stay, and it is said.
	s.ip("rule add iif lo fwmark 7 lookup 200 priority 2000 protocol 87", "rule add not fwmark 7 lookup 200 priority 2000 protocol 87")
	before := s.rulesOf()
	for range 2 {
		foreign(t, h.Up(s.ctx(), 0), "table 200", "priority 2000", "comes before ours")
		if now := s.rulesOf(); !slices.Equal(now, before) || s.read(h).Ready {
			t.Errorf("had %v, now %v", before, now)
		}
	}
	s.ip("rule del iif lo fwmark 7 lookup 200 priority 2000 protocol 87")
	must(t, h.Up(s.ctx(), 0))
	if now := s.rulesOf(); !slices.Equal(now, want) || !s.read(h).Ready {
		t.Errorf("now %v, want %v", now, want)
	}
	// And in the place of the one that is wanted.
	must(t, h.Remove(s.ctx()))
	s.ip("rule add fwmark 51820 lookup 7777 priority 32501 protocol 87")
	_, _, err := h.Adopt(s.ctx(), kind, nil)
	must(t, err)
	foreign(t, h.Up(s.ctx(), 0), "table 7777", "priority 32501", "inverted")
	if s.read(h).Ready {
		t.Error("ready")
	}
}

// That a rule was not there is an error if it is.
func TestRuleStillThere(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(ruled)
	rs, err := h.rules(s.ctx())
	must(t, err)
	i := slices.IndexFunc(rs, func(r rule) bool { return r.table == 7777 })
	there, not := rs[i], rs[i]
	not.table = 99
	if err := h.removed(s.ctx(), rs, there, unix.ENOENT); !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), "still listed") {
		t.Errorf("got %v", err)
	}
	must(t, h.removed(s.ctx(), append(rs, not), not, unix.ENOENT))
	must(t, h.removed(s.ctx(), append(rs, there), there, unix.ENOENT)) // one of two
	if err := h.removed(s.ctx(), rs, there, unix.EPERM); !errors.Is(err, unix.EPERM) {
		t.Errorf("got %v", err)
	}
}

// Whatever is not known to be of ours makes a rule somebody else's.
func TestParseRule(t *testing.T) {
	ours := rule{fam: unix.AF_INET, priority: 32501, table: 7777, mark: 5, mask: 7, not: true, proto: 87, action: unix.FR_ACT_TO_TBL}
	before := ours
	before.priority, before.table, before.specific = 32500, MainTable, true
	owner := rule{fam: unix.AF_INET, priority: 32502, table: 7777, proto: 87, action: unix.FR_ACT_NOP, iif: "wg0"}
	for _, r := range []rule{ours, before, owner} {
		body := func() request { return slices.Clone(r.request(unix.RTM_NEWRULE, 0)) }
		parse := func(q request) rule {
			got, ok := parseRule(q[unix.NLMSG_HDRLEN:])
			if !ok {
				t.Error("not parsed")
			}
			return got
		}
		if got := parse(body()); got != r {
			t.Errorf("got %+v, want %+v", got, r)
		}
		if got := parse(body().u32(unix.FRA_SUPPRESS_IFGROUP, ^uint32(0))); got != r {
			t.Errorf("got %+v, want %+v", got, r)
		}
		if got := parse(body().u32(unix.FRA_SUPPRESS_PREFIXLEN, ^uint32(0))); r.specific != got.other {
			t.Errorf("with every prefix: %+v", got)
		}
		if got := parse(body().u32(unix.FRA_SUPPRESS_PREFIXLEN, 0)); r.specific == got.other {
			t.Errorf("without default routes: %+v", got)
		}
		known := []uint16{unix.FRA_PRIORITY, unix.FRA_TABLE, unix.FRA_FWMARK, unix.FRA_FWMASK, unix.FRA_PROTOCOL}
		if r.iif != "" {
			known = append(known, unix.FRA_IIFNAME)
		}
		for typ := range uint16(64) {
			if !slices.Contains(known, typ) && !parse(body().u32(typ, 1)).other {
				t.Errorf("attribute %d: taken for ours", typ)
			}
		}
		for i := 1; i < unix.SizeofRtMsg; i++ {
			q := body()
			if q[unix.NLMSG_HDRLEN+i] ^= 4; i != 4 && !parse(q).other { // 4: the table, which an attribute has too
				t.Errorf("byte %d of the header: taken for ours", i)
			}
		}
	}
}
