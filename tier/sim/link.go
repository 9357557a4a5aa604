package sim

import (
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// link models one direction between host and device, which all streams share:
// transfers follow each other at its rate, and each is done a latency after its
// last byte has passed.
type link struct {
	bytesPerSecond int64 // 0: as fast as memory
	latency        time.Duration

	mu struct {
		lockrank.Mutex[lockrank.Device]
		free time.Time // when the last transfer booked so far has passed
	}
}

// book takes the link for n bytes and returns when they have arrived; the zero
// time if nothing is modelled or there is nothing to transfer.
func (l *link) book(n int64) time.Time {
	if n == 0 || l.bytesPerSecond == 0 && l.latency == 0 {
		return time.Time{}
	}
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.free.Before(now) {
		l.mu.free = now
	}
	if l.bytesPerSecond > 0 {
		l.mu.free = l.mu.free.Add(time.Duration(float64(n) / float64(l.bytesPerSecond) * float64(time.Second)))
	}
	return l.mu.free.Add(l.latency)
}
