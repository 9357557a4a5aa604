package repository

import (
	"cmp"
	"container/list"
	"io"
	"slices"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// entry is a batch for as long as it is in a repository: a batch that is put again gets another
// entry. The batch reports its changes to it. The repository's lock guards all fields but b and seq.
type entry struct {
	b       *batch.Batch
	seq     uint64 // order of arrival within the plan
	part    *partition
	version uint64        // of the batch when class, kind and bytes were noted
	bytes   int64         // charged where the data was last seen; 0 for a batch that was dropped
	changed chan struct{} // closed at the next change; nil without waiters
	class   class
	kind    tier.Kind // where the data was last seen; 0 when it is gone
	claim   *Claim    // that holds the entry for longer than a call; nil if none does
}

// older compares entries by arrival.
func older(a, b *entry) int { return cmp.Compare(a.seq, b.seq) }

// awaitLocked returns a channel that is closed when the entry changes.
func (e *entry) awaitLocked() <-chan struct{} {
	if e.changed == nil {
		e.changed = make(chan struct{})
	}
	return e.changed
}

// signalLocked wakes the goroutines that wait for a change of the entry.
func (e *entry) signalLocked() {
	if e.changed != nil {
		close(e.changed)
		e.changed = nil
	}
}

// holdLocked makes c, which may be nil, the claim that holds a claimed entry.
func (e *entry) holdLocked(c *Claim) {
	if e.claim != nil {
		e.part.held--
	}
	if e.claim = c; c != nil {
		e.part.held++
	}
	e.signalLocked()
}

// class is the set of its partition that an entry is in. There is one set for each state, by the
// state in which the repository last saw the batch, and one for claimed entries, whatever their
// state. The claimer of an entry is about to take it, and may put it back.
type class uint8

const (
	idle        = class(batch.Idle)
	taskCreated = class(batch.TaskCreated)
	processing  = class(batch.Processing)
	inTransit   = class(batch.InTransit)
	claimed     = inTransit + 1
	classes     = claimed + 1
	gone        = classes // the entry has left its partition; there is no set for it
)

// want is what kind of batch a taker waits for. Takers of one kind wait in one queue.
type want uint8

const (
	wantIdle want = iota
	wantTask
	wantTransit
	wantRest  // as wantTask, but only until the partition is empty
	wantClaim // as wantTask, but not for batches in open claims
	wants

	unordered want = 8                 // may be added: batches in transit are skipped
	queues         = wants + unordered // some are never used
)

// eligible lists the classes that a taker can be given: those from whose state
// the batch can move to the one wanted.
var eligible = [wants][]class{
	wantIdle:    {idle},
	wantTask:    {idle, taskCreated, processing},
	wantTransit: {idle, taskCreated},
	wantRest:    {idle, taskCreated, processing},
	wantClaim:   {idle, taskCreated, processing},
}

// A partition is a queue. Its entries are in one set per class, each ordered by arrival, so that a
// taker finds its entry in logarithmic time. The repository's lock guards it.
//
// Invariant: whenever the lock is free, no waiter could be served. So every change of an entry's
// class ends with a call of matchLocked.
type partition struct {
	r         *Repository
	number    int
	n         int // all entries, claimed ones too, because a taker may fail
	sets      [classes]*btree.BTreeG[queued]
	held      int               // entries in Claims
	last      uint64            // the largest seq that was put
	queues    [queues]list.List // of *waiter, in order of arrival
	waiting   int               // waiters in all queues
	arrived   uint64            // number of the last waiter
	gathering chan struct{}     // has a token while a ClaimAll runs: two would wait for each other
}

// queued is an entry in a set, with its order by value.
type queued struct {
	seq uint64
	e   *entry
}

// waiter is a taker that waits. The repository's lock guards e and err until ready is closed, then
// they are the taker's.
type waiter struct {
	arrival uint64
	ready   chan struct{}
	e       *entry // claimed for the taker
	err     error
}

func newPartition(r *Repository, number int) *partition {
	p := &partition{r: r, number: number, gathering: make(chan struct{}, 1)}
	for c := range p.sets {
		p.sets[c] = btree.NewWithFreeListG(32, func(a, b queued) bool { return a.seq < b.seq }, r.nodes)
	}
	return p
}

// oldestLocked returns the oldest entry of the classes, nil if there is none.
func (p *partition) oldestLocked(of ...class) (oldest *entry) {
	for _, c := range of {
		if q, ok := p.sets[c].Min(); ok && (oldest == nil || q.seq < oldest.seq) {
			oldest = q.e
		}
	}
	return oldest
}

// firstLocked returns the entry for a taker; nil if there is none now. It is the oldest in a state
// that the batch can move from. A batch in transit is back in such a state in a moment: until then,
// takers that want the order get no younger one.
func (p *partition) firstLocked(w want) *entry {
	e := p.oldestLocked(eligible[w&^unordered]...)
	if e == nil || w&unordered != 0 {
		return e
	}
	if moving := p.oldestLocked(inTransit); moving != nil && moving.seq < e.seq {
		return nil
	}
	return e
}

// allLocked returns the entries in order of arrival.
func (p *partition) allLocked() []*entry {
	entries := make([]*entry, 0, p.n)
	for _, set := range p.sets {
		set.Ascend(func(q queued) bool {
			entries = append(entries, q.e)
			return true
		})
	}
	slices.SortFunc(entries, older)
	return entries
}

// moveLocked moves an entry to the set of another class, or out of all sets if that is gone. It
// moves no data.
func (p *partition) moveLocked(e *entry, to class) {
	p.sets[e.class].Delete(queued{seq: e.seq})
	if e.class = to; to != gone {
		p.sets[to].ReplaceOrInsert(queued{e.seq, e})
	}
}

// waitLocked queues a taker.
func (p *partition) waitLocked(w want) (*waiter, *list.Element) {
	p.arrived++
	p.waiting++
	wt := &waiter{arrival: p.arrived, ready: make(chan struct{})}
	return wt, p.queues[w].PushBack(wt)
}

// leaveLocked takes a taker out of its queue.
func (p *partition) leaveLocked(w want, at *list.Element) *waiter {
	p.waiting--
	return p.queues[w].Remove(at).(*waiter)
}

// matchLocked hands out entries while a waiter can have one: to the one that waits longest. It ends
// the waits that cannot succeed any more.
func (p *partition) matchLocked() {
	for p.waiting > 0 {
		var (
			best  *entry
			queue want
			since uint64
		)
		for w := range queues {
			front := p.queues[w].Front()
			if front == nil {
				continue
			}
			arrival := front.Value.(*waiter).arrival
			if best != nil && since < arrival {
				continue
			}
			if e := p.firstLocked(w); e != nil {
				best, queue, since = e, w, arrival
			}
		}
		if best == nil {
			break
		}
		p.moveLocked(best, claimed)
		wt := p.leaveLocked(queue, p.queues[queue].Front())
		wt.e = best
		close(wt.ready)
	}
	if p.waiting > 0 {
		for w := range queues {
			if err := p.endLocked(w); err != nil {
				p.endWaitsLocked(w, err)
			}
		}
	}
}

// endLocked returns why a taker that finds nothing now need not wait; nil if it must.
func (p *partition) endLocked(w want) error {
	w &^= unordered
	switch ended := p.r.mu.inputClosed; {
	case p.n == 0 && (ended || w == wantRest):
		return io.EOF
	case p.n == p.held && ended && w == wantClaim:
		return p.claimedErrorLocked()
	}
	return nil
}

func (p *partition) endWaitsLocked(w want, err error) {
	for at := p.queues[w].Front(); at != nil; at = p.queues[w].Front() {
		wt := p.leaveLocked(w, at)
		wt.err = err
		close(wt.ready)
	}
}
