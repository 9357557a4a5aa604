package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/image/columns"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/pump"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

const (
	// ColumnRequest is the most that one read of columns carries: one request, as volumes
	// have them by default, that is verified while others are under way.
	ColumnRequest = 2 << 20
	// columnsUnderWay is how many of those are under way: as many bytes as a transfer from disk
	// to host memory has a permit for.
	columnsUnderWay = ReadsAhead * MaxPiece / ColumnRequest
)

// ColumnReader reads what was planned of a disk image.
type ColumnReader struct {
	Plan *columns.Plan
	Src  Imaged
	File tier.FileMemory
	// Enter enters the record into the account of the space in which its memory lies.
	Enter func(l *image.Lease, s *tier.Space, memory any, bytes int64)
}

// ReadColumns reads what was planned into memory drawn from r, with one permit, and
// opens it there.
func (b *Builtin) ReadColumns(ctx context.Context, c *ColumnReader, r reservation.Reservation) (rec arrow.RecordBatch, err error) {
	p := c.Plan
	// An image of those dictionaries alone. It is never released: its references are src's.
	dicts := batch.NewImage(&batch.Descriptor{Dictionaries: p.Desc.Dictionaries}, nil, c.Src.Space(), p.Shared...)
	largest := max(p.Desc.Body, largestShared(dicts))
	err = b.Permitted(ctx, r.Space(), c.Src.Space(), largest, func(ctx context.Context) error {
		buf, err := r.AllocCuts(p.Desc.Body, p.Desc.Cuts())
		if err != nil {
			return err
		}
		shared, err := b.share(ctx, dicts, r)
		if err == nil {
			rec, err = c.read(ctx, buf, shared)
		}
		// The record has a lease, and arrays of dictionaries have theirs.
		return errors.Join(err, ReleaseAll(shared), buf.Release())
	})
	return Released(rec, err)
}

// read fills buf and opens it.
func (c *ColumnReader) read(ctx context.Context, buf *tier.Buffer, shared []batch.Shared) (arrow.RecordBatch, error) {
	extents, release, err := InPlace(buf)
	if err != nil {
		return nil, err
	}
	l := image.NewLease(release)
	if buf != nil {
		c.Enter(l, buf.Space(), &columnsRead{buf, shared}, buf.Charge())
	}
	err = c.Fill(ctx, extents)
	if err == nil {
		err = safely(func() error { return c.Plan.Mend(extents) })
	}
	if err != nil {
		l.End()
		return nil, err
	}
	return image.OpenRows(c.Plan.Desc, c.Plan.Skip, extents, l, FinderOf(shared))
}

// Released gives rec up if there is an error.
func Released(rec arrow.RecordBatch, err error) (arrow.RecordBatch, error) {
	if err != nil && rec != nil {
		rec.Release()
		rec = nil
	}
	return rec, err
}

// Fill reads and verifies all runs. Nothing is under way when it returns.
func (c *ColumnReader) Fill(ctx context.Context, extents [][]byte) error {
	requests := c.Requests()
	return run(ctx, pump.Job[struct{}]{
		Pieces: len(requests),
		Lanes:  columnsUnderWay,
		End:    func(ctx context.Context, _ struct{}, i int) error { return c.readPieces(ctx, requests[i], extents) },
	})
}

// Requests returns what is read one after the other: a request each, or of a packed
// image all that is wanted of a run, which is read and uncompressed as a whole.
func (c *ColumnReader) Requests() (all [][]columns.ChunkRun) {
	_, packed := c.File.(*packedFile)
	last := int64(-1)
	for _, r := range c.Plan.Runs {
		for done := int64(0); done < r.N; {
			off, most := r.Off+done, int64(ColumnRequest)
			if packed {
				most = payload.RunSize - off%payload.RunSize
			}
			piece := columns.ChunkRun{Off: off, N: min(r.N-done, most), At: r.At + done}
			done += piece.N
			if run := off / payload.RunSize; packed && run == last {
				all[len(all)-1] = append(all[len(all)-1], piece)
			} else {
				last, all = run, append(all, []columns.ChunkRun{piece})
			}
		}
	}
	return all
}

