package repository

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Cursor reads the rows of one partition in order of arrival, and consumes it. Each call of Next reads
// as many rows as its memory holds, so batches may be larger than all host memory.
//
// A Cursor claims one batch at a time. Between calls of Next nothing keeps that batch where it is: it
// may be evicted. Other takers do not get it. It leaves the repository, and its memory is freed, at the
// call of Next after the one that returned its last rows.
//
// A Cursor must be closed. One goroutine at a time may use it; different ones may use the Cursors of
// one call.
type Cursor struct {
	r         *Repository
	partition int
	memory    *cursorMemory
	share     []byte      // of the memory
	inUse     atomic.Bool // by a record
	closed    bool

	claim   *Claim      // of the batch that is read; nil between batches
	rows    *image.Rows // of that batch; nil if none were read
	current arrow.RecordBatch
}

// cursorMemory is the memory of the Cursors of one call. Each has a use of it, and so has each record
// that was not released.
type cursorMemory struct {
	reservation *reservation.Reservation
	buffer      *tier.Buffer
	uses        atomic.Int64
}

func (m *cursorMemory) release() {
	if m.uses.Add(-1) == 0 {
		_ = errors.Join(m.buffer.Release(), m.reservation.Release()) // the only releases
	}
}

// Cursors returns a Cursor for each of the partitions, for example to merge sorted runs. It waits until
// so many bytes are reserved in host memory, and divides them equally. They are free again when all
// Cursors are closed and their records are released.
//
// Rows are read best from repositories with the option ByRows: then from disk, each byte is read about
// once. Cursors read the batches of any other, too, but more bytes of them.
//
// Columns whose rows cannot be read by themselves (lists, maps, views, unions, run-end encoded ones) are
// read whole, so a Cursor's share must hold these of a batch, and of other columns a page of 4 KiB for
// each Arrow buffer and one row. If it is too small for the batches that are first in the partitions,
// the error matches reservation.ErrExceeded, and has the bytes that one Cursor needs: read fewer
// partitions at a time, or give more bytes. For later batches Next returns the error. Dictionaries of
// more than 4 KiB, which batches share, are brought to host memory whole, once for all Cursors. They are
// not part of the bytes, and stay while a Cursor reads a batch that has them.
//
// The other errors are those of Reserve. A partition may be named once.
func (r *Repository) Cursors(ctx context.Context, partitions []int, bytes int64) (_ []*Cursor, err error) {
	mover, n := r.m.cfg.Mover, int64(len(partitions))
	if mover == nil || r.m.cfg.Reservations == nil {
		return nil, r.errorf(": cursors need a mover and reservations: %w", tier.ErrNotSupported)
	}
	switch {
	case r.life.Err() != nil:
		return nil, r.closedError()
	case n == 0:
		return nil, nil
	}
	share := max(0, bytes/n/tier.Page*tier.Page)
	if share == 0 {
		return nil, r.errorf(": cursors: %w", &reservation.ExceededError{
			Space: tier.ID{Kind: tier.Host}, Requested: n * tier.Page, Available: bytes, Limit: bytes,
			Hint: "each cursor needs 4 KiB and more: raise the bytes of Cursors, or read fewer partitions at a time",
		})
	}
	sorted := slices.Sorted(slices.Values(partitions))
	for i, number := range sorted {
		if i > 0 && number == sorted[i-1] {
			return nil, r.errorf(": two cursors for partition %d", number)
		}
		r.mu.Lock()
		_, err := r.partitionLocked(number)
		r.mu.Unlock()
		if err != nil {
			return nil, err
		}
		if b, ok := r.Peek(number); ok {
			if d := b.Info().Descriptor; d != nil {
				_, err = image.NewRows(d, 0, share, tier.ID{Kind: tier.Host})
			}
			if err != nil {
				return nil, r.errorf(", partition %d, batch %d: %w", number, b.ID(), err)
			}
		}
	}
	inner, done := within(ctx, r.life)
	defer done()
	held, err := r.m.cfg.Reservations.Reserve(inner, reservation.AnyInTier(tier.Host), n*share,
		&reservation.Options{Owner: reservation.OwnerOf(ctx), Name: "cursors of " + r.key.String()})
	if err != nil {
		return nil, r.errorf(": cursors: %w", err)
	}
	var cuts []int64
	for at := share; at < n*share; at += share {
		cuts = append(cuts, at)
	}
	buffer, err := held.Alloc(n*share, cuts...)
	if err != nil {
		return nil, errors.Join(r.errorf(": cursors: %w", err), held.Release())
	}
	memory := &cursorMemory{reservation: held, buffer: buffer}
	memory.uses.Store(n)
	extents := buffer.Memory().(tier.HostMemory).Extents()
	cursors := make([]*Cursor, n)
	for i := range cursors {
		own := image.Stretch(extents, int64(i)*share, share)
		cursors[i] = &Cursor{r: r, partition: partitions[i], memory: memory, share: own}
	}
	return cursors, nil
}

// Schema returns the schema of the repository, and nil if it is not known yet.
func (c *Cursor) Schema() *arrow.Schema {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	return c.r.mu.schema
}

