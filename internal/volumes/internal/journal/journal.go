// Package journal writes and reads what a directory of spill files has to say to the next volume:
// which memories persist, where they lie, and what their owner says of them.
//
//	manifest.go   the format of the file: a header and frames, each with a checksum (pure)
//	record.go     what a frame says: a Record (pure)
//	journal.go    Journal: appends records, ends them, and writes the file anew
//	found.go      Found: what an abandoned directory's manifests say, and whether that can be
//
// A record is appended after its memories were written. That it has ended is appended before
// their room can be used again, or written over it where the disk is full. Nothing is
// synchronized to the disk: what a killed process has written is in the page cache.
//
// The package knows segments by number, and nothing of volumes.
package journal

import (
	"cmp"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"

	"github.com/spillway-db/spillway/internal/oneline"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
)

// File is an open manifest. A read or write does all or is an error, as package io says.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
}

// Dir is the directory that manifests are in. Its errors do not name the file.
type Dir interface {
	Create(name string) (File, error)              // must not be there
	Open(name string) (f File, n int64, err error) // n: the file's length
	Remove(name string) error                      // may be gone already
}

var nameFormat = regexp.MustCompile(`^manifest-([0-9a-f]{16})$`)

// IsManifest reports whether a file's name is a manifest's.
func IsManifest(name string) bool { return nameFormat.MatchString(name) }

func nameOf(generation uint64) string { return fmt.Sprintf("manifest-%016x", generation) }

func generationOf(name string) (uint64, error) {
	return strconv.ParseUint(nameFormat.FindStringSubmatch(name)[1], 16, 64)
}

// Journal is a manifest that is written. It is not safe for concurrent use.
type Journal struct {
	dir    Dir
	sealer *seal.Sealer // nil if nothing is encrypted
	warn   func(error)

	file       File
	generation uint64
	newest     uint64 // the highest generation that there has been
	at         int64  // the manifest's length
	live       int64  // of it, in records that have not ended
	next       uint64 // key
	torn       bool   // a write has failed: the manifest must be written anew
	closed     bool   // what has its name may be another's manifest

	records map[uint64]*liveRecord
	shared  map[string]*sharedRecord // by their bytes, also those that no record shares any more
}

type liveRecord struct {
	place
	key    uint64
	shared *sharedRecord // nil if it has nothing in common with others
}

// sharedRecord is what several records have in common.
type sharedRecord struct {
	place
	key   uint64
	bytes []byte
	users int // records
}

// New makes a journal in an empty directory. It must be closed, also after an error. warn is
// called for what could not be written and will be tried again.
func New(dir Dir, sealer *seal.Sealer, warn func(error)) (*Journal, error) {
	return (&Found{dir: dir, sealer: sealer, manifest: manifest{next: 1}}).Continue(warn)
}

// Add appends a record and returns its key. What it shares with others is written once for all
// that have the same bytes; nil is nothing. On an error what it replaces has not ended.
func (j *Journal) Add(rec *Record, shared, meta []byte) (key uint64, err error) {
	if n := max(len(meta), len(shared)); n > maxBody/2 {
		return 0, fmt.Errorf("%d bytes of meta are too many", n)
	}
	if j.torn {
		if err := j.rewrite(); err != nil {
			return 0, fmt.Errorf("the manifest: %w", err)
		}
	}
	common, err := j.share(shared)
	if err != nil {
		j.tidy()
		return 0, fmt.Errorf("the manifest: %w", err)
	}
	r := &liveRecord{key: j.next, shared: common}
	if common != nil {
		rec.shared = common.key
	}
	body := rec.body(j.sealer, Live, r.key, meta)
	if len(body) > maxBody {
		return 0, fmt.Errorf("a record of %d bytes is too long: the most is %d", len(body), maxBody)
	}
	if r.place, err = j.write(Live, r.key, body); err != nil {
		j.tidy() // it may be there all the same
		return 0, fmt.Errorf("the manifest: %w", err)
	}
	j.next++
	j.count(r, 1)
	j.records[r.key] = r
	if old := j.records[rec.Replaces]; old != nil {
		delete(j.records, old.key)
		j.count(old, -1)
	}
	j.tidy()
	return r.key, nil
}

// share returns the record of what others have, too, which it writes if there is none.
func (j *Journal) share(bytes []byte) (*sharedRecord, error) {
	if len(bytes) == 0 {
		return nil, nil
	}
	if s := j.shared[string(bytes)]; s != nil {
		return s, nil
	}
	s := &sharedRecord{key: j.next, bytes: slices.Clone(bytes)}
	var err error
	if s.place, err = j.write(Shared, s.key, NewRecord(j.sealer).body(j.sealer, Shared, s.key, bytes)); err != nil {
		return nil, err
	}
	j.next++
	j.shared[string(bytes)] = s
	return s, nil
}

// NewRecord returns a record of nothing, to be written by a journal with a sealer.
func NewRecord(s *seal.Sealer) *Record {
	rec := new(Record)
	if s != nil {
		rec.Salts = []seal.Salt{s.Own().Salt()}
	}
	return rec
}

// count notes that a record is live (1), or is not any more (-1).
func (j *Journal) count(r *liveRecord, n int) {
	j.live += int64(n) * r.n
	s := r.shared
	if s == nil {
		return
	}
	if n < 0 {
		if s.users--; s.users == 0 {
			j.live -= s.n
		}
		return
	}
	if s.users++; s.users == 1 {
		j.live += s.n
	}
}

