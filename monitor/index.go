package monitor

import (
	"cmp"
	"math"
	"slices"
	"sync/atomic"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// index holds, for all batches, where they are and which of them could be evicted, in the policy's
// order. It is a batch.Observer, which the observer of the engine calls. Each change costs a look
// at that one batch, and steps in ordered trees if its place in one of them has changed. Nothing
// scans a whole tree.
//
// A victim is idle or only waited for by tasks, is not empty, and has a slower tier to go to. It
// has neither subscribers nor leases of its memory. Batches in the slowest tier are only counted.
//
// An index is safe for concurrent use.
type index struct {
	policy Policy
	panics guard.Log       // of the policy
	places map[tier.ID]int // immutable
	gained func()          // called with no lock held when there is a new victim; immutable

	mu struct {
		lockrank.Mutex[lockrank.Monitor]
		entries map[*batch.Batch]*entry
		ids     map[batch.ID]*entry // the first of each id; a wrapper of the index may hide a second one
		entered uint64              // how many entries there were so far
		spaces  []spaceIndex
		habits  decide.Habits // of the batches in entries
	}
}

// entry is the index's record of one batch. The index's lock guards it.
type entry struct {
	b      *batch.Batch
	id     batch.ID
	number uint64 // ascending in the order of arrival
	facts
	key     Key         // zero if the batch is no victim
	in      *spaceIndex // where the batch is; nil if the entry is new or has left
	version uint64      // of the batch when facts and key were noted

	// The monitor sets these after moves.
	aside bool              // a move is under way, or failed a moment ago
	kept  bool              // skipped after a failure, until the batch has another form
	not   decide.Kinds      // the tiers that the batch cannot be converted for in this form
	form  batch.PayloadType // for which kept and not hold
}

// failed reports whether kept or not is set, which hold for e.form alone.
func (e *entry) failed() bool { return e.kept || e.not != 0 }

// fits reports whether a tier that the batch may go to has room for it.
func (e *entry) fits(room byKind) bool {
	for _, k := range tier.Kinds() {
		if e.bytes <= room[k] && !e.not.Has(k) {
			return true
		}
	}
	return false
}

func (e *entry) asVictim() Victim {
	return Victim{Batch: e.b, ID: e.id, Bytes: e.bytes, Key: e.key, not: e.not}
}

// byKind has a number of bytes for each tier.
type byKind [tier.Disk + 1]int64

// inEach returns n bytes for each tier.
func inEach(n int64) (all byKind) {
	for k := range all {
		all[k] = n
	}
	return all
}

// facts are what the orders and sums are made from, besides the key.
type facts struct {
	bytes  int64
	size   int64 // as an image
	rest   bool  // it is not being read, moved or dropped
	idle   bool  // and has no subscribers
	leased bool  // but readers hold its memory
	victim bool  // it could go down unless it is skipped
	active bool  // it has open handles
	uses   uint8 // see batch.Info.Uses
}

// spaceIndex is the part of an index that belongs to one space.
type spaceIndex struct {
	place    int  // in spaces
	lowest   bool // nothing below: batches are not listed, only counted
	orders   [orders]*btree.BTreeG[*entry]
	largest  *atomic.Int64 // the largest of bySize, to be read without the lock
	bytes    int64
	rest     int64  // bytes at rest
	idle     int64  // of them, those without subscribers
	version  uint64 // rises with every change of a batch
	progress uint64 // rises with those that are not the monitor's failed tries to move a batch
}

// The orders of a space's batches. In each, entries that are equal are ordered by id and number.
const (
	byKey   = iota // the victims
	byBytes        // all that could go down, also with subscribers
	bySize         // all
	orders
)

// orders returns the orders that an entry is in; the others are nil.
func (e *entry) orders() (in [orders]*btree.BTreeG[*entry]) {
	if e.in == nil {
		return in
	}
	in[bySize] = e.in.orders[bySize]
	if e.aside || e.in.lowest {
		return in
	}
	if e.victim {
		in[byKey] = e.in.orders[byKey]
	}
	if e.rest && e.bytes > 0 {
		in[byBytes] = e.in.orders[byBytes]
	}
	return in
}

func newIndex(policy Policy, ids []tier.ID, lowest func(i int) bool, gained func()) *index {
	x := &index{policy: policy, places: make(map[tier.ID]int), gained: gained}
	x.mu.entries = make(map[*batch.Batch]*entry)
	x.mu.ids = make(map[batch.ID]*entry)
	x.mu.spaces = make([]spaceIndex, len(ids))
	by := func(compare func(a, b *entry) int) *btree.BTreeG[*entry] {
		return btree.NewG(32, func(a, b *entry) bool {
			return cmp.Or(compare(a, b), cmp.Compare(a.id, b.id), cmp.Compare(a.number, b.number)) < 0
		})
	}
	for i, id := range ids {
		x.places[id] = i
		s := &x.mu.spaces[i]
		s.place, s.lowest, s.largest = i, lowest(i), new(atomic.Int64)
		s.orders[byKey] = by(func(a, b *entry) int { return slices.Compare(a.key[:], b.key[:]) })
		s.orders[byBytes] = by(func(a, b *entry) int { return cmp.Compare(a.bytes, b.bytes) })
		s.orders[bySize] = by(func(a, b *entry) int { return cmp.Compare(a.size, b.size) })
	}
	return x
}

// largest returns the bytes of the largest batch in a space that has at most atMost. It takes no
// lock if none has more.
func (x *index) largest(place int, atMost int64) (bytes int64) {
	s := &x.mu.spaces[place]
	if n := s.largest.Load(); n <= atMost {
		return n
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	last := &entry{facts: facts{size: atMost}, id: math.MaxUint64}
	s.orders[bySize].DescendLessOrEqual(last, func(e *entry) bool {
		bytes = e.size
		return false
	})
	return bytes
}

// resting returns how many bytes of a space are of batches at rest.
func (x *index) resting(place int) int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.mu.spaces[place].rest
}

// BatchChanged notes what b is like now. It implements batch.Observer.
func (x *index) BatchChanged(b *batch.Batch, now batch.Info) { _ = x.note(b, now, false) }

// Register notes a new batch. A second one of an id is batch.ErrDuplicateID. It implements
// batch.Registrar.
func (x *index) Register(b *batch.Batch, now batch.Info) error { return x.note(b, now, true) }

// Knows reports whether b was announced to the index, and not dropped. It implements
// batch.Registrar.
func (x *index) Knows(b *batch.Batch) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.mu.entries[b] != nil
}

