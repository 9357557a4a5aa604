package persist

import (
	"fmt"
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
	Record *volumes.KeptRecord
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
		l := Listed{Record: &d.Records[i], Err: d.Records[i].Err}
		if l.Err == nil {
			l.Entry, l.Err = schemas.Read(l.Record.Meta, l.Record.Place)
		}
		if l.Err == nil && !fitMemories(l.Entry.Memories(), l.Record.Sizes) {
			l.Err = errFormat
		}
		if l.Err == nil {
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
			return fmt.Errorf("its dictionary %016x is not there, or is damaged", key)
		}
	}
	if !checksums {
		return nil
	}
	e := l.Entry
	for i := range l.Record.Sizes {
		if e.Packed {
			stored := int(e.Runs[i].Stored()) // the rest is of the last page
			if err := l.compare(i, max(1, stored), []uint64{e.Runs[i].Sum}); err != nil {
				return err
			}
			continue
		}
		if err := l.compare(i, payload.SumChunk, e.Descriptor.Sums); err != nil {
			return err
		}
	}
	return nil
}

// compare compares the first pieces of a memory with their checksums.
func (l *Listed) compare(memory, size int, sums []uint64) error {
	next := 0
	return l.Record.Read(memory, size, func(piece []byte) error {
		if next == len(sums) {
			return nil
		}
		if got := xxh3.Hash(piece); got != sums[next] {
			return &image.CorruptError{
				Volume: l.Record.Path(memory),
				Offset: int64(next * size),
				Want:   sums[next],
				Got:    got,
			}
		}
		next++
		return nil
	})
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
