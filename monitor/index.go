package monitor

import (
	"cmp"
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
// at that one batch, and steps in ordered trees if its place in one of them has changed. The trees
// hold keys and sizes by value, and one node for all batches of a size. Nothing scans a whole tree
// except a search for victims that fit into a nearly full tier.
//
// A victim is idle or only waited for by tasks, is not empty, and has a slower tier to go to. It
// has neither subscribers nor leases of its memory. Batches in the slowest tier are only counted.
//
// An index is safe for concurrent use.
type index struct {
	policy Policy
	panics guard.Log // of the policy
	ids    []tier.ID // of the spaces; immutable
	gained func(int) // called with the place of a new victim's space and no lock held; immutable

	mu struct {
		lockrank.Mutex[lockrank.Monitor]
		entries map[batch.ID]*entry
		spaces  []spaceIndex
	}
}

// entry is the index's record of one batch. The index's lock guards it.
type entry struct {
	x       *index
	b       *batch.Batch
	id      batch.ID
	version uint64 // of the batch when standing was noted
	standing
	form batch.PayloadType // for which not holds
}

// standing is what decides where an entry is listed.
type standing struct {
	in     *spaceIndex // where the batch is; nil if the entry is new or has left
	key    Key         // zero if the batch is no victim
	bytes  int64
	size   int64 // as an image
	rest   bool  // it is not being read, moved, leased or dropped
	idle   bool  // and has no subscribers
	victim bool  // it could be evicted unless it is skipped
	moving bool  // it is in transit

	not decide.Kinds // the tiers that the batch is not to be moved to in this form, after failures
}

// isListed reports whether the batch is among the victims: it could be evicted, and to some tier now.
func (s *standing) isListed() bool {
	return s.in != nil && s.victim && s.not&s.in.lower != s.in.lower
}

// fits reports whether a tier that the batch may go to has room for it.
func (s *standing) fits(room byKind) bool {
	for k, n := range room {
		if s.bytes <= n && !s.not.Has(tier.Kind(k)) {
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

// spaceIndex is the part of an index that belongs to one space.
type spaceIndex struct {
	place   int          // in spaces
	lower   decide.Kinds // the tiers below; if there are none, batches are not listed, only counted
	victims victimTree
	small   sizeTree     // the victims by size
	sizes   sizeTree     // all batches, by their sizes as images
	largest atomic.Int64 // the largest of sizes, to be read without the lock
	count   int          // batches
	bytes   int64        // of all batches
	rest    int64        // of those at rest
	idle    int64        // of those at rest without subscribers
	moving  int64        // of those in transit
	changes uint64       // rises with each change of a batch
}

// add adds an entry to the sums, or with a sign of -1 takes it out.
func (s *spaceIndex) add(of *standing, sign int64) {
	s.count += int(sign)
	s.bytes += sign * of.bytes
	if of.rest {
		s.rest += sign * of.bytes
	}
	if of.idle {
		s.idle += sign * of.bytes
	}
	if of.moving {
		s.moving += sign * of.bytes
	}
}

// victimTree is victims in the order of their keys, and then of their ids.
type victimTree struct{ *btree.BTreeG[listed] }

type listed struct {
	key Key
	id  batch.ID
	e   *entry
}

func (l listed) compare(other listed) int {
	return cmp.Or(l.key.compare(other.key), cmp.Compare(l.id, other.id))
}

// sizeTree counts batches by size.
type sizeTree struct{ *btree.BTreeG[sizeCount] }

type sizeCount struct {
	bytes int64
	count int
}

func newSizeTree() sizeTree {
	return sizeTree{btree.NewG(32, func(a, b sizeCount) bool { return a.bytes < b.bytes })}
}

func (t sizeTree) add(bytes int64, by int) {
	now, _ := t.Get(sizeCount{bytes: bytes})
	now.bytes, now.count = bytes, now.count+by
	if now.count == 0 {
		t.Delete(now)
	} else {
		t.ReplaceOrInsert(now)
	}
}

// newIndex returns an index of spaces.
func newIndex(policy Policy, spaces []*space, gained func(place int)) *index {
	x := &index{policy: policy, gained: gained}
	x.mu.entries = make(map[batch.ID]*entry)
	x.mu.spaces = make([]spaceIndex, len(spaces))
	for i, of := range spaces {
		x.ids = append(x.ids, of.ID())
		s := &x.mu.spaces[i]
		s.place, s.lower, s.small, s.sizes = i, of.lower, newSizeTree(), newSizeTree()
		s.victims = victimTree{btree.NewG(16, func(a, b listed) bool { return a.compare(b) < 0 })}
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
	s.sizes.DescendLessOrEqual(sizeCount{bytes: atMost}, func(c sizeCount) bool {
		bytes = c.bytes
		return false
	})
	return bytes
}

// BatchChanged notes what b is like now. It implements batch.Observer.
func (x *index) BatchChanged(b *batch.Batch, now batch.Info) { _ = x.note(b, &now, false) }

// Register notes a new batch. A second one of an id is batch.ErrDuplicateID. It implements
// batch.Registrar.
func (x *index) Register(b *batch.Batch, now batch.Info) error { return x.note(b, &now, true) }

// Knows reports whether b was announced to the index, and not dropped. It implements
// batch.Registrar.
func (x *index) Knows(b *batch.Batch) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.entryLocked(b) != nil
}

// entryLocked returns the entry of b, nil if it has none.
func (x *index) entryLocked(b *batch.Batch) *entry {
	e, _ := b.Inside().Entry().Load().(*entry)
	if e != nil && e.x != x { // a program's observer announces the batch to several engines
		e = x.mu.entries[b.ID()]
	}
	if e == nil || e.b != b || e.in == nil {
		return nil
	}
	return e
}

// note notes a cut through b. A new batch is refused if its id is known. If an observer around the
// index has hidden a second batch of an id, the index ignores it while it has the first.
//
// The policy is called without the lock. Meanwhile a newer cut may have been recorded, and stays.
// Cuts of the same version differ in leases only, which begin without an announcement.
func (x *index) note(b *batch.Batch, now *batch.Info, isNew bool) error {
	var key Key
	place := slices.Index(x.ids, now.Space)
	if place >= 0 && x.mu.spaces[place].lower != 0 && movable(now) {
		key = x.keyOf(now)
	}
	x.mu.Lock()
	gained, err := x.noteLocked(b, now, place, key, isNew)
	x.mu.Unlock()
	if gained {
		x.gained(place)
	}
	return err
}

// movable reports whether a batch could be moved as far as its own state goes.
func movable(info *batch.Info) bool {
	return (info.State == batch.Idle || info.State == batch.TaskCreated) &&
		info.Active == 0 && info.Subscribers == 0 && info.Bytes > 0
}

// noteLocked reports whether the cut makes b a victim that it was not before. key is zero unless
// the batch is movable and has a tier below.
func (x *index) noteLocked(b *batch.Batch, now *batch.Info, place int, key Key, isNew bool) (gained bool, err error) {
	e := x.entryLocked(b)
	switch {
	case e != nil && now.Version < e.version:
		return false, nil
	case e == nil && !isNew && now.Version != b.Inside().Cut().Version:
		return false, nil // a newer one was announced, or is about to be
	case e == nil && x.mu.entries[now.ID] != nil:
		return false, batch.ErrDuplicateID
	}
	if now.State == batch.Released || place < 0 {
		if e != nil {
			e.in.changes++
			e.become(standing{})
			delete(x.mu.entries, now.ID)
		}
		return false, nil
	}
	if e == nil {
		e = &entry{x: x, b: b, id: now.ID}
		x.mu.entries[now.ID] = e
		b.Inside().Entry().Store(e)
	}
	s := &x.mu.spaces[place]
	next := e.standing
	next.in, next.bytes, next.size = s, now.Bytes, now.Bytes
	next.rest = (now.State == batch.Idle || now.State == batch.TaskCreated) && !now.Leased
	next.idle = next.rest && now.Subscribers == 0
	next.moving = now.State == batch.InTransit
	next.victim = movable(now) && !now.Leased && s.lower != 0
	if now.Descriptor != nil { // where nothing is compressed
		next.size = max(now.Bytes, now.Descriptor.Body)
	}
	if next.key = key; !next.victim {
		next.key = Key{}
	}
	moved, newer := e.in != s || e.bytes != next.bytes, now.Version > e.version
	newForm, wasVictim := e.not != 0 && e.form != now.Form, e.victim
	e.version = now.Version
	switch {
	case moved && e.in != nil:
		e.in.changes++
		s.changes++
	case moved, next == e.standing && newer && movable(now) && !next.victim: // its key may be another
		s.changes++
	case next != e.standing, newForm:
		s.changes++
	}
	if e.not != 0 && (moved || newForm) {
		next.not, wasVictim = 0, false
	}
	stayed := e.moving && !moved // a move has failed: its caller knows, and must not be woken by it
	e.become(next)
	return next.victim && !wasVictim && !stayed, nil
}

// become makes next the standing of e, in the sums and the trees, too.
func (e *entry) become(next standing) {
	was := e.standing
	if was == next {
		return
	}
	e.standing = next
	if was.in != nil {
		was.in.add(&was, -1)
	}
	if next.in != nil {
		next.in.add(&next, 1)
	}
	if stays := was.in == next.in; !stays || was.size != next.size {
		was.in.countSize(was.size, -1)
		next.in.countSize(next.size, 1)
	}
	old, now := was.isListed(), next.isListed()
	if old == now && was.in == next.in && was.key == next.key && was.bytes == next.bytes {
		return
	}
	if old {
		was.in.victims.Delete(listed{key: was.key, id: e.id})
		was.in.small.add(was.bytes, -1)
	}
	if now {
		next.in.victims.ReplaceOrInsert(listed{next.key, e.id, e})
		next.in.small.add(next.bytes, 1)
	}
}

// countSize adds a batch to sizes, or takes it out. s may be nil.
func (s *spaceIndex) countSize(bytes int64, by int) {
	if s == nil {
		return
	}
	s.sizes.add(bytes, by)
	largest, _ := s.sizes.Max()
	if s.largest.Load() != largest.bytes {
		s.largest.Store(largest.bytes)
	}
}

// excludeLocked excludes b from the tiers in not, and from no others, until it has another form
// than this one.
func (x *index) excludeLocked(b *batch.Batch, form batch.PayloadType, not decide.Kinds) {
	if e := x.entryLocked(b); e != nil {
		next := e.standing
		next.not, e.form = not, form
		e.become(next)
	}
}

// summary is a cut through one space's part of the index.
type summary struct {
	count   int
	bytes   int64
	rest    int64
	idle    int64
	moving  int64
	victims int
	changes uint64
}

func (x *index) summary(place int) summary {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := &x.mu.spaces[place]
	return summary{s.count, s.bytes, s.rest, s.idle, s.moving, s.victims.Len(), s.changes}
}

// from returns the victims of a space that come after one, or the first ones if that is the zero
// Victim, those with the smallest keys first: shortlistMax at most.
func (x *index) from(after Victim, place int) (list []Victim) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.mu.spaces[place].victims.AscendGreaterOrEqual(listed{key: after.Key, id: after.ID}, func(l listed) bool {
		if l.id != after.ID {
			list = append(list, l.e.asVictim())
		}
		return len(list) < shortlistMax
	})
	return list
}

// victims returns limit victims of a space, those with the smallest keys first, and reports whether
// there are more. With CostAware, some that are stale follow. With a limit of shortlistMax, if none
// of the first ones is at most as large as fit has for a tier, some that are follow: a tier below
// that is nearly full must not be the end while there is a batch that it could take.
func (x *index) victims(place int, fit byKind, limit int, now int64) (list []Victim, more bool) {
	if more = limit < shortlistMax; !more { // it ends there all the same
		limit = shortlistMax - smallMax - staleMax
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	s, fitting := &x.mu.spaces[place], false
	list = make([]Victim, 0, min(limit, s.victims.Len()))
	var last listed
	add := func(l listed) {
		list = append(list, l.e.asVictim())
		fitting = fitting || l.e.fits(fit)
	}
	s.victims.Ascend(func(l listed) bool {
		add(l)
		last = l
		return len(list) < limit
	})
	if _, aware := x.policy.(costAware); aware && last.e != nil {
		// Stale ones are among the last that were used more than once.
		looked, found := 0, 0
		s.victims.DescendLessOrEqual(listed{key: Key{used + 1}}, func(l listed) bool {
			if looked++; looked > 4*staleMax || found >= staleMax || l.compare(last) <= 0 {
				return false
			}
			if l.key.stale(now) {
				add(l)
				found++
			}
			return true
		})
	}
	more = more && s.victims.Len() > len(list)
	if smallest, _ := s.small.Min(); fitting || more || last.e == nil || smallest.bytes > slices.Max(fit[:]) {
		return list, more
	}
	found := 0
	s.victims.AscendGreaterOrEqual(last, func(l listed) bool {
		if l.id != last.id && l.e.fits(fit) {
			add(l)
			found++
		}
		return found < smallMax
	})
	return list, more
}

// order has the policy arrange a shortlist.
func (x *index) order(now int64, list []Victim) {
	x.panics.Do("Policy.Order", func() { x.policy.Order(now, list) })
}

// keyOf calls the policy. A batch without a known key has the zero key.
func (x *index) keyOf(info *batch.Info) (key Key) {
	defer x.panics.Recover("Policy.Key")
	return x.policy.Key(*info)
}

// staleMax is how many victims are taken at most because they are stale: a fourth of those looked
// at, as what is only late may stand between them.
const staleMax = 32

// smallMax is how many victims beyond the policy's first ones are taken for their size.
const smallMax = 24
