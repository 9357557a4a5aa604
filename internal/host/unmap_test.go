package host

import (
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/tier"
)

func TestMappingStaysUntilTheLastFree(t *testing.T) {
	var released atomic.Int64
	a := openFaulty(t, Config{Capacity: 4 * step, Node: -1, Touch: true}, &faulty{released: &released})
	x, y := alloc(t, a, 100), alloc(t, a, 2*step)
	<-a.touchDone
	fill(x, 1)
	fill(y, 2)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if !holds(x, 1) || !holds(y, 2) {
		t.Error("Close changed memory that is handed out")
	}
	if n := trim(a); n != 0 {
		t.Errorf("Trim gave %d bytes of a closed arena back", n)
	}
	free(a, x)
	if !holds(y, 2) || released.Load() != 0 {
		t.Error("the mapping went before the last memory")
	}
	free(a, y)
	if released.Load() != 1 {
		t.Errorf("released %d times after the last Free", released.Load())
	}
	b := openFaulty(t, Config{Capacity: 4 * step, Node: -1}, &faulty{released: &released})
	if err := b.Close(); err != nil || released.Load() != 2 {
		t.Errorf("closing an empty arena: %v, released %d times", err, released.Load())
	}
}

// TestLastFreeLeavesTheToucherItsPages: the mapping stays also while a goroutine of
// the arena's works on it.
func TestLastFreeLeavesTheToucherItsPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var released atomic.Int64
		leave := make(chan struct{})
		a := openFaulty(t, Config{Capacity: 4 * step, Node: -1, Touch: true}, &faulty{
			released: &released,
			onTouch:  func([]byte) error { <-leave; return nil },
		})
		m := alloc(t, a, 100)
		synctest.Wait() // the toucher is under way
		closed := make(chan error, 1)
		go func() { closed <- a.Close() }()
		synctest.Wait()
		free(a, m)
		if released.Load() != 0 {
			t.Error("the mapping went while pages are touched")
		}
		close(leave)
		if err := <-closed; err != nil || released.Load() != 1 {
			t.Errorf("Close: %v; released %d times", err, released.Load())
		}
	})
}

// TestFreedMemoryFaults reads freed memory, which must fault.
func TestFreedMemoryFaults(t *testing.T) {
	if !poison {
		t.Skip("needs -tags invariants without -race, to hide pages")
	}
	a := open(t, Config{Capacity: 4 * step, Node: -1})
	m, other := alloc(t, a, 3*tier.Page), alloc(t, a, tier.Page)
	fill(m, 1)
	fill(other, 2)
	e := m.Extents()[0]
	free(a, m)
	if !faults(func() { sink = e[tier.Page] }) {
		t.Error("freed memory can be read")
	}
	if !holds(other, 2) {
		t.Error("a neighbour was hidden too")
	}
	again := alloc(t, a, 3*tier.Page)
	fill(again, 3)
	if !holds(again, 3) {
		t.Error("memory that is handed out again does not work")
	}
	free(a, other, again)
}

// TestShrunkMemoryIsOneUse: memory that was shrunk keeps the arena mapped like any other, and what was
// cut off can be had again.
func TestShrunkMemoryIsOneUse(t *testing.T) {
	const capacity = 8 * tier.Page
	var released atomic.Int64
	a := openFaulty(t, Config{Capacity: capacity, Node: -1}, &faulty{released: &released})
	m := alloc(t, a, 6*tier.Page)
	a.Shrink(m, tier.Page+1)
	if n := m.Size(); n != 2*tier.Page || a.Stats().Used != n {
		t.Errorf("%d bytes are left, and %d are used", n, a.Stats().Used)
	}
	rest := alloc(t, a, 6*tier.Page)
	free(a, m, rest)
	fill(alloc(t, a, capacity), 1)
	if n := released.Load(); n != 0 {
		t.Errorf("the arena was unmapped %d times while it was open", n)
	}
}
