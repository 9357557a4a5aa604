package repository

import (
	"cmp"
	"context"
	"errors"
	"io"
	"iter"
	"sync"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// defaultAhead is how many batches are prefetched at most without the option ReadAhead: two, so
// that the time of a longer work is used, too. maxAhead is the largest value of the option.
const (
	defaultAhead = 2
	maxAhead     = 64
)

// Drain takes one batch of the partition after the other, fetches it to a tier, and yields a handle
// on it. It ends when the partition is empty or, with WaitInput, when the partition is empty and
// the input is closed. A partition whose batches are in open claims is not empty: Drain waits until
// the claims consume or restore them.
//
// Of the spaces of the tier, the batch goes to the nearest that has room, and of those equally near
// to the one with the most room. The option In names other spaces.
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
	return func(yield func(*batch.Handle, error) bool) {
		if !to.Valid() {
			yield(nil, r.errorf(": draining to an invalid tier"))
			return
		}
		ctx, done := within(ctx, r.life)
		s := stream{r: r, ctx: ctx, partition: partition, to: to, consumes: true, taker: newTaker(workable, opts)}
		defer s.running.Wait()
		defer done()
		for {
			e, h, err := s.next()
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield(nil, err)
				return
			}
			r.remove(e)
			s.prefetch(nil)
			if !yield(h, nil) {
				return
			}
		}
	}
}

// stream is a Drain or a Reader of a partition. While its consumer works, it prefetches the batches
// that come next, one after the other, so that demand never waits for more than one of them.
type stream struct {
	r         *Repository
	ctx       context.Context // of the caller and the repository: array.RecordReader has none in Next
	partition int
	to        tier.Kind
	consumes  bool // the handles are in the tier, and free their batches
	taker     *taker

	running     sync.WaitGroup // prefetching
	prefetching bool           // guarded by the repository's lock
}

// next claims the batch that comes next and opens a handle on it. The caller ends the claim, by
// remove or restore. io.EOF is the end of the partition. After any error, and after a panic of a
// converter, nothing is claimed.
func (s *stream) next() (_ *entry, _ *batch.Handle, err error) {
	mover := s.r.m.cfg.Mover
	if mover == nil {
		return nil, nil, s.r.errorf(": draining and reading need a mover: %w", tier.ErrNotSupported)
	}
	s.taker.noWait = false // which is not for streams
	var c *Claim
	defer func() {
		if c != nil {
			c.restore()
		}
	}()
	for {
		if c, err = s.r.claim(s.ctx, s.partition, s.taker, true); err != nil {
			return nil, nil, err
		}
		e := c.entries[0]
		var h *batch.Handle
		if s.consumes {
			to := s.taker.in
			switch from := e.b.Snapshot().Space; {
			case to != nil:
			case from.Kind > s.to:
				to = reservation.ToUpgrade(from, s.to)
			case from.Valid() && from.Kind < s.to:
				to = reservation.ToDowngrade(from, s.to)
			default:
				to = reservation.AnyInTier(s.to)
			}
			h, err = mover.Consume(s.ctx, e.b, to)
		} else {
			if s.taker.in != nil {
				err = mover.Move(s.ctx, e.b, s.taker.in)
			}
			if err == nil || errors.Is(err, batch.ErrState) { // a batch in use is read where it is
				h, err = e.b.Read(s.ctx, tier.ID{}) // pending tasks stay their callers'
			}
		}
		if err == nil {
			c = nil
			return e, h, nil
		}
		// Skip a batch that another caller dropped in its place. Return other errors, even if a
		// Clear has dropped the batch since.
		if !errors.Is(err, batch.ErrState) || e.b.Info().State != batch.Released {
			return nil, nil, s.r.errorf(", partition %d: %w", s.partition, err)
		}
		c.restore()
	}
}

