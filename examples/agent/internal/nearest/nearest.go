// Package nearest finds what somebody who mistyped a name may have meant.
package nearest

// To returns the name that takes the fewest edits to get to from s, the first one of several, or "" if
// all are too far to be what was meant: an edit is a letter more, less or other, or two neighbours
// swapped, and about one in three letters is allowed to be wrong.
func To(s string, names ...string) string {
	best, least := "", max(2, len(s)/3)+1
	for _, name := range names {
		if d := Distance(s, name); d < least && d < max(len(s), len(name)) {
			best, least = name, d
		}
	}
	return best
}

// Distance counts the edits from a to b: the optimal string alignment distance, by bytes.
func Distance(a, b string) int {
	before, last, next := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := range len(a) {
		next[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			next[j+1] = min(last[j]+cost, last[j+1]+1, next[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				next[j+1] = min(next[j+1], before[j-1]+1)
			}
		}
		before, last, next = last, next, before
	}
	return last[len(b)]
}
