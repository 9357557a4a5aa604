package volumes

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/spillway-db/spillway/internal/oneline"
	"github.com/spillway-db/spillway/internal/volumes/internal/journal"
	"github.com/spillway-db/spillway/tier/disk"
)

// Kept is a directory in which memory persists, as Inspect found it.
type Kept struct {
	Path      string
	InUse     bool         // a volume has it locked, of this process or of another
	Sealed    bool         // it is encrypted with a user's key; the records have no Shared and no Meta
	Records   []KeptRecord // the oldest first
	Lost      []error      // why records cannot be read; not known while InUse
	Unlisted  []string     // names of files that hold nothing that persists, and are no volume's in use
	FileBytes int64        // the lengths of all segments, which may have holes
	Err       error        // why nothing of it could be read
}

// KeptRecord is a record of a Kept.
type KeptRecord struct {
	Persisted
	path     string
	memories []journal.Memory
}

// errReadOnly is the error of a change that is not made.
var errReadOnly = errors.New("only read")

// readOnly is a directory whose manifests are read and not changed.
type readOnly struct{ path string }

// Create implements journal.Dir.
func (readOnly) Create(string) (journal.File, error) { return nil, errReadOnly }

// Remove implements journal.Dir.
func (readOnly) Remove(string) error { return errReadOnly }

// Open implements journal.Dir.
func (d readOnly) Open(name string) (journal.File, int64, error) {
	f, err := os.Open(filepath.Join(d.path, name))
	if err != nil {
		return nil, 0, bare(err)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, 0, oneline.Join(bare(err), f.Close())
	}
	return f, info.Size(), nil
}

// Inspect describes the directories in dir in which memory persists, or dir itself if it is one. It
// changes nothing. To find out whether a directory is in use it tries the lock, which it gives back at
// once, before it reads. A directory that is in use changes while it is read.
func Inspect(dir string) ([]Kept, error) {
	if persistentName.MatchString(filepath.Base(dir)) {
		return []Kept{inspect(dir)}, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var all []Kept
	for _, e := range entries {
		if e.IsDir() && persistentName.MatchString(e.Name()) {
			all = append(all, inspect(filepath.Join(dir, e.Name())))
		}
	}
	return all, nil
}

func inspect(path string) (k Kept) {
	for range 3 {
		k = Kept{Path: path}
		// The owner of a directory in use may have replaced a manifest or removed a segment meanwhile.
		if k.Err = k.read(); !k.InUse || !errors.Is(k.Err, fs.ErrNotExist) {
			break
		}
	}
	return k
}

func (k *Kept) read() (err error) {
	lock, err := disk.OS().Lock(filepath.Join(k.Path, lockName), false)
	switch {
	case errors.Is(err, disk.ErrLocked):
		k.InUse = true
	case err == nil:
		if err := lock.Close(); err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrNotExist): // its maker was killed before it made the lock
		return bare(err)
	}
	own := &ownDir{fs: disk.OS(), path: k.Path}
	listed, err := own.list()
	if err != nil {
		return bare(err)
	}
	found, err := journal.Read(readOnly{k.Path}, nil, listed.manifests)
	if err != nil {
		return err
	}
	defer func() { err = oneline.Join(err, found.Close()) }()
	opens, sealed, err := found.Opens()
	if err != nil {
		return err
	}
	found.Resolve(listed.lengths, segmentFile)
	records := found.Records
	if k.Sealed = !opens && sealed; k.Sealed {
		records = found.Outline()
	} else if !k.InUse {
		k.Lost = found.Lost
	}
	for _, r := range records {
		kept := KeptRecord{
			Persisted: Persisted{Key: r.Key, Shared: r.Shared, Meta: r.Meta},
			path:      k.Path,
			memories:  r.Memories,
		}
		for _, m := range r.Memories {
			kept.Sizes = append(kept.Sizes, m.Size)
		}
		k.Records = append(k.Records, kept)
	}
	slices.SortFunc(k.Records, func(a, b KeptRecord) int { return cmp.Compare(a.Key, b.Key) })
	return k.listFiles(listed, found)
}

// listFiles sums up the segments, and finds the files that hold nothing that persists.
func (k *Kept) listFiles(listed *listing, found *journal.Found) error {
	used := map[string]bool{lockName: true, found.Manifest(): true}
	for i, n := range listed.lengths {
		k.FileBytes += n
		// Where records cannot be opened it is not known which segments they need.
		if k.InUse || k.Sealed || found.Segments[i] != nil {
			used[segmentFile(i)] = true
		}
	}
	entries, err := os.ReadDir(k.Path)
	if err != nil {
		return bare(err)
	}
	for _, e := range entries {
		if name := e.Name(); !used[name] && !(k.InUse && journal.IsManifest(name)) {
			k.Unlisted = append(k.Unlisted, name)
		}
	}
	return nil
}

// Room returns the bytes of the record's room on the disk.
func (r *KeptRecord) Room() (bytes int64) {
	for _, n := range r.Sizes {
		bytes += round(n)
	}
	return bytes
}

// Path returns the file that memory i of the record begins in.
func (r *KeptRecord) Path(i int) string {
	return filepath.Join(r.path, segmentFile(r.memories[i].Pieces[0].Segment))
}

// Read reads memory i of the record and calls f for each piece of size bytes, the last of which may be
// shorter. The piece is valid during the call.
func (r *KeptRecord) Read(i, size int, f func(piece []byte) error) error {
	buf, have, left := make([]byte, size), 0, r.Sizes[i]
	for _, p := range r.memories[i].Pieces {
		for off := p.Off; off < p.Off+p.Len; {
			n := min(int64(size-have), p.Off+p.Len-off)
			if err := readSegment(
				filepath.Join(r.path, segmentFile(p.Segment)),
				buf[have:have+int(n)],
				off,
			); err != nil {
				return err
			}
			off, have, left = off+n, have+int(n), left-n
			if have < size && left > 0 {
				continue
			}
			if err := f(buf[:have]); err != nil {
				return err
			}
			have = 0
		}
	}
	return nil
}

func readSegment(path string, p []byte, off int64) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	if _, err = f.ReadAt(p, off); err == io.EOF {
		err = fmt.Errorf("%s ends before byte %d", filepath.Base(path), off+int64(len(p)))
	}
	return oneline.Join(err, f.Close())
}
