package main

import (
	"encoding/xml"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath/internal/bench/measure"
)

func TestSpread(t *testing.T) {
	for _, test := range []struct {
		values []float64
		want   spread
	}{
		{[]float64{3}, spread{3, 3, 3}},
		{[]float64{4, 1, 3}, spread{1, 3, 4}},
		{[]float64{4, 1, 3, 2}, spread{1, 2.5, 4}},
	} {
		if got := spreadOf(test.values); got != test.want {
			t.Errorf("%v: got %v, want %v", test.values, got, test.want)
		}
	}
}

// A ratio is of one round, and above 1 where Warren is better; a round in which somebody failed has none.
func TestRatios(t *testing.T) {
	for _, test := range []struct {
		ours, theirs []float64
		less         bool
		want         []float64
	}{
		{[]float64{4, 9}, []float64{2, 3}, false, []float64{2, 3}},
		{[]float64{4, 9}, []float64{2, 3}, true, []float64{0.5, 1. / 3}},
		{[]float64{0, 9, 5}, []float64{2, 0, 5}, false, []float64{1}},
		{[]float64{0, 9, 5}, []float64{2, 0, 5}, true, []float64{1}},
		{[]float64{1, math.NaN()}, []float64{2}, false, []float64{0.5}},
		{nil, []float64{2}, false, nil},
	} {
		if got := ratios(test.ours, test.theirs, test.less); !slices.Equal(got, test.want) {
			t.Errorf("%v to %v: got %v, want %v", test.ours, test.theirs, got, test.want)
		}
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	readme, picture := filepath.Join(dir, "README.md"), filepath.Join(dir, "picture.svg")
	lines := []line{
		{row: "one <row>", against: "others & more", ratio: spread{1.5, 2, 12.3}, floor: 1.5},
		{row: "worse", against: "veth", ratio: spread{0.05, 0.1, 0.2}},
		{row: "failed", against: "nobody", err: "cannot be\nbuilt", floor: 3},
	}
	if err := os.WriteFile(readme, []byte("before\n"+beginMark+"old\n"+endMark+"after\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 { // again and again
		if err := write(readme, picture, lines, table(lines)); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	s := string(b)
	for _, want := range []string{"before\n", "\nafter\n", "| one <row> | others & more | **2x** | 1.5 .. 12 | 1.5x |\n", "| failed | nobody | cannot be built | | 3x |\n"} {
		if strings.Count(s, want) != 1 {
			t.Errorf("%q is there %d times: %s", want, strings.Count(s, want), s)
		}
	}
	if strings.Contains(s, "old") {
		t.Error("the old table is there")
	}
	svg, err := os.ReadFile(picture)
	if err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(strings.NewReader(string(svg))); ; {
		if _, err := d.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("%v in %s", err, svg)
		}
	}
	if !strings.Contains(string(svg), "one &lt;row&gt;, against others &amp; more") || strings.Contains(string(svg), "failed") || strings.Contains(string(svg), "NaN") || strings.Contains(string(svg), "%!") {
		t.Errorf("picture: %s", svg)
	}
	if err := os.WriteFile(readme, []byte("no marks"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := write(readme, picture, lines, "text"); err == nil {
		t.Error("a README without marks was written")
	}
	draw(nil)
}

// The README has the marks, and every row a name of its own and contenders that there are.
func TestRows(t *testing.T) {
	b, err := os.ReadFile("../../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := insert(string(b), ""); err != nil {
		t.Error(err)
	}
	seen := make(map[string]bool)
	for _, w := range rows() {
		if seen[w.name] {
			t.Errorf("two rows are called %q", w.name)
		}
		seen[w.name] = true
		if again, err := measure.Parse(w.what.String()); err != nil || again != w.what {
			t.Errorf("%s: %v is %v, %v", w.name, w.what, again, err)
		}
		if len(w.others) == 0 || w.figure.of == nil || w.path == (path{}) == (w.tunnel == tunnel{}) {
			t.Errorf("%s compares nothing", w.name)
		}
		for _, o := range w.others {
			if !slices.Contains([]string{"warren", "wireguard-go", "tsnet", "nebula", "veth", "floor"}, o.name) {
				t.Errorf("%s: nobody is called %s", w.name, o.name)
			}
			for _, p := range needs(o.name, w.tunnel != tunnel{}) {
				if _, ok := programs[p]; !ok {
					t.Errorf("%s: there is no program %s", w.name, p)
				}
			}
		}
	}
}

// The measures, between two sockets of the host.
func TestMeasures(t *testing.T) {
	host := func(port uint16) string { return (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(port)}).String() }
	for _, kind := range []string{measure.TCP, measure.UDP, measure.Request, measure.Loaded} {
		open := map[uint16]net.Addr{}
		var ends []io.Closer
		p := measure.Pair{
			Listen: func(port uint16) (net.Listener, error) {
				l, err := net.Listen("tcp", host(0))
				if err == nil {
					open[port], ends = l.Addr(), append(ends, l)
				}
				return l, err
			},
			ListenPacket: func(port uint16) (net.PacketConn, error) {
				c, err := net.ListenPacket("udp", host(0))
				if err == nil {
					open[port], ends = c.LocalAddr(), append(ends, c)
				}
				return c, err
			},
		}
		dial := func(network string) func(port uint16) (net.Conn, error) {
			return func(port uint16) (net.Conn, error) {
				c, err := net.Dial(network, open[port].String())
				if err == nil {
					ends = append(ends, c)
				}
				return c, err
			}
		}
		p.Dial, p.DialPacket = dial("tcp"), dial("udp")
		r, err := measure.Do(p, measure.What{Kind: kind, N: 2, For: 200 * time.Millisecond})
		for _, c := range ends {
			c.Close()
		}
		if err != nil || r.Rate <= 0 || (kind == measure.TCP || kind == measure.UDP) != (r.CPU > 0) || (kind == measure.Request || kind == measure.Loaded) != (r.Median > 0 && r.P99 >= r.Median) {
			t.Errorf("%s: %+v, %v", kind, r, err)
		}
	}
	if _, err := measure.Do(measure.Pair{}, measure.What{Kind: "speed"}); err == nil {
		t.Error("an unknown measure was done")
	}
	for _, s := range []string{"", "tcp", "tcp,1", "tcp,x,1s", "tcp,0,1s", "tcp,1,soon"} {
		if _, err := measure.Parse(s); err == nil {
			t.Errorf("%q is a measure", s)
		}
	}
}
