package monitor

import (
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// index knows where all batches are and which of them could be moved down, in
// the policy's order. It is the batch.Observer that an engine gives to its batches:
// each change costs a look at that one batch and, if it became a victim or
// ceased to be one, two steps in ordered trees. No part of it is ever scanned.
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
		ids     map[batch.ID]*batch.Batch // the first of each id; a wrapper of the index may hide a second one
		made    uint64                    // number of the last entry
		spaces  []spaceIndex
	}
}

// entry is what is known of one batch.
type entry struct {
	batch *batch.Batch
	id    batch.ID
	made  uint64 // its number: no two entries are equal in a tree
	told  uint64 // version of the batch that the facts are of
	facts
	aside bool              // a move of it is under way, or failed a moment ago
	kept  bool              // skipped after a failure, until its form is no longer that which failed
	not   kinds             // the tiers that it cannot be converted for in this form
	form  batch.PayloadType // that failed, where kept or not says so
	keyed bool              // it is in byKey
	sized bool              // it is in bySize
}

// kinds is a set of tiers.
type kinds uint8

func (s kinds) has(k tier.Kind) bool   { return s&(1<<k) != 0 }
func (s kinds) with(k tier.Kind) kinds { return s | 1<<k }

// byKind has a number of bytes for each tier.
type byKind [tier.Disk + 1]int64

// inEach is n bytes for each tier.
func inEach(n int64) (all byKind) {
	for k := range all {
		all[k] = n
	}
	return all
}

// facts are what the trees and sums are made from.
type facts struct {
	place  int // index in spaces
	key    Key
	bytes  int64
	size   int64 // as an image
	rest   bool  // it is not being read, moved or dropped
	idle   bool  // and has no subscribers
	leased bool  // but readers hold its memory
	victim bool  // it could go down unless it is skipped
}

// spaceIndex is the part of an index that belongs to one space.
type spaceIndex struct {
	lowest  bool                  // nothing below: nothing is listed, only counted
	byKey   *btree.BTreeG[*entry] // the victims
	bySize  *btree.BTreeG[*entry] // all that could go down, also with subscribers
	count   int
	bytes   int64
	rest    int64 // bytes at rest
	idle    int64 // of them, those without subscribers
	sizes   sizeClasses
	version uint64 // rises with every change
	life    uint64 // rises with those that are not the monitor's vain tries to move a batch
}

// sizeClasses knows how large the largest batch of a space is. Each class holds the sizes of one
// power of two, and the largest and the smallest that have been in it since it was empty.
type sizeClasses struct {
	count       [64]uint32
	top, bottom [64]int64
	most        atomic.Int64 // read without the lock
}

func (c *sizeClasses) add(bytes int64) {
	k := bits.Len64(uint64(bytes))
	if c.count[k]++; c.count[k] == 1 {
		c.bottom[k] = bytes
	}
	c.top[k], c.bottom[k] = max(c.top[k], bytes), min(c.bottom[k], bytes)
	c.most.Store(max(c.most.Load(), c.top[k]))
}

func (c *sizeClasses) remove(bytes int64) {
	k := bits.Len64(uint64(bytes))
	if c.count[k]--; c.count[k] > 0 {
		return
	}
	c.top[k] = 0
	for k = 63; k > 0 && c.count[k] == 0; k-- {
	}
	c.most.Store(c.top[k])
}

// largestUpTo returns the bytes of the largest batch that has at most so many. It may be more, but
// not more than bytes: sizes of a class are remembered together.
func (c *sizeClasses) largestUpTo(bytes int64) int64 {
	for k := bits.Len64(uint64(bytes)); k > 0; k-- {
		if c.count[k] > 0 && c.bottom[k] <= bytes {
			return min(c.top[k], bytes)
		}
	}
	return 0
}

// largest returns the bytes of the largest batch in a space that has at most so many. It takes no
// lock if none has more.
func (x *index) largest(place int, atMost int64) int64 {
	c := &x.mu.spaces[place].sizes
	if n := c.most.Load(); n <= atMost {
		return n
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return c.largestUpTo(atMost)
}

// resting returns how many bytes of a space are of batches at rest.
func (x *index) resting(place int) int64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.mu.spaces[place].rest
}

