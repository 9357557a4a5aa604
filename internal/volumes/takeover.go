package volumes

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/fsinfo"
	"github.com/spillway-db/spillway/internal/oneline"
	"github.com/spillway-db/spillway/internal/volumes/internal/journal"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// A volume with Config.Persist has its files in a directory of another kind,
//
//	<Dir>/spillway-kept-<random>/lock                       held by flock while the volume is open
//	                            /manifest-0000000000000001  see package journal
//	                            /segment-0000
//	                            /…
//
// which no volume removes that finds it abandoned: the next one with Config.Persist takes it
// over. It goes when it is closed, or found, with nothing in it that persists.

var persistentName = regexp.MustCompile(`^spillway-kept-[0-9a-f]{16}$`)

const persistentPrefix = "spillway-kept-"

// openJournal takes over the first directory that has something in it and is not in use, or makes
// one. If all that there are need another key, it fails: with the wrong key a volume would begin
// anew beside what persists.
func (v *Volume) openJournal() error {
	entries, err := v.cfg.FS.ReadDir(v.dir)
	if err != nil {
		return bare(err)
	}
	var other error // what a key, or another one, is needed for
	entries = slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return !e.IsDir() || !persistentName.MatchString(e.Name()) })
	for i, e := range entries {
		path := filepath.Join(v.dir, e.Name())
		took, err := false, v.checkOwner(path)
		if err == nil {
			took, err = v.takeOver(path)
		}
		if errors.Is(err, disk.ErrKey) && other == nil {
			other = err
		}
		if err != nil {
			v.warn(causes.KeptLeft, "%s was kept and is left as it is: %v", e.Name(), bare(err))
		}
		if took {
			v.passed = entries[i+1:]
			return nil
		}
	}
	if other != nil {
		return other
	}
	own, err := makeOwnDir(v.cfg.FS, v.dir, persistentPrefix)
	if errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("keeping spill files needs locked files, which this system does not have: %w", tier.ErrNotSupported)
	}
	if err != nil {
		return bare(err)
	}
	j, err := journal.New(own, v.sealer, v.warnOfJournal)
	v.own, v.journal = own, j
	if err != nil {
		err = oneline.Join(err, v.leaveJournal())
		v.own, v.journal = nil, nil
	}
	return err
}

// WarnOfOthers has volumes warn of directories that persist and that none of them has taken over.
// It is called once, when all volumes of an engine are open. Other processes may use these
// directories. It takes no lock to see that: a volume that is being opened passes by what is
// locked.
func WarnOfOthers(all ...*Volume) {
	known := make(map[string]bool) // by names, which are random
	for _, v := range all {
		if v.journal != nil {
			known[filepath.Base(v.own.path)] = true
		}
	}
	for _, v := range all {
		for _, e := range v.passed {
			path := filepath.Join(v.dir, e.Name())
			if !known[e.Name()] && v.checkOwner(path) == nil && v.persistsIn(path) {
				v.warn(causes.KeptLeft, "%s was kept by another process: if that has ended, it is left for the next engine, because one volume finds what one process kept", e.Name())
			}
			known[e.Name()] = true
		}
		v.passed = nil
	}
}

// persistsIn reports whether something persists in a directory, which may be in use.
func (v *Volume) persistsIn(path string) bool {
	d := &ownDir{fs: v.cfg.FS, path: path}
	l, err := d.list()
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	found, err := journal.Read(d, v.sealer, l.manifests)
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	_ = found.Close() // it was only read
	return found.Any()
}

func (v *Volume) warnOfJournal(err error) { v.warn(causes.Manifest, "%v", err) }

func (v *Volume) warnOfLost(path string, found *journal.Found) {
	for _, err := range found.Lost {
		v.warn(causes.KeptDamaged, "%s: %v", filepath.Base(path), err)
	}
}

// errOwner: in a directory of temporary files other users could have their bytes adopted, and
// have ours in files of theirs.
var errOwner = errors.New("it belongs to another user")

// checkOwner refuses another user's directory, unless the volume's directory is that user's too.
func (v *Volume) checkOwner(path string) error {
	info, err := v.cfg.FS.Stat(path)
	if err != nil {
		return ignoreMissing(err)
	}
	uid, known := fsinfo.Owner(info)
	if !known || int(uid) == os.Geteuid() {
		return nil
	}
	info, err = v.cfg.FS.Stat(v.dir)
	if err != nil {
		return err
	}
	if above, _ := fsinfo.Owner(info); above != uid {
		return errOwner
	}
	return nil
}

