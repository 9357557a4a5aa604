package faultfs

import (
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
)

const (
	// shortestSleep is the shortest time that wait sleeps for. A sleep takes about 60 µs too long,
	// which would add up over small transfers. A transfer that is ahead by less returns at once and
	// moves the clock, so later ones wait for it.
	shortestSleep = time.Millisecond
	// maxLate limits how much time one sleep that was too long may make up for. A process that was
	// stopped for a second has not used the disk for a second.
	maxLate = 50 * time.Millisecond
	// longestPause is how long after its time the next request of a transfer may come. A later
	// request begins a new transfer and gets no credit.
	longestPause = 10 * time.Millisecond
)

// rate is a clock that the bytes of all transfers advance. A transfer begins at the clock's time,
// or now if that is later, and has passed once its bytes are added. No errors accumulate in the
// clock, so requests of any size and number result in the same rate.
type rate struct {
	bytesPerSecond float64
	sleep          func(time.Duration)

	mu struct {
		lockrank.Mutex[lockrank.Device]
		clock time.Time
		late  time.Duration // by which sleeps were too long, unless made up for
	}
}

func newRate(bytesPerSecond int64) *rate {
	return &rate{bytesPerSecond: float64(bytesPerSecond), sleep: time.Sleep}
}

// book advances the clock by n bytes and returns when they have passed. The caller does the
// transfer meanwhile, because it is part of the time that a disk takes.
//
// A clock that is behind restarts now: there were no requests, or the disk is slower than the rate.
// But the caller is not responsible for sleeps that were too long, so the clock may be behind by
// that much until it has caught up.
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

// wait waits until a time that book returned.
func (r *rate) wait(until time.Time) {
	ahead := time.Until(until)
	if ahead <= shortestSleep {
		return
	}
	r.sleep(ahead)
	late := min(time.Since(until), maxLate)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.late = max(r.mu.late, late)
}
