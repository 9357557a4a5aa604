package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
)

// A volume with Config.Keep has its files in a directory of another kind,
//
//	<Dir>/spillway-kept-<random>/lock                       held by flock while the volume is open
//	                            /manifest-0000000000000001  see manifest.go
//	                            /segment-0000
//	                            /…
//
// which no volume removes that finds it abandoned: the next one with Config.Keep takes it
// over. It goes when it is closed with nothing kept in it, or found so.

var (
	keptName     = regexp.MustCompile(`^spillway-kept-[0-9a-f]{16}$`)
	manifestName = regexp.MustCompile(`^manifest-([0-9a-f]{16})$`)
)

const keptPrefix = "spillway-kept-"

func (d *ownDir) manifest(generation uint64) string {
	return filepath.Join(d.path, fmt.Sprintf("manifest-%016x", generation))
}

// openKept takes over the first kept directory that has something in it and that nobody
// uses, or makes one. If there are only such as another key was used for, it fails: who gave
// the wrong one would not see what he has, and begin anew beside it.
func (v *Volume) openKept() error {
	entries, err := v.cfg.FS.ReadDir(v.dir)
	if err != nil {
		return bare(err)
	}
	var other error // what a key, or another one, is needed for
	for _, e := range entries {
		if !e.IsDir() || !keptName.MatchString(e.Name()) {
			continue
		}
		path := filepath.Join(v.dir, e.Name())
		took, err := false, v.checkOwner(path)
		if err == nil {
			took, err = v.takeOver(path)
		}
		if errors.Is(err, ErrKey) && other == nil {
			other = err
		}
		if err != nil {
			v.warn(tier.CauseKeptLeft, "%s was kept and is left as it is: %v", e.Name(), bare(err))
		}
		if took {
			return nil
		}
	}
	if other != nil {
		return other
	}
	own, err := makeOwnDir(v.cfg.FS, v.dir, keptPrefix)
	if errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("keeping spill files needs locked files, which this system does not have: %w", tier.ErrNotSupported)
	}
	if err != nil {
		return bare(err)
	}
	return v.ownKept(own, &found{own: own, next: 1})
}

// ownKept makes a locked directory the volume's, with a manifest of what was found.
func (v *Volume) ownKept(own *ownDir, f *found) error {
	v.own = own
	v.kept = &keptDir{
		turn: make(chan struct{}, 1), file: f.file, generation: f.generation, newest: f.newest, next: f.next,
		shared: make(map[string]*sharedMeta),
	}
	if v.sealer != nil {
		v.kept.mark = v.sealer.mark
	}
	v.firstSegment = f.firstSegment
	for _, ent := range f.entries {
		v.mu.entries[ent.key] = ent
	}
	if err := v.rewrite(); err != nil {
		err = also(fmt.Errorf("writing the manifest: %w", err), v.leaveKept())
		v.own, v.kept = nil, nil
		clear(v.mu.entries)
		return err
	}
	return nil
}

// found is what was found in a kept directory.
type found struct {
	own          *ownDir
	file         File // the manifest
	generation   uint64
	newest       uint64
	next         uint64
	firstSegment int
	entries      []*entry
	shared       map[uint64]*sharedMeta // what entries have in common
	segments     map[int]*segment       // those that entries lie in
	spare        []string               // segments that nothing lies in
	foreign      bool
	all          []string // manifests
	lengths      map[int]int64
	compared     int // see takenRoom
}

// takeOver makes an abandoned directory the volume's, and says whether it did. An empty
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
	case errors.Is(err, ErrLocked), errors.Is(err, fs.ErrPermission), errors.Is(err, errors.ErrUnsupported):
		return false, nil
	case err != nil:
		return false, err
	}
	f := &found{own: &ownDir{fs: fsys, path: path, lock: lock}, lengths: make(map[int]int64), segments: make(map[int]*segment), next: 1}
	defer func() {
		if !took && f.file != nil {
			err = also(err, bare(f.file.Close()))
		}
		if !took && f.own.lock != nil {
			err = also(err, lock.Close())
		}
	}()
	if err := f.list(); err != nil {
		return false, err
	}
	records, err := v.readManifests(f)
	if err != nil {
		return false, err
	}
	if err := v.checkMark(path, records); err != nil {
		return false, err
	}
	v.resolve(f, records)
	if len(f.entries) == 0 {
		return false, f.remove()
	}
	if n := f.size(); n > v.cfg.Capacity {
		return false, fmt.Errorf("what is kept there needs a capacity of %d bytes, and the volume's is %d: %w", n, v.cfg.Capacity, tier.ErrNoSpace)
	}
	if err := v.ownKept(f.own, f); err != nil {
		f.file, f.own.lock = nil, nil // closed by then
		return false, err
	}
	for _, name := range f.all {
		if name != v.own.manifest(v.kept.generation) {
			err = also(err, bare(v.own.removeFile(name)))
		}
	}
	for _, name := range f.spare {
		err = also(err, bare(v.own.removeSegment(name)))
	}
	if err != nil {
		v.warn(tier.CauseNotRemoved, "removing what is dead in %s: %v", filepath.Base(path), err)
	}
	for _, i := range slices.Sorted(maps.Keys(f.segments)) {
		s := f.segments[i]
		v.mu.segments = append(v.mu.segments, s)
		v.mu.used += s.used
		v.mu.stays += s.stays
	}
	return true, nil
}

