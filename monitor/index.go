package monitor

import (
	"slices"
	"time"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// index holds, for all batches, where they are and which of them could be evicted, in the policy's
// order. It is a batch.Observer, which the observer of the engine calls. Each change costs a look
// at that one batch, and steps in ordered trees if its place in one of them has changed. The trees
// hold keys and sizes by value, and those of sizes have one item for all batches of a size. Nothing
// scans a whole tree except a search for victims that fit into a nearly full tier.
//
// A victim is idle or only waited for by tasks, is not empty, and has a slower tier to go to. It
// has neither subscribers nor leases of its memory. Batches in the slowest tier are only counted.
//
// An index is safe for concurrent use.
type index struct {
	policy Policy
	ids    []tier.ID // of the spaces; immutable
	gained func(int) // called with the place of a new victim's space and no lock held; immutable

	mu struct {
		lockrank.Mutex[lockrank.Monitor]
		entries map[batch.ID]*entry
		spaces  []spaceIndex
		faults  map[*entry]*fault // of the batches whose last moves failed
		due     time.Time         // when the first of their pauses ends; zero if there is none
		changes uint64            // what Config.Changes returned last
	}
}

// entry is the index's record of one batch, from its making until it is dropped. Register changes it, and
// for failures noteMove and putBack. The index's lock guards it. These are its states, by its standing:
//
//   - Counted: the batch is in use, in transit, empty, or in the slowest tier. It is only in the sums
//     and in the sizes of its space. Bytes at rest are those that nobody uses.
//   - Victim: it is at rest with a tier below, without subscribers and leases. It has the policy's key.
//   - Listed: a victim, unless failures exclude all tiers below (not). It is in the trees of victims, from
//     which lists of moves are chosen. putBack lists it again when its pause is over.
type entry struct {
	b       *batch.Batch
	id      batch.ID
	version uint64 // of the batch when standing was noted
	form    batch.PayloadType
	standing
}

// standing is what decides where an entry is listed.
type standing struct {
	in     *spaceIndex // where the batch is; nil if the entry is new or has left
	key    Key         // zero if the batch is no victim
	bytes  int64
	size   int64        // as an image
	rest   bool         // it is not being read, moved, leased or dropped
	idle   bool         // and has no subscribers
	victim bool         // it could be evicted unless failures exclude it
	moving bool         // it is in transit
	not    decide.Kinds // the tiers that the batch is not to be moved to in this form, after failures
	listed bool         // it is among the victims of its space: there is a tier that it may go to
}

// byKind has a number of bytes for each tier.
type byKind [tier.KindCount]int64

// spaceIndex is the part of an index that belongs to one space.
type spaceIndex struct {
	place   int          // in spaces
	lower   decide.Kinds // the tiers below; if there are none, batches are not listed, only counted
	victims *btree.BTreeG[listed]
	small   sizeTree // the victims by their bytes
	sizes   sizeTree // all batches by their sizes as images
	summary
}

// summary is sums over the batches of one space. Those at rest count as room that evictions could
// make: see Monitor.Headroom.
type summary struct {
	count   int
	bytes   int64
	rest    int64  // of those at rest
	idle    int64  // of those at rest without subscribers
	moving  int64  // of those in transit
	changes uint64 // rises with each change of a batch's standing
}

// listed is a victim in a tree: they are in the order of their keys, and then of their ids.
type listed struct {
	key Key
	id  batch.ID
	e   *entry
}

func (l *listed) isLess(other *listed) bool {
	for i := range l.key {
		if l.key[i] != other.key[i] {
			return l.key[i] < other.key[i]
		}
	}
	return l.id < other.id
}

// sizeTree counts batches by size.
type sizeTree struct{ *btree.BTreeG[sizeCount] }

type sizeCount struct{ bytes, batches int64 }

func (t sizeTree) add(bytes, batches int64) {
	now, _ := t.Get(sizeCount{bytes: bytes})
	if batches += now.batches; batches == 0 {
		t.Delete(now)
	} else {
		t.ReplaceOrInsert(sizeCount{bytes, batches})
	}
}

// newIndex returns an index of spaces.
func newIndex(policy Policy, spaces []*space, gained func(place int)) *index {
	x := &index{policy: policy, gained: gained}
	x.mu.entries, x.mu.faults = make(map[batch.ID]*entry), make(map[*entry]*fault)
	x.mu.spaces = make([]spaceIndex, len(spaces))
	isSmaller := func(a, b sizeCount) bool { return a.bytes < b.bytes }
	for i, of := range spaces {
		x.ids = append(x.ids, of.ID())
		s := &x.mu.spaces[i]
		s.place, s.lower = i, of.lower
		s.victims = btree.NewG(16, func(a, b listed) bool { return a.isLess(&b) })
		s.small, s.sizes = sizeTree{btree.NewG(32, isSmaller)}, sizeTree{btree.NewG(32, isSmaller)}
	}
	return x
}

// BatchChanged notes what b is like now. It implements batch.Observer.
func (x *index) BatchChanged(b *batch.Batch, now batch.Info) { _ = x.Register(b, now) }

// Knows reports whether b was announced to the index, and not dropped. It implements
// batch.Registrar.
func (x *index) Knows(b *batch.Batch) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.entryLocked(b) != nil
}

