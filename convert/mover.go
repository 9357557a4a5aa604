package convert

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Why a batch is moved: the Reason of events, and of the Mover's statistics.
const (
	ReasonTrigger = "trigger" // the monitor: the space is at its trigger or above
	ReasonDemand  = "demand"  // the monitor: requests wait for room
	ReasonWork    = "work"    // a caller needs the batch
	ReasonAhead   = "ahead"   // a caller will need it soon
)

// MoverConfig configures a Mover. Reservations, Registry and Builtin are required. The mover adds
// the converters of Builtin to Registry.
type MoverConfig struct {
	Reservations *reservation.Manager
	Registry     *Registry
	Builtin      *transfer.Builtin
	IDs          *batch.IDs     // numbers clones; nil: the mover has its own
	Observer     batch.Observer // of clones for which no other is named; may be nil
	// Events is called for moves, clean images, prefetches, corrupt bytes, and batches that fit
	// only in a slower tier than asked for. It may be nil; see package events.
	Events func(events.Event)
	// Persists reports whether batches that come to a space are recorded for the next process; nil
	// means that no space does.
	Persists     func(tier.ID) bool
	PersistAhead bool         // pre-clean to such spaces too, which records batches that are still in faster tiers
	Logger       *slog.Logger // logs panics of Events and oversized batches; nil means slog.Default
}

// Mover moves batches between spaces. An engine has one, and all code that needs a batch in another
// space calls it: consumers through Acquire and Consume, the monitor through Evict, and
// repositories through Ahead. It is safe for concurrent use.
//
// run makes a move: each round of its loop reserves room (request), and makes one attempt.
type Mover struct {
	cfg    MoverConfig
	stats  stats
	panics guard.Log // of functions that must not fail an operation

	// calls are the operations in progress. Close refuses later ones, ends life, cancels those in progress
	// with tier.ErrClosed, and waits for them, because the engine closes what they work on after that.
	// Each has an entry in cancels; a context.AfterFunc of life would cost a move 1 µs.
	calls struct {
		sync.Mutex // a leaf
		closed     bool
		cancels    map[uint64]context.CancelCauseFunc
		last       uint64 // key of cancels
		running    sync.WaitGroup
	}
	life context.Context
	end  context.CancelCauseFunc
}

// NewMover returns a mover, the only one of its registry.
func NewMover(cfg MoverConfig) (*Mover, error) {
	if cfg.Reservations == nil || cfg.Registry == nil || cfg.Builtin == nil {
		return nil, errors.New("convert: a mover needs reservations, a registry and the built-in converters")
	}
	if err := cfg.Builtin.Open(); err != nil {
		return nil, err
	}
	// Spillway's own converter is one: from every form of an image to every other.
	for _, from := range payload.Forms() {
		for _, to := range payload.Forms() {
			e := Edge{Form(from), Form(to)}
			own := func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
				return cfg.Builtin.Convert(ctx, src, to.Type, r)
			}
			if err := cfg.Registry.replace(e, nil, &entry{convert: e.guarded(own, true), builtin: true}); err != nil {
				return nil, err
			}
		}
	}
	if cfg.IDs == nil {
		cfg.IDs = new(batch.IDs)
	}
	cfg.Builtin.Scratch.Bind(cfg.Reservations)
	m := &Mover{cfg: cfg, panics: guard.Log{Logger: cfg.Logger}}
	m.stats.init()
	m.calls.cancels = make(map[uint64]context.CancelCauseFunc)
	m.life, m.end = context.WithCancelCause(context.Background())
	return m, nil
}

// Close cancels the operations in progress, with tier.ErrClosed as the cause, and waits for them.
// Later operations fail with tier.ErrClosed.
func (m *Mover) Close() error {
	m.calls.Lock()
	closed := m.calls.closed
	m.calls.closed = true
	cancels := slices.Collect(maps.Values(m.calls.cancels))
	m.calls.Unlock()
	if closed {
		return fmt.Errorf("convert: the mover is %w", tier.ErrClosed)
	}
	m.end(tier.ErrClosed)
	for _, cancel := range cancels {
		cancel(tier.ErrClosed)
	}
	m.calls.running.Wait()
	return nil
}

// begin starts an operation. The context that it returns ends with ctx, and when Close is called.
// The caller must call end once.
func (m *Mover) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	m.calls.Lock()
	defer m.calls.Unlock()
	if m.calls.closed {
		cancel(tier.ErrClosed)
		return nil, nil, fmt.Errorf("convert: the mover is %w", tier.ErrClosed)
	}
	m.calls.last++
	key := m.calls.last
	m.calls.cancels[key] = cancel
	m.calls.running.Add(1)
	return ctx, func() {
		m.calls.Lock()
		delete(m.calls.cancels, key)
		m.calls.Unlock()
		cancel(nil)
		m.calls.running.Done()
	}, nil
}

