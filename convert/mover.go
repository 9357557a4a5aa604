package convert

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/gate"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Why a batch is moved: the Reason of Moved.
const (
	ReasonTrigger = "trigger" // the monitor: the space is at its trigger or above
	ReasonDemand  = "demand"  // the monitor: requests wait for room
	ReasonWork    = "work"    // a caller needs the batch
	ReasonAhead   = "ahead"   // a caller will need it soon
)

// MoverConfig says what a Mover works with. Reservations, Registry and Builtin
// are required. The mover adds the converters of Builtin to Registry.
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
	Logger       *slog.Logger // logs panics of Events, and mistakes of converters; nil means slog.Default
}

// Moved describes a move that has ended.
type Moved struct {
	Batch    batch.ID
	From, To tier.ID
	Bytes    int64 // of the body; 0 if the move failed, or used a clean image
	Copy     bool  // the target had a clean image of the batch: see batch.Batch.Copies
	Took     time.Duration
	Reason   string
	Err      error
}

// Mover moves batches between spaces. An engine has one, and all code that needs a batch in another
// space calls it: consumers through Acquire and Consume, the monitor through Inside().Relieve,
// repositories through Inside().Ahead. It is safe for concurrent use.
//
// run makes a move: each round of its loop reserves room (request), and makes one attempt.
type Mover struct {
	cfg        MoverConfig
	stats      stats
	operations operations // in progress
	panics     guard.Log  // of Events, which must not fail the move
	// lost has a channel for each GPU space, which is closed when the space is lost. Other spaces are
	// never lost. The mover subscribes once to each space, because a space calls all subscribers at
	// each change, and there may be thousands of waiters.
	lost     map[tier.ID]<-chan struct{}
	cancels  []func()                  // end the subscriptions
	begun    time.Time                 // quiet before the mover was made, so that prefetches may begin at once
	relieved map[tier.ID]*atomic.Int64 // when the monitor last evicted a batch from a space: nanoseconds since begun
}

// NewMover returns a mover, the only one of its registry.
func NewMover(cfg MoverConfig) (*Mover, error) {
	if cfg.Reservations == nil || cfg.Registry == nil || cfg.Builtin == nil {
		return nil, errors.New("convert: a mover needs reservations, a registry and the built-in converters")
	}
	if err := cfg.Registry.registerBuiltin(cfg.Builtin); err != nil {
		return nil, err
	}
	if cfg.IDs == nil {
		cfg.IDs = new(batch.IDs)
	}
	cfg.Builtin.Scratch.Bind(cfg.Reservations)
	m := &Mover{
		cfg: cfg, panics: guard.Log{Logger: cfg.Logger}, begun: time.Now().Add(-quiet),
		lost: make(map[tier.ID]<-chan struct{}), relieved: make(map[tier.ID]*atomic.Int64),
	}
	m.operations.life, m.operations.end = context.WithCancelCause(context.Background())
	for _, s := range cfg.Reservations.Spaces().All() {
		m.relieved[s.ID()] = new(atomic.Int64)
		if s.Kind() != tier.GPU {
			continue
		}
		lost, cancel := context.WithCancel(context.Background())
		look := func(bool) {
			if s.Lost() != nil {
				cancel()
			}
		}
		m.lost[s.ID()] = lost.Done()
		m.cancels = append(m.cancels, s.Subscribe(look), cancel)
		look(false) // it may have been lost before
	}
	return m, nil
}

