package disk

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/tier"
)

// keptDir is the directory of a volume with Config.Keep: named.go's, with a manifest
// in it. All but the channel is guarded by the turn.
type keptDir struct {
	turn       chan struct{} // a token: one writes the manifest at a time
	generation uint64        // of the manifest
	newest     uint64        // the highest generation that there has been
	file       File
	at         int64 // the manifest's length
	live       int64 // of it, in records of what is kept
	next       uint64
	torn       bool                   // a write has failed: the manifest must be written anew
	shared     map[string]*sharedMeta // by their bytes, also such as nobody shares any more
	mark       keyMark
	left       bool // the directory is given up: what has its name may be another's manifest
}

// sharedMeta is what several entries have in common, and has a record of its own. The
// manifest's turn guards all but the bytes.
type sharedMeta struct {
	key   uint64
	bytes []byte
	at, n int64 // of the record
	users int   // entries
}

// entry is what one record says is kept.
type entry struct {
	key    uint64
	meta   []byte      // of one that was found when the volume was opened
	shared *sharedMeta // nil if it has nothing in common with others
	at, n  int64       // of the record; guarded by the manifest's turn

	// Guarded by the volume's mutex.
	memories []*Extents
	gone     bool
	stays    bool // nobody has taken it: it stays when the volume is closed
}

// Kept is something that a process before this one has kept; see Volume.Kept.
type Kept struct {
	Key    uint64
	Shared []byte  // as it was given to KeepWith, in the same memory for all that share it; nil: nothing. Not to be changed
	Meta   []byte  // as it was given to Keep; not to be changed
	Sizes  []int64 // of its memories, in bytes
}

// errNotKept is what a volume without Config.Keep says.
var errNotKept = errors.New("disk: the volume keeps nothing (Config.Keep is not set)")

// Keep records that memories of this volume, which hold what they are to hold, are to
// outlive the process: a volume that is opened later finds them with meta, whatever
// ends this one, as long as the system itself goes on. What has been kept together
// before, in the same order, gets the new meta in the same step. The record ends
// when the first of the memories is freed, before its room can be used again, or by
// Forget; without memories, only so, or when the volume is closed. On an error what was recorded before is recorded still.
//
// Nothing may be written to the memories from then on. Where the volume encrypts, the record
// has their seals, and is sealed itself; memory whose writing failed is not kept then.
func (v *Volume) Keep(meta []byte, memories ...tier.Memory) (key uint64, err error) {
	return v.KeepWith(nil, meta, memories...)
}

// KeepWith is Keep with a part of the meta that others have, too: the manifest has it once
// for all that are kept with the same bytes. nil is nothing.
func (v *Volume) KeepWith(shared, meta []byte, memories ...tier.Memory) (key uint64, err error) {
	if v.kept == nil {
		return 0, errNotKept
	}
	if n := max(len(meta), len(shared)); n > maxRecord/2 {
		return 0, fmt.Errorf("disk: volume %s: keeping %d bytes of meta", v.cfg.Dir, n)
	}
	es := make([]*Extents, 0, len(memories))
	defer func() {
		for _, e := range es { // with the turn given back: this may free them
			e.unref()
		}
	}()
	for _, m := range memories {
		e, ok := m.(*Extents)
		if !ok || e.v != v {
			return 0, fmt.Errorf("disk: volume %s: keeping memory that is not its own", v.cfg.Dir)
		}
		if err := e.ref(); err != nil {
			return 0, err
		}
		es = append(es, e)
	}
	rec, err := v.describe(es)
	if err != nil {
		return 0, fmt.Errorf("disk: volume %s: keeping: %w", v.cfg.Dir, err)
	}
	return v.record(rec, shared, meta, slices.Clone(es))
}

