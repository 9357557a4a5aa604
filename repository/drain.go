package repository

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Drain takes one batch of the partition after the other, fetches it to a tier, and yields a handle
// on it. It ends when the partition is empty or, with WaitInput, when the partition is empty and
// the input is closed. A partition whose batches are in open claims is not empty: Drain waits until
// the claims consume or restore them.
//
// The order is that of arrival: Drain waits for an older batch that is in transit, unless it is
// Unordered. Batches that a claim restores return to their places in the order.
//
// The caller owns the handle and must close it; it may keep it beyond the loop. The batch has left
// the repository and is dropped (batch.Released): closing its last handle frees its data. To keep a
// batch, Take it.
//
// While the caller works, Drain prefetches the batches that come next, into room that nobody needs:
// see ReadAhead. Drain waits for room in the tier, and for batches that others use in other spaces.
// If a fetch fails, the batch is whole in its place in the repository. Drain yields the error with
// a nil handle and ends; a new Drain tries the batch again. A batch in a lost GPU fails each time
// with a *tier.LostError, as does a tier of which all GPUs are lost. Peek shows where the batch is,
// and Take removes it, to be dropped. Breaking the loop leaves the rest in the repository. Several
// goroutines may drain one partition; each gets different batches, in ascending order.
func (r *Repository) Drain(
	ctx context.Context, partition int, to tier.Kind, opts ...TakeOption,
) iter.Seq2[*batch.Handle, error] {
	o := takeOptionsOf(opts)
	w := o.want(wantRest)
	if o.waitInput {
		w = o.want(wantTask)
	}
	return func(yield func(*batch.Handle, error) bool) {
		if !to.Valid() {
			yield(nil, fmt.Errorf("repository %s: draining to an invalid tier", r.key))
			return
		}
		consume := func(ctx context.Context, b *batch.Batch) (*batch.Handle, error) {
			return r.m.cfg.Mover.Consume(ctx, b, reservation.AnyInTier(to))
		}
		ctx, done := r.within(ctx)
		defer done()
		ahead := r.lookAhead(ctx, partition, to, o.ahead)
		defer ahead.end()
		for {
			e, h, err := r.acquire(ctx, partition, w, consume)
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield(nil, err)
				return
			}
			r.remove(e)
			ahead.begin()
			if !yield(h, nil) {
				return
			}
			ahead.worked()
		}
	}
}

// opener opens a handle on a claimed batch: for Drain after a fetch, for Reader where the batch is.
type opener func(context.Context, *batch.Batch) (*batch.Handle, error)

// acquire claims the oldest batch and opens a handle on it. The caller ends the claim, by remove or
// putBack. io.EOF is the end of the partition. After any error nothing is claimed.
func (r *Repository) acquire(ctx context.Context, partition int, w want, open opener) (*entry, *batch.Handle, error) {
	if r.m.cfg.Mover == nil {
		return nil, nil, fmt.Errorf("repository %s: draining and reading need a mover: %w", r.key, tier.ErrNotSupported)
	}
	for {
		e, err := r.claim(ctx, partition, w, true)
		if err != nil {
			return nil, nil, err
		}
		h, err := r.open(ctx, e, open)
		if err == nil {
			return e, h, nil
		}
		// Skip a batch that another caller dropped in its place. Return other errors, even if a
		// Clear has dropped the batch since.
		if !errors.Is(err, batch.ErrState) || e.b.Info().State != batch.Released {
			return nil, nil, fmt.Errorf("repository %s, partition %d: %w", r.key, partition, err)
		}
	}
}

// open opens a handle on the batch of a claimed entry. If it fails or panics, it puts the entry
// back.
func (r *Repository) open(ctx context.Context, e *entry, open opener) (h *batch.Handle, err error) {
	defer func() { // also when a converter panics
		if h == nil {
			r.putBack(e)
		}
	}()
	return open(ctx, e.b)
}

