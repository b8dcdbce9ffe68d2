package policy

import "unicode/utf8"

// Nearest returns the candidate that is most like the given name, or the empty
// string when none is near enough to be what was meant. "Near" is an edit
// distance of at most a third of the name, and at least two, so that a slip of
// the finger is found and an unrelated name is not suggested. Among equals the
// first candidate wins.
func Nearest(name string, candidates []string) string {
	best, bestDistance := "", max(2, utf8.RuneCountInString(name)/3)+1
	for _, c := range candidates {
		if d := editDistance(name, c); d < bestDistance {
			best, bestDistance = c, d
		}
	}
	return best
}

// editDistance counts the insertions, deletions, replacements and swaps of
// neighbours that turn one name into the other. Its cost is the product of both
// lengths, so callers bound the names first.
func editDistance(a, b string) int {
	x, y := []rune(a), []rune(b)
	before := make([]int, len(y)+1)
	last := make([]int, len(y)+1)
	row := make([]int, len(y)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(x); i++ {
		row[0] = i
		for j := 1; j <= len(y); j++ {
			cost := 1
			if x[i-1] == y[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && x[i-1] == y[j-2] && x[i-2] == y[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(y)]
}
