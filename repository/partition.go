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

// entry is a batch that a repository holds. All fields but b, part and seq are
// guarded by the repository's lock.
type entry struct {
	b    *batch.Batch
	part *partition
	seq  uint64 // order of arrival within the plan

	class   class
	gone    bool      // the repository does not hold it any more
	kind    tier.Kind // where the data was last seen; 0 when it is gone
	bytes   int64     // charged there; 0 for a batch that was dropped
	told    uint64    // the version of the batch that this is of
	changed chan struct{}
	holder  *Claim // has claimed it for longer than a call; nil: none. See holdLocked
}

// holdLocked makes c the holder of a claimed entry; nil ends that.
func (e *entry) holdLocked(c *Claim) {
	if e.holder != nil {
		e.part.held--
	}
	if e.holder = c; c != nil {
		e.part.held++
	}
}

// class is which of its partition's sets an entry is in. There is one for each state that a batch
// was last seen in, and one for claimed entries, whose claimer is about to take them and may put
// them back.
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
	wantRest  // as wantTask, but only until the partition is empty
	wantClaim // as wantTask, but not for what open claims hold
	wantAll   // all that the partition holds, as a Claim
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
	wantAll:     {idle, taskCreated, processing},
}

// A partition is a queue. Its entries are kept by class, each ordered by arrival,
// so that a taker finds the one that it is given in logarithmic time, however
// many there are. Guarded by the repository's lock.
//
// Invariant: no waiter could be served. Every change calls matchLocked.
type partition struct {
	number    int
	sets      [classes]*btree.BTreeG[*entry]
	held      int               // of those that are claimed: in Claims
	last      uint64            // the largest seq that was put
	queues    [queues]list.List // of *waiter, in order of arrival
	waiting   int               // in all queues
	arrived   uint64            // number of the last waiter
	gathering *gathering        // of the first that waits for all; nil: it has not begun
}

// waiter is a taker that waits. The repository's lock guards e, all and err until
// ready is closed, then they are the taker's.
type waiter struct {
	arrival uint64
	ready   chan struct{}
	e       *entry // claimed for it
	all     *Claim // or this, if it wants all
	err     error
}

// gathering is how a taker gets all that the partition held when it began. It keeps what
// it has, so that it waits for each batch once. There is one at a time in a partition: two
// would wait for each other.
type gathering struct {
	claim   *Claim   // what it has
	last    uint64   // the largest seq that it wants
	awaited []*entry // in transit, or in the hands of a call, when it began; some are gone since
}

func newPartition(number int, nodes *btree.FreeListG[*entry]) *partition {
	p := &partition{number: number}
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

// firstLocked returns the entry for a taker; nil if there is none now. It is the oldest in a state
// that the batch can move from. A batch in transit is back in such a state in a moment: until then,
// takers that want the order get no younger one.
func (p *partition) firstLocked(w want) *entry {
	e := p.oldestLocked(eligible[w&^unordered]...)
	switch {
	case e == nil || w&unordered != 0:
		return e
	case w == wantAll:
		if p.gathering == nil || e.seq > p.gathering.last {
			return nil
		}
		return e
	}
	if moving, ok := p.sets[inTransit].Min(); ok && moving.seq < e.seq {
		return nil
	}
	return e
}

func older(a, b *entry) int { return cmp.Compare(a.seq, b.seq) }

// allLocked returns the entries in order of arrival.
func (p *partition) allLocked() []*entry {
	entries := make([]*entry, 0, p.lenLocked())
	for _, s := range p.sets {
		s.Ascend(func(e *entry) bool {
			entries = append(entries, e)
			return true
		})
	}
	if !slices.IsSortedFunc(entries, older) { // it is when all are in one state
		slices.SortFunc(entries, older)
	}
	return entries
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
	if w == wantAll && at == p.queues[w].Front() {
		p.gathering = nil
	}
	p.waiting--
	return p.queues[w].Remove(at).(*waiter)
}

// matchLocked hands out entries while a waiter can have one: to the one that waits
// longest. It ends waits that have become vain.
func (p *partition) matchLocked(r *Repository, s *signals) {
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
			if !p.gatherLocked(r, s) {
				break
			}
			continue
		}
		p.moveLocked(best, claimed)
		if queue == wantAll {
			p.gathering.claim.addLocked(best)
			continue
		}
		wt := p.leaveLocked(queue, p.queues[queue].Front())
		wt.e = best
		s.add(wt.ready)
	}
	if p.waiting > 0 {
		for w := range queues {
			if err := p.endLocked(r, w); err != nil {
				p.endWaitsLocked(w, err, s)
			}
		}
	}
}

// gatherLocked begins or ends the gathering of the first taker that wants all. It says
// whether that has changed what waiters can have.
func (p *partition) gatherLocked(r *Repository, s *signals) bool {
	at, g := p.queues[wantAll].Front(), p.gathering
	if at == nil {
		return false
	}
	if g == nil {
		if p.endLocked(r, wantAll) != nil {
			return false
		}
		g = &gathering{claim: &Claim{r: r, part: p}, last: p.last}
		for _, c := range []class{inTransit, claimed} { // of which none is held
			p.sets[c].Ascend(func(e *entry) bool {
				g.awaited = append(g.awaited, e)
				return true
			})
		}
		p.gathering = g
		return true
	}
	others := func(e *entry) bool { return e.holder != nil && e.holder != g.claim }
	if p.held > len(g.claim.entries) && slices.ContainsFunc(g.awaited, others) {
		wt := p.leaveLocked(wantAll, at)
		g.claim.giveBackLocked(s)
		wt.err = p.claimedErrorLocked(r)
		s.add(wt.ready)
		return true
	}
	for n := len(g.awaited); n > 0; n-- { // only the last is looked at: there may be many
		if e := g.awaited[n-1]; e.holder != g.claim && !e.gone {
			return false
		}
		g.awaited = g.awaited[:n-1]
	}
	p.gathering = nil
	g.claim.leaveDroppedLocked(s)
	if len(g.claim.entries) > 0 { // else it begins again
		slices.SortFunc(g.claim.entries, older)
		wt := p.leaveLocked(wantAll, at)
		wt.all = g.claim
		s.add(wt.ready)
	}
	return true
}

// endLocked returns why a taker that finds nothing now need not wait; nil if it must.
func (p *partition) endLocked(r *Repository, w want) error {
	w &^= unordered
	switch n := p.lenLocked(); {
	case n == 0 && (r.mu.inputClosed || w == wantRest || w == wantAll):
		return io.EOF
	case p.held > 0 && w == wantAll && p.gathering == nil:
		return p.claimedErrorLocked(r)
	case n == p.held && r.mu.inputClosed && w == wantClaim:
		return p.claimedErrorLocked(r)
	}
	return nil
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
	first chan struct{} // spares the slice, because there is rarely more than one
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