// readPieces reads whole chunks, one piece after the other.
func (c *ColumnReader) readPieces(ctx context.Context, pieces []columns.ChunkRun, extents [][]byte) error {
	file := c.File
	if f, ok := file.(*packedFile); ok {
		r, err := f.reader(ctx)
		if err != nil {
			return err
		}
		defer r.close()
		file = r
	}
	for _, piece := range pieces {
		if err := c.readPiece(ctx, file, piece, extents); err != nil {
			return err
		}
	}
	return nil
}

// readPiece reads whole chunks, which may come to lie in several extents.
func (c *ColumnReader) readPiece(ctx context.Context, file tier.FileMemory, r columns.ChunkRun, extents [][]byte) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	off := r.Off
	err := image.Across(extents, r.At, r.N, func(p []byte) error {
		err := file.ReadAt(ctx, p, off)
		off += int64(len(p))
		return err
	})
	if err != nil {
		return err
	}
	return image.NewVerifier(c.Src.Descriptor(), file).CheckIn(extents, r.At, r.N, r.Off)
}

// ReadBounds looks offsets up. Each chunk that has some of them passes once through a
// pinned chunk, so that no room is needed, and is verified.
func (b *Builtin) ReadBounds(ctx context.Context, src Imaged, file tier.FileMemory, bounds []columns.Bound) error {
	if len(bounds) == 0 {
		return nil
	}
	slices.SortFunc(bounds, func(a, b columns.Bound) int { return cmp.Compare(a.At, b.At) })
	var chunks [][]columns.Bound
	for i, o := range bounds {
		if i == 0 || o.At/payload.SumChunk != bounds[i-1].At/payload.SumChunk {
			chunks = append(chunks, nil)
		}
		last := len(chunks) - 1
		chunks[last] = append(chunks[last], o)
	}
	pool, err := b.Staging(src.Space().Node())
	if err != nil {
		return err
	}
	lanes := min(len(chunks), StagedUnderWay)
	read := func(ctx context.Context) error {
		return run(ctx, pump.Job[struct{}]{
			Pieces: len(chunks),
			Lanes:  lanes,
			End:    func(ctx context.Context, _ struct{}, i int) error { return readChunk(ctx, src, file, pool, chunks[i]) },
		})
	}
	if src.Space().Kind() != tier.Disk {
		return read(ctx)
	}
	return b.OnDisk(ctx, int64(lanes)*pool.Chunk(), false, read)
}

// readChunk looks up the offsets in one chunk.
func readChunk(ctx context.Context, src Imaged, file tier.FileMemory, pool Staging, bounds []columns.Bound) error {
	if f, ok := file.(*packedFile); ok { // scratch first, then a chunk
		r, err := f.reader(ctx)
		if err != nil {
			return err
		}
		defer r.close()
		file = r
	}
	p, err := pool.Borrow(ctx)
	if err != nil {
		return err
	}
	defer pool.Return(p)
	if p = p[:len(p)/8*8]; len(p) == 0 { // no offset is cut
		return fmt.Errorf("convert: staging in chunks of %d bytes", pool.Chunk())
	}
	desc := src.Descriptor()
	v := image.NewVerifier(desc, file)
	off := bounds[0].At / payload.SumChunk * payload.SumChunk
	for end := min(off+payload.SumChunk, desc.Body); off < end; off += int64(len(p)) {
		p = p[:min(int64(len(p)), end-off)]
		if err := file.ReadAt(ctx, p, off); err != nil {
			return err
		}
		if err := v.Check(p, off); err != nil {
			return err
		}
		for _, o := range bounds {
			if o.At >= off && o.At < off+int64(len(p)) {
				o.Set(p[o.At-off:])
			}
		}
	}
	return nil
}

// columnsRead is the memory of a record of columns, for the space's account.
type columnsRead struct {
	buf    *tier.Buffer
	shared []batch.Shared
}

func (c *columnsRead) Buffers() []*tier.Buffer { return []*tier.Buffer{c.buf} }

func (c *columnsRead) EachShared(f func(*tier.Buffer)) {
	for _, s := range c.shared {
		if b := s.Buffer(); b != nil {
			f(b)
		}
	}
}
