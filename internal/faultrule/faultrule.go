// Package faultrule decides which of the operations that a rule for faults matches
// it is applied to. The packages that put faults under tests, one for file systems and
// one for devices, share it, so that their rules mean the same.
//
//	operations that match ──▶ Turns ──▶ hit?      by index, by count, by chance
//
// A Turns is guarded by its owner's lock, and takes none.
package faultrule

import "math/rand/v2"

// Turns counts what a rule matches. Of that, Skip operations pass before the rule
// begins; Times is how many it is applied to then, 0 for all; Probability is the
// chance of each that is due so, 0 for certainty.
type Turns struct {
	Skip, Times int
	Probability float64

	seen, hits int
}

// Next counts an operation and says whether the rule is applied to it. One that is
// taken, by a rule before this one, is counted and no more.
func (t *Turns) Next(random *rand.Rand, taken bool) bool {
	t.seen++
	if taken || t.seen <= t.Skip || t.Times > 0 && t.hits >= t.Times {
		return false
	}
	if t.Probability > 0 && random.Float64() >= t.Probability {
		return false
	}
	t.hits++
	return true
}

// Hits returns how many operations the rule was applied to.
func (t *Turns) Hits() int { return t.hits }
