package gate

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
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

// TestAlarm: the call comes when it is due, and Wait waits for it. A stopped alarm does not call.
// It may be started anew, also by the call itself.
func TestAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a Alarm
		var mu sync.Mutex
		calls, again := 0, true
		ring := func() {
			time.Sleep(time.Second)
			mu.Lock()
			defer mu.Unlock()
			calls++
			a.Done()
			if again {
				again = false
				a.Start(time.Second, func() { t.Error("another function is called") })
			}
		}
		a.Stop()
		a.Wait()
		begun := time.Now()
		mu.Lock()
		a.Start(time.Hour, ring)
		a.Stop()
		if a.IsSet() {
			t.Error("a stopped alarm is set")
		}
		a.Start(time.Second, ring)
		mu.Unlock()
		time.Sleep(1500 * time.Millisecond)
		mu.Lock()
		a.Stop() // too late
		if !a.IsSet() || calls != 0 {
			t.Errorf("set: %v, %d calls; want one under way", a.IsSet(), calls)
		}
		mu.Unlock()
		a.Wait()
		if took := time.Since(begun); calls != 2 || took != 4*time.Second {
			t.Errorf("%d calls in %v; want 2 in 4s", calls, took)
		}
		time.Sleep(2 * time.Hour)
		if calls != 2 {
			t.Errorf("%d calls in the end", calls)
		}
	})
}
