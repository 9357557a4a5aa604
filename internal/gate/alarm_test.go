package gate

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

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