// entryLocked returns the entry of b, nil if it has none.
func (x *index) entryLocked(b *batch.Batch) *entry {
	if e := x.mu.entries[b.ID()]; e != nil && e.b == b {
		return e
	}
	return nil
}

// movable reports whether a batch could be moved as far as its own state goes. Leases of its memory
// begin without an announcement.
func movable(info *batch.Info) bool {
	return (info.State == batch.Idle || info.State == batch.TaskCreated) &&
		info.Active == 0 && info.Subscribers == 0 && info.Bytes > 0 && !info.Leased
}

// Register notes what b, which may be new, is like now. A second batch of an id is
// batch.ErrDuplicateID. It implements batch.Registrar. If an observer around the index has hidden a
// second batch of an id, the index ignores it while it has the first.
//
// The policy is called without the lock. Meanwhile a newer Info may have been recorded, and stays.
// Those of the same version differ in leases only, which begin without an announcement.
//
// If the batch becomes a victim, waiters for its space and for faster ones are woken.
func (x *index) Register(b *batch.Batch, now batch.Info) error {
	var key Key
	place, gained := slices.Index(x.ids, now.Space), false
	if place >= 0 && x.mu.spaces[place].lower != 0 && movable(&now) {
		key = x.policy.Key(now)
	}
	x.mu.Lock()
	defer func() {
		x.mu.Unlock()
		if gained {
			x.gained(place)
		}
	}()
	e := x.entryLocked(b)
	switch {
	case e != nil && now.Version < e.version:
		return nil
	case e == nil && x.mu.entries[now.ID] != nil:
		return batch.ErrDuplicateID
	case e == nil && now.Version != b.Cut().Version:
		return nil // a newer one was announced, or is about to be
	}
	if now.State == batch.Released || place < 0 {
		if e != nil {
			e.become(standing{})
			delete(x.mu.entries, now.ID)
			delete(x.mu.faults, e)
		}
		return nil
	}
	if e == nil {
		e = &entry{b: b, id: now.ID}
		x.mu.entries[now.ID] = e
	}
	s := &x.mu.spaces[place]
	next := e.standing
	next.in, next.bytes, next.size = s, now.Bytes, now.Bytes
	next.rest = (now.State == batch.Idle || now.State == batch.TaskCreated) && !now.Leased
	next.idle = next.rest && now.Subscribers == 0
	next.moving = now.State == batch.InTransit
	next.victim = movable(&now) && s.lower != 0
	if now.Descriptor != nil { // where nothing is compressed
		next.size = max(now.Bytes, now.Descriptor.Body)
	}
	next.key = key
	wasVictim, moved := e.victim, e.in != s || e.bytes != now.Bytes
	if moved || e.form != now.Form { // failures of another form do not count
		delete(x.mu.faults, e)
		wasVictim, next.not = wasVictim && e.not == 0, 0
	}
	// A batch whose move has failed is no new victim: the caller of the move has the error, and
	// must not be woken by it.
	gained = next.victim && !wasVictim && !(e.moving && !moved)
	e.version, e.form = now.Version, now.Form
	e.become(next)
	return nil
}

