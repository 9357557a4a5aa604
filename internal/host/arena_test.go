package host

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

func open(t testing.TB, cfg Config) *Arena {
	t.Helper()
	a, err := NewArena(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
	})
	return a
}

func alloc(t testing.TB, a *Arena, size int64, cuts ...int64) tier.HostMemory {
	t.Helper()
	m, err := a.Alloc(size, cuts)
	if err != nil {
		t.Fatalf("Alloc(%d): %v", size, err)
	}
	return m.(tier.HostMemory)
}

func free(a *Arena, ms ...tier.HostMemory) {
	for _, m := range ms {
		a.Free(m, func() {})
	}
}

// A pinned arena keeps its pages, and refuses memory that fits in no range. Other arenas map their
// pages elsewhere.
func TestArenaKeepsThePoolContract(t *testing.T) {
	for _, c := range []struct {
		cfg    Config
		pinned bool
	}{
		{Config{Node: -1}, false},
		{Config{Node: -1}, true},
		{Config{Node: -1, Touch: true, Huge: true}, false},
		{Config{Node: 0, Lock: true}, false},
	} {
		if c.pinned && onHeap {
			continue
		}
		var traits []tiertest.Trait
		if !c.pinned {
			traits = append(traits, tiertest.HolesUnknown)
		}
		name := fmt.Sprintf("node=%d,lock=%v,touch=%v,pinned=%v", c.cfg.Node, c.cfg.Lock, c.cfg.Touch, c.pinned)
		t.Run(name, func(t *testing.T) {
			tiertest.RunPool(t, func(t *testing.T, capacity int64) tier.Pool {
				cfg := c.cfg
				cfg.Capacity = capacity
				a, err := NewArena(cfg)
				if err != nil {
					t.Fatal(err)
				}
				if c.pinned {
					if err := a.Pin(&pinner{t: t, onUnpin: func() {}}); err != nil {
						t.Fatal(err)
					}
				}
				return a
			}, traits...)
		})
	}
}

func TestConfig(t *testing.T) {
	for _, cfg := range []Config{{}, {Capacity: -1}, {Capacity: tier.Page - 1}, {Capacity: tier.Page, Node: -2}} {
		if a, err := NewArena(cfg); err == nil {
			a.Close()
			t.Errorf("%+v was accepted", cfg)
		}
	}
	a := open(t, Config{Capacity: 3*tier.Page + 5, Node: -1})
	if got := a.Stats().Capacity; got != 3*tier.Page {
		t.Errorf("capacity %d: want it rounded down to whole pages", got)
	}
}

func fill(m tier.HostMemory, b byte) {
	for _, e := range m.Extents() {
		for i := range e {
			e[i] = b
		}
	}
}

func holds(m tier.HostMemory, b byte) bool {
	for _, e := range m.Extents() {
		if bytes.Count(e, []byte{b}) != len(e) {
			return false
		}
	}
	return true
}

func TestFreeTwicePanics(t *testing.T) {
	a := open(t, Config{Capacity: step, Node: -1})
	m := alloc(t, a, 100)
	free(a, m)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
		if u := a.Stats().Used; u != 0 {
			t.Errorf("used %d", u)
		}
	}()
	free(a, m)
}

func TestHugeRequestsAreRefused(t *testing.T) {
	a := open(t, Config{Capacity: step, Node: -1})
	for _, size := range []int64{step + 1, 1<<63 - 1, 1<<63 - tier.Page} {
		var full *tier.NoSpaceError
		if _, err := a.Alloc(size, nil); !errors.As(err, &full) || full.Available != step || full.Largest != 0 {
			t.Errorf("Alloc(%d): %v", size, err)
		}
	}
	for _, size := range []int64{0, -1} {
		if _, err := a.Alloc(size, nil); err == nil || errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("Alloc(%d): %v", size, err)
		}
	}
}

// TestShrinkCounts: memory that was cut is charged what is left of it, and nothing when it is freed.
func TestShrinkCounts(t *testing.T) {
	a := open(t, Config{Capacity: 64 * tier.Page, Node: -1})
	m := alloc(t, a, 20*tier.Page)
	a.Shrink(m, 5*tier.Page+1)
	if used := a.Stats().Used; used != 6*tier.Page || m.Size() != 6*tier.Page || len(bytes.Join(m.Extents(), nil)) != 6*tier.Page {
		t.Errorf("%d bytes are used by a memory of %d", used, m.Size())
	}
	small := alloc(t, a, 100)
	before := a.Stats().Used
	a.Shrink(small, 10)
	if used := a.Stats().Used; used != before || small.Size() != 100 {
		t.Errorf("%d bytes are used, %d before a place in a slab was to be cut", used, before)
	}
	free(a, m, small)
	var pages []tier.HostMemory
	for range 64 {
		pages = append(pages, alloc(t, a, tier.Page))
	}
	free(a, pages[0], pages[2])
	whole := alloc(t, a, tier.Page+100, tier.Page) // pages, because there is no room for a slab
	a.Shrink(whole, tier.Page)
	if used := a.Stats().Used; used != 63*tier.Page {
		t.Errorf("%d bytes are used by 63 pages", used)
	}
	adds(t, a)
	free(a, append(pages[3:], pages[1], whole)...)
	if used := a.Stats().Used; used != 0 {
		t.Errorf("%d bytes are used at the end", used)
	}
}