// treeDegree keeps a node of pointers at about 1 KiB.
const treeDegree = 64

func lessByKey(a, b *entry) bool {
	if c := a.key.compare(b.key); c != 0 {
		return c < 0
	}
	return earlier(a, b)
}

// earlier orders entries that are alike otherwise.
func earlier(a, b *entry) bool {
	if a.id != b.id {
		return a.id < b.id
	}
	return a.made < b.made
}

func lessBySize(a, b *entry) bool {
	if a.bytes != b.bytes {
		return a.bytes < b.bytes
	}
	return earlier(a, b)
}

func newIndex(policy Policy, ids []tier.ID, lowest func(i int) bool, gained func()) *index {
	x := &index{policy: policy, places: make(map[tier.ID]int), gained: gained}
	x.mu.entries = make(map[*batch.Batch]*entry)
	x.mu.ids = make(map[batch.ID]*batch.Batch)
	x.mu.spaces = make([]spaceIndex, len(ids))
	for i, id := range ids {
		x.places[id] = i
		x.mu.spaces[i] = spaceIndex{
			lowest: lowest(i),
			byKey:  btree.NewG(treeDegree, lessByKey),
			bySize: btree.NewG(treeDegree, lessBySize),
		}
	}
	return x
}

// BatchChanged notes what b is like now. It implements batch.Observer.
func (x *index) BatchChanged(b *batch.Batch, now batch.Info) {
	if gained, _ := x.note(b, now, false); gained {
		x.gained()
	}
}

// Register notes a new batch. A second one of an id is batch.ErrDuplicateID. It implements
// batch.Registrar.
func (x *index) Register(b *batch.Batch, now batch.Info) error {
	gained, err := x.note(b, now, true)
	if gained {
		x.gained()
	}
	return err
}

// Knows reports whether b was announced to the index, and not dropped. It implements
// batch.Registrar.
func (x *index) Knows(b *batch.Batch) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.mu.entries[b] != nil
}

