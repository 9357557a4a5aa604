package guard

import "sync"

// Gate counts the calls that are in progress, so that closing can refuse later calls and wait for
// these. It is open until Shut. The zero value is open. It is safe for concurrent use.
type Gate struct {
	mu    sync.Mutex // orders Enter and Shut: no call is added after Wait began
	shut  bool
	calls sync.WaitGroup
}

// Enter counts a call and returns true; after Shut it returns false. After true, the caller must
// Leave once.
func (g *Gate) Enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.shut {
		g.calls.Add(1)
	}
	return !g.shut
}

// Leave ends what Enter began. It panics if called more often.
func (g *Gate) Leave() { g.calls.Done() }

// Shut refuses later calls. It does not wait. It returns whether it was the first Shut.
func (g *Gate) Shut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	first := !g.shut
	g.shut = true
	return first
}

// Wait returns when all calls have left. The gate must have been shut.
func (g *Gate) Wait() { g.calls.Wait() }
