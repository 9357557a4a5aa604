// Package gate counts what is under way inside of something, so that closing it can
// refuse what comes later and wait for the rest.
package gate

import "sync"

// Gate is open until it is shut, once and for all. The zero value is open. It is safe for
// concurrent use.
type Gate struct {
	mu     sync.Mutex // a leaf: nothing is called under it
	inside int
	empty  chan struct{} // nil while the gate is open; closed when it is shut and empty
}

// Enter lets the caller in and returns true, or false once the gate is shut. After true, the caller
// must Leave once.
func (g *Gate) Enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.empty != nil {
		return false
	}
	g.inside++
	return true
}

// Leave ends what Enter began.
func (g *Gate) Leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inside == 0 {
		panic("gate: left more often than entered")
	}
	g.inside--
	if g.inside == 0 && g.empty != nil {
		close(g.empty)
	}
}

// Shut closes the gate to new callers. It does not wait. It returns whether it was the first.
func (g *Gate) Shut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.empty != nil {
		return false
	}
	g.empty = make(chan struct{})
	if g.inside == 0 {
		close(g.empty)
	}
	return true
}

// Wait returns when all callers have left. The gate must have been shut.
func (g *Gate) Wait() { <-g.Empty() }

// Empty returns what is closed when all callers have left. The gate must have been shut.
func (g *Gate) Empty() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.empty
}
