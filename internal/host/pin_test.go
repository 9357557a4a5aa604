package host

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// pinner notes what it is asked for.
type pinner struct {
	t       *testing.T
	refuse  error
	holds   []byte
	unpins  int
	onUnpin func()
}

func (p *pinner) Pin(mem []byte) error {
	if p.refuse == nil {
		p.holds = mem
	}
	return p.refuse
}

func (p *pinner) Unpin(mem []byte) error {
	p.unpins++
	if len(mem) != len(p.holds) || &mem[0] != &p.holds[0] {
		p.t.Error("other memory is unpinned than was pinned")
	}
	p.onUnpin()
	return nil
}

// An arena is pinned as a whole, keeps its pages as long, and is unpinned once, when the last
// memory is freed and before it is unmapped.
func TestPinnedUntilTheLastIsFreed(t *testing.T) {
	if onHeap {
		a := open(t, Config{Capacity: 1 << 20, Node: -1})
		if err := a.Pin(&pinner{t: t}); !errors.Is(err, tier.ErrNotSupported) {
			t.Errorf("pinning Go's heap: %v", err)
		}
		return
	}
	const capacity = 8 << 20
	var released atomic.Int64
	a := openFaulty(t, Config{Capacity: capacity, Node: -1}, &faulty{released: &released})
	refused := errors.New("refused")
	no := &pinner{t: t, refuse: refused}
	if err := a.Pin(no); !errors.Is(err, refused) {
		t.Errorf("pinning that is refused: %v", err)
	}
	if n := a.Stats().Committed; n != 0 {
		t.Errorf("%d bytes may be present, and nothing was touched or pinned", n)
	}
	yes := &pinner{t: t}
	yes.onUnpin = func() {
		if released.Load() != 0 {
			t.Error("the arena is unpinned after it was unmapped")
		}
	}
	if err := a.Pin(yes); err != nil {
		t.Fatal(err)
	}
	if len(yes.holds) != capacity {
		t.Errorf("%d bytes are pinned, want all %d", len(yes.holds), capacity)
	}
	if n := a.Stats().Committed; n != capacity {
		t.Errorf("%d bytes may be present, want all %d, which are pinned", n, capacity)
	}
	if n := trim(a); n != 0 || a.Stats().Committed != capacity {
		t.Errorf("%d bytes of a pinned arena were given back", n)
	}
	m := alloc(t, a, 100)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if yes.unpins != 0 || released.Load() != 0 {
		t.Error("the arena is unpinned, or unmapped, with memory handed out")
	}
	free(a, m)
	if yes.unpins != 1 || no.unpins != 0 || released.Load() != 1 {
		t.Errorf("unpinned %d times, by who refused %d, unmapped %d: want 1, 0, 1", yes.unpins, no.unpins, released.Load())
	}
	if err := a.Pin(&pinner{t: t}); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("pinning a closed arena: %v", err)
	}
}

// An arena can be locked later, too, when pinning was refused; a closed one is left alone.
func TestLockLater(t *testing.T) {
	const capacity = 8 << 20
	locked := 0
	a := openFaulty(t, Config{Capacity: capacity, Node: -1}, &faulty{
		onLock: func(b []byte) error { locked += len(b); return nil },
	})
	if n := a.Stats().Locked; n != 0 || locked != 0 {
		t.Fatalf("%d bytes are locked that were not to be", n)
	}
	a.Lock()
	if n := a.Stats().Locked; n != capacity || locked != capacity {
		t.Errorf("%d bytes are locked, and %d are said to be; want %d", locked, n, capacity)
	}
	a.Lock()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	a.Lock()
	if locked != capacity {
		t.Error("what is locked, or closed, was locked again")
	}
}