// Corrupt returns how often a batch was found with other bytes than were written: each is a
// CorruptError that some caller got.
func (m *Mover) Corrupt() int64 { return m.stats.corrupt.Load() }

// Move brings b to the first space of the strategy that stays below its trigger, or else to the
// first that has room. It reserves there, takes the batch in transit, converts, commits, and
// releases the source. After any failure the batch is whole where it was, and Move has given back
// everything that it took. A batch that is already in a space of the strategy stays.
//
// Move waits for room, for a transit in progress, and for a permit to transfer from or to a disk. A
// batch with open handles is a *batch.StateError.
//
// If a space is lost meanwhile, Move tries the others of the strategy. A batch in a lost space is a
// *tier.LostError, from Acquire and Record, too; the caller can only drop it.
//
// A program's payload for which there is no converter to the target becomes an image in host memory
// first, and an image that was made of such a payload becomes one there before it gets its own type
// again. Each is a move by itself: if the second one fails, the batch is in host memory.
func (m *Mover) Move(ctx context.Context, b *batch.Batch, to reservation.Strategy) error {
	_, err := m.run(ctx, &move{b: b, to: to, reason: ReasonWork})
	return err
}

// MoveAs is Move to a type of payload that the caller chooses, for example to compress a batch in
// host memory. The strategy's tier must have such payloads. A batch that is in a space of the strategy
// in another form is converted there, which needs room for both forms. The next Move chooses the type
// itself.
func (m *Mover) MoveAs(ctx context.Context, b *batch.Batch, to reservation.Strategy, as batch.PayloadType) error {
	if as == "" {
		return errors.New("convert: moving to a type of payload needs one")
	}
	_, err := m.run(ctx, &move{b: b, to: to, as: as, reason: ReasonWork})
	return err
}

// Acquire brings b to a space of the strategy and opens a handle on it there. The handle takes a
// pending task, if there is one. Acquire waits for room, and for callers that move the batch or
// hold it in another space. The caller must Close the handle.
//
// The batch arrives and the handle is opened in one step, so that the monitor cannot move it away
// in between.
func (m *Mover) Acquire(ctx context.Context, b *batch.Batch, to reservation.Strategy) (*batch.Handle, error) {
	return m.run(ctx, &move{b: b, to: to, reason: ReasonWork, opens: true})
}

// AcquireIn is Acquire for callers that have room already: it brings b to the space of r, with
// memory drawn from r, and locks it there. Charges returns what it draws; that stays the batch's
// when r is released. A batch that is in the space is locked there and draws nothing.
//
// It never waits for room there, only for others that move the batch or hold it elsewhere. Too little
// in r is a *reservation.ExceededError (unless r's policy helps). If the room is in pieces, even after
// reservation.Config.Clear, the error is a *tier.NoSpaceError. It does not wait for more while r is
// held, because others may wait for r's room. Only a batch that moves by way of host memory (see Move)
// waits for room, as a request of r's owner does: a *reservation.DeadlockError ends the wait if nobody
// can free any. r must stay unreleased until AcquireIn returns. If ctx names no owner, the handle is
// that of r's owner.
func (m *Mover) AcquireIn(ctx context.Context, b *batch.Batch, r *reservation.Reservation) (*batch.Handle, error) {
	return m.run(ctx, &move{b: b, given: r, reason: ReasonWork, opens: true})
}

// Consume is Acquire for the last reader: it drops b in the step that opens the handle. Closing the
// last handle frees the data. Repository.Drain calls it.
func (m *Mover) Consume(ctx context.Context, b *batch.Batch, to reservation.Strategy) (*batch.Handle, error) {
	return m.run(ctx, &move{b: b, to: to, reason: ReasonWork, opens: true, last: true})
}

// Digest computes the fingerprint of all bytes of the image that h holds: in place in host memory,
// and else through pinned chunks. Dictionaries that are images of their own count as if they
// followed the body, in the order of AllDictionaries. Two images of the same record have the same.
func (m *Mover) Digest(ctx context.Context, h *batch.Handle) (d tier.Digest, err error) {
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return d, err
	}
	defer end()
	p, err := payloadOf(h, "computing a digest")
	if err != nil {
		return d, err
	}
	img, ok := p.(*batch.Image)
	if !ok {
		return d, fmt.Errorf("convert: %s has no digest", p.Type())
	}
	d, err = m.cfg.Builtin.Digest(ctx, img)
	return d, m.ofBatch(ctx, ofLost(err, img.Space()), h.Batch())
}

