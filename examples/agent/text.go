package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func join[T fmt.Stringer](vs []T) string {
	var out []string
	for _, v := range vs {
		out = append(out, v.String())
	}
	return strings.Join(out, " ")
}

func sorted(s []string) string {
	slices.Sort(s)
	return strings.Join(s, ",")
}

// ago is how long it is since t, in as few letters as a table has room for.
func ago(now, t time.Time) string {
	d := max(now.Sub(t), 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
}

// size is a number of bytes, in steps of 1000.
func size(n uint64) string {
	if n < 1000 {
		return fmt.Sprintf("%d B", n)
	}
	f, unit := float64(n), ""
	for _, unit = range []string{"kB", "MB", "GB", "TB", "PB"} {
		if f /= 1000; f < 999.95 {
			break
		}
	}
	return fmt.Sprintf("%.1f %s", f, unit)
}
