package volumes

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// keptFile is the file of one memory on a volume with Config.Persist. Its name is its number with
// the suffix ".part". While it has the header of an entry, its name is the entry's key.
type keptFile struct {
	number uint64
	key    atomic.Uint64 // set before the file is renamed; 0: it never had a header
	named  atomic.Bool   // the key is its name

	tail   *keptTail // nil: it has no header. Persist and SetPlace write it while they hold the memory
	giveUp func()    // gives back the header's room in the space; nil: none
}

func (k *keptFile) name() string {
	if k.named.Load() {
		return keptName(k.key.Load(), "")
	}
	return keptName(k.number, partSuffix)
}

// entry is a batch or a dictionary that persists. The volume's mutex guards memory and stays; the
// rest does not change.
type entry struct {
	Persisted
	order  uint64   // in which entries were written
	memory *extents // of size 0 for a batch without memory
	end    sync.Once
	stays  bool // it was found and not taken, and stays when the volume is closed
}

// Persisted is a batch or a dictionary that an earlier process left; see Volume.Persisted.
type Persisted struct {
	Key         uint64
	Meta, Place []byte // as they were given to Persist; not to be changed
	Size        int64  // of its memory, in bytes; 0: it has none
	Room        int64  // of its file with the header, in bytes
	File        string
	Err         error // why it cannot be read; Forget removes it
}

// Persist makes a batch outlive the process: its memory, which is one of this volume, or nil if it has
// none. The memory holds what it is to hold, and nothing may be written to it afterwards. The next
// volume in the directory finds it with meta and place, unless it is freed before, or Forget is called.
// One caller at a time may call Persist and SetPlace for a memory.
//
// The header takes room, in whole pages: occupy takes it in the space, and giveUp gives it back when
// the file is removed. A memory whose writing failed is an error.
func (v *Volume) Persist(
	meta, place []byte, occupy func(bytes int64) (giveUp func(), err error), m tier.Memory,
) (key uint64, err error) {
	if !v.cfg.Persist {
		return 0, fmt.Errorf("disk: volume %s: nothing persists here: Config.Persist is not set", v.cfg.Dir)
	}
	e, ok := m.(*extents)
	switch {
	case m == nil:
		if e, err = v.createKept(0, new(growth)); err != nil {
			return 0, err
		}
		defer func() {
			if key == 0 {
				v.Free(e, func() {})
			}
		}()
	case !ok || e.v != v:
		return 0, fmt.Errorf("disk: volume %s: persisting memory of another volume", v.cfg.Dir)
	default:
		if err := e.ref(); err != nil {
			return 0, err
		}
		defer e.unref() // the owner may have freed it meanwhile
	}
	ent := &entry{memory: e}
	if err := v.writeHeader(ent, meta, place, occupy); err != nil {
		if !errors.Is(err, tier.ErrClosed) {
			err = fmt.Errorf("disk: volume %s: persisting: %w", v.cfg.Dir, err)
		}
		return 0, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	e.entry = ent
	v.mu.entries[ent.Key] = ent
	return ent.Key, nil
}

// writeHeader writes the header of an entry behind the body, and renames the file.
func (v *Volume) writeHeader(ent *entry, meta, place []byte, occupy func(int64) (func(), error)) error {
	e := ent.memory
	if _, ok := v.KeyOf(e); ok {
		return errors.New("memory that persists already")
	}
	ent.order = v.numbers.Add(1)
	fixed := fixedHeader{Order: ent.order, File: e.kept.number, Size: e.size}
	var blocks []seal.Block
	if e.sealed != nil {
		var err error
		if blocks, err = e.sealed.Blocks(); err != nil {
			return err
		}
		fixed.Salt = e.sealed.Key().Salt()
	}
	text := headerText(fixed, blocks, meta)
	t := &keptTail{Magic: [8]byte([]byte(tailMagic)), Body: round(e.size), Length: int64(len(text))}
	if most := maxHeader(t.Body); t.Length > most {
		return fmt.Errorf("its header has %d bytes, and the limit is %d", t.Length, most)
	}
	if v.sealer != nil {
		text, t.HeaderSeal.Seal = v.sealer.SealText(text, headerExtra)
		t.HeaderSeal.Salt = v.sealer.Own().Salt()
	}
	t.Key, t.Room = xxh3.Hash(text), round(t.Length+tailSize)
	if err := t.setPlace(v.sealer, place); err != nil {
		return err
	}
	k := e.kept
	if had := k.tail; had != nil { // of an entry that was forgotten: the file keeps its length
		t.Room = had.Room
		if t.Length > t.Room-tailSize {
			return fmt.Errorf("its header has %d bytes, and that before had room for %d", t.Length, t.Room-tailSize)
		}
	} else {
		giveUp, err := occupy(t.Room)
		if err != nil {
			return err
		}
		if err := v.takeKept(t.Room); err != nil {
			giveUp()
			return err
		}
		k.giveUp = giveUp
	}
	k.tail = t // from now on the file may have a header
	k.key.Store(t.Key)
	p := make([]byte, t.Room)
	copy(p, text)
	copy(p[t.Room-tailSize:], t.bytes())
	if err := v.writeKept(k, p, t.Body); err != nil {
		return err
	}
	if err := v.rename(k, keptName(t.Key, ""), true); err != nil {
		return err
	}
	ent.Key = t.Key
	return nil
}

// SetPlace replaces the place of an entry. On an error the old one stays.
func (v *Volume) SetPlace(key uint64, place []byte) error {
	v.mu.Lock()
	ent := v.mu.entries[key]
	v.mu.Unlock()
	if ent == nil {
		return v.notThere(key)
	}
	e := ent.memory
	if err := e.ref(); err != nil {
		return err
	}
	defer e.unref()
	t := *e.kept.tail
	err := t.setPlace(v.sealer, place)
	if err == nil {
		err = v.writeKept(e.kept, t.bytes(), t.Body+t.Room-tailSize)
	}
	if err != nil {
		return fmt.Errorf("disk: volume %s: persisting: %w", v.cfg.Dir, err)
	}
	*e.kept.tail = t
	return nil
}

// GiveUp has giveUp called when the file of an entry that was found is removed.
func (v *Volume) GiveUp(key uint64, giveUp func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.entries[key].memory.kept.giveUp = giveUp
}

// KeyOf returns the key of the entry that a memory is in; false if there is none.
func (v *Volume) KeyOf(m tier.Memory) (uint64, bool) {
	e, ok := m.(*extents)
	if !ok || e.v != v {
		return 0, false
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if e.entry == nil {
		return 0, false
	}
	return e.entry.Key, true
}

// Persisted lists what was found when the volume was opened and was not taken since, the oldest
// first. It counts as used, and stays when the volume is closed, for the next one.
func (v *Volume) Persisted() []Persisted {
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []*entry
	for _, ent := range v.mu.entries {
		if ent.stays {
			all = append(all, ent)
		}
	}
	slices.SortFunc(all, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.Key, b.Key))
	})
	out := make([]Persisted, len(all))
	for i, ent := range all {
		out[i] = ent.Persisted
	}
	return out
}

