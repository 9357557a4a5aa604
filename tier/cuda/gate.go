package cuda

import "github.com/spillway-db/spillway/internal/lockrank"

// gate lets calls in until it is closed, which waits for those that are inside.
type gate struct {
	mu struct {
		lockrank.Mutex[lockrank.Device]
		inside int
		empty  chan struct{} // set when closed; closed when nobody is inside
	}
}

func (g *gate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mu.empty != nil {
		return false
	}
	g.mu.inside++
	return true
}

func (g *gate) leave() {
	g.mu.Lock()
	g.mu.inside--
	last := g.mu.empty != nil && g.mu.inside == 0
	g.mu.Unlock()
	if last {
		close(g.mu.empty)
	}
}

// close returns false if the gate was closed before.
func (g *gate) close() bool {
	g.mu.Lock()
	if g.mu.empty != nil {
		g.mu.Unlock()
		return false
	}
	empty := make(chan struct{})
	g.mu.empty = empty
	if g.mu.inside == 0 {
		close(empty)
	}
	g.mu.Unlock()
	<-empty
	return true
}