// OnDisk runs f, which reads bytes from a disk or, if writes is set, writes bytes to one, when it
// has a permit for that. A converter of a program's own that uses a disk must do so through it, as
// the built-in ones do. pinned is how many bytes of pinned memory it uses at a time. f must use the
// context that it is given, which carries the permit: OnDisk within OnDisk asks for no second one.
// f must not wait for room in any memory.
//
// The wait ends with ctx, when the mover is closed, and when the pool of permits is.
func (m *Mover) OnDisk(ctx context.Context, pinned int64, writes bool, f func(context.Context) error) error {
	return m.cfg.Builtin.OnDisk(ctx, pinned, writes, f)
}

// Share returns the dictionaries of src in the space of r, for an image of the same descriptor
// there: a reference to each, which is the caller's. Those that are not there yet are copied, into
// memory drawn from r. It is what a converter between images, other than the built-in ones, needs
// for dictionaries. Between memory and disk it takes a permit, unless it is called within OnDisk.
func (m *Mover) Share(ctx context.Context, src *batch.Image, r *reservation.Reservation) ([]batch.Shared, error) {
	if src == nil {
		return nil, errors.New("convert: sharing dictionaries: the image is nil")
	}
	return m.cfg.Builtin.Share(ctx, src.Parts.Shared, src.Space(), r)
}

// Verify reads all bytes of an image on disk, compressed or not, and compares them with
// their checksums. Other bytes are a *CorruptError. Its dictionaries are not read.
func (m *Mover) Verify(ctx context.Context, p batch.Payload) error {
	if p == nil {
		return errors.New("convert: verifying an image: the payload is nil")
	}
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	return m.cfg.Builtin.Verify(ctx, p)
}

// The methods below, and Evict, IngestAs, ReadRows, WriteAhead, Speed and BatchChanged, are for this module's
// packages: engines, repositories, and the monitor. Programs do not need them.

// Ahead prefetches b: it is Move for a batch that a consumer will need soon. It waits for nothing
// but the transfer, and takes only room that nobody needs: the space must stay below its stop mark,
// have no waiters, and the monitor must not have evicted from it in the last 100 ms. Otherwise, and
// where there is no room, the error is a *tier.NoSpaceError. A batch in a space where it persists
// is tier.ErrNotSupported, and so is one on a GPU that would go to another by way of host memory.
func (m *Mover) Ahead(ctx context.Context, b *batch.Batch, to reservation.Strategy) error {
	_, err := m.run(ctx, &move{b: b, to: to, reason: ReasonAhead, prefetches: true})
	return err
}

// ReadIn is AcquireIn, but leaves pending tasks to their callers.
func (m *Mover) ReadIn(ctx context.Context, b *batch.Batch, r *reservation.Reservation) (*batch.Handle, error) {
	return m.run(ctx, &move{b: b, given: r, reason: ReasonWork, opens: true, keepsPending: true})
}

// Ended returns a context that ends, with tier.ErrClosed, when Close is called.
func (m *Mover) Ended() context.Context { return m.life }

// DropCopies drops all clean images, so that the next moves copy bytes.
func (m *Mover) DropCopies() {
	for _, s := range m.cfg.Reservations.Spaces().All() {
		s.DropAllClean()
	}
}

// DictionaryBytes returns what the dictionaries that batches in a space share are
// charged there. It is not part of the batches' own bytes.
func (m *Mover) DictionaryBytes(space tier.ID) int64 { return m.cfg.Builtin.Dicts.Charged(space) }

// Charges returns what batches and the dictionaries that they share take in a space: how many bytes
// are there already, and how many would have to be brought. Batches that were dropped count
// nothing, and those that are just being moved are not there. By the time it returns others may
// have moved some.
func (m *Mover) Charges(s *tier.Space, batches ...*batch.Batch) (there, missing int64) {
	// Whether a dictionary is in the space depends on the batches there that have it. One that only
	// leaving batches have leaves with them.
	const elsewhere, leaving, staying = 0, 1, 2
	held := make(map[*transfer.Dictionary]int)
	for _, b := range batches {
		info, at := b.Info(), elsewhere
		if info.State == batch.Released {
			continue
		}
		what := m.footprint(info.Descriptor, info.Bytes)
		switch {
		case info.Space == s.ID() && info.State != batch.InTransit:
			there, at = there+info.Bytes, staying
		case info.Space == s.ID():
			at = leaving
			fallthrough
		default:
			missing += s.Charge(what.body)
		}
		for _, d := range what.dicts {
			held[d] = max(held[d], at)
		}
	}
	for d, at := range held {
		absent := s.Charge(d.Body)
		if at != leaving {
			own := footprint{dicts: []*transfer.Dictionary{d}}
			absent = own.in(s)
		}
		there, missing = there+s.Charge(d.Body)-absent, missing+absent
	}
	return there, missing
}
