// Package pace measures how fast a volume is written and read. From that follow whose turn it is
// among volumes (Pacer), and how much may be under way on one (Window).
package pace

import (
	"cmp"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/stripe"
)

// Stripe is what volumes have in common that are used side by side. The zero value is ready, and
// not to be copied. It is safe for concurrent use.
type Stripe struct {
	front atomic.Int64 // the largest lead at which one of them was given bytes
}

// reach raises the front to lead, and returns it.
func (s *Stripe) reach(lead time.Duration) time.Duration {
	for {
		front := s.front.Load()
		if int64(lead) <= front {
			return time.Duration(front)
		}
		if s.front.CompareAndSwap(front, int64(lead)) {
			return lead
		}
	}
}

const (
	// catchUp bounds the skipped time that a full or failed volume may make up for when it is used
	// again. Otherwise it would have to take everything until it had been busy for as long as the
	// others.
	catchUp = time.Second

	// recent is over how much writing a bandwidth is averaged: longer than a
	// device's hiccups and shorter than a query. The lead, by which bytes are shared
	// out, counts time itself, so that nothing but the price of the backlog depends on it.
	recent = time.Second

	// unmeasured is the bandwidth, in bytes a second, that the backlog of a volume is
	// priced with before anything was written: the same for all.
	unmeasured = 1 << 30

	// fastest, in bytes a second, keeps the bandwidth a number where a test's clock
	// says that writing takes no time.
	fastest = 1 << 40

	// After a failure a volume is skipped for so long, twice as long after the next, and so on up
	// to 64 s. Then one Alloc may try it.
	setback     = time.Second
	setbackMost = 6 // doublings
)

// Pacer measures how long a volume has been written to, how fast that went, and what it has taken
// on: what stripe.Pace is made of. It is safe for concurrent use.
//
// Its lead is the time in which at least one write was under way, plus what the backlog will take.
// Sharing out by that, and not by the bandwidth itself, makes up for every error of the estimate
// as soon as the bytes are written.
type Pacer struct {
	stripe *Stripe

	mu struct {
		lockrank.Mutex[lockrank.Device]
		backlog  int64         // bytes handed out, and not written since
		promised int64         // bytes, by the last call of Promised
		writing  int           // requests under way
		since    time.Time     // up to when busy is counted, while there are some
		busy     time.Duration // in which there were some
		skipped  time.Duration // added to busy where the stripe went on without the volume

		speed speed // of writing

		failures int       // in a row
		until    time.Time // when the setback of the last one ends
		trying   bool      // it has ended, and one Alloc tries whether the volume works again
	}
}

// NewPacer returns the pacer of a volume of a stripe; nil: the volume is by itself.
func NewPacer(s *Stripe) *Pacer {
	if s == nil {
		s = new(Stripe)
	}
	return &Pacer{stripe: s}
}

// Pace says how far ahead of the others the volume is.
func (p *Pacer) Pace() stripe.Pace {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	return stripe.Pace{
		Lead: p.leadLocked(now), Bandwidth: cmp.Or(p.bandwidthLocked(), unmeasured), Ailing: p.ailingLocked(now),
	}
}

// Promised takes how many bytes of the space are promised and not drawn, before each Alloc.
func (p *Pacer) Promised(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.promised = n
}

func (p *Pacer) leadLocked(now time.Time) time.Duration {
	lead := stripe.Pace{Lead: p.mu.busy + p.mu.skipped, Bandwidth: cmp.Or(p.bandwidthLocked(), unmeasured)}
	if p.mu.writing > 0 {
		lead.Lead += now.Sub(p.mu.since)
	}
	return lead.After(p.mu.backlog).Lead
}

// bandwidthLocked returns what was measured, in bytes a second; 0 for nothing yet.
func (p *Pacer) bandwidthLocked() int64 { return p.mu.speed.bytesPerSecond() }

func (p *Pacer) ailingLocked(now time.Time) bool { return p.mu.failures > 0 && now.Before(p.mu.until) }

// TakeOn adds n bytes to the backlog. If the volume was skipped, the time before catchUp does not
// count as idle. A volume was not skipped if others went first because so much is promised here:
// else they would do so for as long as there is a reservation.
func (p *Pacer) TakeOn(n int64) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	lead := stripe.Pace{Lead: p.leadLocked(now), Bandwidth: cmp.Or(p.bandwidthLocked(), unmeasured)}.After(p.mu.promised).Lead
	if behind := p.stripe.reach(lead) - lead - catchUp; behind > 0 {
		p.mu.skipped += behind
	}
	p.mu.backlog += n
	if p.mu.failures > 0 && !p.ailingLocked(now) { // the others wait for what becomes of this one
		p.mu.trying = true
		p.mu.until = now.Add(pause(p.mu.failures))
	}
}

// Settle takes n bytes, which were written or never will be, off the backlog.
func (p *Pacer) Settle(n int64) {
	if n == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.backlog -= n
}

// Begin says that a write begins.
func (p *Pacer) Begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now() // see Stats
	if p.mu.writing == 0 {
		p.mu.since = now
	}
	p.mu.writing++
}

// End says that a write has ended: n bytes were written, of which settled were in the
// backlog. Or n is 0, and it failed or was given up. How long that took says nothing
// of how fast the volume writes: a disk that gives a write up after half a minute would
// count as one of a byte a second.
func (p *Pacer) End(n, settled int64, failed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now() // see Stats
	took := now.Sub(p.mu.since)
	p.mu.since = now
	p.mu.busy += took
	p.mu.writing--
	p.mu.backlog -= settled
	switch {
	case failed:
		p.failLocked(now)
	case n > 0:
		p.mu.speed.add(float64(n), took.Seconds())
		p.mu.failures, p.mu.trying = 0, false
	}
}

// Fail records that the volume failed, so that others are tried first for a while.
func (p *Pacer) Fail() {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failLocked(now)
}

func (p *Pacer) failLocked(now time.Time) {
	if p.ailingLocked(now) && !p.mu.trying {
		return // several that were under way together are one failure
	}
	p.mu.trying = false
	p.mu.failures++
	p.mu.until = now.Add(pause(p.mu.failures))
}

func pause(failures int) time.Duration { return setback << min(failures-1, setbackMost) }

// Stats are figures of writing at a moment.
type Stats struct {
	Bandwidth int64 // bytes a second, of late; 0: nothing yet
	Backlog   int64 // bytes handed out, and not written since
	Writing   time.Duration
	Ailing    bool
}

// Stats returns the figures.
func (p *Pacer) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now() // with the mutex held: since never goes back, nor does the time of writing
	s := Stats{Bandwidth: p.bandwidthLocked(), Backlog: p.mu.backlog, Writing: p.mu.busy, Ailing: p.ailingLocked(now)}
	if p.mu.writing > 0 {
		s.Writing += now.Sub(p.mu.since)
	}
	return s
}