// Next returns the rows that come next, at least one. They are in the Cursor's memory, and valid until
// its next call of Next or Close, which release the record: the caller copies what it needs longer. If
// it has retained the record, or something in it, Next is ErrRowsInUse, and may be called again. A
// Writer retains what was appended; call Writer.Copy before Next.
//
// Next waits for input. If the input is closed and the partition is empty, also of batches in open
// claims of others, it returns io.EOF. After another error Next may be called again, and returns the
// same rows: the batch is whole. If its memory is too small for the batch, the error matches
// reservation.ErrExceeded. Bytes that are not what was written are a *convert.CorruptError. Once the
// repository or the plan is closed, Next returns tier.ErrClosed.
func (c *Cursor) Next(ctx context.Context) (arrow.RecordBatch, error) {
	c.dropRecord()
	r := c.r
	if c.closed {
		return nil, r.errorf(": the cursor is closed: %w", tier.ErrReleased)
	}
	if c.inUse.Load() {
		return nil, r.errorf(", partition %d: %w", c.partition, ErrRowsInUse)
	}
	if !r.m.cfg.Calls.Enter() {
		return nil, r.closedError()
	}
	defer r.m.cfg.Calls.Leave()
	ctx, done := within(ctx, r.life)
	defer done()
	for {
		if c.rows != nil && c.rows.Row() == c.rows.Image.Rows { // the batch was read
			if err := c.endBatch(c.claim.Consume); err != nil {
				return nil, err
			}
		}
		if c.claim == nil {
			var err error
			t := &taker{from: workable, waitInput: true, waitClaims: true}
			if c.claim, err = r.claim(ctx, c.partition, t, false); err != nil {
				return nil, err
			}
		}
		b := c.claim.entries[0].b
		rec, err := c.read(ctx, b)
		switch {
		case rec != nil:
			c.current = rec
			return rec, nil
		case err == nil: // a batch without rows
		case r.life.Err() != nil:
			return nil, r.closedError()
		case errors.Is(err, batch.ErrState) && b.Info().State == batch.Released && c.rows == nil:
			_ = c.endBatch(c.claim.Restore) // another caller has dropped it in its place
		default:
			return nil, r.errorf(", partition %d, batch %d: %w", c.partition, b.ID(), err)
		}
	}
}

// read reads the next rows of the batch; a nil record if it has none. It makes an image in host memory
// of a table on a device, and of a program's own payload.
func (c *Cursor) read(ctx context.Context, b *batch.Batch) (rec arrow.RecordBatch, err error) {
	for {
		h, err := b.Read(ctx, tier.ID{}) // pending tasks stay their callers'
		if err != nil {
			return nil, err
		}
		if img, ok := h.Payload().(*batch.Image); ok && img.Parts.Type != payload.ScatteredImage {
			rec, err = c.window(ctx, h, img.Descriptor())
			return rec, errors.Join(err, h.Close()) // which fails only for a batch that others have dropped
		}
		if err := h.Close(); err != nil {
			return nil, err
		}
		if err := c.r.m.cfg.Mover.MoveAs(ctx, b, reservation.AnyInTier(tier.Host), batch.PlainImage); err != nil {
			return nil, err
		}
	}
}

// window reads the next rows of an image.
func (c *Cursor) window(ctx context.Context, h *batch.Handle, d *batch.Descriptor) (arrow.RecordBatch, error) {
	space := c.memory.reservation.Space()
	if c.rows == nil || c.rows.Image != d { // another image of the batch: a program's own converter has made it
		from := int64(0)
		if c.rows != nil {
			from = c.rows.Row()
		}
		rows, err := image.NewRows(d, from, int64(len(c.share)), space.ID())
		if err != nil {
			return nil, err
		}
		err = c.dropRows()
		if rows.Memory, c.rows = c.share, rows; err != nil {
			return nil, err
		}
	}
	if d.Rows == 0 {
		return nil, nil
	}
	c.memory.uses.Add(1)
	c.inUse.Store(true)
	return c.r.m.cfg.Mover.ReadRows(ctx, h, c.rows, space, func() {
		c.inUse.Store(false)
		c.memory.release()
	})
}

func (c *Cursor) dropRecord() {
	if c.current != nil {
		c.current.Release()
		c.current = nil
	}
}

// dropRows releases the dictionaries of the Cursor's batch, and forgets how far it was read.
func (c *Cursor) dropRows() (err error) {
	if c.rows != nil {
		for _, s := range c.rows.Shared {
			err = errors.Join(err, s.Release())
		}
	}
	c.rows = nil
	return err
}

// endBatch ends the claim of the batch by end, one of its methods.
func (c *Cursor) endBatch(end func() error) error {
	c.claim = nil
	return errors.Join(c.dropRows(), end())
}

// Close ends the Cursor. A batch of which it has not returned the last row goes back to its place in
// the partition, whole: another Cursor begins with its first row. A batch that it has read to its end,
// without a further Next, is such a batch, too. A second Close is tier.ErrReleased.
func (c *Cursor) Close() (err error) {
	if c.closed {
		return c.r.errorf(": the cursor is closed: %w", tier.ErrReleased)
	}
	c.closed = true
	c.dropRecord()
	if c.claim != nil {
		err = c.endBatch(c.claim.Restore)
	}
	c.memory.release()
	return err
}
