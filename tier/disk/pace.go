package disk

import (
	"cmp"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Stripe is what volumes have in common that are used side by side; see
// Config.Stripe. The zero value is ready, and not to be copied. It is safe for
// concurrent use.
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
	// catchUp is how much of the time that a volume was passed by, because it was
	// full or failed, it may make up for when it is used again. Otherwise it would
	// have to take everything until it had been busy for as long as the others.
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

	// After a failure a volume is passed by for so long, twice as long after the next,
	// and so on up to 64 s. Then one Alloc may try it.
	setback     = time.Second
	setbackMost = 6 // doublings
)

// pacer keeps how long a volume has been written to, how fast that went, and what it
// has taken on: what tier.Pace is made of.
//
// Its lead is the time in which at least one write was under way, plus what the
// backlog will take. Sharing out by that, and not by the bandwidth itself, makes up for
// every error of the estimate as soon as the bytes are written.
type pacer struct {
	stripe *Stripe

	mu struct {
		lockrank.Mutex[lockrank.Device]
		backlog  int64         // bytes handed out, and not written since
		promised int64         // bytes, when Promised told last
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

// Pace says how far ahead of the others the volume is. The space of the volume asks.
func (v *Volume) Pace() tier.Pace {
	now := time.Now()
	p := &v.pacer
	p.mu.Lock()
	defer p.mu.Unlock()
	return tier.Pace{
		Lead: p.leadLocked(now), Bandwidth: cmp.Or(p.bandwidthLocked(), unmeasured), Ailing: p.ailingLocked(now),
	}
}

// Promised takes how many bytes of the space are promised and not drawn, before each Alloc.
func (v *Volume) Promised(n int64) {
	p := &v.pacer
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.promised = n
}

func (p *pacer) leadLocked(now time.Time) time.Duration {
	lead := tier.Pace{Lead: p.mu.busy + p.mu.skipped, Bandwidth: cmp.Or(p.bandwidthLocked(), unmeasured)}
	if p.mu.writing > 0 {
		lead.Lead += now.Sub(p.mu.since)
	}
	return lead.After(p.mu.backlog).Lead
}

// bandwidthLocked returns what was measured, in bytes a second; 0 for nothing yet.
func (p *pacer) bandwidthLocked() int64 { return p.mu.speed.bytesPerSecond() }

func (p *pacer) ailingLocked(now time.Time) bool { return p.mu.failures > 0 && now.Before(p.mu.until) }

// takeOn adds n bytes to the backlog. If the volume was passed by, it does not count
// as idle what is longer ago than catchUp. It was not where others went first
// because so much is promised here: else they would do so for ever, and again, for as
// long as somebody holds a reservation.
func (p *pacer) takeOn(n int64) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	lead := tier.Pace{Lead: p.leadLocked(now), Bandwidth: cmp.Or(p.bandwidthLocked(), unmeasured)}.After(p.mu.promised).Lead
	if behind := p.stripe.reach(lead) - lead - catchUp; behind > 0 {
		p.mu.skipped += behind
	}
	p.mu.backlog += n
	if p.mu.failures > 0 && !p.ailingLocked(now) { // the others wait for what becomes of this one
		p.mu.trying = true
		p.mu.until = now.Add(pause(p.mu.failures))
	}
}

// settle takes n bytes, which were written or never will be, off the backlog.
func (p *pacer) settle(n int64) {
	if n == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.backlog -= n
}

// begin says that a write begins.
func (p *pacer) begin() {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.writing == 0 {
		p.mu.since = now
	}
	p.mu.writing++
}

// end says that a write has ended: n bytes were written, of which settled were in the
// backlog. Or n is 0, and it failed or was given up. How long that took says nothing
// of how fast the volume writes: a disk that gives a write up after half a minute would
// count as one of a byte a second.
func (p *pacer) end(n, settled int64, failed bool) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
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

// fail says that the volume could not do what it was asked for, so that others are
// asked first for a while.
func (p *pacer) fail() {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failLocked(now)
}

func (p *pacer) failLocked(now time.Time) {
	if p.ailingLocked(now) && !p.mu.trying {
		return // several that were under way together are one failure
	}
	p.mu.trying = false
	p.mu.failures++
	p.mu.until = now.Add(pause(p.mu.failures))
}

func pause(failures int) time.Duration { return setback << min(failures-1, setbackMost) }

// stats fills in the pacer's part of s.
func (p *pacer) stats(s *Stats) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	s.Bandwidth, s.Backlog, s.Ailing = p.bandwidthLocked(), p.mu.backlog, p.ailingLocked(now)
	s.Writing = p.mu.busy
	if p.mu.writing > 0 {
		s.Writing += now.Sub(p.mu.since)
	}
}
