package volumes

import (
	"sync"
	"testing"
	"time"
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
