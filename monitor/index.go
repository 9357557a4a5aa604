package monitor

import (
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/compact"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// index knows where all batches are and which of them could be moved down, in
// the policy's order. It is the batch.Observer that an engine gives to its batches:
// each change costs a look at that one batch and, if it became a victim or ceased
// to be one, two steps in lists in order. No part of it is ever scanned.
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
		entries compact.Table[*batch.Batch, entry]
		others  map[*batch.Batch]uint32 // the numbers of batches that have another observer's mark
		ids     compact.Set             // of batches; a wrapper of the index may hide a second one of an id
		apart   map[uint32]apart        // by number
		spaces  []spaceIndex
		habits  decide.Habits // of the batches in entries
	}
}

// entry is what is known of one batch. It has no pointers: there may be a million.
type entry struct {
	id batch.ID
	facts
	told  uint32       // the lower half of the version of the batch that the facts are of
	aside bool         // a move of it is under way, or failed a moment ago
	kept  bool         // skipped after a failure, until its form is no longer that which failed
	named bool         // it is the first of its id
	not   decide.Kinds // the tiers that it cannot be converted for in this form
	keyed uint32       // in which block of byKey it is; 0 for none
	sized uint32       // of bySize
}

// newer is above 0 if a cut is newer than the facts, and below if it is older.
func (e *entry) newer(now batch.Info) int32 { return int32(uint32(now.Version) - e.told) }

// apart is what is known of few entries beyond that.
type apart struct {
	key  Key               // of a victim that is aside: byKey does not have it
	form batch.PayloadType // that failed, where kept or not says so
}

// byKind has a number of bytes for each tier.
type byKind [tier.Disk + 1]int64

// inEach is n bytes for each tier.
func inEach(n int64) (all byKind) {
	for k := range all {
		all[k] = n
	}
	return all
}

// facts are what the orders and sums are made from, beside the key.
type facts struct {
	bytes  int64
	size   int64  // as an image
	place  uint16 // index in spaces
	rest   bool   // it is not being read, moved or dropped
	idle   bool   // and has no subscribers
	leased bool   // but readers hold its memory
	victim bool   // it could go down unless it is skipped
	active bool   // it has open handles
	uses   uint8  // see batch.Info.Uses
}