func (v *Volume) notThere(key uint64) error {
	return fmt.Errorf("disk: volume %s: %016x: %w", v.cfg.Dir, key, tier.ErrReleased)
}

// Take hands out the memory of an entry that Persisted lists, as if Alloc had; nil if it has none. The
// caller must Free it, which ends the entry, or PutBack it first. It is to be read: encrypted memory
// cannot be written. tier.ErrReleased: the entry is not there, or taken.
func (v *Volume) Take(key uint64) (tier.Memory, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	ent := v.mu.entries[key]
	switch {
	case v.mu.closed:
		return nil, tier.ErrClosed
	case ent == nil || !ent.stays:
		return nil, v.notThere(key)
	}
	ent.stays = false
	v.mu.stays -= ent.Room
	if ent.Size == 0 {
		return nil, nil
	}
	return ent.memory, nil
}

// PutBack undoes a Take: Persisted lists the entry again. The memory that was handed out must still be
// freed, which then frees no room.
func (v *Volume) PutBack(key uint64) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	ent := v.mu.entries[key]
	if ent == nil || ent.stays || ent.Room == 0 {
		return v.notThere(key)
	}
	e := ent.memory
	e.entry, e.disowned = nil, true
	ent.memory = v.keptMemory(e.kept, e.size)
	ent.memory.sealed, ent.memory.entry = e.sealed, ent
	ent.stays = true
	v.mu.stays += ent.Room
	return nil
}

// Forget ends an entry. Memory that was not taken is freed; other memory stays its holder's. An absent
// entry is no error.
func (v *Volume) Forget(key uint64) {
	v.mu.Lock()
	ent := v.mu.entries[key]
	if ent == nil || v.mu.ended { // the directory may be another volume's by now
		v.mu.Unlock()
		return
	}
	e, owned := ent.memory, ent.stays || ent.memory.size == 0
	if ent.stays {
		ent.stays = false
		v.mu.stays -= ent.Room
	}
	v.mu.Unlock()
	v.endEntry(ent)
	if owned {
		v.Free(e, func() {})
	}
}

