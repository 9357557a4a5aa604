package testseed

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// recorder is a test that may fail without failing this one.
type recorder struct {
	testing.TB
	failed  bool
	logged  []string
	cleanup []func()
}

func (r *recorder) Helper()           {}
func (r *recorder) Name() string      { return "TestSomething/with a part" }
func (r *recorder) Failed() bool      { return r.failed }
func (r *recorder) Cleanup(f func())  { r.cleanup = append(r.cleanup, f) }
func (r *recorder) Log(values ...any) { r.logged = append(r.logged, fmt.Sprint(values...)) }
func (r *recorder) Fatalf(format string, values ...any) {
	r.failed = true
	panic(fmt.Sprintf(format, values...))
}

func (r *recorder) end() {
	for _, f := range r.cleanup {
		f()
	}
}

func TestSeeds(t *testing.T) {
	t.Setenv(Variable, "")
	first, second := slices.Collect(Each(&recorder{}, 3)), slices.Collect(Each(&recorder{}, 3))
	if !slices.Equal(first[:3], []uint64{0, 1, 2}) || len(first) != 4 || first[3] == second[3] {
		t.Errorf("the seeds are %d, then %d", first, second)
	}
	if one, another := One(&recorder{}), One(&recorder{}); one == another {
		t.Errorf("the same seed twice: %d", one)
	}
	t.Setenv(Variable, "18446744073709551615")
	if got := slices.Collect(Each(&recorder{}, 3)); !slices.Equal(got, []uint64{1<<64 - 1}) {
		t.Errorf("the seeds are %d", got)
	}
	if got := One(&recorder{}); got != 1<<64-1 {
		t.Errorf("the seed is %d", got)
	}
	t.Setenv(Variable, "x")
	for name, call := range map[string]func(testing.TB){
		"Each": func(t testing.TB) { Each(t, 1) },
		"One":  func(t testing.TB) { One(t) },
	} {
		func() {
			defer func() {
				if p := recover(); p == nil || !strings.Contains(p.(string), Variable) {
					t.Errorf("%s: %v", name, p)
				}
			}()
			call(&recorder{})
		}()
	}
}

// TestFailuresNameTheSeed checks that only the seed that failed is logged, with a command that
// repeats it.
func TestFailuresNameTheSeed(t *testing.T) {
	t.Setenv(Variable, "")
	want := "SPILLWAY_TEST_SEED=1 go test -run '^TestSomething$'"
	for name, fail := range map[string]func(*recorder){
		"error": func(r *recorder) { r.failed = true },
		"panic": func(*recorder) { panic("broken") },
	} {
		r := &recorder{}
		func() {
			defer func() { _ = recover() }()
			for seed := range Each(r, 3) {
				if seed == 1 {
					fail(r)
				}
			}
		}()
		if len(r.logged) != 1 || !strings.Contains(r.logged[0], want) {
			t.Errorf("%s: %q", name, r.logged)
		}
	}
	r := &recorder{}
	for range Each(r, 3) {
		break
	}
	One(r)
	r.end()
	if len(r.logged) != 0 {
		t.Errorf("without a failure: %q", r.logged)
	}
	r.failed = true
	r.end()
	if len(r.logged) != 1 {
		t.Errorf("with one: %q", r.logged)
	}
}

// TestShare checks that all cases are tried, or one of some, and that several seeds try all of
// them. In short mode tests are hurried.
func TestShare(t *testing.T) {
	was := flag.Lookup("test.short").Value.String()
	defer func() { _ = flag.Set("test.short", was) }()
	part := 4
	if Raced {
		part = 8
	}
	for _, short := range []string{"false", "true"} {
		if err := flag.Set("test.short", short); err != nil {
			t.Fatal(err)
		}
		if short == "true" && (!Hurried() || Rounds(9, 2) != 2) {
			t.Error("short tests are not hurried")
		}
		seen := make(map[[2]int]bool)
		for seed := range 16 {
			t.Setenv(Variable, fmt.Sprint(seed))
			first, step := Share(&recorder{}, 4)
			seen[[2]int{first, step}] = true
		}
		want := map[[2]int]bool{{0, 1}: true}
		if Hurried() {
			want = make(map[[2]int]bool)
			for first := range part {
				want[[2]int{first, part}] = true
			}
		}
		if !maps.Equal(seen, want) {
			t.Errorf("short=%s: the shares are %v", short, seen)
		}
	}
}

// The bytes depend only on the seed, and two seeds have different bytes everywhere.
func TestFill(t *testing.T) {
	all := make([][]byte, 20)
	for seed := range all {
		again := make([]byte, 200_000)
		all[seed] = make([]byte, len(again))
		Fill(all[seed], uint64(seed))
		Fill(again, uint64(seed))
		if !bytes.Equal(all[seed], again) {
			t.Errorf("seed %d results in other bytes the second time", seed)
		}
		for _, other := range all[:seed] {
			for at := 0; at < len(again); at += 1000 {
				if bytes.Equal(all[seed][at:at+16], other[at:at+16]) {
					t.Fatalf("two seeds result in the same bytes at %d", at)
				}
			}
		}
	}
}