// record writes the record of memories that are held, and before it that of what it shares, if
// there is none yet.
func (v *Volume) record(rec *keptRecord, shared, meta []byte, es []*Extents) (uint64, error) {
	k := v.kept
	k.turn <- struct{}{}
	defer func() { <-k.turn }()
	v.mu.Lock()
	var old *entry
	if len(es) > 0 {
		old = es[0].entry
	}
	closed := v.mu.closed
	mixed := slices.ContainsFunc(es, func(e *Extents) bool { return e.entry != old }) ||
		old != nil && !slices.Equal(old.memories, es)
	v.mu.Unlock()
	switch {
	case closed:
		return 0, tier.ErrClosed
	case mixed:
		return 0, fmt.Errorf("disk: volume %s: memories that are kept already, with others", v.cfg.Dir)
	}
	if err := v.mend(); err != nil {
		return 0, fmt.Errorf("disk: volume %s: the manifest: %w", v.cfg.Dir, err)
	}
	common, err := v.sharedOf(shared)
	if err != nil {
		v.tidy()
		return 0, fmt.Errorf("disk: volume %s: the manifest: %w", v.cfg.Dir, err)
	}
	ent := &entry{key: k.next, shared: common, memories: es}
	if common != nil {
		rec.shared = common.key
	}
	if old != nil {
		rec.replaces = old.key
	}
	body := v.sealRecord(rec, kindKept, ent.key, meta)
	if len(body) > maxRecord {
		return 0, fmt.Errorf("disk: volume %s: a record of %d bytes is too long: the most is %d", v.cfg.Dir, len(body), maxRecord)
	}
	if ent.at, ent.n, err = k.write(kindKept, ent.key, body); err != nil {
		v.tidy() // it may be there all the same
		return 0, fmt.Errorf("disk: volume %s: the manifest: %w", v.cfg.Dir, err)
	}
	k.next++
	k.count(ent, 1)
	v.mu.Lock()
	v.mu.entries[ent.key] = ent
	for _, e := range es {
		e.entry = ent
	}
	if old != nil {
		old.gone = true
		delete(v.mu.entries, old.key)
		k.count(old, -1)
	}
	v.mu.Unlock()
	v.tidy()
	return ent.key, nil
}

// sharedOf returns the record of what entries have in common, which it writes if the manifest
// has none; nil for nothing. The turn is held.
func (v *Volume) sharedOf(bytes []byte) (*sharedMeta, error) {
	k := v.kept
	if len(bytes) == 0 {
		return nil, nil
	}
	if s := k.shared[string(bytes)]; s != nil {
		return s, nil
	}
	rec := new(keptRecord)
	if v.sealer != nil {
		rec.salts = [][saltSize]byte{v.sealer.own.salt}
	}
	s := &sharedMeta{key: k.next, bytes: slices.Clone(bytes)}
	var err error
	if s.at, s.n, err = k.write(kindShared, s.key, v.sealRecord(rec, kindShared, s.key, bytes)); err != nil {
		return nil, err
	}
	k.next++
	k.shared[string(bytes)] = s
	return s, nil
}

// count notes that an entry is recorded (1), or is not any more (-1). The turn is held.
func (k *keptDir) count(ent *entry, n int) {
	k.live += int64(n) * ent.n
	s := ent.shared
	if s == nil {
		return
	}
	if n < 0 {
		if s.users--; s.users == 0 {
			k.live -= s.n
		}
		return
	}
	if s.users++; s.users == 1 {
		k.live += s.n
	}
}

// KeyOf returns the key of the record that a memory is in; false if there is none.
func (v *Volume) KeyOf(m tier.Memory) (uint64, bool) {
	e, ok := m.(*Extents)
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

// Kept lists, in the order in which it was kept, what was found when the volume was
// opened and nobody has taken. It counts as used, and stays when the volume is
// closed, for the next one.
func (v *Volume) Kept() []Kept {
	v.mu.Lock()
	defer v.mu.Unlock()
	var out []Kept
	for _, ent := range v.mu.entries {
		if !ent.stays {
			continue
		}
		k := Kept{Key: ent.key, Meta: ent.meta}
		if ent.shared != nil {
			k.Shared = ent.shared.bytes
		}
		for _, e := range ent.memories {
			k.Sizes = append(k.Sizes, e.size)
		}
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b Kept) int { return cmp.Compare(a.Key, b.Key) })
	return out
}

