package main

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
)

func TestMedian(t *testing.T) {
	for _, test := range []struct {
		in   []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{4, 2}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{8, 1, 2, 4}, 3}} {
		if got := median(test.in); got != test.want {
			t.Errorf("median of %v is %v, want %v", test.in, got, test.want)
		}
	}
	in := []float64{3, 1, 2}
	median(in)
	if in[0] != 3 {
		t.Error("the list was changed")
	}
}

var some = measure{title: "<load>", in: []string{"a", "b", "c"}, rows: []row{{"rate", "b", false, 2}, {"rate", "c", false, 0}, {"cpu", "b", true, 3}}}

func rate(v float64) map[string]float64 { return map[string]float64{"rate": v, "cpu": 1 / v} }

// TestRatios takes quotients within rounds: those of the medians would be 10.
func TestRatios(t *testing.T) {
	rs := ratios(some, samples{
		"a": {rate(10), rate(100), rate(1000)},
		"b": {rate(5), rate(10), rate(250)},
		"c": nil,
	}, map[string]string{"c": "cannot be built:\nno | compiler"})
	if r := rs[0]; r.Median != 4 || r.Low != 2 || r.High != 10 || r.Rounds != 3 || r.Value != 100 || r.Against != 10 {
		t.Errorf("got %+v", r)
	}
	if r := rs[1]; r.Missing != "c: cannot be built:\nno | compiler" {
		t.Errorf("got %+v", r)
	}
	got := table(rs)
	for _, want := range []string{"| 4.0x ", "| 2.0x to 10x ", "| ≥ 2x ", "| ≤ 3x ", "cannot be built: no / compiler"} {
		if !strings.Contains(got, want) {
			t.Errorf("the table lacks %q:\n%s", want, got)
		}
	}
	for line := range strings.Lines(got) {
		if n := strings.Count(line, "|"); n != 9 {
			t.Errorf("%d bars in %q, want 9", n, line)
		}
	}
}

// TestRoundsInStep leaves out the rounds that one contender lacks.
func TestRoundsInStep(t *testing.T) {
	r := ratios(some, samples{"a": {rate(4), rate(6), rate(8)}, "b": {rate(2)}}, nil)[0]
	if r.Rounds != 1 || r.Median != 2 {
		t.Errorf("got %+v", r)
	}
}

// TestShow has no figure vanish for being small.
func TestShow(t *testing.T) {
	for _, test := range []struct{ got, want string }{
		{figures["rate"].show(1e9), "8.00 Gbit/s"}, {figures["rate"].show(1e6), "8.0 Mbit/s"},
		{times(12.34), "12x"}, {times(1.23), "1.2x"}, {times(0.123), "0.12x"}, {times(0.0031), "0.003x"},
	} {
		if test.got != test.want {
			t.Errorf("got %s, want %s", test.got, test.want)
		}
	}
}

func TestBetween(t *testing.T) {
	text := "head\n" + beginMark + "\nold\n" + endMark + "\nfoot\n"
	got, err := between([]byte(text), "new\n")
	if want := "head\n" + beginMark + "\nnew\n" + endMark + "\nfoot\n"; err != nil || string(got) != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
	if again, err := between(got, "new\n"); err != nil || string(again) != string(got) {
		t.Errorf("twice: got %q, %v", again, err)
	}
	for _, bad := range []string{"", beginMark, endMark, endMark + beginMark} {
		if _, err := between([]byte(bad), "new"); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func TestPicture(t *testing.T) {
	svg := picture([]ratio{
		{Title: "<&>", Figure: "rate", Over: "b", Median: 4, Low: 2, High: 8},
		{Title: "t", Figure: "cpu", Over: "b", Less: true, Median: 0.25, Low: 0.125, High: 0.5},
		{Title: "absent", Figure: "cpu", Missing: "why"},
	})
	texts, bars := 0, 0
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == "rect" {
			bars++
		}
		if c, ok := token.(xml.CharData); ok && string(c) == "4.0x" {
			texts++
		}
	}
	if bars != 3 || texts != 2 { // with the background
		t.Errorf("%d bars and %d labels of 4.0x in %s", bars, texts, svg)
	}
	if strings.Contains(svg, "absent") {
		t.Error("a line without a ratio is drawn")
	}
}

// TestMeasures: every row names contenders and figures that there are, and every name is there once.
func TestMeasures(t *testing.T) {
	names := make(map[string]bool)
	for _, m := range measures {
		if names[m.name] {
			t.Errorf("%s is there twice", m.name)
		}
		names[m.name] = true
		in := make(map[string]bool)
		for _, c := range m.contenders() {
			in[c] = true
			if s, ok := m.rigs[c]; m.rigs != nil && (!ok || tunnels[s.contender] == nil) {
				t.Errorf("%s: no rig for %s", m.name, c)
			}
		}
		for _, r := range m.rows {
			if !in[r.over] || r.over == m.contenders()[0] {
				t.Errorf("%s: %q has no turn there", m.name, r.over)
			}
			if figures[r.figure].show == nil {
				t.Errorf("%s: figure %q is unknown", m.name, r.figure)
			}
		}
	}
}

func TestParseIperf(t *testing.T) {
	v, err := parseIperf([]byte(`{"start":{"test_start":{"protocol":"UDP","blksize":4,"omit":1,"duration":2}},
		"end":{"sum_received":{"bits_per_second":800,"bytes":200,"seconds":2,"packets":100,"lost_packets":140}}}`))
	if err != nil || v["rate"] != 100 || v["packets"] != 25 || v["all"] != 300 {
		t.Errorf("got %v, %v", v, err)
	}
	for _, bad := range []string{``, `{}`, `{"error":"no route"}`} {
		if v, err := parseIperf([]byte(bad)); err == nil {
			t.Errorf("%s is read as %v", bad, v)
		}
	}
}
