// Package faultrule decides which of the operations that a rule for faults matches
// it is applied to. The packages that put faults under tests, one for file systems and
// one for devices, share it, so that their rules mean the same.
//
//	operation ──▶ Set ── rules that match ──▶ Turns ──▶ hit?      by index, by count, by chance
//
// A Set has a lock of the rank of a device, and calls nobody with it but what says whether a rule
// matches.
package faultrule

import (
	"math/rand/v2"
	"slices"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// Set holds rules, and counts the operations that they are asked for. It is safe for
// concurrent use; New makes one.
type Set[Op comparable, Rule any] struct {
	mu struct {
		lockrank.Mutex[lockrank.Device]
		random *rand.Rand
		rules  []*active[Rule]
		counts map[Op]int
		total  int
	}
}

type active[Rule any] struct {
	rule  Rule
	turns Turns
}

// New returns a set without rules. seed makes chance repeatable, as far as the order of
// operations is.
func New[Op comparable, Rule any](seed uint64) *Set[Op, Rule] {
	s := new(Set[Op, Rule])
	s.mu.random = rand.New(rand.NewPCG(seed, 0))
	s.mu.counts = make(map[Op]int)
	return s
}

// Add adds a rule, behind those that are there, and returns what removes it.
func (s *Set[Op, Rule]) Add(r Rule, turns Turns) (remove func()) {
	a := &active[Rule]{r, turns}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.rules = append(s.mu.rules, a)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.mu.rules = slices.DeleteFunc(s.mu.rules, func(b *active[Rule]) bool { return b == a })
	}
}

// Choose counts an operation and returns the rule that is applied to it, nil if none is. All
// that match count it, the first whose turn it is is applied.
func (s *Set[Op, Rule]) Choose(op Op, matches func(*Rule) bool) (chosen *Rule) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.total++
	s.mu.counts[op]++
	for _, a := range s.mu.rules {
		if matches(&a.rule) && a.turns.next(s.mu.random, chosen != nil) {
			chosen = &a.rule
		}
	}
	return chosen
}

// Count returns how many operations of the kinds there were; without a kind, all.
func (s *Set[Op, Rule]) Count(ops ...Op) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(ops) == 0 {
		return s.mu.total
	}
	n := 0
	for _, op := range ops {
		n += s.mu.counts[op]
	}
	return n
}

// Hits returns how many operations the rules that are there were applied to.
func (s *Set[Op, Rule]) Hits() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, a := range s.mu.rules {
		n += a.turns.hits
	}
	return n
}

// Below returns a number from 0 to n-1, by chance.
func (s *Set[Op, Rule]) Below(n int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.random.Int64N(n)
}

// Turns counts what a rule matches. Of that, Skip operations pass before the rule
// begins; Times is how many it is applied to then, 0 for all; Probability is the
// chance of each that is due so, 0 for certainty.
type Turns struct {
	Skip, Times int
	Probability float64

	seen, hits int
}

// next counts an operation and says whether the rule is applied to it. One that is
// taken, by a rule before this one, is counted and no more.
func (t *Turns) next(random *rand.Rand, taken bool) bool {
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
