package lockrank

import (
	"runtime"
	"sync"
	"testing"
)

// Goroutines that run at once have different numbers, and each keeps its own.
func TestGoroutineID(t *testing.T) { apart(t, GoroutineID) }

func TestLiving(t *testing.T) { apart(t, func() int64 { return int64(living()) }) }

// grown has a deep stack, so that the goroutine's moves.
func grown(depth int) int {
	var room [256]byte
	if depth == 0 {
		return 0
	}
	return grown(depth-1) + int(room[depth%len(room)])
}

func apart(t *testing.T, id func() int64) {
	const n = 64
	ids := make([]int64, n)
	var read, over sync.WaitGroup
	read.Add(n)
	for i := range n {
		over.Go(func() {
			ids[i] = id()
			read.Done()
			read.Wait() // so that all of them live at once
			grown(1000)
			runtime.GC()
			if again := id(); again != ids[i] {
				t.Errorf("a goroutine was %d and is %d", ids[i], again)
			}
		})
	}
	over.Wait()
	seen := map[int64]bool{id(): true}
	for _, id := range ids {
		if id <= 0 || seen[id] {
			t.Errorf("the number %d is wrong or not the only one", id)
		}
		seen[id] = true
	}
}
