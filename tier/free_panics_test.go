package tier

import (
	"io"
	"log/slog"
	"testing"
)

// twicePool is a backend of ours with a bug: it says of each memory twice that it is reclaimed.
type twicePool struct{ adoptPool }

func (p *twicePool) Free(mem Memory, reclaimed func()) {
	p.adoptPool.Free(mem, reclaimed)
	reclaimed()
}

// TestBooksThatBreakAreNotHidden: the ledger panics when it is given back more than it has. That is
// our own bug, not a function of the program's, and must not end in a line of the log.
func TestBooksThatBreakAreNotHidden(t *testing.T) {
	s, err := NewSpace(SpaceConfig{ID: ID{Kind: GPU}, Capacity: 8 * Page, Pool: new(twicePool), Backend: "test", Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Inside().Occupy(2 * Page); err != nil {
		t.Fatal(err)
	}
	b := s.Inside().Adopt(adoptMemory(2*Page), nil)
	defer func() {
		if p := recover(); p == nil {
			t.Errorf("memory was reclaimed twice, and nobody hears of it; the books say %+v", s.Usage())
		}
	}()
	_ = b.Release()
}
