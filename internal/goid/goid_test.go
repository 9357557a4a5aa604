package goid_test

import (
	"sync"
	"testing"

	"github.com/spillway-db/spillway/internal/goid"
)

// Goroutines that run at once have different numbers, and each keeps its own.
func TestID(t *testing.T) {
	const n = 64
	ids := make([]int64, n)
	var read, over sync.WaitGroup
	read.Add(n)
	for i := range n {
		over.Go(func() {
			ids[i] = goid.ID()
			read.Done()
			read.Wait() // so that all of them live at once
			if again := goid.ID(); again != ids[i] {
				t.Errorf("a goroutine was %d and is %d", ids[i], again)
			}
		})
	}
	over.Wait()
	seen := map[int64]bool{goid.ID(): true}
	for _, id := range ids {
		if id <= 0 || seen[id] {
			t.Errorf("the number %d is wrong or not the only one", id)
		}
		seen[id] = true
	}
}