// End ends a record, if it has not ended. If that cannot be written in any way there is a
// warning, and its room may be used again all the same: a process must not lose its disk for
// that. A volume that believes the old record finds other bytes, and their checksums say so.
func (j *Journal) End(key uint64) {
	r := j.records[key]
	if r == nil || j.closed {
		return
	}
	delete(j.records, key)
	j.count(r, -1)
	if _, err := j.write(Ended, key, nil); err != nil {
		if failed := j.endInPlace(r); failed != nil {
			j.warn(fmt.Errorf("the manifest: %w", oneline.Join(err, failed)))
		}
	}
	j.tidy()
}

// endInPlace makes of a live record one that has ended. Where the file cannot grow, because the
// disk is full, what is in it can be changed still.
func (j *Journal) endInPlace(r *liveRecord) error {
	f, err := j.frame(r.place)
	if err != nil {
		return err
	}
	over := AppendFrame(nil, j.generation, r.at, Ended, r.key, f.Body)
	_, err = j.file.WriteAt(over[:FrameSize], r.at)
	return err
}

// frame reads a frame. Its checksum says that it is what was written there: the sum's seed is
// made of the generation and the place, where nothing was written since.
func (j *Journal) frame(at place) (Frame, error) {
	p := make([]byte, at.n)
	if _, err := j.file.ReadAt(p, at.at); err != nil {
		return Frame{}, err
	}
	f, ok := ParseFrame(p, j.generation, at.at)
	if !ok {
		return f, fmt.Errorf("the record at %d of it is damaged", at.at)
	}
	return f, nil
}

// write appends a frame, and returns its place.
func (j *Journal) write(kind Kind, key uint64, body []byte) (place, error) {
	p := AppendFrame(nil, j.generation, j.at, kind, key, body)
	if _, err := j.file.WriteAt(p, j.at); err != nil {
		j.torn = true
		return place{}, err
	}
	at := place{j.at, int64(len(p))}
	j.at += at.n
	return at, nil
}

// deadBytes is how much of a manifest may be dead, beside as much as is live.
const deadBytes = 1 << 20

// tidy writes the manifest anew if most of it is dead, or if it is torn. What cannot be done
// now is tried again after the next record.
func (j *Journal) tidy() {
	if j.torn || j.at-j.live > j.live+deadBytes {
		if err := j.rewrite(); err != nil {
			j.warn(fmt.Errorf("writing the manifest anew: %w", err))
		}
	}
}

// rewrite begins a manifest with what is live now, and removes the old one when it is whole. On
// an error before that the old one is the manifest still.
func (j *Journal) rewrite() error {
	j.newest++ // also if this fails: the name may be taken then
	name := nameOf(j.newest)
	f, err := j.dir.Create(name)
	if err != nil {
		return err
	}
	var shared []*sharedRecord
	var records []*liveRecord
	var places []*place // of both, in the order in which they are written
	users := make(map[*sharedRecord]bool)
	for _, r := range j.records {
		records = append(records, r)
		if s := r.shared; s != nil && !users[s] {
			users[s] = true
			shared = append(shared, s)
		}
	}
	slices.SortFunc(shared, func(a, b *sharedRecord) int { return cmp.Compare(a.key, b.key) })
	slices.SortFunc(records, func(a, b *liveRecord) int { return cmp.Compare(a.key, b.key) })
	for _, s := range shared {
		places = append(places, &s.place)
	}
	for _, r := range records {
		places = append(places, &r.place)
	}
	next := &copying{file: f, generation: j.newest}
	if err := next.fill(j, places); err != nil {
		return oneline.Join(err, f.Close(), j.dir.Remove(name))
	}
	oldFile, oldName := j.file, nameOf(j.generation)
	j.file, j.generation, j.at, j.torn = f, j.newest, next.at, false
	j.live = 0
	for i, p := range places {
		*p = next.places[i]
		j.live += p.n
	}
	clear(j.shared)
	for _, s := range shared {
		j.shared[string(s.bytes)] = s
	}
	if oldFile == nil {
		return nil
	}
	return oneline.Join(oldFile.Close(), j.dir.Remove(oldName))
}

// copying is a manifest that is being written.
type copying struct {
	file       File
	generation uint64
	at         int64   // where p will be written
	p          []byte  // not yet written
	places     []place // of what was copied, in order
}

// fill writes a whole manifest of the old one's frames at some places.
func (c *copying) fill(old *Journal, places []*place) error {
	c.p = AppendHeader(c.p, c.generation, old.sealer.Mark())
	for _, p := range places {
		f, err := old.frame(*p)
		if err != nil {
			return err
		}
		c.places = append(c.places, place{c.at + int64(len(c.p)), p.n})
		if err := c.add(f.Kind, f.Key, withoutReplaced(f.Body)); err != nil {
			return err
		}
	}
	if err := c.add(Whole, old.next-1, nil); err != nil {
		return err
	}
	return c.flush()
}

func (c *copying) add(kind Kind, key uint64, body []byte) error {
	c.p = AppendFrame(c.p, c.generation, c.at+int64(len(c.p)), kind, key, body)
	if len(c.p) < 1<<20 {
		return nil
	}
	return c.flush()
}

func (c *copying) flush() error {
	if _, err := c.file.WriteAt(c.p, c.at); err != nil {
		return err
	}
	c.at += int64(len(c.p))
	c.p = c.p[:0]
	return nil
}

// Close ends the journal, of which nothing is written any more. It may be called after an error
// of New and of Continue.
func (j *Journal) Close() error {
	j.closed = true
	if j.file == nil {
		return nil
	}
	return j.file.Close()
}

// Closed reports whether Close was called.
func (j *Journal) Closed() bool { return j.closed }

// Remove removes the manifest of a closed journal.
func (j *Journal) Remove() error { return j.dir.Remove(nameOf(j.generation)) }