// listing is what the names in a directory say.
type listing struct {
	manifests    []string
	lengths      map[int]int64 // of segments
	firstSegment int           // that is new
	foreign      bool          // there is something else
}

func (d *ownDir) list() (*listing, error) {
	entries, err := d.fs.ReadDir(d.path)
	if err != nil {
		return nil, err
	}
	l := &listing{lengths: make(map[int]int64)}
	for _, e := range entries {
		switch name := e.Name(); {
		case name == lockName, hiddenFile(name) && !e.IsDir():
		case e.Type().IsRegular() && segmentName.MatchString(name):
			i, err := strconv.Atoi(name[len("segment-"):])
			if err != nil || segmentFile(i) != name {
				l.foreign = true
				continue
			}
			info, err := d.fs.Stat(filepath.Join(d.path, name))
			if err != nil {
				return nil, err
			}
			l.lengths[i] = info.Size()
			l.firstSegment = max(l.firstSegment, i+1)
		case e.Type().IsRegular() && journal.IsManifest(name):
			l.manifests = append(l.manifests, name)
		default:
			l.foreign = true
		}
	}
	return l, nil
}

// takeOver makes an abandoned directory the volume's, and reports whether it did. An empty
// one it removes.
func (v *Volume) takeOver(path string) (took bool, err error) {
	fsys := v.cfg.FS
	lock, err := fsys.Lock(filepath.Join(path, lockName), false)
	switch {
	case errors.Is(err, fs.ErrNotExist): // see removeIfAbandoned
		if removeHidden(fsys, path) {
			_ = fsys.Remove(path)
		}
		return false, nil
	case errors.Is(err, disk.ErrLocked), errors.Is(err, fs.ErrPermission), errors.Is(err, errors.ErrUnsupported):
		return false, nil
	case err != nil:
		return false, err
	}
	own := &ownDir{fs: fsys, path: path, lock: lock}
	var found *journal.Found
	locked := true
	defer func() {
		err = oneline.Join(err, found.Close())
		if !took && locked {
			err = oneline.Join(err, lock.Close())
		}
	}()
	l, err := own.list()
	if err != nil {
		return false, err
	}
	if found, err = journal.Read(own, v.sealer, l.manifests); err != nil {
		return false, err
	}
	v.warnOfLost(path, found)
	if ok, sealed, err := found.Opens(); err != nil {
		return false, err
	} else if !ok {
		return false, &disk.KeyError{Dir: v.cfg.Dir, Name: filepath.Base(path), Sealed: sealed, Encrypt: v.sealer != nil}
	}
	found.Resolve(l.lengths, segmentFile)
	v.warnOfLost(path, found)
	if len(found.Records) == 0 {
		gone, err := removeFound(own, l, found)
		locked = !gone
		return false, err
	}
	if n := sizeOf(found); n > v.cfg.Capacity {
		return false, fmt.Errorf("what is kept there needs a capacity of %d bytes, and the volume's is %d: %w", n, v.cfg.Capacity, tier.ErrNoSpace)
	}
	j, err := found.Continue(v.warnOfJournal)
	if err != nil {
		return false, oneline.Join(err, j.Close())
	}
	v.own, v.journal, v.firstSegment = own, j, l.firstSegment
	v.adopt(found)
	if err := oneline.Join(found.RemoveOld(v.journal), own.removeSpare(l, found)); err != nil {
		v.warn(causes.NotRemoved, "removing what is dead in %s: %v", filepath.Base(path), err)
	}
	return true, nil
}

// sizeOf is how much of a volume's capacity the segments take.
func sizeOf(found *journal.Found) (n int64) {
	for _, s := range found.Segments {
		if s.Size > 1<<62-n {
			return 1 << 62
		}
		n += s.Size
	}
	return n
}

// removeSpare removes the segments that nothing lies in.
func (d *ownDir) removeSpare(l *listing, found *journal.Found) (err error) {
	for i := range l.lengths {
		if found.Segments[i] == nil {
			err = oneline.Join(err, d.removeFile(segmentFile(i)))
		}
	}
	return err
}

// removeFound removes a directory in which nothing persists; what is foreign stays in it. gone
// says that its lock is closed.
func removeFound(own *ownDir, l *listing, found *journal.Found) (gone bool, err error) {
	err = oneline.Join(own.removeSpare(l, found), found.Close())
	if err == nil {
		err = found.Remove()
	}
	if err != nil || l.foreign {
		return false, err
	}
	return true, own.remove()
}

