package repository

import (
	"cmp"
	"container/list"
	"context"
	"io"
	"math"
	"slices"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
)

// entry is a batch for as long as it is in a repository: a batch that is put again gets another
// entry. The batch calls it at each change, and is asked for its state when that matters. The
// repository's lock guards at and claim; the other fields do not change.
//
// An entry is free, or claimed by one Claim at a time. A claimed entry keeps its place in the
// queue. It leaves the queue when its claimer has taken the batch, or when the batch is dropped
// while the entry is free.
type entry struct {
	b     *batch.Batch
	seq   uint64 // order of arrival within the plan
	size  int64  // bytes of the batch's image, however small it is where it lies
	part  *partition
	at    *list.Element // place in the partition's queue; nil once the entry has left
	claim *Claim        // that has the entry; nil if it is free
}

// older compares entries by arrival.
func older(a, b *entry) int { return cmp.Compare(a.seq, b.seq) }

// A partition is a queue of entries in order of arrival, and a line of the takers that wait for
// some. The repository's lock guards it.
//
// Invariant: whenever the lock is free, no taker in the line could be served, but for a change of a
// batch that is about to be announced. So every change of an entry or of the queue, and every
// announcement, ends with a call of serveLocked.
type partition struct {
	r         *Repository
	number    int
	queue     list.List     // of *entry, claimed ones too, because a taker may fail
	free      *list.Element // all entries before this one are claimed; nil if all are
	last      uint64        // the largest seq that was put
	takers    list.List     // of *taker, in the order in which they came
	gathering *Claim        // of the ClaimAll that is under way: two would wait for each other
}

// taker is a call that wants entries of a partition, with the options that it was given. It waits
// in the partition's line until it is served: it has its claim, or an error.
//
// There are four kinds. A taker of the first entries gets from 1 to limit of them. With only, it
// gets the one that it names. With whole, it gets all that the partition has. With schema, it gets
// none.
type taker struct {
	from       []batch.State // the states that the batches may be in; nil: any, also in a closed repository
	unordered  bool          // skip batches in transit, instead of waiting for them
	waitInput  bool          // an empty partition is not the end before the input is closed
	waitClaims bool          // nor is it the end if all that is left is in open claims
	noWait     bool
	limit      int    // entries; 0 means 1
	min, max   int64  // bytes; a max of 0 means no limit
	only       *entry // this one
	whole      bool   // all up to last
	last       uint64 // set at the first attempt
	schema     bool   // no entry: it waits until the schema is known, or the input is closed

	in      reservation.Strategy // where Drain and Reader fetch to; nil means the default
	ahead   int                  // how many batches to prefetch
	transit **batch.Transit

	claim  *Claim
	err    error
	ready  chan struct{} // closed when the taker is served
	served bool
}

// The states from which a batch can be taken as idle, with a task or in transit.
var (
	idle      = []batch.State{batch.Idle}
	workable  = []batch.State{batch.Idle, batch.TaskCreated, batch.Processing}
	removable = []batch.State{batch.Idle, batch.TaskCreated}
)

// newTaker returns a taker of batches in the states, with its options applied.
func newTaker(from []batch.State, opts []TakeOption) *taker {
	t := &taker{from: from, ahead: defaultAhead}
	for _, opt := range opts {
		opt(t)
	}
	return t
}

// partitionLocked returns a partition, and makes it if it is new.
func (r *Repository) partitionLocked(n int) (*partition, error) {
	if n < 0 || n >= r.opts.Partitions {
		return nil, r.errorf(", partition %d of %d: %w", n, r.opts.Partitions, ErrPartition)
	}
	p := r.mu.parts[n]
	if p == nil {
		p = &partition{r: r, number: n}
		r.mu.parts[n] = p
	}
	return p, nil
}

