// Package suggest finds what a person meant who typed something else: a command, a flag or a value.
//
//	"--polciy" ──Nearest──▶ "--policy"        "lur" ──Hint──▶ "did you mean lru? "
//
// Its functions are pure and may be called at the same time.
package suggest

import "strings"

// tolerance is how many letters may be wrong, missing, too many or swapped: as many as cobra and git
// allow for short words.
const tolerance = 2

// Nearest returns the known word that is most like the typed one; empty if none is like it. A word
// that begins as typed is like it.
func Nearest(typed string, known []string) string {
	best, nearest := tolerance+1, ""
	typed = strings.ToLower(typed)
	for _, k := range known {
		d := distance(typed, strings.ToLower(k))
		if len(typed) > 1 && strings.HasPrefix(k, typed) {
			d = min(d, 1)
		}
		if d < best && d < len(k) && d < len(typed) { // else nothing of it is the same
			best, nearest = d, k
		}
	}
	return nearest
}

// Hint returns "did you mean …? " for a message, with prefix before the word that is most like the
// typed one; empty if none is like it.
func Hint(typed, prefix string, known []string) string {
	if n := Nearest(typed, known); n != "" {
		return "did you mean " + prefix + n + "? "
	}
	return ""
}

// distance is the number of letters to replace, insert, drop or swap with the next: the optimal string
// alignment distance.
func distance(a, b string) int {
	s, t := []rune(a), []rune(b)
	d := make([][]int, len(s)+1)
	for i := range d {
		d[i] = make([]int, len(t)+1)
		d[i][0] = i
		for j := 1; j <= len(t); j++ {
			if i == 0 {
				d[i][j] = j
				continue
			}
			cost := 1
			if s[i-1] == t[j-1] {
				cost = 0
			}
			d[i][j] = min(d[i-1][j]+1, d[i][j-1]+1, d[i-1][j-1]+cost)
			if i > 1 && j > 1 && s[i-1] == t[j-2] && s[i-2] == t[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(s)][len(t)]
}
