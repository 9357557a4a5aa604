package convert

import (
	"context"
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/tier"
)

// gate counts the operations under way, so that closing can cancel them and wait
// for them: what they work on is taken apart after that.
type gate struct {
	life context.Context // ends with tier.ErrClosed when the gate is shut
	end  context.CancelCauseFunc

	mu     sync.Mutex // a leaf: nothing is called under it
	shut   bool
	inside int
	empty  chan struct{} // closed when it is shut and nobody is inside
}

func newGate() *gate {
	g := &gate{empty: make(chan struct{})}
	g.life, g.end = context.WithCancelCause(context.Background())
	return g
}

// enter lets an operation in. The context that it returns ends with ctx and when
// the gate is shut; leave must be called once.
func (g *gate) enter(ctx context.Context) (_ context.Context, leave func(), err error) {
	g.mu.Lock()
	if g.shut {
		g.mu.Unlock()
		return nil, nil, fmt.Errorf("convert: the mover is %w", tier.ErrClosed)
	}
	g.inside++
	g.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(g.life, func() { cancel(context.Cause(g.life)) })
	return ctx, func() {
		stop()
		cancel(nil)
		g.mu.Lock()
		g.inside--
		last := g.shut && g.inside == 0
		g.mu.Unlock()
		if last {
			close(g.empty)
		}
	}, nil
}

// close lets nobody in any more, cancels those inside and waits for them. It says
// whether it was the first.
func (g *gate) close() bool {
	g.mu.Lock()
	first := !g.shut
	g.shut = true
	empty := first && g.inside == 0
	g.mu.Unlock()
	if empty {
		close(g.empty)
	}
	g.end(tier.ErrClosed)
	<-g.empty
	return first
}
