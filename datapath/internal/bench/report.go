package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"slices"
	"strings"
)

// samples has the values of one measure: by contender and figure, one of each round.
type samples map[string][]map[string]float64

// ratio is a line of the table. Each round gives one quotient; Median, Low and High are of those, which a machine
// that is busier in one minute than in the next hardly moves.
type ratio struct {
	Title, Figure, Of, Over string
	Less                    bool    // less is better
	Must                    float64 // what is asked for at least, or at most where less is better; 0: nothing
	Median, Low, High       float64
	Rounds                  int
	Value, Against          float64 // medians, in the figure's unit
	Missing                 string  // why there is no ratio
}

// median of a non-empty list; the mean of the two in the middle where there are two.
func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	n := len(v)
	return (v[(n-1)/2] + v[n/2]) / 2
}

// ratios takes the rows of m from what was measured. missing has the contenders without values, and why.
func ratios(m measure, s samples, missing map[string]string) []ratio {
	of := m.contenders()[0]
	var rs []ratio
	for _, w := range m.rows {
		r := ratio{Title: m.title, Figure: w.figure, Of: of, Over: w.over, Less: w.less, Must: w.must}
		var qs, as, bs []float64
		for i := range min(len(s[of]), len(s[w.over])) {
			a, aok := s[of][i][w.figure]
			b, bok := s[w.over][i][w.figure]
			if aok && bok && b != 0 {
				qs, as, bs = append(qs, a/b), append(as, a), append(bs, b)
			}
		}
		if len(qs) == 0 {
			for _, c := range []string{of, w.over} {
				if why := missing[c]; why != "" {
					r.Missing = c + ": " + why
				}
			}
			if r.Missing == "" {
				r.Missing = "no figure in any round"
			}
		} else {
			r.Median, r.Low, r.High, r.Rounds = median(qs), slices.Min(qs), slices.Max(qs), len(qs)
			r.Value, r.Against = median(as), median(bs)
		}
		rs = append(rs, r)
	}
	return rs
}

// figures are the names of figures in the table, and how their values read.
var figures = map[string]struct {
	title string
	show  func(float64) string
}{
	"rate": {"throughput", func(v float64) string {
		if v*8 < 1e8 {
			return fmt.Sprintf("%.1f Mbit/s", v*8/1e6)
		}
		return fmt.Sprintf("%.2f Gbit/s", v*8/1e9)
	}},
	"packets": {"packets that arrive", func(v float64) string { return fmt.Sprintf("%.0f k/s", v/1e3) }},
	"asks":    {"answers", func(v float64) string { return fmt.Sprintf("%.1f k/s", v/1e3) }},
	"p50":     {"median latency", func(v float64) string { return fmt.Sprintf("%.3f ms", v*1e3) }},
	"p99":     {"99th percentile", func(v float64) string { return fmt.Sprintf("%.3f ms", v*1e3) }},
	"cpu":     {"CPU a byte", func(v float64) string { return fmt.Sprintf("%.1f s/GB", v) }},
	"peak":    {"peak memory", func(v float64) string { return fmt.Sprintf("%.0f MB", v/1e6) }},
	"mallocs": {"allocations a packet", func(v float64) string { return fmt.Sprintf("%.2f", v) }},
}

func (r ratio) must() string {
	switch {
	case r.Must == 0:
		return ""
	case r.Less:
		return fmt.Sprintf("≤ %gx", r.Must)
	}
	return fmt.Sprintf("≥ %gx", r.Must)
}

func times(v float64) string {
	switch {
	case v >= 10:
		return fmt.Sprintf("%.0fx", v)
	case v >= 1:
		return fmt.Sprintf("%.1fx", v)
	case v >= 0.1:
		return fmt.Sprintf("%.2fx", v)
	}
	return fmt.Sprintf("%.3fx", v)
}