// Reader returns the partition as a stream of Arrow records, which consumes it: each batch leaves
// the repository when its record is returned. The order is that of Drain. The stream ends when the
// input is closed and nothing is left, also not in open claims. It ends early, with the reason in
// Err, when ctx ends, the repository is closed, or a batch cannot be opened, which then stays in
// the repository. A payload whose release fails does not end the stream: Err returns the first such
// error after the end. Records may be in pinned host memory, which they keep until they are
// released.
//
// If the schema is unknown, Reader waits for the first batch that has one; a payload of a program
// without a descriptor has none. If the input is closed before that, Reader returns ErrNoSchema.
// The reader must be released; it is not safe for concurrent use.
func (r *Repository) Reader(ctx context.Context, partition int, opts ...TakeOption) (array.RecordReader, error) {
	r.mu.Lock()
	_, err := r.partitionLocked(partition)
	learned := r.mu.learned
	r.mu.Unlock()
	if err != nil {
		return nil, err
	}
	select {
	case <-learned:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	r.mu.Lock()
	schema, closed := r.mu.schema, r.mu.closed // and not r.life, which ends a little later
	r.mu.Unlock()
	if closed {
		return nil, r.closedError()
	}
	if schema == nil {
		return nil, fmt.Errorf("repository %s: %w", r.key, ErrNoSchema)
	}
	o := takeOptionsOf(opts)
	ctx, done := r.within(ctx)
	rd := &reader{
		r: r, ctx: ctx, done: done, partition: partition, want: o.want(wantTask), schema: schema,
		ahead: r.lookAhead(ctx, partition, tier.Host, o.ahead),
	}
	rd.refs.Store(1)
	return rd, nil
}

type reader struct {
	r         *Repository
	ctx       context.Context // of Reader's caller and the repository: array.RecordReader has none in Next
	done      func()          // ends ctx
	partition int
	want      want
	schema    *arrow.Schema
	refs      atomic.Int64
	ahead     *lookahead

	current arrow.RecordBatch
	err     error
	late    error // of the first payload whose release failed: its record is whole
	ended   bool
}

func (rd *reader) Retain() { rd.refs.Add(1) }

func (rd *reader) Release() {
	if rd.refs.Add(-1) == 0 {
		rd.end()
		rd.drop()
	}
}

// end ends the stream. It may be called again.
func (rd *reader) end() {
	rd.ended = true
	rd.ahead.end()
	rd.done()
}

func (rd *reader) drop() {
	if rd.current != nil {
		rd.current.Release()
		rd.current = nil
	}
}

func (rd *reader) Schema() *arrow.Schema          { return rd.schema }
func (rd *reader) RecordBatch() arrow.RecordBatch { return rd.current }
func (rd *reader) Record() arrow.RecordBatch      { return rd.current }
func (rd *reader) Err() error                     { return rd.err }

func (rd *reader) Next() bool {
	rd.drop()
	if rd.ended {
		return false
	}
	rd.ahead.worked()
	rec, err := rd.read()
	if err != nil {
		rd.end()
		if errors.Is(err, io.EOF) {
			err = nil
		}
		rd.err = errors.Join(err, rd.late)
		return false
	}
	rd.current = rec
	rd.ahead.begin()
	return true
}

// read opens the next batch as a record. The Mover copies it to host memory if it is elsewhere.
func (rd *reader) read() (arrow.RecordBatch, error) {
	r := rd.r
	if !r.m.calls.Enter() {
		return nil, r.closedError()
	}
	defer r.m.calls.Leave()
	here := func(ctx context.Context, b *batch.Batch) (*batch.Handle, error) {
		return b.Inside().Read(ctx, tier.ID{}) // pending tasks stay their callers'
	}
	e, h, err := r.acquire(rd.ctx, rd.partition, rd.want, here)
	if err != nil {
		return nil, err
	}
	rec, err := rd.open(h)
	if err != nil {
		err = errors.Join(fmt.Errorf("repository %s, batch %d: %w", r.key, e.b.ID(), err), h.Close())
		r.putBack(e)
		return nil, err
	}
	// With a handle open only one error is possible, that the batch was dropped in place, and that
	// makes no difference.
	_ = e.b.Drop()
	r.remove(e)
	if err := h.Close(); err != nil && rd.late == nil {
		rd.late = fmt.Errorf("repository %s, batch %d: %w", r.key, e.b.ID(), err)
	}
	return rec, nil
}

func (rd *reader) open(h *batch.Handle) (_ arrow.RecordBatch, err error) {
	defer guard.Error(&err, "a payload") // the batch is put back
	return rd.r.m.cfg.Mover.Record(rd.ctx, h)
}