// Take hands the memories of something that Kept lists out, as if Alloc had: the
// caller must Free them, which ends their record, or PutBack them first. They are to be
// read; what is encrypted cannot be written either, for the key that it was sealed with seals
// nothing any more. tier.ErrReleased: it is not there, or taken.
func (v *Volume) Take(key uint64) ([]tier.Memory, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	ent := v.mu.entries[key]
	switch {
	case v.mu.closed:
		return nil, tier.ErrClosed
	case ent == nil || !ent.stays:
		return nil, fmt.Errorf("disk: volume %s: what was kept as %d: %w", v.cfg.Dir, key, tier.ErrReleased)
	}
	v.stayLocked(ent, false)
	out := make([]tier.Memory, len(ent.memories))
	for i, e := range ent.memories {
		out[i] = e
	}
	return out, nil
}

// stayLocked says whether what is kept stays when the volume is closed.
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

// PutBack undoes a Take: Kept lists it again. The memories that were handed out must
// still be freed, which then frees no room.
func (v *Volume) PutBack(key uint64) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	ent := v.mu.entries[key]
	if ent == nil || ent.stays || ent.meta == nil {
		return fmt.Errorf("disk: volume %s: what was kept as %d: %w", v.cfg.Dir, key, tier.ErrReleased)
	}
	for i, e := range ent.memories {
		e.entry, e.disowned = nil, true
		ent.memories[i] = &Extents{v: v, size: e.size, pieces: e.pieces, seals: e.seals, entry: ent}
		ent.memories[i].refs.Store(1)
	}
	v.stayLocked(ent, true)
	return nil
}

// Forget ends a record. Memories that nobody has taken are freed; others stay their
// holder's. What is not there is forgotten already.
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

// endRecord writes that something is not kept any more, if it is.
func (v *Volume) endRecord(ent *entry) {
	v.kept.turn <- struct{}{}
	defer func() { <-v.kept.turn }()
	v.endInTurn(ent)
}

// endInTurn is endRecord for who holds the turn.
func (v *Volume) endInTurn(ent *entry) {
	k := v.kept
	v.mu.Lock()
	if ent.gone || k.left {
		v.mu.Unlock()
		return
	}
	ent.gone = true
	delete(v.mu.entries, ent.key)
	v.mu.Unlock()
	k.count(ent, -1)
	// If neither can be written, nor a new manifest, the room is used again all the same: a
	// process must not lose its disk for that. Whoever takes the old record for true and finds
	// other bytes has their checksums.
	if _, _, err := k.write(kindGone, ent.key, nil); err != nil {
		if failed := k.endInPlace(ent); failed != nil {
			v.warn(tier.CauseManifest, "the manifest: %v", also(err, failed))
		}
	}
	v.tidy()
	// Only now may a memory's room be used again: who frees one comes to wait for the turn.
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, e := range ent.memories {
		e.entry = nil
	}
}

// endOf ends the record that a memory is in, before its room is free.
func (v *Volume) endOf(e *Extents) {
	if v.kept == nil {
		return
	}
	v.mu.Lock()
	ent := e.entry
	v.mu.Unlock()
	if ent != nil {
		v.endRecord(ent)
	}
}

// write appends a record, and returns its place.
func (k *keptDir) write(kind uint32, key uint64, body []byte) (at, n int64, err error) {
	p := appendRecord(nil, k.generation, k.at, kind, key, body)
	if err := transferAll(k.file.WriteAt, p, k.at, 1); err != nil {
		k.torn = true
		return 0, 0, bare(err)
	}
	at, n = k.at, int64(len(p))
	k.at += n
	return at, n, nil
}

// deadBytes is how much of a manifest may be dead, beside as much as is alive.
const deadBytes = 1 << 20

// tidy writes the manifest anew if most of it is dead, or if it is torn. What cannot
// be done now is tried again after the next record. The turn is held.
func (v *Volume) tidy() {
	k := v.kept
	if k.torn || k.at-k.live > k.live+deadBytes {
		if err := v.rewrite(); err != nil {
			v.warn(tier.CauseManifest, "writing the manifest anew: %v", err)
		}
	}
}

// mend writes the manifest anew if it is torn. The turn is held.
func (v *Volume) mend() error {
	if !v.kept.torn {
		return nil
	}
	return v.rewrite()
}

