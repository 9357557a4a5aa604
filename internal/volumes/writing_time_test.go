package volumes

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/testseed"
)

// The time of writing never falls while requests begin and end: it is shown as a counter.
func TestWritingNeverFalls(t *testing.T) {
	p := &speed{request: 1, depth: 1, stripe: new(Stripe)}
	var writers sync.WaitGroup
	for range 4 {
		writers.Go(func() {
			for range 5000 {
				p.begin(1, writing, false)
				p.finish(1, 1, 0, writing)
			}
		})
	}
	done := make(chan struct{})
	go func() { writers.Wait(); close(done) }()
	var last time.Duration
	for over := false; !over; {
		select {
		case <-done:
			over = true
		default:
		}
		now := p.stats().Writing
		if now < last {
			t.Fatalf("it fell from %v to %v", last, now)
		}
		last = now
	}
}

// TestSkippedTimeCountsOnce: two allocations at once on a disk that is far behind the others do not
// count the time for which it was skipped twice, which would leave it as far ahead of them.
func TestSkippedTimeCountsOnce(t *testing.T) {
	const front = 100 * time.Second
	for range testseed.Rounds(20_000, 2000) {
		p := &speed{request: 1, depth: 1, stripe: new(Stripe)}
		p.stripe.front.Store(int64(front))
		var ready atomic.Int32
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for ready.Add(1); ready.Load() < 2; {
					runtime.Gosched()
				}
				p.takeOn(1)
			})
		}
		wg.Wait()
		if lead := p.Pace().Lead; lead > front {
			t.Fatalf("the lead is %v, of a front of %v", lead, front)
		}
	}
}
