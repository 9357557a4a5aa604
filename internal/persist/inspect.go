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

// Directory is what persists in one directory, for tools that show it. Unlike Found it takes
// nothing over: it takes no room of a space, and an engine may use the directory at the same time.
type Directory struct {
	volumes.PersistedDir
	// Batches are the oldest first, damaged files among them, with their Err. It is nil if
	// PersistedDir.Sealed, because the entries of an encrypted volume cannot be read without the user's
	// key.
	Batches      []*Batch
	Dictionaries []*Batch
}

// Inspect lists what persists in dir; see volumes.Inspect. With checksums it also reads all bytes
// of the batches and dictionaries in directories that no engine uses, and compares them with their
// checksums; differences are in the Err of each Batch. In a directory in use, files may end between
// their listing and their reading, which would be reported as damage. The returned error is about
// dir as a whole.
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

// list fills d from d.Records, which come in the order in which they were written. With checksums
// it also reads the bodies.
func (d *Directory) list(checksums bool) {
	schemas := make(Schemas)
	files := make(map[uint64]*Batch)
	for _, p := range d.Records {
		// Dictionaries were written before the batches that need them, and come first.
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

// check reads the bytes of a file, block by block or run by run, and returns an error at the first
// difference: a *image.CorruptError with the offset in the file, or that the file is too short. The
// memory begins at offset 0 of the file. The file must not be encrypted.
func (b *Batch) check() error {
	type part struct {
		off, n int64
		want   uint64
	}
	var parts []part
	d := b.Entry.Descriptor
	// The checksums of a compressed image are those of its runs, which cover the stored bytes.
	// Descriptor.Sums are of the body, which would have to be uncompressed first.
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
	// No part is longer than a run: see Entry.fits.
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

// Codecs returns the codecs of the stored bytes, each once, in the order of their first run; nil
// for plain bytes.
func (e *Entry) Codecs() (all []codec.Codec) {
	for i := range e.Runs {
		if c := codec.Codec(e.Runs[i].Codec); !slices.Contains(all, c) {
			all = append(all, c)
		}
	}
	return all
}
