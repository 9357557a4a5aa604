package faultfs

import (
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
)

const (
	// shortestSleep is what is not slept for: a sleep is some 60 µs too long, which
	// small transfers would add up. What passes ahead of its time by less is on the
	// clock, and those after it wait for it.
	shortestSleep = time.Millisecond
	// mostLate bounds what one sleep that was too long may make up for: a process that
	// was stopped for a second has not had a second of the disk.
	mostLate = 50 * time.Millisecond
	// longestPause is how long after its time the next request of a transfer may come. A later
	// request begins something new, and is credited nothing.
	longestPause = 10 * time.Millisecond
)

// rate is a clock that all bytes move on, of any transfer. Each transfer begins where the clock is,
// or now, and has passed when the clock says so. As the clock adds up no errors, requests of any
// size and number come to the same rate.
type rate struct {
	bytesPerSecond float64
	sleep          func(time.Duration)

	mu struct {
		lockrank.Mutex[lockrank.Device]
		clock time.Time
		late  time.Duration // how much too long sleeps were, if that is not made up for
	}
}

func newRate(bytesPerSecond int64) *rate {
	return &rate{bytesPerSecond: float64(bytesPerSecond), sleep: time.Sleep}
}

// book moves the clock on by n bytes and returns when they have passed. The transfer
// itself is done meanwhile, because it is a part of the time that a disk takes.
//
// A clock that is behind starts anew: there were no requests, or the disk is slower than the rate.
// Sleeps that were too long are not the caller's fault. So the clock may be behind by that much
// until it has caught up.
func (r *rate) book(n int) (until time.Time) {
	took := time.Duration(float64(n) / r.bytesPerSecond * float64(time.Second))
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	behind := now.Sub(r.mu.clock)
	if behind < 0 || behind > r.mu.late+longestPause {
		r.mu.late = 0
	}
	if behind > 0 {
		r.mu.clock = now.Add(-min(behind, r.mu.late))
	}
	r.mu.clock = r.mu.clock.Add(took)
	return r.mu.clock
}

// wait waits for a time that book returned.
func (r *rate) wait(until time.Time) {
	ahead := time.Until(until)
	if ahead <= shortestSleep {
		return
	}
	r.sleep(ahead)
	late := min(time.Since(until), mostLate)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.late = max(r.mu.late, late)
}