// entriesInOrder returns what is kept in the order of its records. The turn is held.
func (v *Volume) entriesInOrder() []*entry {
	v.mu.Lock()
	defer v.mu.Unlock()
	all := make([]*entry, 0, len(v.mu.entries))
	for _, ent := range v.mu.entries {
		all = append(all, ent)
	}
	slices.SortFunc(all, func(a, b *entry) int { return cmp.Compare(a.key, b.key) })
	return all
}

// sharedBy returns what entries have in common, in the order of its records.
func sharedBy(entries []*entry) (all []*sharedMeta) {
	seen := make(map[*sharedMeta]bool)
	for _, ent := range entries {
		if s := ent.shared; s != nil && !seen[s] {
			seen[s] = true
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *sharedMeta) int { return cmp.Compare(a.key, b.key) })
	return all
}

// rewrite begins a manifest with what is kept now, and removes the old one when it is
// whole. On an error the old one is the manifest still. The turn is held.
func (v *Volume) rewrite() error {
	k := v.kept
	k.newest++ // also if this fails: the name may be taken then
	name := v.own.manifest(k.newest)
	f, err := v.cfg.FS.Create(name, false)
	if err != nil {
		return bare(err)
	}
	all := v.entriesInOrder()
	shared := sharedBy(all)
	next := &manifestCopy{file: f, generation: k.newest}
	if err := next.fill(k, shared, all); err != nil {
		return also(also(err, bare(f.Close())), bare(v.own.removeFile(name)))
	}
	oldFile, oldName := k.file, v.own.manifest(k.generation)
	k.file, k.generation, k.at, k.torn = f, k.newest, next.at, false
	k.live = 0
	clear(k.shared)
	for i, s := range shared {
		s.at, s.n = next.places[i].at, next.places[i].n
		k.live += s.n
		k.shared[string(s.bytes)] = s
	}
	for i, ent := range all {
		place := next.places[len(shared)+i]
		ent.at, ent.n = place.at, place.n
		k.live += ent.n
	}
	if oldFile == nil {
		return nil
	}
	return also(bare(oldFile.Close()), bare(v.own.removeFile(oldName)))
}

// manifestCopy is a manifest that is being written.
type manifestCopy struct {
	file       File
	generation uint64
	at         int64         // where p will be written
	p          []byte        // not yet written
	places     []recordPlace // of what was copied, in order
}

type recordPlace struct{ at, n int64 }

// fill writes a whole manifest of what is kept, after what it has in common, as the old one
// has them.
func (c *manifestCopy) fill(old *keptDir, shared []*sharedMeta, all []*entry) error {
	c.p = appendManifestHeader(c.p, c.generation, old.mark)
	for _, s := range shared {
		if err := c.copy(old, recordPlace{s.at, s.n}); err != nil {
			return err
		}
	}
	for _, ent := range all {
		if err := c.copy(old, recordPlace{ent.at, ent.n}); err != nil {
			return err
		}
	}
	if err := c.add(kindWhole, old.next-1, nil); err != nil {
		return err
	}
	return c.flush()
}

// copy adds a record of the old manifest. Its checksum says that it is what was written there:
// the sum's seed is made of the generation and the place, where nothing was written since.
func (c *manifestCopy) copy(old *keptDir, from recordPlace) error {
	record := make([]byte, from.n)
	if err := transferAll(old.file.ReadAt, record, from.at, 1); err != nil {
		return bare(err)
	}
	r, ok := parseRecordAt(record, old.generation, from.at)
	if !ok {
		return fmt.Errorf("the record at %d of it is damaged", from.at)
	}
	c.places = append(c.places, recordPlace{at: c.at + int64(len(c.p)), n: from.n})
	return c.add(r.kind, r.key, withoutReplaced(r.body))
}

// add adds a record.
func (c *manifestCopy) add(kind uint32, key uint64, body []byte) error {
	c.p = appendRecord(c.p, c.generation, c.at+int64(len(c.p)), kind, key, body)
	if len(c.p) < 1<<20 {
		return nil
	}
	return c.flush()
}

func (c *manifestCopy) flush() error {
	if err := transferAll(c.file.WriteAt, c.p, c.at, 1); err != nil {
		return bare(err)
	}
	c.at += int64(len(c.p))
	c.p = c.p[:0]
	return nil
}
