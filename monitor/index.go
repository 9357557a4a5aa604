package monitor

import (
	"math"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/tier"
)

// The index is what a Monitor keeps of all batches: where they are, and which of them could be
// evicted, in the policy's order. Each change of a batch costs a look at that one batch, and steps in
// ordered trees if its place in one of them has changed. The trees hold keys and sizes by value, so a
// search in them rarely leaves the cache.
//
// A victim is idle or only waited for by tasks, is not empty, and has a slower tier to go to. It
// has neither subscribers nor leases of its memory. Batches in the slowest tier are only counted.

// entry is the record of one batch, from its making until it is dropped. note changes it, and for
// failures noteMove and putBack. The Monitor's lock guards it. These are its states, by its standing:
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
	in     *space // where the batch is; nil if the entry is new or has left
	key    Key    // zero if the batch is no victim
	bytes  int64
	size   int64        // as an image
	rest   bool         // it is not being read, moved, leased or dropped
	idle   bool         // and has no subscribers
	victim bool         // it could be evicted unless failures exclude it
	moving bool         // it is in transit
	listed bool         // it is a victim that failures do not exclude from all tiers: become sets it
	not    decide.Kinds // the tiers that the batch is not to be moved to in this form, after failures
}

// byKind has a number of bytes for each tier.
type byKind [tier.KindCount]int64

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

// listed is an entry in a tree of victims, or of batches by size: in the order of the keys, and then
// of the ids.
type listed struct {
	key Key
	id  batch.ID
	e   *entry
}

func isLess(a, b listed) bool {
	for i, word := range a.key {
		if word != b.key[i] {
			return word < b.key[i]
		}
	}
	return a.id < b.id
}

// become makes next the standing of e. Trees that list the batch in the same place before and after
// are left alone.
func (e *entry) become(next standing) {
	was := e.standing
	next.listed = next.victim && next.not&next.in.lower != next.in.lower
	if was == next {
		return
	}
	isHere := was.in == next.in
	staysListed := isHere && was.listed && next.listed
	for i, of := range []*standing{&was, &next} {
		s, sign := of.in, int64(2*i-1) // the old standing leaves its space's sums and trees, the new one joins them
		if s == nil {
			continue
		}
		put := (*btree.BTreeG[listed]).ReplaceOrInsert
		if of == &was {
			put = (*btree.BTreeG[listed]).Delete
		}
		if !isHere || was.size != next.size {
			put(s.sizes, listed{Key{of.size}, e.id, e})
		}
		if of.listed && !(staysListed && was.key == next.key) {
			put(s.victims, listed{of.key, e.id, e})
		}
		if of.listed && !(staysListed && was.bytes == next.bytes) {
			put(s.small, listed{Key{of.bytes}, e.id, e})
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
	}
	e.standing = next
}

// excludeLocked excludes the batch from the tiers in not, and from no others, until it has another
// form.
func (e *entry) excludeLocked(not decide.Kinds) {
	next := e.standing
	next.not = not
	e.become(next)
}

// Knows reports whether b was announced to the Monitor, and not dropped. It implements
// batch.Registrar.
func (m *Monitor) Knows(b *batch.Batch) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.mu.entries[b.ID()]
	return e != nil && e.b == b
}

// movable reports whether a batch could be moved as far as its own state goes. Leases of its memory
// begin without an announcement.
func movable(info *batch.Info) bool {
	return (info.State == batch.Idle || info.State == batch.TaskCreated) &&
		info.Subscribers == 0 && info.Bytes > 0 && !info.Leased
}

// BatchChanged notes what b is like now. It implements batch.Observer.
func (m *Monitor) BatchChanged(b *batch.Batch, now batch.Info) { _ = m.Register(b, now) }

// Register notes what b, which may be new, is like now. A second batch of an id is
// batch.ErrDuplicateID. It implements batch.Registrar. If an observer around the Monitor has hidden a
// second batch of an id, the Monitor ignores it while it has the first.
//
// If the batch becomes a victim, waiters that it may help are woken: those for its space, and for
// faster ones, whose batches may take its place.
func (m *Monitor) Register(b *batch.Batch, now batch.Info) error {
	gained, err := m.note(b, now)
	for _, s := range m.spaces {
		if gained != nil && (s == gained || s.Kind() < gained.Kind()) {
			m.cfg.Reservations.Wake(s.ID())
		}
	}
	return err
}

// note is Register without the waking. It returns the space of the batch if that has become a victim.
//
// The policy is called without the lock. Meanwhile a newer Info may have been recorded, and stays.
// Those of the same version differ in leases only, which begin without an announcement.
func (m *Monitor) note(b *batch.Batch, now batch.Info) (gained *space, _ error) {
	s, isVictim := m.byID[now.Space], false
	var key Key
	if s != nil && s.lower != 0 && movable(&now) {
		isVictim, key = true, m.cfg.Policy.Key(now)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.mu.entries[now.ID]
	switch {
	case e != nil && e.b != b:
		return nil, batch.ErrDuplicateID
	case e != nil && now.Version < e.version:
		return nil, nil
	case e == nil && now.Version != b.Snapshot().Version:
		return nil, nil // a newer one was announced, or is about to be
	}
	if now.State == batch.Released || s == nil {
		if e != nil {
			e.become(standing{})
			delete(m.mu.entries, now.ID)
			delete(m.mu.faults, e)
		}
		return nil, nil
	}
	if e == nil {
		e = &entry{b: b, id: now.ID}
		m.mu.entries[now.ID] = e
	}
	was, next := e.standing, standing{
		in: s, key: key, bytes: now.Bytes, size: now.Bytes, victim: isVictim, moving: now.State == batch.InTransit,
		rest: (now.State == batch.Idle || now.State == batch.TaskCreated) && !now.Leased, not: e.not,
	}
	next.idle = next.rest && now.Subscribers == 0
	if now.Descriptor != nil { // where nothing is compressed
		next.size = max(now.Bytes, now.Descriptor.Body)
	}
	moved := was.in != s || was.bytes != now.Bytes
	if moved || e.form != now.Form { // failures of another form do not count
		delete(m.mu.faults, e)
		was.victim, next.not = was.victim && e.not == 0, 0
	}
	// A batch whose move has failed is no new victim: the caller of the move has the error, and
	// must not be woken by it.
	if isVictim && !was.victim && (!was.moving || moved) {
		gained = s
	}
	e.version, e.form = now.Version, now.Form
	e.become(next)
	return gained, nil
}

// sums returns the sums of one space.
func (m *Monitor) sums(s *space) summary {
	m.mu.Lock()
	defer m.mu.Unlock()
	return s.summary
}

// from returns the victims of a space that come after one, or the first ones if that is the zero
// Victim, those with the smallest keys first, limit at most.
func (m *Monitor) from(after Victim, s *space, limit int) []Victim {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := make([]Victim, 0, min(limit, s.victims.Len()))
	begin := listed{key: after.Key, id: after.ID + 1}
	if after.Batch == nil {
		begin = listed{key: Key{math.MinInt64, math.MinInt64, math.MinInt64, math.MinInt64}}
	}
	s.victims.AscendGreaterOrEqual(begin, func(l listed) bool {
		list = append(list, l.e.asVictim())
		return len(list) < limit
	})
	return list
}

func (e *entry) asVictim() Victim {
	return Victim{Batch: e.b, ID: e.id, Bytes: e.bytes, Key: e.key, not: e.not}
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
