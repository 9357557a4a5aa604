package thread

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"
)

// TestLook: what is done is seen, what is done soon is where processors are to spare, and what is
// not does not hold the caller, also where time stands still.
func TestLook(t *testing.T) {
	done, never := make(chan struct{}), make(chan struct{})
	close(done)
	defer func(was bool) { spare = was }(spare)
	for _, spare = range []bool{false, true} {
		if !Look(done) || Look(never) {
			t.Errorf("with processors to spare %v: what is done is not, or what is not is", spare)
		}
		synctest.Test(t, func(t *testing.T) {
			if Look(make(chan struct{})) {
				t.Error("nothing was done")
			}
		})
	}
	if runtime.GOMAXPROCS(0) == 1 {
		t.Skip("needs two processors: run with GOMAXPROCS=2 at least")
	}
	for range 100 {
		soon := make(chan struct{})
		go func() {
			time.Sleep(time.Microsecond)
			close(soon)
		}()
		if Look(soon) {
			return
		}
	}
	t.Error("of 100 waits for something that comes soon none has met it")
}
