// Package testseed gives random tests their seeds: some that are always the same, so that
// what was found once is found again, and one that is new in each run, so that more is
// found. A failure prints its seed and how to repeat it.
//
//	for seed := range testseed.Each(t, 20) { // 0 to 19, and a new one
//		rng := rand.New(rand.NewPCG(seed, 1))
//		…
//	}
//
// With the variable SPILLWAY_TEST_SEED all of them run with that seed alone. A seed
// repeats what a test does; where goroutines race, not in which order they do it.
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
	"github.com/spillway-db/spillway/internal/racemark"
)

// Variable names the environment variable that sets the seed of all random tests, a
// decimal number.
const Variable = "SPILLWAY_TEST_SEED"

// Given returns the seed that the environment sets, if it does.
func Given(t testing.TB) (seed uint64, ok bool) {
	t.Helper()
	v := os.Getenv(Variable)
	if v == "" {
		return 0, false
	}
	seed, err := strconv.ParseUint(v, 10, 64)
	if err != nil {
		t.Fatalf("%s=%q is no seed: it takes a decimal number", Variable, v)
	}
	return seed, true
}

// Each goes through the seeds 0 to fixed-1 and a new one, or through that of the
// environment alone. If t fails during one, that one is logged.
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
	defer func() { // also when t.Fatal or a panic ends the loop
		if !ended || t.Failed() && !failed {
			t.Log(hint(t, seed))
		}
	}()
	more := yield(seed)
	ended = true
	return more
}

// One returns a new seed, or that of the environment. If t fails, it is logged.
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

// Share returns which of many things, counted from 0, t tries: the first and then every
// step-th. That is all, and if tests are Hurried one of part, of twice that many if they are
// Raced, which a seed of One chooses: after several runs all have been tried.
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

// Half is Share for products of many types with what is done to each: pairs whose indices add up to
// first, modulo step. They are every other pair, which a seed of One chooses, so that each type and
// each thing is tried in each run. Hurried tests try one of part.
func Half(t testing.TB, part int) (first, step int) {
	t.Helper()
	if Hurried() {
		return Share(t, part)
	}
	return int(One(t) % 2), 2
}

func hint(t testing.TB, seed uint64) string {
	name, _, _ := strings.Cut(t.Name(), "/")
	return fmt.Sprintf("the seed was %d; to repeat: %s=%d go test -run '^%s$' in this package", seed, Variable, seed, name)
}

// noise is what Fill copies from. To make as many random bytes anew takes longer than what many
// tests do with them.
var noise = sync.OnceValue(func() []byte {
	b := make([]byte, 1<<20)
	rand.NewChaCha8([32]byte{}).Read(b)
	return b
})

// Fill fills p with bytes that look random and depend on the seed alone. No two pieces of 64 KiB
// are alike, nor those of two seeds.
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

// Main is the TestMain of a package whose tests keep little and make much. The heap is collected at
// five times its size, not at twice, which was up to a third of their time. Benchmarks measure with
// the setting that programs have, and the race detector's heap also has all arenas.
func Main(m *testing.M) {
	flag.Parse()
	if bench := flag.Lookup("test.bench"); !Raced && bench.Value.String() == "" {
		debug.SetGCPercent(400)
	}
	os.Exit(m.Run())
}

// Raced says that the race detector is on, under which all takes ten times as long, and
// memory is Go's.
const Raced = racemark.Enabled

// Hurried says that tests are to try less: they run in short mode, or in a build in which
// each try takes long.
func Hurried() bool { return testing.Short() || invariants.Enabled || Raced }

// Rounds returns how often a test does something: few times if it is Hurried.
func Rounds(full, few int) int {
	if Hurried() {
		return few
	}
	return full
}