// spaceIndex is the part of an index that belongs to one space.
type spaceIndex struct {
	lowest  bool          // nothing below: nothing is listed, only counted
	byKey   compact.Order // the victims
	bySize  compact.Order // all that could go down, also with subscribers
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

func newIndex(policy Policy, ids []tier.ID, lowest func(i int) bool, gained func()) *index {
	x := &index{policy: policy, places: make(map[tier.ID]int), gained: gained}
	x.mu.others = make(map[*batch.Batch]uint32)
	x.mu.apart = make(map[uint32]apart)
	x.mu.entries.Moved = x.movedLocked
	x.mu.spaces = make([]spaceIndex, len(ids))
	for i, id := range ids {
		x.places[id] = i
		s := &x.mu.spaces[i]
		s.lowest = lowest(i)
		s.byKey.Block = func(n uint32) *uint32 { return &x.mu.entries.At(n).keyed }
		s.byKey.Tie = func(n uint32) uint64 { return uint64(x.mu.entries.At(n).id) }
		s.bySize.Block = func(n uint32) *uint32 { return &x.mu.entries.At(n).sized }
	}
	return x
}

// numberLocked returns the number of a batch's entry; 0 if it has none.
func (x *index) numberLocked(b *batch.Batch) uint32 {
	if n := b.Inside().Mark().Load(); n != 0 && x.mu.entries.Of(n) == b {
		return n
	}
	return x.mu.others[b]
}

// entryLocked returns a batch's entry; nil if it has none. It is valid while the lock is held.
func (x *index) entryLocked(b *batch.Batch) *entry {
	if n := x.numberLocked(b); n != 0 {
		return x.mu.entries.At(n)
	}
	return nil
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
	return x.numberLocked(b) != 0
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
	n, e := x.numberLocked(b), x.entryLocked(b)
	if e != nil && e.newer(now) < 0 || e == nil && !isNew && now.Version != b.Inside().Cut().Version {
		return false, nil // a newer one was announced, or is about to be
	}
	place, known := x.places[now.Space]
	if e != nil {
		x.useLocked(e, now)
	}
	if now.State == batch.Released || !known {
		if e != nil {
			x.mu.habits.Leave(e.uses)
			x.removeLocked(n, e)
			x.mu.spaces[e.place].life++
			x.forgetLocked(n, e)
		}
		return false, nil
	}
	if isNew && x.mu.ids.Has(uint64(now.ID)) {
		return false, batch.ErrDuplicateID
	}
	rest := (now.State == batch.Idle || now.State == batch.TaskCreated) && !now.Leased
	f := facts{
		place: uint16(place), bytes: now.Bytes, size: imageSize(now), leased: now.Leased, rest: rest, idle: rest && now.Subscribers == 0,
		victim: x.victim(now) && !now.Leased && !x.mu.spaces[place].lowest, active: now.Active > 0, uses: now.Uses,
	}
	if !f.victim {
		key = Key{}
	}
	entered := e == nil
	if entered {
		n, e = x.enterLocked(b, now.ID)
		x.mu.habits.Enter(now.Uses)
	} else if same := x.keyLocked(n, e) == key; same && e.facts == f && !(e.failed() && x.mu.apart[n].form != now.Form) {
		if s := &x.mu.spaces[place]; x.victim(now) && !f.victim && e.newer(now) > 0 { // its key may be another
			s.version++
			s.life++
		}
		e.told = uint32(now.Version)
		return false, nil
	} else if e.place == f.place {
		// Most changes leave the place and the size as they are, and one order of
		// the two.
		if !same {
			x.unkeyLocked(n, e)
		}
		if e.bytes != f.bytes {
			x.unsizeLocked(n, e)
		}
		x.uncountLocked(e)
	} else {
		x.removeLocked(n, e)
	}
	was := e.victim
	arrives := entered || e.place != f.place || e.bytes != f.bytes
	if arrives && !entered {
		x.mu.spaces[e.place].life++
	}
	if arrives || !e.aside || e.kept {
		x.mu.spaces[f.place].life++
	}
	form := x.mu.apart[n].form
	if e.failed() && (e.place != f.place || e.bytes != f.bytes || form != now.Form) {
		e.aside, e.kept, e.not, was = e.aside && !e.kept, false, 0, false
	}
	e.facts, e.told = f, uint32(now.Version)
	x.countLocked(e)
	x.listLocked(n, e, key, form)
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

func (x *index) enterLocked(b *batch.Batch, id batch.ID) (n uint32, e *entry) {
	n = x.mu.entries.Add(b)
	if !b.Inside().Mark().CompareAndSwap(0, n) {
		x.mu.others[b] = n
	}
	e = x.mu.entries.At(n)
	e.id = id
	if e.named = !x.mu.ids.Has(uint64(id)); e.named {
		x.mu.ids.Add(uint64(id))
	}
	return n, e
}

func (x *index) forgetLocked(n uint32, e *entry) {
	b := x.mu.entries.Of(n)
	if e.named {
		x.mu.ids.Remove(uint64(e.id))
	}
	if x.mu.others[b] == n {
		delete(x.mu.others, b)
	} else {
		b.Inside().Mark().Store(0)
	}
	delete(x.mu.apart, n)
	x.mu.entries.Remove(n)
}

// movedLocked is told that an entry has another number.
func (x *index) movedLocked(b *batch.Batch, from, to uint32) {
	if x.mu.others[b] == from {
		x.mu.others[b] = to
	} else {
		b.Inside().Mark().Store(to)
	}
	if a, ok := x.mu.apart[from]; ok {
		delete(x.mu.apart, from)
		x.mu.apart[to] = a
	}
	e := x.mu.entries.At(to)
	s := &x.mu.spaces[e.place]
	if e.keyed != 0 {
		s.byKey.Renumber(from, to)
	}
	if e.sized != 0 {
		s.bySize.Renumber(from, to)
	}
}

// keyLocked returns the key of a victim, and the zero one of others.
func (x *index) keyLocked(n uint32, e *entry) Key {
	if e.keyed != 0 {
		return Key(x.mu.spaces[e.place].byKey.Key(n))
	}
	return x.mu.apart[n].key
}

// victim reports whether a batch could be moved as far as its own state goes.
func (x *index) victim(info batch.Info) bool {
	return (info.State == batch.Idle || info.State == batch.TaskCreated) &&
		info.Active == 0 && info.Subscribers == 0 && info.Bytes > 0
}

// useLocked notes whether a batch is in use, and how often it was.
func (x *index) useLocked(e *entry, now batch.Info) {
	if now.Active > 0 && !e.active {
		x.mu.habits.Use(e.uses, now.LastUse)
	}
	x.mu.habits.Leave(e.uses)
	e.active, e.uses = now.Active > 0, now.Uses
	x.mu.habits.Enter(e.uses)
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

func (x *index) removeLocked(n uint32, e *entry) {
	x.unkeyLocked(n, e)
	x.unsizeLocked(n, e)
	x.uncountLocked(e)
}

// listLocked puts an entry into the orders that it belongs in and takes it out of the others. key
// is its key, and form what failed, if something did.
func (x *index) listLocked(n uint32, e *entry, key Key, form batch.PayloadType) {
	s := &x.mu.spaces[e.place]
	listed := !e.aside && !s.lowest
	if !listed || !e.victim {
		x.unkeyLocked(n, e)
	} else if e.keyed == 0 {
		s.byKey.Insert(n, compact.Key(key))
	}
	if !listed || !e.rest || e.bytes == 0 {
		x.unsizeLocked(n, e)
	} else if e.sized == 0 {
		s.bySize.Insert(n, compact.Key{uint64(e.bytes)})
	}
	if e.aside && e.victim || e.failed() {
		x.mu.apart[n] = apart{key, form}
	} else {
		delete(x.mu.apart, n)
	}
}

func (x *index) unkeyLocked(n uint32, e *entry) {
	if e.keyed != 0 {
		x.mu.spaces[e.place].byKey.Remove(n)
	}
}

func (x *index) unsizeLocked(n uint32, e *entry) {
	if e.sized != 0 {
		x.mu.spaces[e.place].bySize.Remove(n)
	}
}

// setAside takes b out of the victims until it is put back.
func (x *index) setAside(b *batch.Batch, aside bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.setAsideLocked(b, aside)
}

func (x *index) setAsideLocked(b *batch.Batch, aside bool) {
	x.changeLocked(b, func(e *entry, _ *batch.PayloadType) { e.aside, e.kept = aside, false })
}

// keepAsideLocked takes b out of the victims until it is put back or has another form, size or
// place.
func (x *index) keepAsideLocked(b *batch.Batch, form batch.PayloadType) {
	x.changeLocked(b, func(e *entry, failed *batch.PayloadType) { e.aside, e.kept, *failed = true, true, form })
}

// excludeLocked keeps b out of some tiers until they are allowed again or it has another form,
// size or place.
func (x *index) excludeLocked(b *batch.Batch, form batch.PayloadType, not decide.Kinds) {
	x.changeLocked(b, func(e *entry, failed *batch.PayloadType) { e.not, *failed = not, form })
}

// allowLocked ends the exclusion of b from all tiers but those in not.
func (x *index) allowLocked(b *batch.Batch, not decide.Kinds) {
	x.changeLocked(b, func(e *entry, _ *batch.PayloadType) { e.not &= not })
}

// changeLocked changes what is remembered of b beside its facts, if it is there.
func (x *index) changeLocked(b *batch.Batch, f func(e *entry, failed *batch.PayloadType)) {
	n := x.numberLocked(b)
	if n == 0 {
		return
	}
	e := x.mu.entries.At(n)
	key, form := x.keyLocked(n, e), x.mu.apart[n].form
	f(e, &form)
	x.listLocked(n, e, key, form)
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
	life     uint64
}

func (x *index) summary(place int) summary {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := &x.mu.spaces[place]
	return summary{
		count: s.count, bytes: s.bytes, rest: s.rest, idle: s.idle, smallest: x.smallestLocked(place), victims: s.byKey.Len(), version: s.version, life: s.life,
	}
}

// smallestLocked looks past batches that are excluded from a tier: they are few, or all there are.
func (x *index) smallestLocked(place int) (bytes byKind) {
	left := tier.Kinds()
	open := left[:]
	for n := range x.mu.spaces[place].bySize.All() {
		e := x.mu.entries.At(n)
		open = slices.DeleteFunc(open, func(k tier.Kind) bool {
			if !e.not.Has(k) {
				bytes[k] = e.bytes
			}
			return !e.not.Has(k)
		})
		if len(open) == 0 {
			break
		}
	}
	return bytes
}

// from returns the victims of a space that come after one, or the first ones if that is the zero
// Victim, those with the smallest keys first: shortlistMax at most.
func (x *index) from(after Victim, place int) (list []Victim) {
	x.mu.Lock()
	defer x.mu.Unlock()
	order := &x.mu.spaces[place].byKey
	all := order.All()
	if after.ID != 0 {
		all = order.After(compact.Key(after.Key), uint64(after.ID))
	}
	for n, key := range all {
		if list = append(list, x.victimLocked(n, Key(key))); len(list) >= shortlistMax {
			break
		}
	}
	return list
}

// victims appends victims of a space to dst, those with the smallest keys first, and reports whether
// there are more. It takes limit of them, and as many of each other class of CostAware. With a limit
// of shortlistMax, if none of the first ones is at most as large as fit says of a tier, the smallest
// ones that are follow: a tier below that is nearly full must not be the end while there is a batch
// that it could take.
func (x *index) victims(dst []Victim, place int, fit byKind, limit int, now int64) (_ []Victim, more bool) {
	begin := len(dst)
	fitting, looked := false, 0
	most := slices.Max(fit[:])
	_, aware := x.policy.(costAware)
	if more = limit < shortlistMax; !more { // it ends there all the same
		limit = shortlistMax - smallMax - staleMax
		if aware {
			limit /= 3
		}
	}
	x.mu.Lock()
	s := &x.mu.spaces[place]
	var last uint32
	var lastKey Key
	add := func(n uint32, key Key) {
		dst = append(dst, x.victimLocked(n, key))
		fitting = fitting || x.mu.entries.At(n).fits(fit)
		last, lastKey = n, key
	}
	for n, key := range s.byKey.All() {
		if add(n, Key(key)); len(dst)-begin >= limit {
			break
		}
	}
	if aware && last != 0 {
		for _, class := range []uint64{once, used} {
			listed, begin := lastKey[0] >= class, len(dst)
			for n, key := range s.byKey.After(compact.Key{class}, 0) {
				if listed || key[0] != class || len(dst)-begin >= limit {
					break
				}
				add(n, Key(key))
			}
		}
		if lastKey[0] <= used { // else all that were used are listed
			x.staleLocked(s, last, now, add)
		}
	}
	more = more && s.byKey.Len() > len(dst)-begin
	if !fitting && !more {
		for n := range s.bySize.All() {
			e := x.mu.entries.At(n)
			if e.bytes > most || looked >= shortlistMax || len(dst)-begin >= shortlistMax {
				break
			}
			if !e.fits(fit) { // a tier that has the room is none for it
				continue
			}
			if e.victim {
				dst = append(dst, x.victimLocked(n, x.keyLocked(n, e)))
			}
			looked++
		}
	}
	x.mu.Unlock()
	return dst, more
}

// staleLocked adds victims of a space that are stale, behind the last one that was added. Of those
// that were used, they are among the last in the order of keys.
func (x *index) staleLocked(s *spaceIndex, last uint32, now int64, add func(uint32, Key)) {
	looked, found := 0, 0
	for n, key := range s.byKey.Before(compact.Key{used + 1}) {
		if looked++; looked > 4*staleMax || found >= staleMax || n == last {
			return
		}
		if Key(key).stale(now, &x.mu.habits) {
			add(n, Key(key))
			found++
		}
	}
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

func (x *index) victimLocked(n uint32, key Key) Victim {
	e := x.mu.entries.At(n)
	return Victim{Batch: x.mu.entries.Of(n), ID: e.id, Bytes: e.bytes, Key: key, not: e.not}
}

// fits reports whether a tier that e may go to has room for it.
func (e *entry) fits(room byKind) bool {
	for _, k := range tier.Kinds() {
		if e.bytes <= room[k] && !e.not.Has(k) {
			return true
		}
	}
	return false
}
