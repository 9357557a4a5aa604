// Package testseed provides the seeds of random tests: fixed ones, which find known failures again,
// and a new one in each run, which can find others. A failure prints its seed and how to repeat it.
//
//	for seed := range testseed.Each(t, 20) { // 0 to 19, and a new one
//		rng := rand.New(rand.NewPCG(seed, 1))
//		…
//	}
//
// If the environment variable SPILLWAY_TEST_SEED is set, all random tests run with that seed only.
// A seed repeats the operations of a test, but not the order in which concurrent goroutines do
// them.
package testseed

import (
	"encoding/binary"
	"flag"
	"fmt"
	"iter"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/internal/invariants"
)

// Variable names the environment variable with the seed of all random tests, a decimal number.
const Variable = "SPILLWAY_TEST_SEED"

// Given returns the seed in the environment, if it is set.
func Given(t testing.TB) (seed uint64, ok bool) {
	t.Helper()
	v := os.Getenv(Variable)
	if v == "" {
		return 0, false
	}
	seed, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		t.Fatalf("%s=%q is not a seed: want a decimal number", Variable, v)
	}
	return seed, true
}

// Each returns the seeds 0 to fixed-1 and a new one, or only that of the environment. If t fails
// during one of them, Each logs it.
func Each(t testing.TB, fixed int) iter.Seq[uint64] {
	t.Helper()
	var seeds []uint64
	if seed, ok := Given(t); ok {
		seeds = append(seeds, seed)
	} else {
		for seed := range fixed {
			seeds = append(seeds, uint64(seed))
		}
		seeds = append(seeds, rand.Uint64())
	}
	return func(yield func(uint64) bool) {
		for _, seed := range seeds {
			if !run(t, seed, yield) {
				return
			}
		}
	}
}

func run(t testing.TB, seed uint64, yield func(uint64) bool) bool {
	failed, ended := t.Failed(), false
	defer func() { // even if t.Fatal or a panic ends the loop
		if !ended || t.Failed() && !failed {
			t.Log(hint(t, seed))
		}
	}()
	more := yield(seed)
	ended = true
	return more
}

// One returns a new seed, or that of the environment. If t fails, One logs it.
func One(t testing.TB) uint64 {
	t.Helper()
	seed, ok := Given(t)
	if !ok {
		seed = rand.Uint64()
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(hint(t, seed))
		}
	})
	return seed
}

// Share returns which of many cases, counted from 0, t tries: the first and then every step-th.
// These are all cases, unless tests are Hurried: then it is one of part, or of twice that many if
// Raced. A seed of One chooses which, so several runs try all cases.
func Share(t testing.TB, part int) (first, step int) {
	t.Helper()
	if !Hurried() {
		return 0, 1
	}
	if Raced {
		part *= 2
	}
	return int(One(t) % uint64(part)), part
}

// Half is Share for pairs of a type and an operation: t tries those whose indices add up to first,
// modulo step. These are half of the pairs, which a seed of One chooses, so that each run tries
// each type and each operation. Hurried tests try one of part.
func Half(t testing.TB, part int) (first, step int) {
	t.Helper()
	if Hurried() {
		return Share(t, part)
	}
	return int(One(t) % 2), 2
}

func hint(t testing.TB, seed uint64) string {
	name, _, _ := strings.Cut(t.Name(), "/")
	return fmt.Sprintf("the seed was %d; to repeat: %s=%d go test -run '^%s$' in this package",
		seed, Variable, seed, name)
}

// noise returns the random bytes that Fill copies. Generating new ones takes longer than many tests
// use them.
var noise = sync.OnceValue(func() []byte {
	b := make([]byte, 1<<20)
	rand.NewChaCha8([32]byte{}).Read(b)
	return b
})

// Fill fills p with bytes that look random and depend only on the seed. No two pieces of 64 KiB are
// equal, not even those of different seeds.
func Fill(p []byte, seed uint64) {
	const piece = 64 << 10
	rng := rand.New(rand.NewPCG(seed, 0xf111))
	for len(p) > 0 {
		n := copy(p, noise()[rng.IntN(len(noise())-piece):][:piece])
		if n >= 8 {
			binary.LittleEndian.PutUint64(p, rng.Uint64())
		}
		p = p[n:]
	}
}

// Main is the TestMain of a package whose tests allocate much and keep little. It collects the heap
// at five times its live size instead of twice, which saves up to a third of their time. Benchmarks
// keep the default that programs have, and so do tests with the race detector, whose heap includes
// all arenas.
func Main(m *testing.M) {
	flag.Parse()
	if bench := flag.Lookup("test.bench"); !Raced && bench.Value.String() == "" {
		debug.SetGCPercent(400)
	}
	os.Exit(m.Run())
}

// Raced reports whether the race detector is on. Tests then take ten times as long, and their
// memory is Go's.
const Raced = invariants.Race

// Hurried reports whether tests should try less: in short mode, and in a build in which they are
// slow.
func Hurried() bool { return testing.Short() || invariants.Enabled || Raced }

// Rounds returns few if tests are Hurried, otherwise full.
func Rounds(full, few int) int {
	if Hurried() {
		return few
	}
	return full
}
