package transfer

import (
	"context"
	"errors"

	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/tier"
)

// Checked returns the memory of a volume for reading or writing a body: what an encrypted volume
// itself finds altered is corrupt, as is what the checksums find. All that converters do on disks
// goes through it.
func Checked(m tier.FileMemory) tier.FileMemory { return checkedFile{m} }

type checkedFile struct{ tier.FileMemory }

func (f checkedFile) ReadAt(ctx context.Context, p []byte, off int64) error {
	return corruptFile(f.FileMemory.ReadAt(ctx, p, off))
}

// WriteAt reads, too, where it writes a part of what is sealed as a whole.
func (f checkedFile) WriteAt(ctx context.Context, p []byte, off int64) error {
	return corruptFile(f.FileMemory.WriteAt(ctx, p, off))
}

func corruptFile(err error) error {
	var a *tier.AlteredError
	if !errors.As(err, &a) {
		return err
	}
	return &image.CorruptError{Volume: a.Volume + " " + a.File, Offset: a.Offset, Cause: err}
}

// metered returns the memory of a disk's space as checked does, so that what is done with it is
// timed if codecs are chosen by that.
func (b *Builtin) metered(space *tier.Space, m tier.FileMemory) tier.FileMemory {
	m = Checked(m)
	if b.Codec != codec.Auto {
		return m
	}
	return b.Choose.Metered(space.ID(), m)
}
