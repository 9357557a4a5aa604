package journal

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/internal/oneline"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
)

// Found is the contents of a directory by its manifests, when no process uses it.
type Found struct {
	Records  []FoundRecord    // the youngest first; set by Resolve
	Segments map[int]*Segment // in which those lie
	Lost     []error          // what was recorded and is lost, and why

	dir        Dir
	sealer     *seal.Sealer
	names      []string // of all manifests, the youngest first
	file       File     // of the one that is believed
	generation uint64
	newest     uint64
	manifest   manifest
	records    []*liveRecord
	shared     map[uint64]*sharedRecord
}

// FoundRecord is a record whose memories are there.
type FoundRecord struct {
	Key      uint64
	Shared   []byte // in the same memory for all that share it; nil: nothing
	Meta     []byte // not nil
	Memories []Memory
	Keys     []*seal.Key // by Memory.Salt; nil: nothing is sealed
}

// Segment is a segment in which something persists.
type Segment struct {
	Length int64  // of the file
	Size   int64  // up to the end of what persists
	Used   int64  // of it
	Gaps   []Span // the rest
}

// Span is a stretch of a segment.
type Span struct{ Off, Len int64 }

// Read reads the manifests with some names: of those that are whole the youngest is believed, or
// else the youngest. It changes nothing, and fails if there is one that cannot be read. The
// caller must Close what it gets.
func Read(dir Dir, sealer *seal.Sealer, names []string) (*Found, error) {
	f := &Found{dir: dir, sealer: sealer, names: slices.Clone(names), manifest: manifest{next: 1}}
	slices.Sort(f.names)
	slices.Reverse(f.names)
	for _, name := range f.names {
		m, file, generation, err := read(dir, name)
		if err != nil {
			return nil, oneline.Join(fmt.Errorf("%s: %w", name, err), f.Close())
		}
		f.newest = max(f.newest, generation)
		worse := file
		if f.file == nil || m.whole && !f.manifest.whole {
			worse = f.file
			f.manifest, f.file, f.generation = m, file, generation
		}
		if worse == nil {
			continue
		}
		if err := worse.Close(); err != nil {
			return nil, oneline.Join(err, f.Close())
		}
	}
	if m := &f.manifest; f.file != nil && (m.broken > 0 || !m.whole) {
		f.Lost = append(f.Lost, fmt.Errorf("%d bytes of the manifest are damaged, or were not written to their end: what they said is ignored", m.broken))
	}
	return f, nil
}

func read(dir Dir, name string) (m manifest, file File, generation uint64, err error) {
	if generation, err = generationOf(name); err != nil {
		return m, nil, 0, err
	}
	file, n, err := dir.Open(name)
	if err != nil {
		return m, nil, 0, err
	}
	p, err := readAll(file, min(n, HeaderSize))
	if err == nil && len(p) < HeaderSize {
		if len(p) >= 12 {
			err = checkVersion(p)
		}
		if err == nil {
			return manifest{next: 1, broken: int64(len(p))}, file, generation, nil // killed when it was begun
		}
	}
	if err == nil { // before all of it, which may be no manifest and gigabytes, is in memory
		_, err = ParseHeader(p, generation)
	}
	if err == nil {
		p, err = readAll(file, n)
	}
	if err == nil {
		m, err = parseManifest(p, generation)
	}
	if err != nil {
		return m, nil, 0, oneline.Join(err, file.Close())
	}
	return m, file, generation, nil
}

func readAll(f File, size int64) ([]byte, error) {
	if size > math.MaxInt32*4 {
		return nil, fmt.Errorf("%d bytes are too many", size)
	}
	p := make([]byte, size)
	_, err := f.ReadAt(p, 0)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, errors.New("shorter than it says")
	}
	return p, err
}

// Any reports whether there are records, as far as the manifest says.
func (f *Found) Any() bool { return len(f.manifest.live) > 0 }

// Manifest returns the name of the manifest that is believed; empty if there is none.
func (f *Found) Manifest() string {
	if f.file == nil {
		return ""
	}
	return nameOf(f.generation)
}

// Outline returns where the memories of all records lie, without opening the records. Where they are
// sealed nothing vouches for that. It leaves out records that make no sense.
func (f *Found) Outline() (out []FoundRecord) {
	for key, frame := range f.manifest.live {
		if rec, err := ParseRecord(frame.Body); err == nil {
			out = append(out, FoundRecord{Key: key, Memories: rec.Memories})
		}
	}
	return out
}

// Opens reports whether what was found was written with this key of the user's. Where it is certain
// that there is nothing, no key is needed. sealed says that there was a key.
func (f *Found) Opens() (ok, sealed bool, err error) {
	m := &f.manifest
	if m.mark == nil || len(m.live) == 0 && m.broken == 0 {
		return true, false, nil
	}
	ok, err = f.sealer.Opens(*m.mark)
	return ok, m.mark.Sealed, err
}

// Resolve finds the memories of records, in segments of some lengths. Of records that lie in the
// same room, the youngest is right: the end of the others was lost.
func (f *Found) Resolve(lengths map[int]int64, name func(segment int) string) {
	f.Segments = make(map[int]*Segment)
	room := &takenRoom{lengths: lengths, name: name, segments: make(map[int]*btree.BTreeG[Span])}
	f.resolve(room)
}

func (f *Found) resolve(room *takenRoom) {
	for _, key := range slices.Backward(slices.Sorted(maps.Keys(f.manifest.live))) {
		if err := f.restore(room, f.manifest.live[key]); err != nil {
			f.Lost = append(f.Lost, fmt.Errorf("what was kept as %d is lost: %w", key, err))
		}
	}
	for i, taken := range room.segments {
		if taken.Len() > 0 {
			f.Segments[i] = newSegment(room.lengths[i], taken)
		}
	}
}

