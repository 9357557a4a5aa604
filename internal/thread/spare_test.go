package thread

import (
	"runtime"
	"testing"
	"testing/synctest"
)

// TestLook checks that Look reports a closed channel, one that is closed while it looks if processors
// are to spare, and returns if the channel stays open, also where time stands still.
func TestLook(t *testing.T) {
	done, never := make(chan struct{}), make(chan struct{})
	close(done)
	defer func(was bool) { spare = was }(spare)
	for _, spare = range []bool{false, true} {
		if !Look(done) || Look(never) {
			t.Errorf("with processors to spare %v: Look missed a closed channel, or reported an open one", spare)
		}
		synctest.Test(t, func(t *testing.T) {
			if Look(make(chan struct{})) {
				t.Error("Look reported an open channel")
			}
		})
	}
	if runtime.GOMAXPROCS(0) == 1 {
		t.Skip("needs two processors: run with GOMAXPROCS=2 at least")
	}
	for range 10_000 { // other programs may use the second processor
		soon := make(chan struct{})
		go close(soon)
		if Look(soon) {
			return
		}
	}
	t.Error("Look reported none of 10,000 channels that were closed while it looked")
}