// prefetch starts to fetch the first of the batches that come next which is in a slower tier, and
// then the others. last is the one that was prefetched last; nil if the consumer calls, which is at
// the beginning of each work: then it does nothing while a prefetch is under way.
func (s *stream) prefetch(last *batch.Batch) {
	s.r.mu.Lock()
	defer s.r.mu.Unlock()
	if last == nil && s.prefetching || s.ctx.Err() != nil {
		return
	}
	s.prefetching = false
	p, coming := s.r.mu.parts[s.partition], min(s.taker.ahead, maxAhead)
	for at := p.free; at != nil && coming > 0; at = at.Next() {
		e := at.Value.(*entry)
		if e.claim != nil {
			continue
		}
		coming--
		now := e.b.Snapshot()
		if e.b == last || now.Space.Kind <= s.to || now.State != batch.Idle && now.State != batch.TaskCreated {
			continue
		}
		s.prefetching = true
		to := cmp.Or(s.taker.in, reservation.ToUpgrade(now.Space, s.to))
		s.running.Go(func() {
			labels.ReadAhead.Set()
			if s.bring(e.b, to) == nil && e.b.Info().Space.Kind <= s.to {
				s.prefetch(e.b)
				return
			}
			// There is no room, for example: the next work tries again.
			s.r.mu.Lock()
			s.prefetching = false
			s.r.mu.Unlock()
		})
		return
	}
}

// bring prefetches one batch.
func (s *stream) bring(b *batch.Batch, to reservation.Strategy) (err error) {
	defer guard.Error(&err, "a mover")
	return s.r.m.cfg.Mover.Ahead(s.ctx, b, to)
}

// Reader returns the partition as a stream of Arrow records, which consumes it: each batch leaves
// the repository when its record is returned. The order is that of Drain. The stream ends when the
// input is closed and nothing is left, not even in open claims. It ends early, with the reason in
// Err, when ctx ends, the repository is closed, or a batch cannot be opened, which then stays in
// the repository. A payload whose release fails does not end the stream: Err returns the first such
// error after the end. Records may be in pinned host memory, which they keep until they are
// released. With the option In, batches are moved to a space of that strategy before they are read.
//
// If the schema is unknown, Reader waits for the first batch that has one; a payload of a program
// without a descriptor has none. If the input is closed before that, Reader returns ErrNoSchema.
// The reader must be released; it is not safe for concurrent use.
func (r *Repository) Reader(ctx context.Context, partition int, opts ...TakeOption) (array.RecordReader, error) {
	if _, err := r.claim(ctx, partition, &taker{from: workable, schema: true}, true); err != nil {
		return nil, err
	}
	r.mu.Lock()
	schema := r.mu.schema
	r.mu.Unlock()
	if schema == nil {
		return nil, r.errorf(": %w", ErrNoSchema)
	}
	ctx, done := within(ctx, r.life)
	rd := &reader{done: done, schema: schema}
	rd.stream = stream{r: r, ctx: ctx, partition: partition, to: tier.Host, taker: newTaker(workable, opts)}
	rd.taker.waitInput = true
	rd.refs.Store(1)
	return rd, nil
}

// reader is not array.ReaderFromIter, whose coroutine ends the process if its callers differ in being
// locked to a thread.
type reader struct {
	stream
	done   func() // ends the stream's context
	schema *arrow.Schema
	refs   atomic.Int64

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
	rd.done()
	rd.running.Wait()
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
	rd.prefetch(nil)
	return true
}

// read opens the next batch as a record. The Mover copies it to host memory if it is elsewhere.
func (rd *reader) read() (arrow.RecordBatch, error) {
	r := rd.r
	if !r.m.cfg.Calls.Enter() {
		return nil, r.closedError()
	}
	defer r.m.cfg.Calls.Leave()
	e, h, err := rd.next()
	if err != nil {
		return nil, err
	}
	rec, err := rd.open(h)
	if err != nil {
		err = errors.Join(r.errorf(", batch %d: %w", e.b.ID(), err), h.Close())
		rd.taker.claim.restore()
		return nil, err
	}
	// With a handle open only one error is possible, that the batch was dropped in place, and that
	// makes no difference.
	_ = e.b.Drop()
	r.remove(e)
	if err := h.Close(); err != nil && rd.late == nil {
		rd.late = r.errorf(", batch %d: %w", e.b.ID(), err)
	}
	return rec, nil
}

func (rd *reader) open(h *batch.Handle) (_ arrow.RecordBatch, err error) {
	defer guard.Error(&err, "a payload") // the batch is put back
	return rd.r.m.cfg.Mover.Record(rd.ctx, h)
}
