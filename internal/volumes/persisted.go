package volumes

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// persistedFile is the file of one memory on a volume with Config.Persist. Its name is its number with
// the suffix ".part". While it has the header of a batch or a dictionary, it is an entry of the volume,
// and its name is the entry's key.
type persistedFile struct {
	number uint64
	name   atomic.Pointer[string] // its present one
	memory *extents               // of size 0 for a batch without memory

	// turn is a token: its owner opens the file, writes the header or changes the name. It guards tail.
	turn chan struct{}
	tail *persistedTail // nil: it has no header

	// Guarded by the volume's mutex.
	state     persistedState
	key       uint64    // 0: it never had a header
	persisted Persisted // what was found
	giveUp    func()    // gives back the header's room in the space; nil: none
}

// persistedState is what a persistedFile is. The Free of its memory removes the file, except for lent memory.
type persistedState int

const (
	isPart  persistedState = iota // not an entry
	isOwned                       // an entry of this process: Volume.Persist has written it, or Own was called
	isFound                       // an earlier process left it; it stays when the volume is closed
	isLent                        // it was found, and Take has handed out its memory: Free makes it isFound again
)

// part is the name of the file while it is not an entry.
func (k *persistedFile) part() string { return persistedName(k.number, partSuffix) }

// room returns the length of the file.
func (k *persistedFile) room() int64 {
	n := extent.RoundUp(k.memory.size, tier.Page)
	if k.tail != nil {
		n += k.tail.Room
	}
	return n
}

// Persisted is a batch or a dictionary that an earlier process left; see Volume.Persisted.
type Persisted struct {
	Key         uint64
	Meta, Place []byte // as they were given to Persist; not to be changed
	Size        int64  // of its memory, in bytes; 0: it has none
	Room        int64  // of its file with the header, in bytes
	File        string
	Err         error  // why it cannot be read; Forget removes it
	order       uint64 // in which headers were written
}

// sortPersisted sorts batches and dictionaries, the oldest first.
func sortPersisted(all []Persisted) {
	slices.SortFunc(all, func(a, b Persisted) int {
		return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.Key, b.Key))
	})
}

// placeInFile makes a file for e; see place.
func (v *Volume) placeInFile(e *extents) (grew bool, refusal, err error) {
	n := extent.RoundUp(e.size, tier.Page)
	if err := v.takeRoom(n); err != nil {
		return false, nil, err
	}
	k := &persistedFile{number: v.numbers.Add(1), memory: e, turn: make(chan struct{}, 1)}
	name := k.part()
	k.name.Store(&name)
	e.persisted, e.pieces = k, []piece{{Len: e.size}}
	var f disk.File
	if refusal = v.checkReserve(n); refusal == nil {
		f, refusal = v.cfg.FS.Create(filepath.Join(v.own.path, name), false)
	}
	if f != nil {
		if n > 0 {
			refusal = v.allocate(f, 0, n)
		}
		if n > 0 && refusal == nil && v.noAllocate.Load() { // it must be as long nevertheless
			_, refusal = wholeFile{f, 1}.WriteAt(make([]byte, 1), n-1)
		}
		refusal = join(refusal, f.Close())
	}
	if refusal != nil {
		refusal = join(fmt.Errorf("taking %d bytes for %s: %w", n, name, bare(refusal)), v.own.removeFile(name))
		v.mu.Lock()
		v.mu.used -= n
		v.mu.Unlock()
		return false, refusal, v.refused(e.size, refusal)
	}
	v.fresh.Add(n)
	return true, nil, nil
}

// takeRoom takes n bytes of the volume's capacity.
func (v *Volume) takeRoom(n int64) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case v.mu.closed:
		return tier.ErrClosed
	case n > v.cfg.Capacity-v.mu.used:
		return &tier.NoSpaceError{Requested: n, Available: v.cfg.Capacity - v.mu.used}
	}
	v.mu.used += n
	return nil
}

// Persist makes a batch outlive the process: its memory, which is one of this volume, or nil if it has
// none. The memory holds what it is to hold, and nothing may be written to it afterwards. The next
// volume in the directory finds it with meta and place, unless it is freed before, or Forget is called.
//
// The header takes room, in whole pages: occupy takes it in the space, and giveUp gives it back when
// the file is removed. occupy must not free the memory. A memory whose writing failed is an error.
func (v *Volume) Persist(
	meta, place []byte, occupy func(bytes int64) (giveUp func(), err error), m tier.Memory,
) (key uint64, err error) {
	if !v.cfg.Persist {
		return 0, fmt.Errorf("disk: volume %s: nothing persists here: Config.Persist is not set", v.cfg.Dir)
	}
	e, ok := m.(*extents)
	switch {
	case m == nil:
		e = &extents{v: v, uses: 1}
		if _, _, err := v.placeInFile(e); err != nil {
			return 0, err
		}
		defer func() {
			if err != nil {
				v.Free(e, func() {})
			}
		}()
	case !ok || e.v != v:
		return 0, fmt.Errorf("disk: volume %s: persisting memory of another volume", v.cfg.Dir)
	}
	key, err = v.writeHeader(e, meta, place, occupy)
	if err != nil && !errors.Is(err, tier.ErrClosed) {
		err = fmt.Errorf("disk: volume %s: persisting: %w", v.cfg.Dir, err)
	}
	return key, err
}

