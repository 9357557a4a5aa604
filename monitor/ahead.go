package monitor

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// Writing ahead: while nothing is needed, the batches that would be the first to leave a space that
// is above its stop mark are copied to a disk. There are so many that the space would be at its
// stop mark without them. One goroutine copies one batch after the other. It ends when anything is
// needed.
//
// A space is looked at again when its batches, its pressure or the copies on disks have changed. So
// an engine in which all copies are made sleeps.

// writing is what the monitor remembers of that. It is for Run's goroutine alone, except for ended.
type writing struct {
	cancel   context.CancelCauseFunc // of the goroutine; nil if there is none
	ended    chan written            // by the goroutine
	soon     bool                    // there is something to write, as soon as the disks are free
	after    time.Time               // nothing is begun before
	next     time.Time               // nor anything written, because of the rate
	failures int                     // in a row
}

// coverage is what a space was like when all that is above its stop mark had copies.
type coverage struct {
	version       uint64 // of the index
	above, cached int64
}

// written is what became of a goroutine that wrote ahead.
type written struct {
	space int
	seen  coverage // when it began
	bytes int64
	next  time.Time
	err   error // why it ended early
}

// errNeeded ends writing ahead.
var errNeeded = errors.New("monitor: something is needed")

// quiet is for how long nothing must have been needed, and the disks idle, before anything is
// written.
const quiet = 200 * time.Millisecond

// writeAhead begins to copy batches, if there are some to be copied.
func (m *Monitor) writeAhead(ctx context.Context, now time.Time) {
	w := &m.writing
	if m.cfg.WriteAhead == nil || m.cfg.AheadRate <= 0 || w.cancel != nil || now.Before(w.after) {
		return
	}
	w.soon = false
	for i := len(m.spaces) - 1; i >= 0; i-- { // what is nearest to a disk goes there first
		job, seen := m.uncopied(i)
		if len(job) == 0 {
			continue
		}
		ctx, cancel := context.WithCancelCause(ctx)
		w.cancel = cancel
		next := w.next
		m.executors.Add(1)
		go func() {
			defer m.executors.Done()
			w.ended <- m.copyAhead(ctx, i, seen, job, next)
		}()
		return
	}
}

// uncopied returns the batches of a space that are to be copied, the coldest first.
func (m *Monitor) uncopied(i int) (job []Victim, seen coverage) {
	s := m.spaces[i]
	above := s.PressureBytes() - s.Stop()
	if above <= 0 || !s.lower.Has(tier.Disk) || m.isLost(s) {
		return nil, seen
	}
	seen = coverage{version: m.index.summary(i).version, above: above}
	for _, to := range m.spaces {
		if to.Kind() == tier.Disk {
			seen.cached += to.Inside().Cached()
		}
	}
	if seen == s.covered {
		return nil, seen
	}
	victims, _ := m.victims(nil, i, inEach(math.MaxInt64), shortlistMax)
	for _, v := range victims {
		if above <= 0 {
			break
		}
		above -= v.Bytes
		if !v.not.Has(tier.Disk) && !m.onDisk(v) {
			job = append(job, v)
		}
	}
	if len(job) == 0 {
		s.covered = seen
	}
	return job, seen
}

// onDisk reports whether there is a copy of v on a disk.
func (m *Monitor) onDisk(v Victim) bool {
	for i, s := range m.spaces {
		if s.Kind() == tier.Disk && v.copied.Has(i) {
			return true
		}
	}
	return false
}

// copyAhead copies batches as fast as the rate allows, until one fails.
func (m *Monitor) copyAhead(ctx context.Context, i int, seen coverage, job []Victim, next time.Time) written {
	s := m.spaces[i]
	w := written{space: i, seen: seen, next: next}
	for _, v := range job {
		if w.err = pause(ctx, time.Until(w.next)); w.err != nil || s.PressureBytes() <= s.Stop() {
			break
		}
		if !m.canLeave(v.Batch.Info(), s.ID()) {
			continue
		}
		start := time.Now()
		var n int64
		func() {
			defer guard.Error(&w.err, "Config.WriteAhead")
			n, w.err = m.cfg.WriteAhead(ctx, v.Batch, quiet)
		}()
		w.bytes += n
		if n > 0 || w.err != nil { // or a part of it may have been written
			w.next = start.Add(time.Duration(float64(v.Bytes) / float64(m.cfg.AheadRate) * float64(time.Second)))
		}
		if w.err != nil {
			break
		}
	}
	return w
}

// pause waits, and returns why ctx has ended.
func pause(ctx context.Context, d time.Duration) error {
	if d > 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-ctx.Done():
		}
	}
	return context.Cause(ctx)
}

// stopWriting ends writing ahead, because something is needed, and has it begin later.
func (m *Monitor) stopWriting(now time.Time) {
	m.writing.after = latest(m.writing.after, now.Add(quiet))
	if m.writing.cancel != nil {
		m.writing.cancel(errNeeded)
	}
}

// hasWritten notes the end of a goroutine. A space of which nothing could be copied is left until
// it has changed. After an error there is a pause: a short one if others use the disks, and else
// longer ones, because a disk that is full or broken stays so for a while.
func (m *Monitor) hasWritten(r written) {
	w, now := &m.writing, time.Now()
	w.cancel(nil)
	w.cancel, w.next = nil, r.next
	switch {
	case r.err == nil:
		w.failures = 0
		if r.bytes == 0 {
			m.spaces[r.space].covered = r.seen
		}
	case errors.Is(r.err, context.Canceled) || errors.Is(r.err, errNeeded):
		w.soon, w.after = true, latest(w.after, now.Add(quiet))
	default:
		w.after = now.Add(backoff(idlePeriod, w.failures+1))
		w.failures++
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// endWriting takes note of the end of a goroutine when Run ends.
func (m *Monitor) endWriting() {
	if m.writing.cancel != nil {
		m.hasWritten(<-m.writing.ended)
	}
}