// become makes next the standing of e. It updates the sums and the trees in two passes: the first
// takes the old standing out of them, the second adds the new one. Trees that list the batch under
// the same key before and after are left alone. It computes next.listed.
func (e *entry) become(next standing) {
	next.listed = next.in != nil && next.victim && next.not&next.in.lower != next.in.lower
	was := e.standing
	if was == next {
		return
	}
	e.standing = next
	isElsewhere := was.in != next.in
	isListed := isElsewhere || was.listed != next.listed // or is not any more
	for _, of := range []*standing{&was, &next} {
		s, sign := of.in, int64(1)
		if s == nil {
			continue
		}
		if of == &was {
			sign = -1
		}
		s.changes++
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
		if isElsewhere || was.size != next.size {
			s.sizes.add(of.size, sign)
		}
		if of.listed && (isListed || was.bytes != next.bytes) {
			s.small.add(of.bytes, sign)
		}
		switch at := (listed{of.key, e.id, e}); {
		case !of.listed || !isListed && was.key == next.key:
		case of == &was:
			s.victims.Delete(at)
		default:
			s.victims.ReplaceOrInsert(at)
		}
	}
}

// excludeLocked excludes the batch from the tiers in not, and from no others, until it has another
// form.
func (e *entry) excludeLocked(not decide.Kinds) {
	next := e.standing
	next.not = not
	e.become(next)
}

// summary returns the sums of one space.
func (x *index) summary(place int) summary {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.mu.spaces[place].summary
}

const (
	// shortlistMax is how many victims of a space are looked at for one list of moves at most, however
	// many batches there are.
	shortlistMax = 1024
	// staleMax is how many of the last victims are taken if they are stale. Victims that are only
	// late may stand between them.
	staleMax = 128
	// smallMax is how many victims beyond the policy's first ones are taken for their size.
	smallMax = 24
)

// from returns the victims of a space that come after one, or the first ones if that is the zero
// Victim, those with the smallest keys first, limit at most.
func (x *index) from(after Victim, place, limit int) []Victim {
	x.mu.Lock()
	defer x.mu.Unlock()
	t := x.mu.spaces[place].victims
	list := make([]Victim, 0, min(limit, t.Len()))
	t.AscendGreaterOrEqual(listed{key: after.Key, id: after.ID + 1}, func(l listed) bool {
		list = append(list, l.e.asVictim())
		return len(list) < limit
	})
	return list
}

func (e *entry) asVictim() Victim {
	return Victim{Batch: e.b, ID: e.id, Bytes: e.bytes, Key: e.key, not: e.not}
}

// victims returns limit victims of a space, those with the smallest keys first, and reports whether
// there are more. With CostAware, some that are stale follow. With a limit of shortlistMax, if none
// of the first ones is at most as large as room has for a tier, some that are follow: a tier below
// that is nearly full must not be the end while there is a batch that it could take.
func (x *index) victims(place int, room byKind, limit int, now int64) (list []Victim, more bool) {
	if more = limit < shortlistMax; !more { // it ends there all the same
		limit = shortlistMax - smallMax - staleMax
	}
	if list = x.from(Victim{}, place, limit); len(list) == 0 {
		return nil, false
	}
	s, last := &x.mu.spaces[place], list[len(list)-1]
	x.mu.Lock()
	if _, aware := x.policy.(costAware); aware {
		// Stale ones are among the last that were used more than once.
		looked, end := 0, listed{key: last.Key, id: last.ID}
		s.victims.DescendLessOrEqual(listed{key: Key{used + 1}}, func(l listed) bool {
			if looked++; looked > staleMax || !end.isLess(&l) {
				return false
			}
			if l.key.stale(now) {
				list = append(list, l.e.asVictim())
			}
			return true
		})
	}
	more = more && s.victims.Len() > len(list)
	smallest, _ := s.small.Min()
	x.mu.Unlock()
	fits := func(v Victim) bool {
		for k, n := range room {
			if s.lower.Has(tier.Kind(k)) && !v.not.Has(tier.Kind(k)) && v.Bytes <= n {
				return true
			}
		}
		return false
	}
	if more || smallest.bytes > slices.Max(room[:]) || slices.ContainsFunc(list, fits) {
		return list, more
	}
	for found, next := 0, []Victim{last}; len(next) > 0; {
		next = x.from(next[len(next)-1], place, shortlistMax)
		for _, v := range next {
			if !fits(v) {
				continue
			}
			if found++; found > smallMax {
				return list, more
			}
			list = append(list, v)
		}
	}
	return list, more
}