// list sorts what is in the directory by its names.
func (f *found) list() error {
	entries, err := f.own.fs.ReadDir(f.own.path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		switch name := e.Name(); {
		case name == lockName, hiddenFile(name) && !e.IsDir():
		case e.Type().IsRegular() && segmentName.MatchString(name):
			i, err := strconv.Atoi(name[len("segment-"):])
			if err != nil || segmentFile(i) != name {
				f.foreign = true
				continue
			}
			info, err := f.own.fs.Stat(filepath.Join(f.own.path, name))
			if err != nil {
				return err
			}
			f.lengths[i] = info.Size()
			f.firstSegment = max(f.firstSegment, i+1)
		case e.Type().IsRegular() && manifestName.MatchString(name):
			f.all = append(f.all, filepath.Join(f.own.path, name))
		default:
			f.foreign = true
		}
	}
	slices.Sort(f.all)
	slices.Reverse(f.all)
	return nil
}

// readManifests reads the youngest manifest that is whole, or else the youngest, and
// leaves it open. It fails, and nothing is touched, if there is one that cannot be read.
func (v *Volume) readManifests(f *found) (best log, err error) {
	for _, name := range f.all {
		l, file, generation, err := v.readManifest(name)
		if err != nil {
			return log{}, err
		}
		f.newest = max(f.newest, generation)
		worse := file
		if f.file == nil || l.whole && !best.whole {
			worse = f.file
			best, f.file, f.generation = l, file, generation
		}
		if worse == nil {
			continue
		}
		if err := worse.Close(); err != nil {
			return log{}, err
		}
	}
	if f.file != nil && (best.broken > 0 || !best.whole) {
		v.warn(tier.CauseKeptDamaged, "%d bytes of the manifest of %s are damaged, or were not written to their end: what they said is ignored",
			best.broken, filepath.Base(f.own.path))
	}
	f.next = max(f.next, best.next)
	return best, nil
}

func (v *Volume) readManifest(name string) (log, File, uint64, error) {
	fail := func(err error) (log, File, uint64, error) {
		return log{}, nil, 0, fmt.Errorf("%s: %w", filepath.Base(name), bare(err))
	}
	generation, err := strconv.ParseUint(manifestName.FindStringSubmatch(filepath.Base(name))[1], 16, 64)
	if err != nil {
		return fail(err)
	}
	info, err := v.cfg.FS.Stat(name)
	if err != nil {
		return fail(err)
	}
	file, err := v.cfg.FS.Reopen(name, false)
	if err != nil {
		return fail(err)
	}
	p, err := readAll(file, min(info.Size(), manifestHeader))
	if err == nil && len(p) < manifestHeader {
		if len(p) >= 12 {
			err = checkVersion(p)
		}
		if err == nil {
			return log{next: 1, broken: int64(len(p))}, file, generation, nil // killed when it was begun
		}
	}
	if err == nil { // before all of it, which may be no manifest and gigabytes, is in memory
		_, err = parseManifestHeader(p, generation)
	}
	if err == nil {
		p, err = readAll(file, info.Size())
	}
	var l log
	if err == nil {
		l, err = parseManifest(p, generation)
	}
	if err != nil {
		return fail(also(err, bare(file.Close())))
	}
	return l, file, generation, nil
}