// writeHeader writes a header behind the body of a memory, renames the file, and makes it an entry.
func (v *Volume) writeHeader(
	e *extents, meta, place []byte, occupy func(int64) (func(), error),
) (uint64, error) {
	k := e.persisted
	k.turn <- struct{}{}
	defer func() { <-k.turn }()
	v.mu.Lock()
	freed, persists := e.freed, k.state != isPart
	v.mu.Unlock()
	switch { // a Free from now on waits for the turn
	case freed:
		return 0, tier.ErrReleased
	case persists:
		return 0, errors.New("memory that persists already")
	}
	fixed := fixedHeader{Order: v.numbers.Add(1), File: k.number, Size: e.size}
	var blocks []sealedBlock
	if e.sealed != nil {
		var err error
		if blocks, err = e.sealed.blocksIn(0, math.MaxInt64); err != nil {
			return 0, err
		}
		fixed.Salt = e.sealed.key.salt
	}
	fixed.Count = uint32(len(blocks))
	text, _ := binary.Append(nil, binary.LittleEndian, fixed)
	text, _ = binary.Append(text, binary.LittleEndian, blocks)
	text = append(text, meta...)
	t := &persistedTail{
		Magic: [8]byte([]byte(tailMagic)), Body: extent.RoundUp(e.size, tier.Page), Length: int64(len(text)),
	}
	if limit := maxHeader(t.Body); t.Length > limit {
		return 0, fmt.Errorf("its header has %d bytes, and the limit is %d", t.Length, limit)
	}
	if v.sealer != nil {
		text, t.HeaderSeal = v.sealer.sealText(text, headerExtra)
		t.Mark = v.sealer.mark
	}
	t.Key, t.Room = xxh3.Hash(text), extent.RoundUp(t.Length+tailSize, tier.Page)
	if err := t.setPlace(v.sealer, place); err != nil {
		return 0, err
	}
	if had := k.tail; had != nil { // of an entry that was forgotten: the file keeps its length
		t.Room = had.Room
		if t.Length > t.Room-tailSize {
			return 0, fmt.Errorf("its header has %d bytes, and that before had room for %d", t.Length, t.Room-tailSize)
		}
	} else {
		giveUp, err := occupy(t.Room)
		if err != nil {
			return 0, err
		}
		if err := v.takeRoom(t.Room); err != nil {
			giveUp()
			return 0, err
		}
		v.mu.Lock()
		k.giveUp = giveUp
		v.mu.Unlock()
	}
	k.tail = t // from now on the file may have a header
	p := make([]byte, t.Room)
	copy(p, text)
	copy(p[t.Room-tailSize:], t.bytes())
	if err := v.writePersisted(k, p, t.Body); err != nil {
		return 0, err
	}
	if err := v.rename(k, persistedName(t.Key, "")); err != nil {
		return 0, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	k.state, k.key = isOwned, t.Key
	v.mu.entries[t.Key] = k
	return t.Key, nil
}

// SetPlace replaces the place of an entry. On an error the old one stays.
func (v *Volume) SetPlace(key uint64, place []byte) error {
	v.mu.Lock()
	k := v.mu.entries[key]
	v.mu.Unlock()
	if k == nil {
		return v.notThere(key)
	}
	k.turn <- struct{}{}
	defer func() { <-k.turn }()
	v.mu.Lock()
	ended := k.state == isPart
	v.mu.Unlock()
	if ended {
		return v.notThere(key)
	}
	t := *k.tail
	err := t.setPlace(v.sealer, place)
	if err == nil {
		err = v.writePersisted(k, t.bytes(), t.Body+t.Room-tailSize)
	}
	if err != nil {
		return fmt.Errorf("disk: volume %s: persisting: %w", v.cfg.Dir, err)
	}
	*k.tail = t
	return nil
}

// KeyOf returns the key of the entry that a memory is in; false if there is none.
func (v *Volume) KeyOf(m tier.Memory) (uint64, bool) {
	e, ok := m.(*extents)
	if !ok || e.v != v || e.persisted == nil {
		return 0, false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return e.persisted.key, e.persisted.state != isPart
}

// Persisted lists what was found when the volume was opened and was not taken since, the oldest
// first. It counts as used, and stays when the volume is closed, for the next one.
func (v *Volume) Persisted() (all []Persisted) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, k := range v.mu.entries {
		if k.state == isFound {
			all = append(all, k.persisted)
		}
	}
	sortPersisted(all)
	return all
}

func (v *Volume) notThere(key uint64) error {
	return fmt.Errorf("disk: volume %s: %016x: %w", v.cfg.Dir, key, tier.ErrReleased)
}

// Take lends the memory of an entry that Persisted lists, as if Alloc had returned it; nil if it has
// none. It is to be read: encrypted memory cannot be written. When the caller frees it, Persisted lists
// the entry again, unless Own was called. tier.ErrReleased: the entry is not there, or taken.
func (v *Volume) Take(key uint64) (tier.Memory, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	k := v.mu.entries[key]
	switch {
	case v.mu.closed:
		return nil, tier.ErrClosed
	case k == nil || k.state != isFound:
		return nil, v.notThere(key)
	case k.memory.size == 0:
		return nil, nil
	}
	k.state = isLent
	v.mu.stays -= k.persisted.Room
	return k.memory, nil
}

// Own makes an entry whose memory the caller has taken its own: the Free of the memory, or Forget,
// removes it, and calls giveUp then.
func (v *Volume) Own(key uint64, giveUp func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	k := v.mu.entries[key]
	if k.state == isFound { // it has no memory
		v.mu.stays -= k.persisted.Room
	}
	k.state, k.giveUp = isOwned, giveUp
}

// Forget ends an entry. Memory that was not taken is freed; other memory stays its holder's. An absent
// entry is no error.
func (v *Volume) Forget(key uint64) {
	v.mu.Lock()
	k := v.mu.entries[key]
	if k == nil || v.mu.ended { // the directory may be another volume's by now
		v.mu.Unlock()
		return
	}
	unheld := k.state == isFound || k.memory.size == 0
	if k.state == isFound {
		v.mu.stays -= k.persisted.Room
	}
	k.state = isOwned
	delete(v.mu.entries, key)
	v.mu.Unlock()
	v.endEntry(k)
	if unheld {
		v.Free(k.memory, func() {})
	}
}

// endEntry ends the entry of a file, if there is one: it returns when the file has no key for a name any
// more.
func (v *Volume) endEntry(k *persistedFile) {
	k.turn <- struct{}{}
	defer func() { <-k.turn }()
	v.mu.Lock()
	ended := k.state == isPart
	v.mu.Unlock()
	if ended {
		return
	}
	if err := v.rename(k, k.part()); err != nil {
		v.warn(causes.Manifest, "ending what persists in %s: %v", *k.name.Load(), err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.mu.entries, k.key)
	k.state = isPart
}

// rename gives a file another name: its key, or its number. Its caller has the file's turn. An error is
// none if the file has that name nevertheless, as may be on a network: no code would find it again.
func (v *Volume) rename(k *persistedFile, to string) error {
	if from := *k.name.Load(); from != to {
		path := filepath.Join(v.own.path, to)
		if err := v.cfg.FS.Rename(filepath.Join(v.own.path, from), path); err != nil {
			if _, absent := v.cfg.FS.Stat(path); absent != nil {
				return bare(err)
			}
		}
		k.name.Store(&to)
	}
	return nil
}

// openPersisted opens a file by the name that it has. Its caller does not have the file's turn.
func (v *Volume) openPersisted(k *persistedFile, direct bool) (disk.File, error) {
	k.turn <- struct{}{}
	defer func() { <-k.turn }()
	return v.cfg.FS.Reopen(filepath.Join(v.own.path, *k.name.Load()), direct)
}

// writePersisted writes to a file through the page cache. Its caller has the file's turn.
func (v *Volume) writePersisted(k *persistedFile, p []byte, off int64) error {
	f, err := v.cfg.FS.Reopen(filepath.Join(v.own.path, *k.name.Load()), false)
	if err != nil {
		return bare(err)
	}
	_, err = wholeFile{f, 1}.WriteAt(p, off)
	return join(err, f.Close())
}

// freePersisted removes the file of a memory that was freed, and gives its room back.
func (v *Volume) freePersisted(k *persistedFile) {
	v.endEntry(k)
	name := *k.name.Load()
	if err := v.own.removeFile(name); err != nil {
		v.warn(causes.NotRemoved, "removing %s: %v", name, err)
	}
	n := k.room()
	v.given.Add(n)
	v.mu.Lock()
	v.mu.used -= n
	giveUp := k.giveUp
	v.mu.Unlock()
	if giveUp != nil {
		giveUp()
	}
}
