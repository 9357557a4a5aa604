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
	volumes.PersistedDir
	Batches      []*Batch // the oldest first; none if PersistedDir.Sealed
	Dictionaries []*Batch // that are images of their own, and batches share
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
		out[i] = Directory{PersistedDir: k}
		if !k.Sealed {
			out[i].list(checksums && !k.InUse)
		}
	}
	return out, nil
}

func (d *Directory) list(checksums bool) {
	schemas := make(Schemas)
	files := make(map[uint64]*Batch)
	for _, p := range d.Records {
		b := &Batch{Persisted: p}
		b.read(schemas, files)
		if b.Err == nil && checksums && b.Size > 0 {
			b.Err = b.check()
		}
		if b.Entry == nil || b.Entry.ID != 0 {
			d.Batches = append(d.Batches, b)
		} else {
			d.Dictionaries = append(d.Dictionaries, b)
		}
	}
}

// check returns an error if a byte of a file is not the one that was written.
func (b *Batch) check() error {
	type part struct {
		off, n int64
		want   uint64
	}
	var parts []part
	d := b.Entry.Descriptor
	for i := range b.Entry.Runs {
		r := &b.Entry.Runs[i]
		parts = append(parts, part{r.Offset, r.Stored(), r.Sum})
	}
	for i, sum := range d.Sums {
		if off := int64(i) * d.SumBlock(); !b.Entry.Packed {
			parts = append(parts, part{off, min(d.SumBlock(), d.Body-off), sum})
		}
	}
	path := b.File
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