// note notes a cut through b. A new batch is refused if its id is known.
//
// The policy is called without the lock. Meanwhile a newer cut may have been recorded, and stays.
// Cuts of the same version differ in leases only, which begin without an announcement.
func (x *index) note(b *batch.Batch, now batch.Info, isNew bool) error {
	var key Key
	if movable(now) {
		key = x.keyOf(now)
	}
	x.mu.Lock()
	gained, err := x.noteLocked(b, now, key, isNew)
	x.mu.Unlock()
	if gained {
		x.gained()
	}
	return err
}

// movable reports whether a batch could be moved as far as its own state goes.
func movable(info batch.Info) bool {
	return (info.State == batch.Idle || info.State == batch.TaskCreated) &&
		info.Active == 0 && info.Subscribers == 0 && info.Bytes > 0
}

// noteLocked reports whether the cut makes b a victim which it was not before.
func (x *index) noteLocked(b *batch.Batch, now batch.Info, key Key, isNew bool) (gained bool, err error) {
	e := x.mu.entries[b]
	switch {
	case e != nil && now.Version < e.version:
		return false, nil
	case e == nil && !isNew && now.Version != b.Inside().Cut().Version:
		return false, nil // a newer one was announced, or is about to be
	case e == nil && isNew && x.mu.ids[now.ID] != nil:
		return false, batch.ErrDuplicateID
	}
	if e != nil {
		if now.Active > 0 && !e.active {
			x.mu.habits.Use(e.uses, now.LastUse)
		}
		x.mu.habits.Leave(e.uses)
		e.active, e.uses = now.Active > 0, now.Uses
	}
	place, known := x.places[now.Space]
	if now.State == batch.Released || !known {
		if e != nil {
			e.in.version++
			e.in.progress++
			replaceLocked(e, entry{})
			delete(x.mu.entries, b)
			if x.mu.ids[now.ID] == e {
				delete(x.mu.ids, now.ID)
			}
		}
		return false, nil
	}
	x.mu.habits.Enter(now.Uses)
	if e == nil {
		x.mu.entered++
		e = &entry{b: b, id: now.ID, number: x.mu.entered}
		x.mu.entries[b] = e
		if x.mu.ids[e.id] == nil {
			x.mu.ids[e.id] = e
		}
	}
	s := &x.mu.spaces[place]
	next := *e
	next.in, next.version = s, now.Version
	rest := (now.State == batch.Idle || now.State == batch.TaskCreated) && !now.Leased
	next.facts = facts{
		bytes: now.Bytes, size: now.Bytes, leased: now.Leased, rest: rest, idle: rest && now.Subscribers == 0,
		victim: movable(now) && !now.Leased && !s.lowest, active: now.Active > 0, uses: now.Uses,
	}
	if now.Descriptor != nil { // where nothing is compressed
		next.size = max(now.Bytes, now.Descriptor.Body)
	}
	if next.key = key; !next.victim {
		next.key = Key{}
	}
	arrives, newForm, was := e.in != s || e.bytes != next.bytes, e.failed() && e.form != now.Form, e.victim
	if !arrives && !newForm && e.key == next.key && e.facts == next.facts {
		if movable(now) && !next.victim && now.Version > e.version { // its key may be another
			s.version++
			s.progress++
		}
		e.version = now.Version
		return false, nil
	}
	if e.in != nil {
		e.in.version++
	}
	s.version++
	if arrives && e.in != nil {
		e.in.progress++
	}
	if arrives || !e.aside || e.kept {
		s.progress++
	}
	if e.failed() && (arrives || newForm) {
		next.aside, next.kept, next.not, was = e.aside && !e.kept, false, 0, false
	}
	replaceLocked(e, next)
	return next.victim && !was, nil
}