// Close cancels the operations in progress, with tier.ErrClosed as the cause, and waits for them.
// Later operations fail with tier.ErrClosed.
func (m *Mover) Close() error {
	if !m.operations.inside.Shut() {
		return fmt.Errorf("convert: the mover is %w", tier.ErrClosed)
	}
	m.operations.end(tier.ErrClosed)
	m.operations.inside.Wait()
	for _, cancel := range m.cancels {
		cancel()
	}
	return nil
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
func (m *Mover) Move(ctx context.Context, b *batch.Batch, to reservation.Strategy) error {
	_, err := m.run(ctx, &move{b: b, to: to, reason: ReasonWork})
	return err
}

// Relieve evicts b: it is Move to one space, for the monitor. It does not wait for room or for the
// batch: no room now is a *tier.NoSpaceError, and a batch in use a *batch.StateError. To write to
// disk it waits only for other moves of the monitor, even if programs have all spill slots. reason
// goes into Moved.
func (m inside) Relieve(ctx context.Context, b *batch.Batch, to tier.ID, reason string) error {
	_, err := m.run(ctx, &move{b: b, to: reservation.Specific(to), reason: reason, evicts: true})
	return err
}

// MoveAs is Move to a form that the caller chooses, for example to compress a batch in host memory.
// The form must be one of the strategy's tier. A batch that is in a space of the strategy in
// another form is converted there, which needs room for both forms. The next Move chooses the form
// itself.
func (m *Mover) MoveAs(ctx context.Context, b *batch.Batch, to reservation.Strategy, form batch.PayloadType) error {
	if form == "" {
		return errors.New("convert: moving to a form needs one")
	}
	_, err := m.run(ctx, &move{b: b, to: to, form: form, reason: ReasonWork})
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

// Consume is Acquire for the last reader: it drops b in the step that opens the handle. Closing the
// last handle frees the data. Repository.Drain calls it.
func (m *Mover) Consume(ctx context.Context, b *batch.Batch, to reservation.Strategy) (*batch.Handle, error) {
	return m.run(ctx, &move{b: b, to: to, reason: ReasonWork, opens: true, last: true})
}

// operations are the calls of a mover that are in progress. Mover.Close refuses later ones, cancels
// these and waits for them, because the engine closes what they work on after that.
type operations struct {
	inside gate.Gate
	life   context.Context // ends with tier.ErrClosed when Close is called
	end    context.CancelCauseFunc
}

// begin starts an operation. The context that it returns ends with ctx, and when Close is called.
// The caller must call end once.
func (o *operations) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	if !o.inside.Enter() {
		return nil, nil, fmt.Errorf("convert: the mover is %w", tier.ErrClosed)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(o.life, func() {
		labels.Cancel.Set()
		cancel(context.Cause(o.life))
	})
	return ctx, func() {
		stop()
		cancel(nil)
		o.inside.Leave()
	}, nil
}

// Digest computes the fingerprint of all bytes of the image that h holds, where
// they are: on the device if it can compute, over the host extents, or else
// through pinned chunks; onDevice says which. Dictionaries that are images of their
// own count as if they followed the body, in the order of AllDictionaries. Two images
// of the same record have the same.
func (m *Mover) Digest(ctx context.Context, h *batch.Handle) (d tier.Digest, onDevice bool, err error) {
	ctx, end, err := m.operations.begin(ctx)
	if err != nil {
		return d, false, err
	}
	defer end()
	payload, err := payloadOf(h, "computing a digest")
	if err != nil {
		return d, false, err
	}
	img, ok := payload.(*batch.Image)
	if !ok {
		return d, false, fmt.Errorf("convert: %s has no digest", payload.Type())
	}
	d, onDevice, err = m.cfg.Builtin.Digest(ctx, img)
	return d, onDevice, m.ofBatch(ctx, ofLost(err, img.Space()), h.Batch())
}

// OnDisk runs f, which reads bytes from a disk or, if writes is set, writes bytes to one, when it
// has a permit for that. A converter of a program's own that uses a disk must do so through it, as
// the built-in ones do. pinned is how many bytes of pinned memory it uses at a time. f must use the
// context that it is given, which says that there is a permit: OnDisk within OnDisk asks for no
// second one. f must not wait for room in any memory.
//
// The wait ends with ctx, when the mover is closed, and when the pool of permits is.
func (m *Mover) OnDisk(ctx context.Context, pinned int64, writes bool, f func(context.Context) error) error {
	return m.cfg.Builtin.OnDisk(ctx, pinned, writes, f)
}

// Share returns the dictionaries of src in the space of r, for an image of the same descriptor
// there: a reference to each, which is the caller's. Those that are not there yet are copied, into
// memory drawn from r. It is what a converter between images, other than the built-in ones, needs
// for dictionaries. Between memory and disk it takes a permit, unless it is called within OnDisk.
func (m *Mover) Share(ctx context.Context, src *batch.Image, r reservation.Reservation) ([]batch.Shared, error) {
	if src == nil {
		return nil, errors.New("convert: sharing dictionaries: the image is nil")
	}
	return m.cfg.Builtin.Share(ctx, src, r)
}

// inside is a Mover as the engine sees it.
type inside struct{ *Mover }

// Inside returns what only an engine does with its mover. Programs have no use for it.
func (m *Mover) Inside() inside { return inside{m} }

// Ended returns a context that ends, with tier.ErrClosed, when Close is called.
func (m inside) Ended() context.Context { return m.operations.life }

// Speed returns how many bytes a second the last moves between two spaces made, each by itself; 0
// if there was none.
func (m inside) Speed(from, to tier.ID) int64 { return m.stats.speed(from, to) }

// Ahead prefetches b: it is Move for a batch that a consumer will need soon. It waits for nothing
// but the transfer, and takes only room that nobody needs: the space must stay below its stop mark,
// have no waiters, and the monitor must not have evicted from it in the last 100 ms. Otherwise, and
// where there is no room, the error is a *tier.NoSpaceError. A batch in a space where it persists
// is tier.ErrNotSupported.
func (m inside) Ahead(ctx context.Context, b *batch.Batch, to reservation.Strategy) error {
	_, err := m.run(ctx, &move{b: b, to: to, reason: ReasonAhead, prefetches: true})
	return err
}

// DropCopies gives up all copies of batches, so that the next moves are moves of bytes.
func (m inside) DropCopies() {
	for _, s := range m.cfg.Reservations.Spaces().All() {
		s.DropAllClean()
	}
}

// DictionaryBytes returns what the dictionaries that batches in a space share are
// charged there. It is not part of the batches' own bytes.
func (m inside) DictionaryBytes(space tier.ID) int64 { return m.cfg.Builtin.Dicts.Charged(space) }

// VerifyDictionary reads all bytes of a dictionary on disk and compares them with their
// checksums.
func (m inside) VerifyDictionary(ctx context.Context, shared batch.Shared) error {
	return m.verify(ctx, func(ctx context.Context) error {
		return m.cfg.Builtin.VerifyBody(ctx, shared.Descriptor(), shared.Buffer())
	})
}
