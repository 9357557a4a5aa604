package persist

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/volumes"
)

// Directory is what a directory holds that persists.
type Directory struct {
	volumes.Kept
	Batches      []Listed // the oldest first; none if Kept.Sealed
	Dictionaries []Listed // that are images of their own, and batches share
}

// Listed is a batch or a dictionary in a Directory.
type Listed struct {
	Record *volumes.Persisted
	Entry  *Entry // nil if it cannot be read
	Err    error  // why it cannot be adopted
}

// Inspect lists what persists in dir; see volumes.Inspect. With checksums it reads all bytes of the
// batches and dictionaries, where no engine uses them, and compares them with their checksums.
func Inspect(dir string, checksums bool) ([]Directory, error) {
	kept, err := volumes.Inspect(dir)
	if err != nil {
		return nil, err
	}
	out := make([]Directory, len(kept))
	for i, k := range kept {
		out[i] = Directory{Kept: k}
		if !k.Sealed {
			out[i].list(checksums && !k.InUse)
		}
	}
	return out, nil
}

func (d *Directory) list(checksums bool) {
	var schemas Schemas
	sound := make(map[uint64]bool) // dictionaries, by key
	for i := range d.Records {
		l := Listed{Record: &d.Records[i]}
		if l.Entry, l.Err = schemas.entry(l.Record); l.Err == nil {
			l.Err = l.check(sound, checksums)
		}
		if l.Entry == nil || l.Entry.ID != 0 {
			d.Batches = append(d.Batches, l)
			continue
		}
		sound[l.Record.Key] = l.Err == nil
		d.Dictionaries = append(d.Dictionaries, l)
	}
}

// check returns an error if a dictionary is missing or damaged, or, with checksums, if a byte is not
// the one that was written.
func (l *Listed) check(sound map[uint64]bool, checksums bool) error {
	for _, key := range l.Entry.Dictionaries {
		if !sound[key] {
			return errDictionary(key)
		}
	}
	if !checksums || l.Record.Size == 0 {
		return nil
	}
	type part struct {
		off, n int64
		want   uint64
	}
	var parts []part
	d := l.Entry.Descriptor
	for i := range l.Entry.Runs {
		r := &l.Entry.Runs[i]
		parts = append(parts, part{r.Offset, r.Stored(), r.Sum})
	}
	for i, sum := range d.Sums {
		if off := int64(i) * d.SumBlock(); !l.Entry.Packed {
			parts = append(parts, part{off, min(d.SumBlock(), d.Body-off), sum})
		}
	}
	path := l.Record.File
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	buf := make([]byte, payload.RunSize)
	for _, p := range parts {
		if _, err := file.ReadAt(buf[:p.n], p.off); err != nil {
			return fmt.Errorf("%s ends before byte %d: %w", filepath.Base(path), p.off+p.n, err)
		}
		if got := xxh3.Hash(buf[:p.n]); got != p.want {
			return &image.CorruptError{Volume: path, Offset: p.off, Want: p.want, Got: got}
		}
	}
	return nil
}

// Codecs returns the codecs that the bytes are stored with, each once; none for plain bytes.
func (e *Entry) Codecs() (all []codec.Codec) {
	for i := range e.Runs {
		if c := codec.Codec(e.Runs[i].Codec); !slices.Contains(all, c) {
			all = append(all, c)
		}
	}
	return all
}
