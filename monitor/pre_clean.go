package monitor

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// cleaner pre-cleans: while nothing is needed, it adds clean images on a disk to the batches that
// would be the first to leave a space that is above its stop mark. There are so many that the space
// would be at its stop mark without them. One goroutine copies one batch after the other, at most at
// Config.AheadRate, and ends when anything is needed.
//
// A space is left alone while all of that has clean images, or cannot have any, until its batches,
// its pressure or what disks have of copies and room has changed. So an engine in which all is clean
// sleeps.
//
// Run's goroutine has it, except for the pause, next and the spaces' covered, which the copying
// goroutine has while it is running.
type cleaner struct {
	pause                      // nothing is begun before it is over
	next    time.Time          // nothing is copied before, because of the rate
	needed  time.Time          // when something was last needed
	running atomic.Bool        // there is a copying goroutine
	cancel  context.CancelFunc // of the last one; nil if there was none
}

// coverage is the state of a space in which all bytes above its stop mark had clean images. While
// it is the same there is nothing to pre-clean.
type coverage struct {
	changes uint64 // of its batches
	above   int64  // its pressure above the stop mark
	room    int64  // of disks, to their marks, without copies
}

const (
	// quiet is for how long nothing must have been needed, and the disks idle, before anything is
	// copied.
	quiet = 200 * time.Millisecond
	// century bounds for how long the rate allows nothing else.
	century = 100 * 365 * 24 * time.Hour
)

// preClean begins to copy batches, if there are some to be copied. After an error there is a pause, a
// longer one each time: others that use the disks may go on for long, and a disk that is full or broken
// stays so for a while.
func (m *Monitor) preClean(ctx context.Context, now time.Time) {
	c := &m.cleaner
	if m.cfg.WriteAhead == nil || m.cfg.AheadRate <= 0 || c.running.Load() ||
		now.Before(c.until) || now.Sub(c.needed) < quiet {
		return
	}
	for _, s := range slices.Backward(m.spaces) { // what is nearest to a disk goes there first
		if !s.lower.Has(tier.Disk) || s.Lost() != nil {
			continue
		}
		now := s.State()
		seen := coverage{changes: m.sums(s).changes, above: now.Pressure - now.Stop}
		for _, to := range s.below(m) {
			if u := to.State(); to.Kind().IsStorage() {
				seen.room += u.Stop + u.Limit - u.Used() - u.Cached
			}
		}
		if seen.above <= 0 || seen == s.covered {
			continue
		}
		ctx, cancel := context.WithCancel(ctx)
		c.cancel = cancel
		c.running.Store(true)
		m.working.Go(func() {
			labels.WriteAhead.Set()
			defer cancel()
			err := m.cleanSpace(ctx, s, seen)
			switch now := time.Now(); {
			case err == nil:
				c.failures = 0
			case ctx.Err() != nil: // something is needed
			case errors.Is(err, context.Canceled):
				c.fail(now, quiet, backoffMax)
			default:
				c.fail(now, idlePeriod, backoffMax)
			}
			c.running.Store(false)
			poke(m.wake)
		})
		return
	}
}

// cleanSpace copies those of a space's batches that are the first to leave it and have no clean
// image on a disk, in the policy's order, until one fails or ctx ends. seen is what the space is like
// at the beginning.
func (m *Monitor) cleanSpace(ctx context.Context, s *space, seen coverage) error {
	c := &m.cleaner
	var after Victim
	passed, copied := int64(0), int64(0)
	for more := true; more; {
		list := m.from(after, s, shortlistMax)
		more = len(list) == shortlistMax
		for _, v := range list {
			now := s.State()
			above := now.Pressure - now.Stop
			if above <= 0 {
				return nil // it may rise again
			}
			if passed >= above {
				more = false
				break
			}
			after, passed = v, passed+v.Bytes
			onDisk := func(in tier.ID) bool { return in.Kind.IsStorage() }
			if v.not.Has(tier.Disk) || slices.ContainsFunc(v.Batch.Copies(), onDisk) {
				continue
			}
			select {
			case <-time.After(time.Until(c.next)):
			case <-ctx.Done():
			}
			if now := v.Batch.Info(); !movable(&now) || now.Space != s.ID() {
				m.BatchChanged(v.Batch, now)
				continue
			}
			start := time.Now()
			n, err := m.cfg.WriteAhead(ctx, v.Batch, quiet)
			if n > 0 { // with an error a part of it may have been written
				took := float64(v.Bytes) / float64(m.cfg.AheadRate) * float64(time.Second)
				c.next = start.Add(time.Duration(min(took, float64(century))))
				c.failures = 0
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				return err
			}
			copied += n
		}
	}
	if copied == 0 {
		s.covered = seen
	}
	return nil
}
