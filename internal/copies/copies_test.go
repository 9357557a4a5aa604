package copies

import (
	"testing"
	"testing/synctest"
)

// TestSettle: the wait ends when a copy that is taken is listed again, used or freed, and not
// before.
func TestSettle(t *testing.T) {
	for name, end := range map[string]func(*Copy){"unhold": (*Copy).Unhold, "used": (*Copy).Used, "release": (*Copy).Release} {
		synctest.Test(t, func(t *testing.T) {
			var l List
			c := l.New(10, false, func() {})
			if c.Add(); l.Settle() {
				t.Errorf("%s: a wait for a copy that nobody has taken", name)
			}
			if taken := c.Take; name != "unhold" && !taken() || name == "unhold" && !c.Hold() {
				t.Fatal("not taken")
			}
			settled := make(chan bool)
			before := l.Changes()
			for range 2 {
				go func() { settled <- l.Settle() }()
			}
			synctest.Wait()
			select {
			case <-settled:
				t.Errorf("%s: no wait", name)
			default:
			}
			end(c)
			first, second := <-settled, <-settled
			if !first || !second || l.Changes() == before {
				t.Errorf("%s: it is no change", name)
			}
		})
	}
}

// TestOldestFirst: of copies of both kinds; those that keep shared memory first where that is asked.
func TestOldestFirst(t *testing.T) {
	var l List
	var all []*Copy
	for _, shares := range []bool{false, true, true, false, true} {
		c := l.New(1, shares, func() {})
		c.Add()
		all = append(all, c)
	}
	for i, want := range []struct {
		sharing bool
		at      int
	}{{false, 0}, {false, 1}, {true, 2}, {false, 3}, {true, 4}} {
		c := l.TakeOldest(want.sharing)
		if c != all[want.at] || c.Listed() {
			t.Fatalf("%d: another copy than %d", i, want.at)
		}
		c.Release()
	}
	if l.TakeOldest(false) != nil || l.TakeOldest(true) != nil || l.Settle() {
		t.Error("a copy is left")
	}
}
