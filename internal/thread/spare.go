package thread

import (
	"runtime"
	"time"
)

// Spare reports whether there are processors enough that a goroutine may look at something for some
// time, instead of sleeping: to be woken takes as long as a small copy.
func Spare() bool { return spare }

var spare = runtime.GOMAXPROCS(0) >= 8

// LookFor is how long a goroutine that waits for a copy looks, where there are processors to spare,
// before it sleeps: as long as some copies of 1 MiB take over a fast link.
const LookFor = 100 * time.Microsecond

// maxLooks bounds Look where time stands still, as in a test's bubble.
const maxLooks = 20_000

// Look waits for done for LookFor at most, without sleeping, if there are processors to spare. It
// reports whether done is closed.
func Look(done <-chan struct{}) bool {
	began := time.Now()
	for range maxLooks {
		select {
		case <-done:
			return true
		default:
		}
		if !spare || time.Since(began) > LookFor {
			break
		}
	}
	return false
}