// resolve finds the memories of records. Of records that lie in the same room, the
// youngest is right: the end of the others was lost.
func (v *Volume) resolve(f *found, records log) {
	taken := &takenRoom{segments: make(map[int]*btree.BTreeG[span])}
	for _, key := range slices.Backward(slices.Sorted(maps.Keys(records.live))) {
		r := records.live[key]
		if err := v.restore(f, taken, records, r); err != nil {
			v.warn(tier.CauseKeptDamaged, "%s: what was kept as %d is lost: %v", filepath.Base(f.own.path), key, err)
		}
	}
	for i := range f.lengths {
		if f.segments[i] == nil {
			f.spare = append(f.spare, segmentFile(i))
		}
	}
	for i, s := range f.segments {
		s.fill(taken.segments[i])
	}
	f.compared = taken.compared
}

// restore makes an entry of a record, or says why that cannot be. What is sealed is opened
// before anything is believed.
func (v *Volume) restore(f *found, taken *takenRoom, records log, r rawRecord) error {
	rec, err := parseKept(r.body)
	if err != nil {
		return err
	}
	meta, keys, err := v.openRecord(rec, r)
	if err != nil {
		return err
	}
	common, err := v.restoreShared(f, records, rec.shared)
	if err != nil {
		return err
	}
	if why := f.claim(taken, rec.memories); why != "" {
		return errors.New(why)
	}
	ent := &entry{key: r.key, meta: meta, shared: common, at: r.at, n: r.n, stays: true}
	if common != nil {
		common.users++
	}
	for _, m := range rec.memories {
		e := &Extents{v: v, size: m.size, entry: ent}
		e.refs.Store(1)
		off := int64(0)
		for _, p := range m.pieces {
			e.pieces = append(e.pieces, piece{Off: off, Len: p.len, At: place{seg: f.segment(p.segment), off: p.off}})
			off += p.len
		}
		if keys != nil {
			e.seals = newSeals(keys[m.salt], m.number, e.pieces)
			copy(e.seals.units, m.units)
		}
		ent.memories = append(ent.memories, e)
	}
	f.entries = append(f.entries, ent)
	return nil
}

// restoreShared returns what a record has in common with others, by the key of that; nil if the
// key is 0.
func (v *Volume) restoreShared(f *found, records log, key uint64) (*sharedMeta, error) {
	if key == 0 {
		return nil, nil
	}
	if s := f.shared[key]; s != nil {
		return s, nil
	}
	r, ok := records.shared[key]
	if !ok {
		return nil, fmt.Errorf("what it has in common with others, which was kept as %d, is lost", key)
	}
	rec, err := parseKept(r.body)
	if err != nil {
		return nil, err
	}
	bytes, _, err := v.openRecord(rec, r)
	if err != nil {
		return nil, err
	}
	if f.shared == nil {
		f.shared = make(map[uint64]*sharedMeta)
	}
	f.shared[key] = &sharedMeta{key: key, bytes: bytes, at: r.at, n: r.n}
	return f.shared[key], nil
}

// span is a stretch of a segment.
type span struct{ off, n int64 }

// takenRoom is the room that records have, by segment. What it costs to look up a span, and to
// add one, grows with the logarithm of how many there are.
type takenRoom struct {
	segments map[int]*btree.BTreeG[span] // ordered by place; no two overlap
	compared int                         // spans with each other, so far
}

// add takes a span, and says whether nobody has any of it.
func (t *takenRoom) add(segment int, s span) bool {
	all := t.segments[segment]
	if all == nil {
		all = btree.NewG(32, func(a, b span) bool {
			t.compared++
			return a.off < b.off
		})
		t.segments[segment] = all
	}
	free := true
	all.DescendLessOrEqual(s, func(below span) bool {
		free = below.off+below.n <= s.off
		return false
	})
	all.AscendGreaterOrEqual(s, func(above span) bool {
		free = free && s.off+s.n <= above.off
		return false
	})
	if free {
		all.ReplaceOrInsert(s)
	}
	return free
}

// claim takes the room of memories, or says why it cannot be theirs.
func (f *found) claim(taken *takenRoom, memories []keptMemory) string {
	type claimed struct {
		segment int
		span
	}
	var mine []claimed
	for _, m := range memories {
		for _, p := range m.pieces {
			length, ok := f.lengths[p.segment]
			s := span{p.off, round(p.len)}
			why := ""
			switch {
			case !ok:
				why = segmentFile(p.segment) + " is not there"
			case s.off > length || p.len > length-s.off: // what follows up to the page was never needed
				why = segmentFile(p.segment) + " is too short"
			case !taken.add(p.segment, s):
				why = "its room was used again"
			}
			if why != "" {
				for _, c := range mine {
					taken.segments[c.segment].Delete(c.span)
				}
				return why
			}
			mine = append(mine, claimed{p.segment, s})
		}
	}
	return ""
}