// restore finds the memories of a record, or says why that cannot be. What is sealed is opened
// before anything is believed.
func (f *Found) restore(room *takenRoom, frame Frame) error {
	rec, err := ParseRecord(frame.Body)
	if err != nil {
		return err
	}
	meta, keys, err := rec.open(f.sealer, frame)
	if err != nil {
		return err
	}
	common, err := f.restoreShared(rec.shared)
	if err != nil {
		return err
	}
	if err := room.claim(rec.Memories); err != nil {
		return err
	}
	found := FoundRecord{Key: frame.Key, Meta: meta, Memories: rec.Memories, Keys: keys}
	if common != nil {
		common.users++
		found.Shared = common.bytes
	}
	f.Records = append(f.Records, found)
	f.records = append(f.records, &liveRecord{place: place{frame.At, frame.Len}, key: frame.Key, shared: common})
	return nil
}

// restoreShared returns what a record has in common with others; nil if the key is 0.
func (f *Found) restoreShared(key uint64) (*sharedRecord, error) {
	if key == 0 {
		return nil, nil
	}
	if s := f.shared[key]; s != nil {
		return s, nil
	}
	frame, ok := f.manifest.shared[key]
	if !ok {
		return nil, fmt.Errorf("what it has in common with others, which was kept as %d, is lost", key)
	}
	rec, err := ParseRecord(frame.Body)
	if err != nil {
		return nil, err
	}
	bytes, _, err := rec.open(f.sealer, frame)
	if err != nil {
		return nil, err
	}
	if f.shared == nil {
		f.shared = make(map[uint64]*sharedRecord)
	}
	f.shared[key] = &sharedRecord{place: place{frame.At, frame.Len}, key: key, bytes: bytes}
	return f.shared[key], nil
}

// takenRoom is the room that records have, by segment. What it costs to look up a span, and to
// add one, grows with the logarithm of how many there are.
type takenRoom struct {
	lengths  map[int]int64 // of the segments that there are
	name     func(int) string
	segments map[int]*btree.BTreeG[Span] // ordered by place; no two overlap
	compared int                         // spans with each other, so far
}

// add takes a span, and reports whether all of it was free.
func (t *takenRoom) add(segment int, s Span) bool {
	all := t.segments[segment]
	if all == nil {
		all = btree.NewG(32, func(a, b Span) bool {
			t.compared++
			return a.Off < b.Off
		})
		t.segments[segment] = all
	}
	free := true
	all.DescendLessOrEqual(s, func(below Span) bool {
		free = below.Off+below.Len <= s.Off
		return false
	})
	all.AscendGreaterOrEqual(s, func(above Span) bool {
		free = free && s.Off+s.Len <= above.Off
		return false
	})
	if free {
		all.ReplaceOrInsert(s)
	}
	return free
}

// claim takes the room of memories, or says why it cannot be theirs.
func (t *takenRoom) claim(memories []Memory) error {
	type claimed struct {
		segment int
		Span
	}
	var mine []claimed
	for _, m := range memories {
		for _, p := range m.Pieces {
			length, ok := t.lengths[p.Segment]
			s := Span{p.Off, (p.Len + tier.Page - 1) &^ (tier.Page - 1)}
			why := ""
			switch {
			case !ok:
				why = t.name(p.Segment) + " is not there"
			case s.Off > length || p.Len > length-s.Off: // what follows up to the page was never needed
				why = t.name(p.Segment) + " is too short"
			case !t.add(p.Segment, s):
				why = "its room was used again"
			}
			if why != "" {
				for _, c := range mine {
					t.segments[c.segment].Delete(c.Span)
				}
				return errors.New(why)
			}
			mine = append(mine, claimed{p.Segment, s})
		}
	}
	return nil
}

// newSegment is as long as it must be, with what is taken used, and all else gaps.
func newSegment(length int64, taken *btree.BTreeG[Span]) *Segment {
	last, _ := taken.Max()
	s := &Segment{Length: length, Size: last.Off + last.Len}
	at := int64(0)
	taken.Ascend(func(t Span) bool {
		if t.Off > at {
			s.Gaps = append(s.Gaps, Span{at, t.Off - at})
		}
		at = t.Off + t.Len
		s.Used += t.Len
		return true
	})
	return s
}

// Continue writes a manifest of what was found, for a volume that goes on in the directory. The
// journal must be closed, also after an error; Found needs not be any more. warn is
// called for what could not be written and will be tried again.
func (f *Found) Continue(warn func(error)) (*Journal, error) {
	j := &Journal{
		dir: f.dir, sealer: f.sealer, warn: warn, file: f.file, generation: f.generation, newest: f.newest, next: f.manifest.next,
		records: make(map[uint64]*liveRecord), shared: make(map[string]*sharedRecord),
	}
	f.file = nil
	for _, r := range f.records {
		j.records[r.key] = r
	}
	if err := j.rewrite(); err != nil {
		return j, fmt.Errorf("writing the manifest: %w", err)
	}
	return j, nil
}

// RemoveOld removes the manifests that were found and are not the journal's.
func (f *Found) RemoveOld(j *Journal) (err error) {
	for _, name := range f.names {
		if name != nameOf(j.generation) {
			err = oneline.Join(err, f.dir.Remove(name))
		}
	}
	return err
}

// Remove removes all manifests that were found, the youngest last: an older one may say more.
func (f *Found) Remove() error {
	for _, name := range slices.Backward(f.names) {
		if err := f.dir.Remove(name); err != nil {
			return err
		}
	}
	return nil
}

// Close changes nothing. A second Close does nothing.
func (f *Found) Close() error {
	if f == nil || f.file == nil {
		return nil
	}
	file := f.file
	f.file = nil
	return file.Close()
}