// note notes a cut through b and reports whether that makes b a victim which it was not before. A
// new batch is refused if its id is known.
//
// The policy is called without the lock. Meanwhile a newer cut may have been recorded, and stays.
// Cuts of the same version differ in leases only, which begin without an announcement.
func (x *index) note(b *batch.Batch, now batch.Info, isNew bool) (gained bool, err error) {
	var key Key
	if x.victim(now) {
		key = x.keyOf(now)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	e := x.mu.entries[b]
	if e != nil && now.Version < e.told || e == nil && !isNew && now.Version != b.Inside().Cut().Version {
		return false, nil // a newer one was announced, or is about to be
	}
	place, known := x.places[now.Space]
	if now.State == batch.Released || !known {
		if e != nil {
			x.removeLocked(e)
			x.forgetLocked(e)
			x.mu.spaces[e.place].life++
		}
		return false, nil
	}
	if isNew && x.mu.ids[now.ID] != nil {
		return false, batch.ErrDuplicateID
	}
	rest := (now.State == batch.Idle || now.State == batch.TaskCreated) && !now.Leased
	f := facts{
		place: place, key: key, bytes: now.Bytes, size: imageSize(now), leased: now.Leased, rest: rest, idle: rest && now.Subscribers == 0,
		victim: x.victim(now) && !now.Leased && !x.mu.spaces[place].lowest,
	}
	entered := e == nil
	if entered {
		e = x.enterLocked(b, now.ID)
	} else if e.facts == f && !(e.failed() && e.form != now.Form) {
		e.told = now.Version
		return false, nil
	} else if e.place == f.place {
		// Most changes leave the place and the size as they are, and one tree of
		// the two.
		if e.key != f.key {
			x.unkeyLocked(e)
		}
		if e.bytes != f.bytes {
			x.unsizeLocked(e)
		}
		x.uncountLocked(e)
	} else {
		x.removeLocked(e)
	}
	was := e.victim
	arrives := entered || e.place != f.place || e.bytes != f.bytes
	if arrives && !entered {
		x.mu.spaces[e.place].life++
	}
	if arrives || !e.aside || e.kept {
		x.mu.spaces[f.place].life++
	}
	if e.failed() && (e.place != f.place || e.bytes != f.bytes || e.form != now.Form) {
		e.aside, e.kept, e.not, was = e.aside && !e.kept, false, 0, false
	}
	e.facts, e.told = f, now.Version
	x.countLocked(e)
	x.listLocked(e)
	return f.victim && !was, nil
}

// imageSize returns how many bytes a batch takes where nothing is packed.
func imageSize(now batch.Info) int64 {
	if now.Descriptor == nil {
		return now.Bytes
	}
	return max(now.Bytes, now.Descriptor.Body)
}

// failed reports whether something is remembered of e that holds for its form alone.
func (e *entry) failed() bool { return e.kept || e.not != 0 }

func (x *index) enterLocked(b *batch.Batch, id batch.ID) *entry {
	x.mu.made++
	e := &entry{batch: b, id: id, made: x.mu.made}
	x.mu.entries[b] = e
	if x.mu.ids[id] == nil {
		x.mu.ids[id] = b
	}
	return e
}

func (x *index) forgetLocked(e *entry) {
	delete(x.mu.entries, e.batch)
	if x.mu.ids[e.id] == e.batch {
		delete(x.mu.ids, e.id)
	}
}

// victim reports whether a batch could be moved as far as its own state goes.
func (x *index) victim(info batch.Info) bool {
	return (info.State == batch.Idle || info.State == batch.TaskCreated) &&
		info.Active == 0 && info.Subscribers == 0 && info.Bytes > 0
}

func (x *index) countLocked(e *entry) {
	s := &x.mu.spaces[e.place]
	s.version++
	s.count++
	s.bytes += e.bytes
	s.sizes.add(e.size)
	if e.rest {
		s.rest += e.bytes
	}
	if e.idle {
		s.idle += e.bytes
	}
}

func (x *index) uncountLocked(e *entry) {
	s := &x.mu.spaces[e.place]
	if e.rest {
		s.rest -= e.bytes
	}
	if e.idle {
		s.idle -= e.bytes
	}
	s.bytes -= e.bytes
	s.sizes.remove(e.size)
	s.count--
	s.version++
}

func (x *index) removeLocked(e *entry) {
	x.unkeyLocked(e)
	x.unsizeLocked(e)
	x.uncountLocked(e)
}

// listLocked puts e into the trees that it belongs in and takes it out of the
// others.
func (x *index) listLocked(e *entry) {
	s := &x.mu.spaces[e.place]
	listed := !e.aside && !s.lowest
	if !listed || !e.victim {
		x.unkeyLocked(e)
	} else if !e.keyed {
		e.keyed = true
		s.byKey.ReplaceOrInsert(e)
	}
	if !listed || !e.rest || e.bytes == 0 {
		x.unsizeLocked(e)
	} else if !e.sized {
		e.sized = true
		s.bySize.ReplaceOrInsert(e)
	}
}

func (x *index) unkeyLocked(e *entry) {
	if e.keyed {
		e.keyed = false
		x.mu.spaces[e.place].byKey.Delete(e)
	}
}

func (x *index) unsizeLocked(e *entry) {
	if e.sized {
		e.sized = false
		x.mu.spaces[e.place].bySize.Delete(e)
	}
}

// setAside takes b out of the victims until it is put back.
func (x *index) setAside(b *batch.Batch, aside bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.setAsideLocked(b, aside)
}

func (x *index) setAsideLocked(b *batch.Batch, aside bool) {
	if e := x.mu.entries[b]; e != nil {
		e.aside, e.kept = aside, false
		x.listLocked(e)
	}
}

// keepAsideLocked takes b out of the victims until it is put back or has another form, size or
// place.
func (x *index) keepAsideLocked(b *batch.Batch, form batch.PayloadType) {
	if e := x.mu.entries[b]; e != nil {
		e.aside, e.kept, e.form = true, true, form
		x.listLocked(e)
	}
}

// excludeLocked keeps b out of some tiers until they are allowed again or it has another form,
// size or place.
func (x *index) excludeLocked(b *batch.Batch, form batch.PayloadType, not kinds) {
	if e := x.mu.entries[b]; e != nil {
		e.not, e.form = not, form
	}
}

// allowLocked ends the exclusion of b from all tiers but those in not.
func (x *index) allowLocked(b *batch.Batch, not kinds) {
	if e := x.mu.entries[b]; e != nil {
		e.not &= not
	}
}

// summary is a cut through one space's part of the index.
type summary struct {
	count    int
	bytes    int64
	rest     int64
	idle     int64
	smallest byKind // bytes of the smallest batch that could go to a tier; 0 if there is none
	version  uint64
	life     uint64
}

func (x *index) summary(place int) summary {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := &x.mu.spaces[place]
	return summary{count: s.count, bytes: s.bytes, rest: s.rest, idle: s.idle, smallest: s.smallest(), version: s.version, life: s.life}
}

// smallest looks past batches that are excluded from a tier: they are few, or all there are.
func (s *spaceIndex) smallest() (bytes byKind) {
	left := tier.Kinds()
	open := left[:]
	s.bySize.Ascend(func(e *entry) bool {
		open = slices.DeleteFunc(open, func(k tier.Kind) bool {
			if !e.not.has(k) {
				bytes[k] = e.bytes
			}
			return !e.not.has(k)
		})
		return len(open) > 0
	})
	return bytes
}

// victims appends at most limit victims of a space to dst, those with the smallest keys first, and
// reports whether there are more. Those that a policy with two ends finds at its other one follow. With a limit of shortlistMax, if none of the first ones is at most as
// large as fit says of a tier, the smallest ones that are follow: a tier below that is nearly full
// must not be the end while there is a batch that it could take.
func (x *index) victims(dst []Victim, place int, fit byKind, limit int, now int64) (_ []Victim, more bool) {
	begin := len(dst)
	fitting, looked := false, 0
	most := slices.Max(fit[:])
	if limit >= shortlistMax {
		limit = shortlistMax - smallMax - staleMax
	} else {
		more = true // unless it ends before
	}
	x.mu.Lock()
	s := &x.mu.spaces[place]
	more = more && s.byKey.Len() > limit
	var last *entry
	add := func(e *entry) {
		dst = append(dst, e.asVictim())
		fitting = fitting || e.fits(fit)
	}
	s.byKey.Ascend(func(e *entry) bool {
		add(e)
		last = e
		return len(dst)-begin < limit
	})
	if p, ok := x.policy.(costAware); ok && last != nil {
		s.byKey.DescendLessOrEqual(afterUsed, func(e *entry) bool {
			if len(dst)-begin >= limit+staleMax || !lessByKey(last, e) || !p.stale(e.key, now) {
				return false
			}
			add(e)
			return true
		})
	}
	if !fitting && !more {
		s.bySize.Ascend(func(e *entry) bool {
			if e.bytes > most {
				return false
			}
			if !e.fits(fit) { // a tier that has the room is none for it
				return true
			}
			if e.victim {
				dst = append(dst, e.asVictim())
			}
			looked++
			return looked < shortlistMax && len(dst)-begin < shortlistMax
		})
	}
	x.mu.Unlock()
	return dst, more
}

// order has the policy arrange a shortlist.
func (x *index) order(now int64, list []Victim) {
	x.panics.Do("Policy.Order", func() { x.policy.Order(now, list) })
}

// keyOf calls the policy. A batch without a known key has the zero key.
func (x *index) keyOf(info batch.Info) (key Key) {
	defer x.panics.Recover("Policy.Key")
	return x.policy.Key(info)
}

// staleMax is how many victims beyond the policy's first ones are taken because they are stale.
const staleMax = 32

// afterUsed comes after all batches that costAware calls used.
var afterUsed = &entry{facts: facts{key: Key{used + 1}}}

// smallMax is how many victims beyond the policy's first ones are taken for
// their size.
const smallMax = 24

func (e *entry) asVictim() Victim {
	return Victim{Batch: e.batch, ID: e.id, Bytes: e.bytes, Key: e.key, not: e.not}
}

// fits reports whether a tier that e may go to has room for it.
func (e *entry) fits(room byKind) bool {
	for _, k := range tier.Kinds() {
		if e.bytes <= room[k] && !e.not.has(k) {
			return true
		}
	}
	return false
}