// claim puts the taker into the line of the partition, and waits until it is served, or ctx ends.
// Every call that takes batches begins here. The entries of the claim are the caller's: it must end
// each with remove, or all with restore. A brief claim ends soon, with the call that makes it, so
// others wait for its end. claim returns nil and no error if there is nothing now and the taker has
// noWait. The claim of a taker that drops its entry is empty if the entry has left.
func (r *Repository) claim(ctx context.Context, partition int, t *taker, brief bool) (*Claim, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, err := r.partitionLocked(partition)
	if err != nil {
		return nil, err
	}
	t.claim, t.err, t.ready, t.served = &Claim{r: r, part: p, brief: brief}, nil, make(chan struct{}), false
	at := p.takers.PushBack(t)
	p.serveLocked()
	if !t.served && !t.noWait {
		r.mu.Unlock()
		select {
		case <-t.ready:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		r.mu.Lock()
	}
	switch {
	case t.served && t.err != nil:
		return nil, t.err
	case t.served && err == nil:
		return t.claim, nil
	case !t.served:
		p.takers.Remove(at)
		if p.gathering == t.claim {
			p.gathering = nil
		}
	}
	p.restoreLocked(t.claim) // also if it was served at the moment at which ctx ended
	p.serveLocked()
	return nil, err
}

// serveLocked serves the takers that can be served, in their order.
func (p *partition) serveLocked() {
	for at := p.takers.Front(); at != nil; {
		t := at.Value.(*taker)
		if !t.tryLocked(p) {
			at = at.Next()
			continue
		}
		if t.err != nil && t.whole { // no other has got anything yet
			p.restoreLocked(t.claim)
		}
		if p.gathering == t.claim {
			p.gathering = nil
		}
		p.takers.Remove(at)
		t.served = true
		close(t.ready)
		at = p.takers.Front() // what t got, or gave back, may end the wait of an older one
	}
}

// tryLocked claims the entries that t can have now. It reports whether t is served: t has all that it
// waits for, or can never have it, and then err is set.
func (t *taker) tryLocked(p *partition) (served bool) {
	r, c := p.r, t.claim
	switch {
	case r.mu.closed && t.from != nil:
		t.err = r.closedError()
		return true
	case t.schema:
		return r.mu.schema != nil || r.mu.inputClosed
	case t.only != nil:
		return t.tryOnlyLocked(p)
	case t.whole:
		return t.tryWholeLocked(p)
	}
	for p.free != nil && p.free.Value.(*entry).claim != nil {
		p.free = p.free.Next()
	}
	var got []*entry
	limit, maxBytes, bytes := max(1, t.limit), cmp.Or(t.max, math.MaxInt64), int64(0)
	full, blocked := false, false
	for at := p.free; at != nil && !full && !blocked; at = at.Next() {
		e := at.Value.(*entry)
		if e.claim != nil {
			continue
		}
		if state := e.b.State(); !slices.Contains(t.from, state) {
			// A batch in transit is back in a moment. Until then no younger one comes before it.
			blocked = state == batch.InTransit && !t.unordered
			continue
		}
		if full = len(got) > 0 && e.size > maxBytes-bytes; !full {
			got = append(got, e)
			bytes += e.size
			full = len(got) == limit
		}
	}
	ended := r.mu.inputClosed
	switch {
	case len(got) > 0:
		if !full && bytes < t.min && (!ended || blocked) {
			return false
		}
		for _, e := range got {
			e.claim = c
		}
		c.entries = got
		return true
	case p.queue.Len() == 0 && (ended || !t.waitInput):
		t.err = io.EOF
		return true
	case ended && !c.brief && !t.waitClaims:
		if err := p.claimedErrorLocked(c); err.Claimed == err.Batches {
			t.err = err
			return true
		}
	}
	return false
}

// tryOnlyLocked is tryLocked for a taker of one entry.
func (t *taker) tryOnlyLocked(p *partition) (served bool) {
	e := t.only
	if e.claim != nil && !e.claim.brief && t.from == nil && p.r.mu.closed {
		e.claim = nil // a program may never end its claim; if it does, the entry is skipped
	}
	switch {
	case e.at == nil:
		if t.from != nil {
			t.err = p.r.errorf(", batch %d: %w", e.b.ID(), ErrUnknown)
		}
		return true
	case e.claim == nil && (t.from == nil || slices.Contains(t.from, e.b.State())):
		e.claim = t.claim
		t.claim.entries = []*entry{e}
		return true
	}
	return false
}

// tryWholeLocked is tryLocked for a taker of the whole partition. It claims what it can have, and
// keeps that while it waits for the others. Two such takers would wait for each other, so the second
// waits for the end of the first.
func (t *taker) tryWholeLocked(p *partition) (served bool) {
	c := t.claim
	if t.waitInput && !p.r.mu.inputClosed || p.gathering != nil && p.gathering != c {
		return false
	}
	p.gathering = c
	for t.last = cmp.Or(t.last, p.last); ; t.last = p.last {
		waits, others := false, false
		for at := p.queue.Front(); at != nil && at.Value.(*entry).seq <= t.last; at = at.Next() {
			switch e := at.Value.(*entry); {
			case e.claim == c:
			case e.claim == nil && e.b.State() != batch.InTransit:
				e.claim = c
				c.entries = append(c.entries, e)
			case e.claim == nil || e.claim.brief:
				waits = true
			default:
				others = true
			}
		}
		switch {
		case others:
			t.err = p.claimedErrorLocked(c)
			return true
		case waits:
			return false
		}
		for _, e := range c.entries {
			if e.b.State() == batch.Released { // another caller has dropped the batch in its place
				e.leaveLocked()
			}
		}
		c.entries = slices.DeleteFunc(c.entries, func(e *entry) bool { return e.at == nil })
		switch {
		case len(c.entries) > 0:
			slices.SortFunc(c.entries, older) // it may have got them in any order
			return true
		case p.queue.Len() == 0:
			t.err = io.EOF
			return true
		}
		// Others have taken or dropped all that was there: begin again.
	}
}

// claimedErrorLocked returns the error of a taker that cannot have what other open claims have.
func (p *partition) claimedErrorLocked(own *Claim) *ClaimedError {
	err := &ClaimedError{Key: p.r.key, Partition: p.number, Batches: p.queue.Len()}
	for at := p.queue.Front(); at != nil; at = at.Next() {
		if c := at.Value.(*entry).claim; c != nil && c != own && !c.brief {
			err.Claimed++
		}
	}
	return err
}

// restoreLocked ends the claim of a taker that has failed, on the entries that it still has. They
// are in their places, unless their batches were dropped. The caller calls serveLocked.
func (p *partition) restoreLocked(c *Claim) {
	for _, e := range c.entries {
		if e.claim != c {
			continue // the end of the repository took it
		}
		e.claim = nil
		if p.free == nil || e.seq < p.free.Value.(*entry).seq {
			p.free = e.at
		}
		if e.b.State() == batch.Released {
			e.leaveLocked()
		}
	}
}

// restore is restoreLocked with the lock.
func (c *Claim) restore() {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	c.part.restoreLocked(c)
	c.part.serveLocked()
}

// leaveLocked takes the entry out of the queue. The caller calls serveLocked.
func (e *entry) leaveLocked() {
	p := e.part
	if p.free == e.at {
		p.free = e.at.Next()
	}
	p.queue.Remove(e.at)
	e.at, e.claim = nil, nil
	delete(p.r.mu.entries, e.b.ID())
}

// BatchChanged implements batch.Observer: the batch calls it at each change. A free entry leaves when
// its batch was dropped.
func (e *entry) BatchChanged(_ *batch.Batch, now batch.Info) {
	r := e.part.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.at == nil || e.claim != nil {
		return
	}
	if now.State == batch.Released {
		e.leaveLocked()
	}
	e.part.serveLocked()
}

// remove ends the claim of a taker that owns the batch from now on: the entry leaves. If the batch was
// not dropped, the caller calls Detach.
func (r *Repository) remove(e *entry) {
	r.mu.Lock()
	if e.at != nil {
		e.leaveLocked()
		e.part.serveLocked()
	}
	r.mu.Unlock()
}
