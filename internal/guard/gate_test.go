package guard

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

func TestGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Gate
		for range 2 {
			if !g.Enter() {
				t.Fatal("an open gate lets nobody in")
			}
		}
		g.Leave()
		if !g.Shut() {
			t.Error("the first to shut it is not the first")
		}
		if g.Enter() {
			t.Error("somebody enters through a gate that is shut")
		}
		closed := make(chan bool)
		for range 2 {
			go func() { closed <- shut(&g) }()
		}
		synctest.Wait()
		select {
		case <-closed:
			t.Error("Wait does not wait for who is inside")
		default:
		}
		g.Leave()
		for range 2 {
			if <-closed {
				t.Error("a second Close is the first")
			}
		}
		if g.Shut() || g.Enter() {
			t.Error("a closed gate is shut again, or lets somebody in")
		}
	})
}

// shut closes the gate as its users do.
func shut(g *Gate) (first bool) {
	first = g.Shut()
	g.Wait()
	return first
}

func TestGateNobodyEntered(t *testing.T) {
	var g Gate
	if !shut(&g) {
		t.Error("the first Close is not the first")
	}
}

func TestGateLeftTooOften(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("nobody is told of a Leave without an Enter")
		}
	}()
	new(Gate).Leave()
}

// TestGateUnderRaces: when Close returns nobody is inside, and nobody is let in afterwards.
func TestGateUnderRaces(t *testing.T) {
	for range 200 {
		var g Gate
		var inside, firsts atomic.Int64
		var closed atomic.Bool
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for range 20 {
					if i%4 == 3 {
						if shut(&g) {
							firsts.Add(1)
						}
						if n := inside.Load(); n != 0 {
							t.Errorf("%d are inside after Close", n)
						}
						closed.Store(true)
						return
					}
					was := closed.Load()
					if !g.Enter() {
						return
					}
					if inside.Add(1); was {
						t.Error("somebody was let in after Close")
					}
					inside.Add(-1)
					g.Leave()
				}
			})
		}
		wg.Wait()
		if n := firsts.Load(); n != 1 {
			t.Fatalf("%d were the first to close", n)
		}
	}
}