// replaceLocked makes e what next is, in the sums and the orders, too.
func replaceLocked(e *entry, next entry) {
	from, to := e.orders(), next.orders()
	stays := [orders]bool{byKey: e.key == next.key, byBytes: e.bytes == next.bytes, bySize: e.size == next.size}
	for i, order := range from {
		if stays[i] = stays[i] && order == to[i]; order != nil && !stays[i] {
			order.Delete(e)
		}
	}
	e.in.add(e.facts, -1)
	old := e.in
	*e = next
	e.in.add(e.facts, 1)
	for i, order := range to {
		if order != nil && !stays[i] {
			order.ReplaceOrInsert(e)
		}
	}
	for _, s := range []*spaceIndex{old, e.in} {
		if s == nil {
			continue
		}
		if top, ok := s.orders[bySize].Max(); ok {
			s.largest.Store(top.size)
		} else {
			s.largest.Store(0)
		}
	}
}

// add adds an entry's bytes to the sums, or with a sign of -1 takes them out. s may be nil.
func (s *spaceIndex) add(f facts, sign int64) {
	if s == nil {
		return
	}
	s.bytes += sign * f.bytes
	if f.rest {
		s.rest += sign * f.bytes
	}
	if f.idle {
		s.idle += sign * f.bytes
	}
}

// changeLocked changes the entry of b, if b has one.
func (x *index) changeLocked(b *batch.Batch, change func(e *entry)) {
	if e := x.mu.entries[b]; e != nil {
		next := *e
		change(&next)
		replaceLocked(e, next)
	}
}

// setAside takes b out of the victims until it is put back.
func (x *index) setAside(b *batch.Batch, aside bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.setAsideLocked(b, aside)
}

func (x *index) setAsideLocked(b *batch.Batch, aside bool) {
	x.changeLocked(b, func(e *entry) { e.aside, e.kept = aside, false })
}

// allowLocked ends the exclusion of b from all tiers but those in not.
func (x *index) allowLocked(b *batch.Batch, not decide.Kinds) {
	x.changeLocked(b, func(e *entry) { e.not &= not })
}

// summary is a cut through one space's part of the index.
type summary struct {
	count    int
	bytes    int64
	rest     int64
	idle     int64
	smallest byKind // bytes of the smallest batch that could go to a tier; 0 if there is none
	victims  int    // without those that are set aside
	version  uint64
	progress uint64
}

func (x *index) summary(place int) summary {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := &x.mu.spaces[place]
	return summary{
		count: s.orders[bySize].Len(), bytes: s.bytes, rest: s.rest, idle: s.idle, smallest: s.smallestLocked(),
		victims: s.orders[byKey].Len(), version: s.version, progress: s.progress,
	}
}

