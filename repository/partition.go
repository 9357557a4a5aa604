package repository

import (
	"container/list"
	"io"
	"slices"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// entry is a batch that a repository holds. All fields but b, part, number and seq are
// guarded by the repository's lock.
type entry struct {
	b    *batch.Batch
	part *partition
	seq  uint64 // order of arrival within the plan

	number int // of the partition

	class   class
	kind    tier.Kind // where the data was last seen; 0 when it is gone
	bytes   int64     // charged there
	changed chan struct{}
	holder  *Claim // who has claimed it for longer than a call; nil: nobody
}

// class says in which of its partition's sets an entry is: one for each state
// that a batch was last seen in, and one for those that somebody has claimed,
// who is about to take them and may put them back.
type class uint8

const (
	idle        = class(batch.Idle)
	taskCreated = class(batch.TaskCreated)
	processing  = class(batch.Processing)
	inTransit   = class(batch.InTransit)
	claimed     = inTransit + 1
	classes     = claimed + 1
)

// want is what a taker waits for.
type want uint8

const (
	wantIdle want = iota
	wantTask
	wantTransit
	wantRest // as wantTask, but only until the partition is empty
	wants
)

// eligible lists the classes that a taker can be given: those from whose state
// the batch can move to the one wanted.
var eligible = [wants][]class{
	wantIdle:    {idle},
	wantTask:    {idle, taskCreated, processing},
	wantTransit: {idle, taskCreated},
	wantRest:    {idle, taskCreated, processing},
}

// A partition is a queue. Its entries are kept by class, each ordered by arrival,
// so that a taker finds the oldest that it can have in logarithmic time, however
// many older ones are in use or on the move. Guarded by the repository's lock.
//
// Nobody who waits could be served: whatever changes calls matchLocked.
type partition struct {
	sets    [classes]*btree.BTreeG[*entry]
	queues  [wants]list.List // of *waiter, in order of arrival
	waiting int              // in all queues
	arrived uint64           // number of the last waiter
}

// waiter is a taker that waits. The repository's lock guards e and err until
// ready is closed, then they are the taker's.
type waiter struct {
	arrival uint64
	ready   chan struct{}
	e       *entry // claimed for it
	err     error
}

func newPartition(nodes *btree.FreeListG[*entry]) *partition {
	p := new(partition)
	for i := range p.sets {
		p.sets[i] = btree.NewWithFreeListG(16, func(a, b *entry) bool { return a.seq < b.seq }, nodes)
	}
	return p
}

// lenLocked counts all entries, claimed ones too: their taker may fail.
func (p *partition) lenLocked() int {
	n := 0
	for _, s := range p.sets {
		n += s.Len()
	}
	return n
}

// oldestLocked returns the oldest entry of the classes, nil if there is none.
func (p *partition) oldestLocked(of ...class) *entry {
	var oldest *entry
	for _, c := range of {
		if e, ok := p.sets[c].Min(); ok && (oldest == nil || e.seq < oldest.seq) {
			oldest = e
		}
	}
	return oldest
}

// allLocked returns the batches in order of arrival.
func (p *partition) allLocked() []*batch.Batch {
	entries := make([]*entry, 0, p.lenLocked())
	for _, s := range p.sets {
		s.Ascend(func(e *entry) bool {
			entries = append(entries, e)
			return true
		})
	}
	older := func(a, b *entry) int {
		if a.seq < b.seq {
			return -1
		}
		return 1
	}
	if !slices.IsSortedFunc(entries, older) { // it is when all are in one state
		slices.SortFunc(entries, older)
	}
	batches := make([]*batch.Batch, len(entries))
	for i, e := range entries {
		batches[i] = e.b
	}
	return batches
}

func (p *partition) moveLocked(e *entry, to class) {
	p.sets[e.class].Delete(e)
	e.class = to
	p.sets[to].ReplaceOrInsert(e)
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

// matchLocked hands out entries for as long as somebody waits who can have one:
// to the one of them who waits longest. It ends waits that have become vain.
func (p *partition) matchLocked(inputClosed bool, s *signals) {
	for p.waiting > 0 {
		var (
			best  *entry
			queue want
			since uint64
		)
		for w := range wants {
			front := p.queues[w].Front()
			if front == nil {
				continue
			}
			arrival := front.Value.(*waiter).arrival
			if best != nil && since < arrival {
				continue
			}
			if e := p.oldestLocked(eligible[w]...); e != nil {
				best, queue, since = e, w, arrival
			}
		}
		if best == nil {
			break
		}
		wt := p.leaveLocked(queue, p.queues[queue].Front())
		p.moveLocked(best, claimed)
		wt.e = best
		s.add(wt.ready)
	}
	if p.waiting > 0 && p.lenLocked() == 0 {
		for w := range wants {
			if inputClosed || w == wantRest {
				p.endWaitsLocked(w, io.EOF, s)
			}
		}
	}
}

func (p *partition) endWaitsLocked(w want, err error, s *signals) {
	for at := p.queues[w].Front(); at != nil; at = p.queues[w].Front() {
		wt := p.leaveLocked(w, at)
		wt.err = err
		s.add(wt.ready)
	}
}

// signals are channels to be closed once the lock is free.
type signals struct {
	first chan struct{} // spares the slice, for there is rarely more than one
	more  []chan struct{}
}

func (s *signals) add(ch chan struct{}) {
	switch {
	case ch == nil:
	case s.first == nil:
		s.first = ch
	default:
		s.more = append(s.more, ch)
	}
}

func (s *signals) fire() {
	if s.first != nil {
		close(s.first)
	}
	for _, ch := range s.more {
		close(ch)
	}
}