// table is Markdown that reads well on a terminal, too.
func table(rs []ratio) string {
	head := []string{"load", "figure", "against", "ratio", "spread", "better", "floor", "medians"}
	lines := [][]string{head}
	for _, r := range rs {
		better := "more"
		if r.Less {
			better = "less"
		}
		l := []string{r.Title, figures[r.Figure].title, r.Over, "", "", better, r.must(), ""}
		if r.Missing != "" {
			l[3], l[7] = "none", strings.Join(strings.Fields(strings.ReplaceAll(r.Missing, "|", "/")), " ")
		} else {
			show := figures[r.Figure].show
			l[3], l[4], l[7] = times(r.Median), times(r.Low)+" to "+times(r.High), show(r.Value)+" / "+show(r.Against)
		}
		lines = append(lines, l)
	}
	width := make([]int, len(head))
	for _, l := range lines {
		for i, s := range l[:len(l)-1] {
			width[i] = max(width[i], len([]rune(s)))
		}
	}
	var b strings.Builder
	for n, l := range lines {
		for i, s := range l {
			fmt.Fprintf(&b, "| %s%s ", s, strings.Repeat(" ", max(0, width[i]-len([]rune(s)))))
		}
		b.WriteString("|\n")
		if n == 0 {
			for i := range l {
				b.WriteString("|" + strings.Repeat("-", max(3, width[i]+2)))
			}
			b.WriteString("|\n")
		}
	}
	return b.String()
}

const (
	beginMark = "<!-- make bench writes from here -->"
	endMark   = "<!-- make bench writes to here -->"
)

// between returns text with what is between the two marks replaced.
func between(text []byte, what string) ([]byte, error) {
	before, rest, ok := bytes.Cut(text, []byte(beginMark))
	_, after, ok2 := bytes.Cut(rest, []byte(endMark))
	if !ok || !ok2 {
		return nil, fmt.Errorf("no lines %q and %q in it", beginMark, endMark)
	}
	return slices.Concat(before, []byte(beginMark+"\n"+what), []byte(endMark), after), nil
}

// picture draws, as SVG, how many times better Warren is, on a scale of doublings: a bar from 1x to the median, a
// line over the spread. Lines without a ratio are left out.
func picture(rs []ratio) string {
	rs = slices.DeleteFunc(slices.Clone(rs), func(r ratio) bool { return r.Missing != "" || r.Low <= 0 })
	const text, plot, line, top = 470, 420, 20, 34
	better := func(r ratio) (mid, low, high float64) {
		if r.Less {
			return 1 / r.Median, 1 / r.High, 1 / r.Low
		}
		return r.Median, r.Low, r.High
	}
	from, to := -1.0, 1.0 // powers of two
	for _, r := range rs {
		_, low, high := better(r)
		from, to = min(from, math.Floor(math.Log2(low))), max(to, math.Ceil(math.Log2(high)))
	}
	x := func(v float64) float64 { return text + plot*(math.Log2(v)-from)/(to-from) }
	height := top + line*len(rs) + 10
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12" role="img">`+"\n", text+plot+60, height)
	b.WriteString("<title>How many times better Warren is than others</title>\n")
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", text+plot+60, height)
	fmt.Fprintf(&b, `<text x="8" y="18" font-weight="bold">Warren against others: times better</text>`+"\n")
	for p := from; p <= to; p++ {
		at, colour := x(math.Exp2(p)), "#dddddd"
		if p == 0 {
			colour = "#444444"
		}
		fmt.Fprintf(&b, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="%s"/><text x="%.1f" y="18" text-anchor="middle">%gx</text>`+"\n",
			at, at, top-8, height-8, colour, at, math.Exp2(p))
	}
	for i, r := range rs {
		mid, low, high := better(r)
		y, colour := top+line*i, "#2a7f62"
		if mid < 1 {
			colour = "#b4532a"
		}
		label := fmt.Sprintf("%s: %s, against %s", r.Title, figures[r.Figure].title, r.Over)
		fmt.Fprintf(&b, `<text x="8" y="%d" font-size="11">%s</text>`+"\n", y+12, html.EscapeString(label))
		fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="12" fill="%s"/>`, min(x(1), x(mid)), y+2, math.Abs(x(mid)-x(1)), colour)
		fmt.Fprintf(&b, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#222222" stroke-width="2"/>`, x(low), x(high), y+8, y+8)
		fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`+"\n", text+plot+8, y+12, times(mid))
	}
	b.WriteString("</svg>\n")
	return b.String()
}
