package volumes

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/oneline"
	"github.com/spillway-db/spillway/internal/volumes/internal/journal"
	"github.com/spillway-db/spillway/tier"
)

// entry is a record of the journal. The volume's mutex guards it, except for what never changes.
type entry struct {
	key          uint64
	shared, meta []byte // of one that was found when the volume was opened
	memories     []*extents
	gone         bool
	stays        bool // not taken: it stays when the volume is closed
}

// Persisted is what one record of an earlier process says; see Volume.Persisted.
type Persisted struct {
	Key    uint64
	Shared []byte  // as it was given to Persist, in the same memory for all that share it; nil: nothing. Not to be changed
	Meta   []byte  // as it was given to Persist; not to be changed
	Sizes  []int64 // of its memories, in bytes
}

var errNotPersistent = errors.New("disk: nothing persists on this volume (Config.Persist is not set)")

// Persist records that memories of this volume outlive the process. They hold what they are to
// hold, and nothing may be written to them from then on. A volume that is opened later finds them
// with meta, whatever ends this process, as long as the system itself goes on. shared is a part of
// the meta that others have, too: it is written once for all that have the same bytes; nil is
// nothing.
//
// Memories that were recorded together before, in the same order, get the new meta in the same
// step. The record ends when the first of the memories is freed, before its room can be used
// again, or by Forget; without memories, only so, or when the volume is closed. On an error what
// was recorded before is recorded still.
//
// Where the volume encrypts, the record has the memories' seals, and is sealed itself. Memory
// whose writing failed is an error then.
func (v *Volume) Persist(shared, meta []byte, memories ...tier.Memory) (key uint64, err error) {
	if v.journal == nil {
		return 0, errNotPersistent
	}
	es := make([]*extents, 0, len(memories))
	defer func() {
		for _, e := range es { // with the journal given back: this may free them
			e.unref()
		}
	}()
	for _, m := range memories {
		e, ok := m.(*extents)
		if !ok || e.v != v {
			return 0, fmt.Errorf("disk: volume %s: persisting memory that is not its own", v.cfg.Dir)
		}
		if err := e.ref(); err != nil {
			return 0, err
		}
		es = append(es, e)
	}
	rec, err := v.describe(es)
	if err == nil {
		key, err = v.record(rec, shared, meta, slices.Clone(es))
	}
	if err != nil && !errors.Is(err, tier.ErrClosed) {
		err = fmt.Errorf("disk: volume %s: persisting: %w", v.cfg.Dir, err)
	}
	return key, err
}

// describe says where memories lie, and how they are sealed. Writes under way end first.
func (v *Volume) describe(es []*extents) (*journal.Record, error) {
	rec := journal.NewRecord(v.sealer)
	rec.Memories = make([]journal.Memory, len(es))
	for i, e := range es {
		m := &rec.Memories[i]
		m.Size = e.size
		for _, p := range e.pieces {
			m.Pieces = append(m.Pieces, journal.Piece{Segment: p.At.seg.index, Off: p.At.off, Len: p.Len})
		}
		if e.units == nil {
			continue
		}
		seals, err := e.units.Seals(v.life)
		if v.life.Err() != nil {
			return nil, tier.ErrClosed
		}
		if err != nil {
			return nil, err
		}
		rec.Sealed(m, e.units.Key(), e.units.Number(), seals)
	}
	return rec, nil
}

var errMixed = errors.New("memories that persist already, with others")

// record writes the record of memories that are held.
func (v *Volume) record(rec *journal.Record, shared, meta []byte, es []*extents) (uint64, error) {
	v.journalTurn <- struct{}{}
	defer func() { <-v.journalTurn }()
	v.mu.Lock()
	var old *entry
	if len(es) > 0 {
		old = es[0].entry
	}
	closed := v.mu.closed
	mixed := slices.ContainsFunc(es, func(e *extents) bool { return e.entry != old }) ||
		old != nil && !slices.Equal(old.memories, es)
	v.mu.Unlock()
	switch {
	case closed:
		return 0, tier.ErrClosed
	case mixed:
		return 0, errMixed
	case old != nil:
		rec.Replaces = old.key
	}
	key, err := v.journal.Add(rec, shared, meta)
	if err != nil {
		return 0, err
	}
	ent := &entry{key: key, memories: es}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.entries[key] = ent
	for _, e := range es {
		e.entry = ent
	}
	if old != nil {
		old.gone = true
		delete(v.mu.entries, old.key)
	}
	return key, nil
}

