package convert

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// packedFile is a packed body as if it were a file of what it was made of, for those who
// want parts of it: only the runs that hold them are read and uncompressed, into memory of
// a lane's, each time that a part of them is asked for.
type packedFile struct {
	b    *Builtin
	from *batch.Packed
}

var _ tier.FileMemory = (*packedFile)(nil)

// Size implements tier.Memory.
func (f *packedFile) Size() int64 { return f.from.Descriptor().Body }

// WriteAt implements tier.FileMemory: it cannot.
func (f *packedFile) WriteAt(context.Context, []byte, int64) error {
	return fmt.Errorf("convert: writing to a packed image: %w", tier.ErrNotSupported)
}

// ReadAt implements tier.FileMemory.
func (f *packedFile) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off < 0 || off > f.Size() || int64(len(p)) > f.Size()-off {
		return fmt.Errorf("convert: %d bytes at %d are outside a body of %d bytes", len(p), off, f.Size())
	}
	l := &lane{b: f.b}
	defer l.close()
	for len(p) > 0 {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		n, err := f.readRun(ctx, l, p, off)
		if err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// readRun fills p from off on, as far as the run goes that off is in.
func (f *packedFile) readRun(ctx context.Context, l *lane, p []byte, off int64) (done int, err error) {
	run := &f.from.Runs()[off/batch.RunSize]
	stored, err := f.b.stored(ctx, l, run)
	if err != nil {
		return 0, err
	}
	begin := off - off%batch.RunSize
	for i := range run.Frames {
		frame := stored[:run.Frames[i]]
		stored = stored[run.Frames[i]:]
		size := min(batch.FrameSize, f.Size()-begin)
		skip := off + int64(done) - begin
		if skip < size && done < len(p) {
			_, raw := l.memory()
			if err := f.b.coders.decode(Codec(run.Codec), raw[:size], frame); err != nil {
				return 0, corruptRun(run, 0, &CorruptError{Cause: err})
			}
			done += copy(p[done:], raw[skip:size])
		}
		if begin += size; begin == f.Size() {
			break
		}
	}
	return done, nil
}

// Locate implements tier.FileMemory: it tells where the run begins that off is in.
func (f *packedFile) Locate(off int64) (volume, file string, offset int64) {
	runs := f.from.Runs()
	run := &runs[max(0, min(off/batch.RunSize, int64(len(runs))-1))]
	if m, ok := run.Buffer.Memory().(tier.FileMemory); ok {
		return m.Locate(0)
	}
	return "", "", off
}
