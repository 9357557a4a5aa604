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
	holder  holder
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

// holder is the kind of claim that holds an entry for longer than a call.
type holder uint8

const (
	unheld    holder = iota
	claimOpen        // a Claim
	gatherer         // the partition's gathering
)

// holdLocked makes h the holder of a claimed entry.
func (e *entry) holdLocked(h holder) {
	if e.holder != unheld {
		e.part.held--
	}
	if e.holder = h; h != unheld {
		e.part.held++
	}
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
	wantAll   // all batches of the partition, as a Claim
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
	held      int               // entries in Claims and in the gathering
	last      uint64            // the largest seq that was put
	queues    [queues]list.List // of *waiter, in order of arrival
	waiting   int               // waiters in all queues
	arrived   uint64            // number of the last waiter
	gathering *gathering        // of the first taker that waits for all; nil before it begins
}

// queued is an entry in a set, with its order by value.
type queued struct {
	seq uint64
	e   *entry
}

// waiter is a taker that waits. The repository's lock guards e, all and err until
// ready is closed, then they are the taker's.
type waiter struct {
	arrival uint64
	ready   chan struct{}
	e       *entry // claimed for the taker
	all     *Claim // or this, if the taker wants all
	err     error
}

// gathering is how a taker gets all batches that the partition held when it began. It keeps the
// entries that it has, so that it waits for each once. There is one at a time in a partition: two
// would wait for each other.
type gathering struct {
	claim   *Claim   // the entries so far
	last    uint64   // the largest seq that it wants
	awaited []*entry // in transit, or claimed by a call, when it began; some may be gone since
}

func newPartition(r *Repository, number int) *partition {
	p := &partition{r: r, number: number}
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
	switch {
	case e == nil || w&unordered != 0:
		return e
	case w == wantAll:
		if p.gathering == nil || e.seq > p.gathering.last {
			return nil
		}
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
	if w == wantAll && at == p.queues[w].Front() {
		p.gathering = nil
	}
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
			if !p.gatherLocked() {
				break
			}
			continue
		}
		p.moveLocked(best, claimed)
		if queue == wantAll {
			p.gathering.claim.addLocked(best, gatherer)
			continue
		}
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

// gatherLocked begins or ends the gathering of the first taker that wants all. It reports whether
// that has changed what waiters can have.
func (p *partition) gatherLocked() bool {
	at, g := p.queues[wantAll].Front(), p.gathering
	if at == nil {
		return false
	}
	if g == nil {
		if p.endLocked(wantAll) != nil {
			return false
		}
		g = &gathering{claim: &Claim{r: p.r, part: p}, last: p.last}
		for _, c := range []class{inTransit, claimed} { // none of them is held
			p.sets[c].Ascend(func(q queued) bool {
				g.awaited = append(g.awaited, q.e)
				return true
			})
		}
		p.gathering = g
		return true
	}
	inClaim := func(e *entry) bool { return e.holder == claimOpen }
	if p.held > len(g.claim.entries) && slices.ContainsFunc(g.awaited, inClaim) {
		wt := p.leaveLocked(wantAll, at)
		g.claim.giveBackLocked()
		wt.err = p.claimedErrorLocked()
		close(wt.ready)
		return true
	}
	for n := len(g.awaited); n > 0; n-- { // only the last is looked at: there may be many
		if e := g.awaited[n-1]; e.class != gone && e.holder != gatherer {
			return false
		}
		g.awaited = g.awaited[:n-1]
	}
	p.gathering = nil
	g.claim.entries = slices.DeleteFunc(g.claim.entries, func(e *entry) bool {
		if e.b.Inside().Cut().State != batch.Released {
			return false
		}
		e.letGoLocked() // it was dropped in place
		p.r.unclaimLocked(e)
		return true
	})
	if len(g.claim.entries) > 0 { // else it begins again
		slices.SortFunc(g.claim.entries, older)
		for _, e := range g.claim.entries {
			e.holder = claimOpen
		}
		wt := p.leaveLocked(wantAll, at)
		wt.all = g.claim
		close(wt.ready)
	}
	return true
}

// endLocked returns why a taker that finds nothing now need not wait; nil if it must.
func (p *partition) endLocked(w want) error {
	w &^= unordered
	switch ended := p.r.mu.inputClosed; {
	case p.n == 0 && (ended || w == wantRest || w == wantAll):
		return io.EOF
	case p.held > 0 && w == wantAll && p.gathering == nil:
		return p.claimedErrorLocked()
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