// smallestLocked looks past batches that are excluded from a tier: they are few, or all there are.
func (s *spaceIndex) smallestLocked() (bytes byKind) {
	left := tier.Kinds()
	open := left[:]
	s.orders[byBytes].Ascend(func(e *entry) bool {
		open = slices.DeleteFunc(open, func(k tier.Kind) bool {
			if !e.not.Has(k) {
				bytes[k] = e.bytes
			}
			return !e.not.Has(k)
		})
		return len(open) > 0
	})
	return bytes
}

// from returns the victims of a space that come after one, or the first ones if that is the zero
// Victim, those with the smallest keys first: shortlistMax at most.
func (x *index) from(after Victim, place int) (list []Victim) {
	x.mu.Lock()
	defer x.mu.Unlock()
	last := &entry{key: after.Key, id: after.ID, number: math.MaxUint64}
	x.mu.spaces[place].orders[byKey].AscendGreaterOrEqual(last, func(e *entry) bool {
		list = append(list, e.asVictim())
		return len(list) < shortlistMax
	})
	return list
}

// victims appends victims of a space to dst, those with the smallest keys first, and reports
// whether there are more. It takes limit of them, and as many of each other class of CostAware, and
// of those that were used some that are stale. With a limit of shortlistMax, if none of the first
// ones is at most as large as fit has for a tier, the smallest ones that are follow: a tier below
// that is nearly full must not be the end while there is a batch that it could take.
func (x *index) victims(dst []Victim, place int, fit byKind, limit int, now int64) (_ []Victim, more bool) {
	_, aware := x.policy.(costAware)
	if more = limit < shortlistMax; !more { // it ends there all the same
		limit = shortlistMax - smallMax - staleMax
		if aware {
			limit /= 3
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	s, begin, fitting := &x.mu.spaces[place], len(dst), false
	var last *entry
	add := func(e *entry) {
		dst, last = append(dst, e.asVictim()), e
		fitting = fitting || e.fits(fit)
	}
	s.orders[byKey].Ascend(func(e *entry) bool {
		add(e)
		return len(dst)-begin < limit
	})
	if aware && last != nil {
		for _, class := range []uint64{once, used} {
			if last.key[0] >= class { // they are listed
				continue
			}
			n := 0
			s.orders[byKey].AscendGreaterOrEqual(&entry{key: Key{class}}, func(e *entry) bool {
				if e.key[0] != class || n >= limit {
					return false
				}
				add(e)
				n++
				return true
			})
		}
		// Stale ones are among the last that were used.
		if end, looked, found := last, 0, 0; end.key[0] <= used { // else all that were used are listed
			s.orders[byKey].DescendLessOrEqual(&entry{key: Key{used + 1}}, func(e *entry) bool {
				if looked++; looked > 4*staleMax || found >= staleMax || e == end {
					return false
				}
				if e.key.stale(now, &x.mu.habits) {
					add(e)
					found++
				}
				return true
			})
		}
	}
	more = more && s.orders[byKey].Len() > len(dst)-begin
	if fitting || more {
		return dst, more
	}
	most, looked := slices.Max(fit[:]), 0
	s.orders[byBytes].Ascend(func(e *entry) bool {
		if e.bytes > most || looked >= shortlistMax || len(dst)-begin >= shortlistMax {
			return false
		}
		if e.fits(fit) { // else the tier that has the room is none for it
			if e.victim {
				dst = append(dst, e.asVictim())
			}
			looked++
		}
		return true
	})
	return dst, more
}

// order has the policy arrange a shortlist.
func (x *index) order(now int64, list []Victim) {
	if p, ok := x.policy.(costAware); ok {
		x.mu.Lock()
		habits := x.mu.habits
		x.mu.Unlock()
		p.OrderBy(now, list, &habits)
		return
	}
	x.panics.Do("Policy.Order", func() { x.policy.Order(now, list) })
}

// keyOf calls the policy. A batch without a known key has the zero key.
func (x *index) keyOf(info batch.Info) (key Key) {
	defer x.panics.Recover("Policy.Key")
	return x.policy.Key(info)
}

// staleMax is how many victims are taken at most because they are stale: a fourth of those looked
// at, as what is only late may stand between them.
const staleMax = 32

// smallMax is how many victims beyond the policy's first ones are taken for
// their size.
const smallMax = 24
