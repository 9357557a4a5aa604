package transfer

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// PackedFile is a packed body as if it were a file of its contents, for reading parts of it. Only
// the runs that hold the parts are read and uncompressed, into memory of a lane's, at each request
// for a part.
type packedFile struct {
	b    *Builtin
	from *payload.Packed
}

var _ tier.FileMemory = (*packedFile)(nil)

func (b *Builtin) PackedFile(from *payload.Packed) *packedFile { return &packedFile{b, from} }

// Size implements tier.Memory.
func (f *packedFile) Size() int64 { return f.from.Descriptor().Body }

// WriteAt implements tier.FileMemory: it cannot.
func (f *packedFile) WriteAt(context.Context, []byte, int64) error {
	return fmt.Errorf("convert: writing to a packed image: %w", tier.ErrNotSupported)
}

// ReadAt implements tier.FileMemory.
func (f *packedFile) ReadAt(ctx context.Context, p []byte, off int64) error {
	r, err := f.reader(ctx)
	if err != nil {
		return err
	}
	defer r.close()
	return r.ReadAt(ctx, p, off)
}

// reader returns a packedFile for one goroutine that wants several parts of a run, one after the
// other: it reads and uncompresses what they share once. It waits for scratch, so that the caller
// must have no pinned chunk yet. The caller must close it.
func (f *packedFile) reader(ctx context.Context) (*packedReader, error) {
	block, err := f.b.Scratch.borrow(ctx, f.from.Space().Node(), BlockSize)
	if err != nil {
		return nil, err
	}
	return &packedReader{packedFile: f, lane: &lane{b: f.b, block: block}, run: -1, frame: -1}, nil
}

// packedReader is a packedFile that keeps what it has read last.
type packedReader struct {
	*packedFile
	lane   *lane
	run    int64  // whose bytes stored is; -1 for none
	stored []byte // in the lane's memory, or that of the run
	frame  int    // of that run, uncompressed in the lane's memory; -1 for none
}

func (r *packedReader) close() { r.lane.close() }

// ReadAt implements tier.FileMemory.
func (r *packedReader) ReadAt(ctx context.Context, p []byte, off int64) error {
	if off < 0 || off > r.Size() || int64(len(p)) > r.Size()-off {
		return fmt.Errorf("convert: %d bytes at %d are outside a body of %d bytes", len(p), off, r.Size())
	}
	for len(p) > 0 {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		n, err := r.readRun(ctx, p, off)
		if err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// readRun fills p from off on, as far as the run goes that off is in.
func (r *packedReader) readRun(ctx context.Context, p []byte, off int64) (done int, err error) {
	at := off / payload.RunSize
	run := &r.from.Runs()[at]
	if r.run != at {
		r.run, r.frame = -1, -1
		if r.stored, err = r.b.stored(ctx, r.lane, run); err != nil {
			return 0, err
		}
		r.run = at
	}
	stored := r.stored
	begin := at * payload.RunSize
	for i := range run.Frames {
		frame := stored[:run.Frames[i]]
		stored = stored[run.Frames[i]:]
		size := min(payload.FrameSize, r.Size()-begin)
		skip := off + int64(done) - begin
		if skip < size && done < len(p) {
			_, raw := r.lane.memory()
			if r.frame != i {
				r.frame = -1
				if err := r.b.coders.Decode(codec.Codec(run.Codec), raw[:size], frame); err != nil {
					return 0, corruptRun(run, 0, &image.CorruptError{Cause: err})
				}
				r.frame = i
			}
			done += copy(p[done:], raw[skip:size])
		}
		if begin += size; begin == r.Size() {
			break
		}
	}
	return done, nil
}

// Locate implements tier.FileMemory: it returns where the run begins that contains off.
func (f *packedFile) Locate(off int64) (volume, file string, offset int64) {
	runs := f.from.Runs()
	run := &runs[max(0, min(off/payload.RunSize, int64(len(runs))-1))]
	if m, ok := run.Buffer.Memory().(tier.FileMemory); ok {
		return m.Locate(0)
	}
	return "", "", off
}