// endEntry ends an entry, and returns when it has ended: its file has no key for a name any more.
func (v *Volume) endEntry(ent *entry) {
	ent.end.Do(func() {
		k := ent.memory.kept
		if err := v.rename(k, keptName(k.number, partSuffix), false); err != nil {
			v.warn(causes.Manifest, "ending what persists in %s: %v", k.name(), err)
		}
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.mu.entries, ent.Key)
		ent.memory.entry = nil
	})
}

// createKept makes a file for a memory. In asked it leaves what the file system answered.
func (v *Volume) createKept(size int64, asked *growth) (*extents, error) {
	n := round(size)
	if err := v.takeKept(n); err != nil {
		return nil, err
	}
	k := &keptFile{number: v.numbers.Add(1)}
	if err := v.makeKept(k, n); err != nil {
		v.mu.Lock()
		v.mu.used -= n
		v.mu.Unlock()
		asked.cause = err
		return nil, v.refused(size, err)
	}
	asked.had = true
	v.fresh.Add(n)
	return v.keptMemory(k, size), nil
}

// takeKept takes n bytes of the volume's capacity.
func (v *Volume) takeKept(n int64) error {
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

// makeKept creates a file of n bytes.
func (v *Volume) makeKept(k *keptFile, n int64) error {
	if err := v.checkReserve(n); err != nil {
		return err
	}
	path := filepath.Join(v.own.path, k.name())
	f, err := v.cfg.FS.Create(path, false)
	if err == nil {
		if n > 0 {
			err = v.allocate(f, 0, n)
		}
		if err == nil && n > 0 && v.noAllocate.Load() { // it must be as long nevertheless
			_, err = wholeFile{f, 1}.WriteAt(make([]byte, 1), n-1)
		}
		err = join(bare(err), bare(f.Close()))
	}
	if err != nil {
		err = fmt.Errorf("taking %d bytes for %s: %w", n, k.name(), bare(err))
		return join(err, v.own.removeFile(k.name()))
	}
	return nil
}

// keptMemory returns the memory of a file, of which the caller has the reference.
func (v *Volume) keptMemory(k *keptFile, size int64) *extents {
	e := &extents{v: v, size: size, kept: k, uses: 1}
	e.pieces = append(e.one[:0], piece{Len: size})
	return e
}

// rename gives a file another name: its key, or its number.
func (v *Volume) rename(k *keptFile, to string, named bool) error {
	if from := k.name(); from != to {
		if err := v.cfg.FS.Rename(filepath.Join(v.own.path, from), filepath.Join(v.own.path, to)); err != nil {
			return bare(err)
		}
	}
	k.named.Store(named)
	return nil
}

// openKept opens a file by the name that it has, which may change meanwhile. The key is looked up
// after the number's name was not found: then the file has been renamed to it.
func (v *Volume) openKept(k *keptFile, direct bool) (f disk.File, err error) {
	name := k.name()
	for range 5 {
		f, err = v.cfg.FS.Reopen(filepath.Join(v.own.path, name), direct)
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
		if part := keptName(k.number, partSuffix); name != part {
			name = part
		} else {
			name = keptName(k.key.Load(), "")
		}
	}
	return f, err
}

// writeKept writes to a file through the page cache.
func (v *Volume) writeKept(k *keptFile, p []byte, off int64) error {
	f, err := v.openKept(k, false)
	if err != nil {
		return bare(err)
	}
	_, err = wholeFile{f, 1}.WriteAt(p, off)
	return join(err, f.Close())
}

// cutKept makes a file shorter, and reports whether it could.
func (v *Volume) cutKept(k *keptFile, size int64) bool {
	f, err := v.openKept(k, false)
	if err != nil {
		return false
	}
	return join(f.Truncate(size), f.Close()) == nil
}

// freeKept removes the file of a memory that was freed, and gives its room back.
func (v *Volume) freeKept(e *extents) {
	v.mu.Lock()
	ent := e.entry
	v.mu.Unlock()
	if ent != nil {
		v.endEntry(ent)
	}
	if e.disowned {
		return
	}
	if err := v.own.removeFile(e.kept.name()); err != nil {
		v.warn(causes.NotRemoved, "removing %s: %v", e.kept.name(), err)
	}
	n := e.kept.room(e.size)
	v.given.Add(n)
	v.mu.Lock()
	v.mu.used -= n
	v.mu.Unlock()
	if e.kept.giveUp != nil {
		e.kept.giveUp()
	}
}

// room returns the bytes that a file takes for a memory of a size.
func (k *keptFile) room(size int64) int64 {
	if k.tail == nil {
		return round(size)
	}
	return round(size) + k.tail.Room
}
