package monitor

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// Writing ahead: while nothing is needed, the batches that would be the first to leave a space that
// is above its stop mark are copied to a disk. There are so many that the space would be at its
// stop mark without them. One goroutine copies one batch after the other. It ends when anything is
// needed.
//
// What is to be copied is searched for by the second: as much as the rate allows in that. A space
// where the search found nothing is searched again when its batches, its pressure or what disks have
// of copies and room has changed. So an engine in which all copies are made sleeps.

// writing is what the monitor remembers of that. It is for Run's goroutine alone, except for ended.
type writing struct {
	cancel   context.CancelCauseFunc // of the goroutine; nil if there is none
	ended    chan written            // by the goroutine
	soon     bool                    // there is something to write, as soon as the disks are free
	after    time.Time               // nothing is begun before
	next     time.Time               // nor anything written, because of the rate
	failures int                     // in a row
	turns    int                     // in a row that others used the disks
}

// coverage is what a space was like when all that is above its stop mark had copies.
type coverage struct {
	version uint64 // of the index
	victims int    // those that are kept back do not count
	above   int64
	room    int64 // of disks, to their marks, without copies
}

// search is how far a space was searched for batches to copy, in the policy's order of keys.
type search struct {
	after  Victim   // the last that was looked at; zero at the beginning
	seen   coverage // at the beginning: what changes meanwhile may be behind it
	passed int64    // the bytes up to there
	wrote  bool     // something was copied since the beginning
}

// pagesMax is how many shortlists are searched at a look. A batch takes about 100 ns.
const pagesMax = 16

// written is what became of a goroutine that wrote ahead.
type written struct {
	space int
	seen  coverage // when its search began
	last  bool     // the search was over, and nothing was copied before
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
		job, begin := m.uncopied(i)
		if len(job) == 0 {
			continue
		}
		ctx, cancel := context.WithCancelCause(ctx)
		w.cancel = cancel
		next := w.next
		m.working.Add(1)
		go func() {
			labels.WriteAhead.Set()
			defer m.working.Done()
			begin.next = next
			w.ended <- m.copyAhead(ctx, begin, job)
		}()
		return
	}
}

// uncopied returns the batches of a space that are to be copied next, the coldest first, and with
// what their writing begins.
func (m *Monitor) uncopied(i int) (job []Victim, w written) {
	s := m.spaces[i]
	above := s.PressureBytes() - s.Stop()
	if above <= 0 || !s.lower.Has(tier.Disk) || s.Lost() != nil {
		s.search = search{}
		return nil, w
	}
	sum := m.index.summary(i)
	disks := slices.DeleteFunc(s.below(m), func(to *space) bool { return to.Kind() != tier.Disk })
	seen := coverage{version: sum.changes, victims: sum.victims, above: above}
	for _, to := range disks {
		u := to.Usage()
		seen.room += to.Stop() + to.Limit() - u.Used() - u.Cached
	}
	if seen == s.covered {
		return nil, w
	}
	if s.search.after.ID == 0 {
		s.search.seen = seen
	}
	w = written{space: i, seen: s.search.seen}
	bytes := int64(0)
	for range pagesMax {
		list := m.index.from(s.search.after, i)
		m.findCopies(disks, list)
		for _, v := range list {
			if s.search.passed >= above {
				break
			}
			s.search.after, s.search.passed = Victim{ID: v.ID, Key: v.Key}, s.search.passed+v.Bytes
			onDisk := slices.ContainsFunc(disks, func(to *space) bool { return v.copied.Has(to.place) })
			if v.not.Has(tier.Disk) || onDisk {
				continue
			}
			job, bytes = append(job, v), bytes+v.Bytes
			if bytes >= m.cfg.AheadRate {
				return job, w
			}
		}
		if len(list) < shortlistMax || s.search.passed >= above {
			if w.last = !s.search.wrote; w.last && len(job) == 0 {
				s.covered = w.seen
			}
			s.search = search{}
			return job, w
		}
		if len(job) > 0 {
			return job, w
		}
	}
	m.writing.soon = true // it goes on at the next look
	return nil, w
}

// century bounds how long the rate allows nothing else.
const century = 100 * 365 * 24 * time.Hour

// copyAhead copies batches as fast as the rate allows, until one fails.
func (m *Monitor) copyAhead(ctx context.Context, w written, job []Victim) written {
	s := m.spaces[w.space]
	for _, v := range job {
		if w.err = pause(ctx, time.Until(w.next)); w.err != nil {
			break
		}
		if s.PressureBytes() <= s.Stop() {
			w.last = false // it may rise again
			break
		}
		if now := v.Batch.Info(); !canLeave(&now, s) {
			_ = m.index.note(v.Batch, &now, false) // leases begin without an announcement
			continue
		}
		start := time.Now()
		var n int64
		func() {
			defer guard.Error(&w.err, "Config.WriteAhead")
			n, w.err = m.cfg.WriteAhead(ctx, v.Batch, quiet)
		}()
		if n > 0 { // with an error a part of it may have been written
			took := float64(v.Bytes) / float64(m.cfg.AheadRate) * float64(time.Second)
			w.next = start.Add(time.Duration(min(took, float64(century))))
		}
		if w.err != nil {
			break
		}
		w.bytes += n
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
	m.writing.after, m.writing.turns = latest(m.writing.after, now.Add(quiet)), 0
	if m.writing.cancel != nil {
		m.writing.cancel(errNeeded)
	}
}

// hasWritten notes the end of a goroutine. A space where the search found nothing is left until it has
// changed. After an error there is a pause, a longer one each time: others that use the
// disks may go on for long, and a disk that is full or broken stays so for a while.
func (m *Monitor) hasWritten(r written) {
	w, now := &m.writing, time.Now()
	w.cancel(nil)
	w.cancel, w.next = nil, r.next
	s := m.spaces[r.space]
	if s.search.wrote = s.search.wrote || r.bytes > 0; r.err != nil {
		s.search = search{} // what was not written is looked for again
	}
	switch {
	case r.err == nil:
		w.failures, w.turns = 0, 0
		if r.bytes == 0 && r.last {
			s.covered = r.seen
		}
	case errors.Is(r.err, context.Canceled) || errors.Is(r.err, errNeeded):
		if w.turns++; r.bytes > 0 {
			w.turns = 1
		}
		pause := quiet << min(w.turns-1, 6)
		w.soon, w.after = pause < idlePeriod, latest(w.after, now.Add(pause))
	default:
		w.after = now.Add(backoff(idlePeriod, w.failures+1, backoffMax))
		w.failures++
	}
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
