package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"os"
	"slices"
	"strings"
)

// spread is a figure of several rounds.
type spread struct{ low, median, high float64 }

// spreadOf returns the median of values, and the least and the most of them. There is one at least.
func spreadOf(values []float64) spread {
	v := slices.Sorted(slices.Values(values))
	m := v[len(v)/2]
	if len(v)%2 == 0 {
		m = (v[len(v)/2-1] + m) / 2
	}
	return spread{v[0], m, v[len(v)-1]}
}

// line is one ratio of the table.
type line struct {
	row, against string
	ratio        spread
	floor        float64
	err          string // why there is no ratio
}

// ratios compares figures of the same rounds: in each, how much better the first is.
func ratios(ours, theirs []float64, less bool) (rs []float64) {
	for i := range min(len(ours), len(theirs)) {
		r := ours[i] / theirs[i]
		if less {
			r = 1 / r
		}
		if !math.IsNaN(r) && !math.IsInf(r, 0) && r > 0 {
			rs = append(rs, r)
		}
	}
	return rs
}

// number is a ratio for people.
func number(x float64) string {
	if x >= 10 {
		return fmt.Sprintf("%.0f", x)
	}
	return fmt.Sprintf("%.2g", x)
}

// table is Markdown.
func table(lines []line) string {
	var b strings.Builder
	b.WriteString("| what | against | Warren is better by | rounds from .. to | asked for |\n|---|---|---|---|---|\n")
	for _, l := range lines {
		floor := ""
		if l.floor > 0 {
			floor = number(l.floor) + "x"
		}
		if l.err != "" {
			fmt.Fprintf(&b, "| %s | %s | %s | | %s |\n", l.row, l.against, strings.ReplaceAll(l.err, "\n", " "), floor)
			continue
		}
		fmt.Fprintf(&b, "| %s | %s | **%sx** | %s .. %s | %s |\n", l.row, l.against, number(l.ratio.median), number(l.ratio.low), number(l.ratio.high), floor)
	}
	return b.String()
}

// Marks of what is written in the README.
const (
	beginMark = "<!-- bench: begin -->\n"
	endMark   = "<!-- bench: end -->\n"
)

// between puts text between the marks of a document.
func insert(document, text string) (string, error) {
	before, rest, ok := strings.Cut(document, beginMark)
	_, after, ok2 := strings.Cut(rest, endMark)
	if !ok || !ok2 {
		return "", fmt.Errorf("no %q with %q after it", strings.TrimSpace(beginMark), strings.TrimSpace(endMark))
	}
	return before + beginMark + text + endMark + after, nil
}

// write puts the table into a README and makes the picture.
func write(readme, picture string, lines []line, text string) error {
	b, err := os.ReadFile(readme)
	if err != nil {
		return err
	}
	s, err := insert(string(b), text)
	if err != nil {
		return fmt.Errorf("%s: %w", readme, err)
	}
	if err := os.WriteFile(readme, []byte(s), 0o644); err != nil {
		return err
	}
	return os.WriteFile(picture, draw(lines), 0o644)
}

// draw is a picture of the ratios: a bar each, on a logarithmic scale, with the spread of its rounds.
func draw(lines []line) []byte {
	lines = slices.DeleteFunc(slices.Clone(lines), func(l line) bool { return l.err != "" })
	const (
		left, width, right = 470, 420, 60
		height, top        = 22, 46
	)
	low, high := 0.5, 2.0
	for _, l := range lines {
		low, high = min(low, l.ratio.low), max(high, l.ratio.high)
	}
	x := func(r float64) float64 {
		return left + width*(math.Log(r)-math.Log(low))/(math.Log(high)-math.Log(low))
	}
	var b bytes.Buffer
	all := top + height*len(lines) + 16
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" font-family="sans-serif" font-size="12">`+"\n", left+width+right, all)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="#ffffff"/><text x="%d" y="18" text-anchor="middle" fill="#333333">Warren is better by a factor of</text>`+"\n", left+width/2)
	for _, tick := range []float64{0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50} {
		if tick < low || tick > high {
			continue
		}
		color := "#dddddd"
		if tick == 1 {
			color = "#333333"
		}
		fmt.Fprintf(&b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s"/><text x="%.1f" y="36" text-anchor="middle" fill="#333333">%g</text>`+"\n", x(tick), top-4, x(tick), all-10, color, x(tick), tick)
	}
	for i, l := range lines {
		y := top + height*i
		from, to := x(1), x(l.ratio.median)
		color := "#2f6fb2"
		if l.ratio.median < 1 {
			color = "#b2602f"
		}
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end" fill="#333333">%s, against %s</text>`, left-8, y+15, html.EscapeString(l.row), html.EscapeString(l.against))
		fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`, min(from, to), y+4, math.Abs(to-from), height-8, color)
		fmt.Fprintf(&b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#222222"/><text x="%.1f" y="%d" fill="#333333">%s</text>`+"\n", x(l.ratio.low), y+height/2, x(l.ratio.high), y+height/2, x(l.ratio.high)+5, y+15, number(l.ratio.median))
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}
