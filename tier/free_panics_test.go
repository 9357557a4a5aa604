package tier_test

import (
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// twicePool is a backend of ours with a bug: it reports twice that memory is reclaimed.
type twicePool struct{ adoptPool }

func (p *twicePool) Free(mem tier.Memory, reclaimed func()) {
	p.adoptPool.Free(mem, reclaimed)
	reclaimed()
}

// TestBooksThatBreakAreNotHidden: the books panic when they are given back more than they have.
// That is our own bug, not a function of the program's, and must not end in a line of the log.
func TestBooksThatBreakAreNotHidden(t *testing.T) {
	s := newSpace(t, 8*page, new(twicePool))
	b := draw(t, s, 2*page)
	mustPanic(t, func() { _ = b.Release() })
}
