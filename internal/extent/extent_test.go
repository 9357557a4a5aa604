package extent

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
)

func ranges(a *Allocator) [][2]int64 {
	var out [][2]int64
	for off, n := range a.All() {
		out = append(out, [2]int64{off, n})
	}
	return out
}

func mustAlloc(t *testing.T, a *Allocator, n, want int64) {
	t.Helper()
	if off, ok := a.Alloc(n); !ok || off != want {
		t.Fatalf("Alloc(%d) = %d, %v; want %d; free: %v", n, off, ok, want, ranges(a))
	}
}

func TestBestFitPrefersTheShortestThenTheLowest(t *testing.T) {
	a := New(100)
	mustAlloc(t, a, 100, 0)
	a.Free(0, 30)
	a.Free(40, 10)
	a.Free(60, 10)
	a.Free(80, 20)
	mustAlloc(t, a, 5, 40)  // 10 at 40 before 10 at 60
	mustAlloc(t, a, 8, 60)  // 5 is too short
	mustAlloc(t, a, 20, 80) // an exact fit leaves nothing behind
	mustAlloc(t, a, 6, 0)
	if got, want := ranges(a), [][2]int64{{6, 24}, {45, 5}, {68, 2}}; !slices.Equal(got, want) {
		t.Fatalf("free: %v, want %v", got, want)
	}
	if _, ok := a.Alloc(25); ok {
		t.Fatal("25 bytes came out of pieces of at most 24")
	}
	if a.FreeBytes() != 31 || a.Largest() != 24 || len(ranges(a)) != 3 {
		t.Fatalf("free %d, largest %d, ranges %v", a.FreeBytes(), a.Largest(), ranges(a))
	}
}

func TestFreeJoinsNeighbours(t *testing.T) {
	for _, order := range [][]int64{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			a := New(30)
			mustAlloc(t, a, 30, 0)
			for _, i := range order {
				a.Free(10*i, 10)
			}
			if got, want := ranges(a), [][2]int64{{0, 30}}; !slices.Equal(got, want) {
				t.Fatalf("free: %v, want %v", got, want)
			}
		})
	}
}

func TestMisusePanics(t *testing.T) {
	full := func() *Allocator { a := New(100); a.Alloc(100); return a }
	for name, f := range map[string]func(){
		"negative line":     func() { New(-1) },
		"empty alloc":       func() { New(1).Alloc(0) },
		"empty free":        func() { full().Free(3, 0) },
		"negative offset":   func() { full().Free(-1, 2) },
		"beyond the end":    func() { full().Free(99, 2) },
		"overflow":          func() { full().Free(1, 1<<63-1) },
		"free twice":        func() { a := full(); a.Free(10, 10); a.Free(10, 10) },
		"inside a free one": func() { a := full(); a.Free(10, 10); a.Free(12, 2) },
		"end overlaps":      func() { a := full(); a.Free(10, 10); a.Free(5, 6) },
		"start overlaps":    func() { a := full(); a.Free(10, 10); a.Free(19, 6) },
		"covers a free one": func() { a := full(); a.Free(10, 10); a.Free(0, 100) },
		"never allocated":   func() { New(100).Free(0, 10) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Fatal("no panic")
				}
			}()
			f()
		})
	}
}

func TestEmptyLine(t *testing.T) {
	a := New(0)
	if _, ok := a.Alloc(1); ok || a.Largest() != 0 || a.FreeBytes() != 0 {
		t.Error("an empty line has room")
	}
}

// TestRandomAgainstModel compares with a line of bytes that is searched from
// one end to the other.
func TestRandomAgainstModel(t *testing.T) {
	for seed := range testseed.Each(t, 20) {
		r := rand.New(rand.NewPCG(seed, 1))
		size := 1 + r.Int64N(400)
		a, line := New(size), make([]bool, size) // true: taken
		type piece struct{ off, n int64 }
		var held []piece
		for step := range 2000 {
			switch k := r.IntN(20); {
			case k < 11:
				n := 1 + r.Int64N(1+size/4)
				off, ok := a.Alloc(n)
				want, fits := modelBestFit(line, n)
				if ok != fits || ok && off != want {
					t.Fatalf("seed %d step %d: Alloc(%d) = %d, %v; want %d, %v", seed, step, n, off, ok, want, fits)
				}
				if ok {
					set(line[off:off+n], true)
					held = append(held, piece{off, n})
				}
			case len(held) > 0:
				i := r.IntN(len(held))
				p := held[i]
				if part := 1 + r.Int64N(p.n); part < p.n { // give the front back
					held[i] = piece{p.off + part, p.n - part}
					p.n = part
				} else {
					held = slices.Delete(held, i, i+1)
				}
				a.Free(p.off, p.n)
				set(line[p.off:p.off+p.n], false)
			}
			free, largest, count := modelStats(line)
			want := [...]int64{free, largest, count}
			if got := [...]int64{a.FreeBytes(), a.Largest(), int64(len(ranges(a)))}; got != want {
				t.Fatalf("seed %d step %d: free, largest, ranges = %v; want %v", seed, step, got, want)
			}
		}
		for _, p := range held {
			a.Free(p.off, p.n)
		}
		if a.Largest() != size || a.FreeBytes() != size {
			t.Fatalf("seed %d: after all was freed: largest %d, free %d of %d", seed, a.Largest(), a.FreeBytes(), size)
		}
	}
}

func set(b []bool, v bool) {
	for i := range b {
		b[i] = v
	}
}

// modelRuns calls f for each free run.
func modelRuns(line []bool, f func(off, n int64)) {
	start := -1
	for i := 0; i <= len(line); i++ {
		switch free := i < len(line) && !line[i]; {
		case free && start < 0:
			start = i
		case !free && start >= 0:
			f(int64(start), int64(i-start))
			start = -1
		}
	}
}

func modelBestFit(line []bool, n int64) (off int64, ok bool) {
	best := int64(len(line)) + 1
	modelRuns(line, func(o, have int64) {
		if have >= n && have < best {
			off, best, ok = o, have, true
		}
	})
	return off, ok
}

func modelStats(line []bool) (free, largest, count int64) {
	modelRuns(line, func(_, n int64) { free += n; largest = max(largest, n); count++ })
	return free, largest, count
}

func BenchmarkAllocFree(b *testing.B) {
	for _, held := range []int{16, 1024, 16384} {
		b.Run(fmt.Sprintf("held=%d", held), func(b *testing.B) {
			r := rand.New(rand.NewPCG(1, 2))
			a := New(int64(held) << 24)
			type piece struct{ off, n int64 }
			pieces := make([]piece, held)
			for i := range pieces {
				n := 4096 * (1 + r.Int64N(256))
				off, _ := a.Alloc(n)
				pieces[i] = piece{off, n}
			}
			b.ReportAllocs()
			for b.Loop() {
				p := &pieces[r.IntN(held)]
				a.Free(p.off, p.n)
				p.n = 4096 * (1 + r.Int64N(256))
				p.off, _ = a.Alloc(p.n)
			}
		})
	}
}
