package repository

import (
	"cmp"
	"container/list"
	"io"
	"iter"
	"slices"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/compact"
	"github.com/spillway-db/spillway/tier"
)

// entry is a batch for as long as it is in a repository: if it is put again, seq is another. The
// zero entry is none.
type entry struct {
	b   *batch.Batch
	seq uint64 // order of arrival within the plan
}

// facts are what a repository knows of an entry that it holds. They have no pointers: there may be
// a million. Their number is in the batch's slot, and changes when others are removed.
type facts struct {
	seq    uint64
	bytes  int64  // charged where the data was last seen; 0 for a batch that was dropped
	told   uint32 // the lower half of the version of the batch that this is of
	part   uint32 // index in list
	listed uint32 // in which block of its partition's set it is
	named  uint32 // in which block of ids
	class  class
	kind   tier.Kind // where the data was last seen; 0 when it is gone
	holder holder
}

// holder is what has claimed an entry for longer than a call.
type holder uint8

const (
	unheld    holder = iota
	claimOpen        // a Claim
	gatherer         // the partition's gathering
)

// holdLocked makes h the holder of a claimed entry.
func (p *partition) holdLocked(rec *facts, h holder) {
	if rec.holder != unheld {
		p.held--
	}
	if rec.holder = h; h != unheld {
		p.held++
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
	r         *Repository
	number    int
	index     uint32                 // in list
	n         int                    // of all entries, claimed ones too: their taker may fail
	sets      [classes]compact.Order // numbers of records, by seq
	held      int                    // of those that are claimed: in Claims
	last      uint64                 // the largest seq that was put
	queues    [queues]list.List      // of *waiter, in order of arrival
	waiting   int                    // in all queues
	arrived   uint64                 // number of the last waiter
	gathering *gathering             // of the first that waits for all; nil: it has not begun
}

// waiter is a taker that waits. The repository's lock guards e, all and err until
// ready is closed, then they are the taker's.
type waiter struct {
	arrival uint64
	ready   chan struct{}
	e       entry  // claimed for it
	all     *Claim // or this, if it wants all
	err     error
}

// gathering is how a taker gets all that the partition held when it began. It keeps what
// it has, so that it waits for each batch once. There is one at a time in a partition: two
// would wait for each other.
type gathering struct {
	claim   *Claim  // what it has
	last    uint64  // the largest seq that it wants
	awaited []entry // in transit, or in the hands of a call, when it began; some are gone since
}

func newPartition(r *Repository, number int, index uint32) *partition {
	p := &partition{r: r, number: number, index: index}
	for i := range p.sets {
		p.sets[i].Block = r.listed
	}
	return p
}

// listed is where a record has its place in a partition's set.
func (r *Repository) listed(n uint32) *uint32 { return &r.mu.records.At(n).listed }

// entriesLocked yields the entries of a class in order of arrival.
func (p *partition) entriesLocked(c class) iter.Seq[entry] {
	return func(yield func(entry) bool) {
		for n, key := range p.sets[c].All() {
			if !yield(entry{p.r.mu.records.Of(n), key[0]}) {
				return
			}
		}
	}
}

// oldestLocked returns the oldest entry of the classes, none if there is none.
func (p *partition) oldestLocked(of ...class) entry {
	var (
		oldest uint32
		seq    uint64
	)
	for _, c := range of {
		if n, key := p.sets[c].First(); n != 0 && (oldest == 0 || key[0] < seq) {
			oldest, seq = n, key[0]
		}
	}
	return entry{p.r.mu.records.Of(oldest), seq}
}

// firstLocked returns the entry for a taker; none if there is none now. It is the oldest in a state
// that the batch can move from. A batch in transit is back in such a state in a moment: until then,
// takers that want the order get no younger one.
func (p *partition) firstLocked(w want) entry {
	e := p.oldestLocked(eligible[w&^unordered]...)
	switch {
	case e.b == nil || w&unordered != 0:
		return e
	case w == wantAll:
		if p.gathering == nil || e.seq > p.gathering.last {
			return entry{}
		}
		return e
	}
	if n, moving := p.sets[inTransit].First(); n != 0 && moving[0] < e.seq {
		return entry{}
	}
	return e
}

func older(a, b entry) int { return cmp.Compare(a.seq, b.seq) }

// allLocked returns the entries in order of arrival.
func (p *partition) allLocked() []entry {
	entries := make([]entry, 0, p.n)
	for c := range classes {
		entries = slices.AppendSeq(entries, p.entriesLocked(c))
	}
	if !slices.IsSortedFunc(entries, older) { // it is when all are in one state
		slices.SortFunc(entries, older)
	}
	return entries
}

// claimLocked makes an entry a claimed one.
func (p *partition) claimLocked(e entry) *facts {
	n, rec := p.r.recordLocked(e)
	p.moveLocked(n, rec, claimed)
	return rec
}

func (p *partition) moveLocked(n uint32, rec *facts, to class) {
	p.sets[rec.class].Remove(n)
	rec.class = to
	p.listLocked(n, rec)
}

func (p *partition) listLocked(n uint32, rec *facts) {
	p.sets[rec.class].Insert(n, compact.Key{rec.seq})
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
			best  entry
			queue want
			since uint64
		)
		for w := range queues {
			front := p.queues[w].Front()
			if front == nil {
				continue
			}
			arrival := front.Value.(*waiter).arrival
			if best.b != nil && since < arrival {
				continue
			}
			if e := p.firstLocked(w); e.b != nil {
				best, queue, since = e, w, arrival
			}
		}
		if best.b == nil {
			if !p.gatherLocked(r, s) {
				break
			}
			continue
		}
		rec := p.claimLocked(best)
		if queue == wantAll {
			p.gathering.claim.addLocked(best, rec, gatherer)
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

// matchIfLocked is matchLocked of a partition that may be nil.
func (p *partition) matchIfLocked(r *Repository, s *signals) {
	if p != nil {
		p.matchLocked(r, s)
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
			g.awaited = slices.AppendSeq(g.awaited, p.entriesLocked(c))
		}
		p.gathering = g
		return true
	}
	others := func(e entry) bool {
		_, rec := r.recordLocked(e)
		return rec != nil && rec.holder == claimOpen
	}
	if p.held > len(g.claim.entries) && slices.ContainsFunc(g.awaited, others) {
		wt := p.leaveLocked(wantAll, at)
		g.claim.giveBackLocked(s)
		wt.err = p.claimedErrorLocked(r)
		s.add(wt.ready)
		return true
	}
	for n := len(g.awaited); n > 0; n-- { // only the last is looked at: there may be many
		if _, rec := r.recordLocked(g.awaited[n-1]); rec != nil && rec.holder != gatherer {
			return false
		}
		g.awaited = g.awaited[:n-1]
	}
	p.gathering = nil
	g.claim.leaveDroppedLocked(s)
	if len(g.claim.entries) > 0 { // else it begins again
		slices.SortFunc(g.claim.entries, older)
		for _, e := range g.claim.entries {
			_, rec := r.recordLocked(e)
			rec.holder = claimOpen
		}
		wt := p.leaveLocked(wantAll, at)
		wt.all = g.claim
		s.add(wt.ready)
	}
	return true
}

// endLocked returns why a taker that finds nothing now need not wait; nil if it must.
func (p *partition) endLocked(r *Repository, w want) error {
	w &^= unordered
	switch n := p.n; {
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