// KeyOf returns the key of the record that a memory is in; false if there is none.
func (v *Volume) KeyOf(m tier.Memory) (uint64, bool) {
	e, ok := m.(*extents)
	if !ok || e.v != v {
		return 0, false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if e.entry == nil || e.entry.gone {
		return 0, false
	}
	return e.entry.key, true
}

// Persisted lists what was found when the volume was opened and was not taken since, the oldest
// first. It counts as used, and stays when the volume is closed, for the next one.
func (v *Volume) Persisted() []Persisted {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []Persisted
	for _, ent := range v.mu.entries {
		if !ent.stays {
			continue
		}
		k := Persisted{Key: ent.key, Shared: ent.shared, Meta: ent.meta}
		for _, e := range ent.memories {
			k.Sizes = append(k.Sizes, e.size)
		}
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b Persisted) int { return cmp.Compare(a.Key, b.Key) })
	return out
}

// notThere says that there is no such record, or that it is taken.
func (v *Volume) notThere(key uint64) error {
	return fmt.Errorf("disk: volume %s: what was kept as %d: %w", v.cfg.Dir, key, tier.ErrReleased)
}

// Take hands out the memories of a record that Persisted lists, as if Alloc had. The caller
// must Free them, which ends their record, or PutBack them first. They are to be read. What is
// encrypted cannot be written, because the key that it was sealed with seals nothing any more.
// tier.ErrReleased: it is not there, or taken.
func (v *Volume) Take(key uint64) ([]tier.Memory, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	ent := v.mu.entries[key]
	switch {
	case v.mu.closed:
		return nil, tier.ErrClosed
	case ent == nil || !ent.stays:
		return nil, v.notThere(key)
	}
	v.stayLocked(ent, false)
	out := make([]tier.Memory, len(ent.memories))
	for i, e := range ent.memories {
		out[i] = e
	}
	return out, nil
}

// stayLocked sets whether a record stays when the volume is closed.
func (v *Volume) stayLocked(ent *entry, stays bool) {
	ent.stays = stays
	for _, e := range ent.memories {
		for _, p := range e.pieces {
			n := round(p.Len)
			if !stays {
				n = -n
			}
			p.At.seg.stays += n
			v.mu.stays += n
		}
	}
}

// PutBack undoes a Take: Persisted lists it again. The memories that were handed out must
// still be freed, which then frees no room.
func (v *Volume) PutBack(key uint64) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	ent := v.mu.entries[key]
	if ent == nil || ent.stays || ent.meta == nil {
		return v.notThere(key)
	}
	for i, e := range ent.memories {
		e.entry, e.disowned = nil, true
		ent.memories[i] = &extents{v: v, size: e.size, pieces: e.pieces, units: e.units, entry: ent}
		ent.memories[i].refs.Store(1)
	}
	v.stayLocked(ent, true)
	return nil
}

// Forget ends a record. Memories that were not taken are freed; others stay their holder's. An
// absent record is no error.
func (v *Volume) Forget(key uint64) {
	v.mu.Lock()
	ent := v.mu.entries[key]
	v.mu.Unlock()
	if ent == nil {
		return
	}
	taken, err := v.Take(key)
	if err != nil {
		v.endRecord(ent)
		return
	}
	for _, m := range taken {
		v.Free(m, func() {})
	}
}

func (v *Volume) endRecord(ent *entry) {
	v.journalTurn <- struct{}{}
	defer func() { <-v.journalTurn }()
	v.endInTurn(ent)
}

// endInTurn is endRecord while the journal is held.
func (v *Volume) endInTurn(ent *entry) {
	v.mu.Lock()
	if ent.gone || v.journal.Closed() {
		v.mu.Unlock()
		return
	}
	ent.gone = true
	delete(v.mu.entries, ent.key)
	v.mu.Unlock()
	v.journal.End(ent.key)
	// Only now may a memory's room be used again: its Free waits for the journal.
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, e := range ent.memories {
		e.entry = nil
	}
}

// endRecordOf ends the record that a memory is in, before its room is free.
func (v *Volume) endRecordOf(e *extents) {
	if v.journal == nil {
		return
	}
	v.mu.Lock()
	ent := e.entry
	v.mu.Unlock()
	if ent != nil {
		v.endRecord(ent)
	}
}

// leaveJournal gives the directory up with all that persists in it, or removes it if that is
// nothing. All segments are closed.
func (v *Volume) leaveJournal() error {
	v.journalTurn <- struct{}{} // a record that is being written still finds the files open
	defer func() { <-v.journalTurn }()
	var over []*entry // without memories, which would have kept the volume open
	stays := false
	v.mu.Lock()
	for _, ent := range v.mu.entries {
		if stays = stays || ent.stays; !ent.stays {
			over = append(over, ent)
		}
	}
	v.mu.Unlock()
	for _, ent := range over {
		v.endInTurn(ent)
	}
	err := v.journal.Close()
	if stays {
		return oneline.Join(err, v.own.lock.Close())
	}
	// If something could not be removed, the manifest stays and says that there is
	// nothing: an older one might say otherwise.
	if !v.own.dirty.Load() {
		err = oneline.Join(err, v.journal.Remove())
	}
	return oneline.Join(err, v.own.remove())
}
