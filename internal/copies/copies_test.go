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

// TestTakeOldestSharing: of copies that keep shared memory the oldest is taken, also between others,
// and none when all of them are gone.
func TestTakeOldestSharing(t *testing.T) {
	var l List
	add := func(bytes int64, shares bool) *Copy {
		c := l.New(bytes, shares, func() {})
		c.Add()
		return c
	}
	add(1, false)
	second := add(2, true)
	add(3, false)
	add(4, true)
	for _, want := range []int64{2, 4} {
		if c := l.TakeOldest(true); c == nil || c.Bytes() != want {
			t.Fatalf("the oldest that shares is %+v, want %d", c, want)
		}
	}
	second.Add() // as the newest
	if c := l.TakeOldest(false); c == nil || c.Bytes() != 1 {
		t.Errorf("the oldest is %+v", c)
	}
	if c := l.TakeOldest(true); c != second {
		t.Errorf("the only one that shares is %+v", c)
	}
	if c := l.TakeOldest(true); c != nil || l.mu.sharing != 0 {
		t.Errorf("%+v is listed of %d that share", c, l.mu.sharing)
	}
}