// adopt makes what was found the volume's: entries that stay, and their segments. All other room of
// these has no owner until clearGaps.
func (v *Volume) adopt(found *journal.Found) {
	segments := make(map[int]*segment)
	for _, i := range slices.Sorted(maps.Keys(found.Segments)) {
		f := found.Segments[i]
		s := &segment{name: segmentFile(i), index: i, size: f.Size, used: f.Used, stays: f.Used, found: f}
		s.holes, s.backed = extent.New(s.size), extent.New(s.size)
		s.holes.Alloc(s.size)
		s.backed.Alloc(s.size)
		segments[i] = s
		v.mu.segments = append(v.mu.segments, s)
		v.mu.used += s.used
		v.mu.stays += s.stays
	}
	for _, r := range found.Records {
		ent := &entry{key: r.Key, shared: r.Shared, meta: r.Meta, stays: true}
		for _, m := range r.Memories {
			ent.memories = append(ent.memories, v.adoptMemory(ent, m, r.Keys, segments))
		}
		v.mu.entries[ent.key] = ent
	}
}

func (v *Volume) adoptMemory(ent *entry, m journal.Memory, keys []*seal.Key, segments map[int]*segment) *extents {
	e := &extents{v: v, size: m.Size, entry: ent}
	e.refs.Store(1)
	off := int64(0)
	for _, p := range m.Pieces {
		e.pieces = append(e.pieces, piece{Off: off, Len: p.Len, At: place{seg: segments[p.Segment], off: p.Off}})
		off += p.Len
	}
	if keys != nil {
		e.units = v.sealer.OldUnits(keys[m.Salt], m.Number, stretches(e.pieces), m.Seals)
	}
	return e
}

// clearGaps makes what lies between what persists free again, and gives it back: before it is
// seen whether the file system has room for the rest of the volume.
func (v *Volume) clearGaps() error {
	for _, s := range v.mu.segments {
		f, err := v.cfg.FS.Reopen(filepath.Join(v.own.path, s.name), false)
		if err != nil {
			return fmt.Errorf("opening %s: %w", s.name, bare(err))
		}
		for _, g := range s.found.Gaps {
			v.clearGap(s, f, g)
		}
		if s.found.Length > s.size {
			_ = f.Punch(s.size, s.found.Length-s.size) // it would never be used
		}
		err = s.complete(f)
		if err := oneline.Join(err, bare(f.Close())); err != nil {
			return fmt.Errorf("opening %s: %w", s.name, err)
		}
		s.found = nil
	}
	return nil
}

// complete makes the file end on a page: a sparse one, written without direct I/O, ends
// where the last memory does, and may be read in pages now.
func (s *segment) complete(f disk.File) error {
	n := s.found.Length
	if n >= s.size {
		return nil
	}
	return bare(transferAll(f.WriteAt, make([]byte, s.size-n), n, 1))
}

// clearGap makes a gap free: a hole, where the file system can.
func (v *Volume) clearGap(s *segment, f disk.File, g journal.Span) {
	err := f.Punch(g.Off, g.Len)
	if err == nil {
		s.holes.Free(g.Off, g.Len)
		return
	}
	if !errors.Is(err, errors.ErrUnsupported) {
		v.warn(causes.DiskFails, "giving %d bytes at %d of %s back: %v", g.Len, g.Off, s.name, bare(err))
	}
	s.backed.Free(g.Off, g.Len)
	v.mu.free += g.Len
}

// reopenSegments opens the files of what persists.
func (v *Volume) reopenSegments() error {
	for _, s := range v.mu.segments {
		f, err := v.cfg.FS.Reopen(filepath.Join(v.own.path, s.name), v.direct)
		if err != nil {
			return fmt.Errorf("opening %s: %w", s.name, bare(err))
		}
		s.file = f
	}
	for _, ent := range v.mu.entries {
		for _, e := range ent.memories {
			for i := range e.pieces {
				e.pieces[i].At.file = e.pieces[i].At.seg.file
			}
		}
	}
	return nil
}

// abandonJournal undoes openJournal and reopenSegments, when the volume could not be opened.
func (v *Volume) abandonJournal() error {
	var err error
	for _, s := range v.mu.segments {
		if s.file != nil {
			err = oneline.Join(err, bare(s.file.Close()))
		}
	}
	return oneline.Join(err, v.leaveJournal())
}
