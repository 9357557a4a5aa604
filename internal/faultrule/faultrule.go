// Package faultrule chooses the rule that applies to an operation. The packages that inject faults
// into file systems and devices share it, so that their rules mean the same.
//
//	operation ──▶ Set ── rules that match ──▶ Turns ──▶ hit?      by index, by count, by chance
//
// A Set has a lock of the rank Device. While it is held, the Set calls only the function that
// matches a rule.
package faultrule

import (
	"fmt"
	"math/rand/v2"
	"path"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// Set holds rules and counts the operations that are checked against them. It is safe for
// concurrent use.
type Set[Rule any] struct {
	ops []string

	mu struct {
		lockrank.Mutex[lockrank.Device]
		random *rand.Rand
		rules  []*active[Rule]
		counts map[string]int
		total  int
	}
}

type active[Rule any] struct {
	rule  Rule
	turns Turns
}

// New returns a set without rules for the operations of these names. seed makes chance repeatable,
// provided that operations come in the same order.
func New[Rule any](seed uint64, ops ...string) *Set[Rule] {
	s := &Set[Rule]{ops: ops}
	s.mu.random = rand.New(rand.NewPCG(seed, 0))
	s.mu.counts = make(map[string]int)
	return s
}

// Add adds a rule after the existing ones and returns a function that removes it. It panics if a
// pattern of turns is malformed or matches no operation.
func (s *Set[Rule]) Add(r Rule, turns Turns) (remove func()) {
	s.check(turns.Ops)
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

// check panics unless each pattern matches an operation.
func (s *Set[Rule]) check(patterns []string) {
	for _, p := range patterns {
		if !slices.ContainsFunc(s.ops, func(op string) bool { return matches([]string{p}, op) }) {
			panic(fmt.Sprintf("no operation is called %q: the operations are %s", p, strings.Join(s.ops, ", ")))
		}
	}
}

// matches reports whether one of the patterns, in the syntax of path.Match, matches an operation.
func matches(patterns []string, op string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		fits, _ := path.Match(p, op)
		return fits
	})
}

// Choose counts an operation and returns the rule that applies to it, or nil. The operation counts
// for each rule whose patterns match it and for which may returns true (nil: each). Of these, the
// first whose turn it is applies.
func (s *Set[Rule]) Choose(op string, may func(*Rule) bool) (chosen *Rule) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.total++
	s.mu.counts[op]++
	for _, a := range s.mu.rules {
		if a.turns.choose(op) && (may == nil || may(&a.rule)) && a.turns.next(s.mu.random, chosen != nil) {
			chosen = &a.rule
		}
	}
	return chosen
}

// Count returns how many operations one of the patterns matches. Without a pattern it returns the
// number of all operations. It panics as Add does.
func (s *Set[Rule]) Count(patterns ...string) int {
	s.check(patterns)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(patterns) == 0 {
		return s.mu.total
	}
	n := 0
	for op, count := range s.mu.counts {
		if matches(patterns, op) {
			n += count
		}
	}
	return n
}

// Hits returns how many operations the present rules were applied to.
func (s *Set[Rule]) Hits() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, a := range s.mu.rules {
		n += a.turns.hits
	}
	return n
}

// Below returns a random number from 0 to n-1.
func (s *Set[Rule]) Below(n int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.random.Int64N(n)
}

// Turns counts the operations that one of the patterns Ops matches, or all without a pattern. Skip
// of them pass before the rule begins. Times is how many it applies to after that, 0 for all.
// Probability is the chance of each operation that is due, 0 for certainty.
type Turns struct {
	Ops         []string
	Skip, Times int
	Probability float64

	seen, hits int
}

func (t *Turns) choose(op string) bool { return len(t.Ops) == 0 || matches(t.Ops, op) }

// next counts an operation and reports whether the rule applies to it. It does not if an earlier
// rule has taken the operation.
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
