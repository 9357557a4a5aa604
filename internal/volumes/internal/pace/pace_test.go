package pace

import (
	"sync"
	"testing"
	"time"
)

// The time of writing never falls while requests begin and end: it is shown as a counter.
func TestWritingNeverFalls(t *testing.T) {
	p := &Disk{Request: 1, Depth: 1, Stripe: new(Stripe)}
	var writers sync.WaitGroup
	for range 4 {
		writers.Go(func() {
			for range 5000 {
				p.Begin(1, true, false)
				p.End(1, 1, 0, true)
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
		now := p.Stats().Writing
		if now < last {
			t.Fatalf("it fell from %v to %v", last, now)
		}
		last = now
	}
}
