package cuda

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestRanges(t *testing.T) {
	var r ranges
	r.add(1000, 100)
	r.add(500, 100)
	r.add(1100, 50) // begins where another ends: no copy may lie across
	r.remove(77)    // it is not known
	for _, c := range []struct {
		addr uintptr
		n    int64
		want bool
	}{
		{1000, 100, true}, {1099, 1, true}, {1000, 101, false}, {999, 1, false}, {999, 2, false},
		{1050, 60, false}, {1100, 50, true}, {1149, 2, false}, {500, 1, true}, {600, 1, false},
		{0, 1, false}, {0, 0, true}, {1000, -1, false}, {1001, math.MaxInt64, false}, {math.MaxUint, 1, false},
	} {
		if got := r.hold(c.addr, c.n); got != c.want {
			t.Errorf("hold(%d, %d) is %v", c.addr, c.n, got)
		}
	}
	r.remove(1000)
	if r.hold(1000, 1) || !r.hold(1100, 50) {
		t.Error("the wrong range was removed")
	}
}

// Ranges come and go as in a model that looks at each byte.
func TestRangesRandom(t *testing.T) {
	const end = 300
	rng := rand.New(rand.NewPCG(3, 9))
	var r ranges
	var owner [end]int // which range has the byte; 0: none
	first := make(map[int]int)
	for step := 1; step < 3000; step++ {
		addr, n := rng.IntN(end), 1+rng.IntN(20)
		n = min(n, end-addr)
		free := true
		for _, o := range owner[addr : addr+n] {
			free = free && o == 0
		}
		if free {
			r.add(uintptr(addr), int64(n))
			first[addr] = n
			for i := range n {
				owner[addr+i] = step
			}
		} else if m, found := first[addr]; found && rng.IntN(2) == 0 {
			r.remove(uintptr(addr))
			delete(first, addr)
			clear(owner[addr : addr+m])
		}
		addr = rng.IntN(end)
		n = min(1+rng.IntN(30), end-addr)
		want := owner[addr] != 0 && owner[addr] == owner[addr+n-1]
		if got := r.hold(uintptr(addr), int64(n)); got != want {
			t.Fatalf("step %d: hold(%d, %d) is %v", step, addr, n, got)
		}
	}
}