// segment returns a segment that something is kept in.
func (f *found) segment(i int) *segment {
	s := f.segments[i]
	if s == nil {
		s = &segment{name: segmentFile(i), index: i, length: f.lengths[i]}
		f.segments[i] = s
	}
	return s
}

// fill makes the segment as long as it must be, with what is taken used, and all else
// nobody's: clearKept makes it free.
func (s *segment) fill(taken *btree.BTreeG[span]) {
	last, _ := taken.Max()
	s.size = last.off + last.n
	s.holes, s.backed = extent.New(s.size), extent.New(s.size)
	s.holes.Alloc(s.size)
	s.backed.Alloc(s.size)
	at := int64(0)
	taken.Ascend(func(t span) bool {
		if t.off > at {
			s.gaps = append(s.gaps, span{at, t.off - at})
		}
		at = t.off + t.n
		s.used += t.n
		return true
	})
	s.stays = s.used
}

// size is how much of a volume's capacity the segments take.
func (f *found) size() (n int64) {
	for _, s := range f.segments {
		if s.size > 1<<62-n {
			return 1 << 62
		}
		n += s.size
	}
	return n
}

// remove removes a directory in which nothing is kept; what is foreign stays in it.
func (f *found) remove() error {
	var err error
	for _, name := range f.spare {
		err = also(err, bare(f.own.removeSegment(name)))
	}
	if f.file != nil {
		err = also(err, bare(f.file.Close()))
		f.file = nil
	}
	for _, name := range slices.Backward(f.all) { // the youngest last: an older one may say more
		if err == nil {
			err = bare(f.own.removeFile(name))
		}
	}
	if err != nil || f.foreign {
		return err
	}
	err = f.own.remove()
	f.own.lock = nil
	return err
}

// clearKept makes what lies between what is kept free again, and gives it back: before
// it is seen whether the file system has room for the rest of the volume.
func (v *Volume) clearKept() error {
	for _, s := range v.mu.segments {
		f, err := v.cfg.FS.Reopen(filepath.Join(v.own.path, s.name), false)
		if err != nil {
			return fmt.Errorf("opening %s: %w", s.name, bare(err))
		}
		for _, g := range s.gaps {
			v.clearGap(s, f, g)
		}
		s.gaps = nil
		if s.length > s.size {
			_ = f.Punch(s.size, s.length-s.size) // nobody would ever use it
		}
		err = s.complete(f)
		if err := also(err, bare(f.Close())); err != nil {
			return fmt.Errorf("opening %s: %w", s.name, err)
		}
	}
	return nil
}

// complete makes the file end on a page: a sparse one, written without direct I/O, ends
// where the last memory does, and may be read in pages now.
func (s *segment) complete(f File) error {
	if s.length >= s.size {
		return nil
	}
	err := transferAll(f.WriteAt, make([]byte, s.size-s.length), s.length, 1)
	s.length = s.size
	return bare(err)
}

// clearGap makes a gap free: a hole, where the file system can.
func (v *Volume) clearGap(s *segment, f File, g span) {
	err := f.Punch(g.off, g.n)
	if err == nil {
		s.holes.Free(g.off, g.n)
		return
	}
	if !errors.Is(err, errors.ErrUnsupported) {
		v.warn(tier.CauseDiskFails, "giving %d bytes at %d of %s back: %v", g.n, g.off, s.name, bare(err))
	}
	s.backed.Free(g.off, g.n)
	v.mu.free += g.n
}

// reopenKept opens the files of what is kept.
func (v *Volume) reopenKept() error {
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

// leaveKept gives a directory up, with all that is kept in it, or removes it if that is
// nothing. All segments are closed.
func (v *Volume) leaveKept() error {
	v.kept.turn <- struct{}{} // who writes a record still finds the files open
	defer func() { <-v.kept.turn }()
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
	v.kept.left = true
	var err error
	if v.kept.file != nil {
		err = bare(v.kept.file.Close())
	}
	if stays {
		return also(err, v.own.lock.Close())
	}
	// If something could not be removed, the manifest stays and says that there is
	// nothing: an older one might say otherwise.
	if !v.own.dirty.Load() {
		err = also(err, bare(v.own.removeFile(v.own.manifest(v.kept.generation))))
	}
	return also(err, v.own.remove())
}

// abandonKept undoes openKept and reopenKept, when the volume could not be
// opened.
func (v *Volume) abandonKept() error {
	var err error
	for _, s := range v.mu.segments {
		if s.file != nil {
			err = also(err, bare(s.file.Close()))
		}
	}
	return also(err, v.leaveKept())
}
