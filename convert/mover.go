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
	ReasonTrigger = "trigger" // a space is at its trigger or above
	ReasonDemand  = "demand"  // there are waiters for room
	ReasonWork    = "work"    // a task needs the batch
	ReasonAhead   = "ahead"   // it will need it soon
)

// MoverConfig says what a Mover works with. Reservations, Registry and Builtin
// are required. The mover adds the converters of Builtin to Registry.
type MoverConfig struct {
	Reservations *reservation.Manager
	Registry     *Registry
	Builtin      *transfer.Builtin
	IDs          *batch.IDs     // numbers clones; nil: the mover has its own
	Observer     batch.Observer // of clones for which no other is named; may be nil
	// Events is called as the mover works: for moves, copies, what is brought ahead, corrupt bytes
	// and batches that fit nowhere else. It may be nil; see package events.
	Events       func(events.Event)
	Persists     func(tier.ID) bool // what comes to a space is recorded for the next process; nil: nowhere
	PersistAhead bool               // batches are written ahead there, too, and so are recorded though they are up
	Logger       *slog.Logger       // logs events that panic, and what converters do wrong; nil means slog.Default
}

// Moved describes a move that has ended.
type Moved struct {
	Batch    batch.ID
	From, To tier.ID
	Bytes    int64 // of the body; 0 if it failed, or found a copy
	Copy     bool  // a copy lay there: see batch.Batch.Copies
	Took     time.Duration
	Reason   string
	Err      error
}

// Mover moves batches between spaces. It is the only mover: all code that needs a batch elsewhere
// calls it. It is safe for concurrent use.
type Mover struct {
	cfg        MoverConfig
	stats      stats
	operations *operations
	ended      context.Context // ends, with tier.ErrClosed, when all operations have ended for good
	end        context.CancelCauseFunc
	losses     *losses
	panics     guard.Log // of events: the move has ended
	// clearing has, for each space, a token for the goroutine that makes room in one piece there.
	clearing map[tier.ID]chan struct{}
	begun    time.Time                 // the time quiet before the mover was made: nothing has been relieved then
	relieved map[tier.ID]*atomic.Int64 // when a batch was relieved from a space last: nanoseconds since begun
	early    early
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
		cfg: cfg, operations: newOperations(), losses: newLosses(cfg.Reservations.Spaces().InTier(tier.GPU)), panics: guard.Log{Logger: cfg.Logger},
		clearing: make(map[tier.ID]chan struct{}), relieved: make(map[tier.ID]*atomic.Int64), begun: time.Now().Add(-quiet),
	}
	for _, s := range cfg.Reservations.Spaces().All() {
		m.clearing[s.ID()], m.relieved[s.ID()] = make(chan struct{}, 1), new(atomic.Int64)
	}
	m.ended, m.end = context.WithCancelCause(context.Background())
	return m, nil
}

// Close ends the mover: operations under way are cancelled, with tier.ErrClosed as
// the cause, and waited for; those that come later are refused with it.
func (m *Mover) Close() error {
	if !m.operations.close() {
		return fmt.Errorf("convert: the mover is %w", tier.ErrClosed)
	}
	m.losses.close()
	m.end(tier.ErrClosed)
	return nil
}

// Stats returns what was moved so far, one entry for each pair of spaces,
// ordered by them.
func (m *Mover) Stats() []EdgeStats { return m.stats.snapshot() }

// Corrupt returns how often a batch was found with other bytes than were written: each is a
// CorruptError that some caller got.
func (m *Mover) Corrupt() int64 { return m.stats.corrupt.Load() }

// Move brings b to the first space of the strategy that stays below its trigger, or else the first
// that has room: it reserves there, locks the batch for transit, converts, commits, and releases
// the source. On any failure the batch is whole where it was and everything taken is given back. A
// batch that is already in a space of the strategy stays.
//
// Move waits for room and for a transit that is under way, and for a permit to transfer from or to
// a disk. A batch with open handles is a *batch.StateError.
//
// Where a space is lost in the middle the others of the strategy are tried. A batch that lies in a
// lost space is a *tier.LostError, from Acquire and Record, too; it can be dropped.
func (m *Mover) Move(ctx context.Context, b *batch.Batch, to reservation.Strategy) error {
	_, err := m.bring(ctx, &trip{b: b, to: to, reason: ReasonWork})
	return err
}

// Relieve is Move to one space for a monitor that makes room for others. It does not wait for room
// or batches: no room now is a *tier.NoSpaceError, a batch in use a *batch.StateError. To write to
// disk it waits only for other moves of the monitor, even if users have all slots. Moved has the
// reason.
func (m inside) Relieve(ctx context.Context, b *batch.Batch, to tier.ID, reason string) error {
	_, err := m.bring(ctx, &trip{b: b, to: reservation.Specific(to), reason: reason, relieves: true})
	return err
}

// MoveAs is Move to a form that the caller chooses, of a tier that the strategy is of: to
// compress a batch in host memory, for example. A batch that is in a space of the strategy in
// another form is converted there, and needs room for both forms at a time. The next Move
// chooses itself again.
func (m *Mover) MoveAs(ctx context.Context, b *batch.Batch, to reservation.Strategy, form batch.PayloadType) error {
	if form == "" {
		return errors.New("convert: moving to a form needs one")
	}
	_, err := m.bring(ctx, &trip{b: b, to: to, form: form, reason: ReasonWork})
	return err
}

// Acquire brings b to a space of the strategy and locks it there for processing: it uses a pending
// task, or makes one if there is none. It waits for room, and for others that move the batch or
// hold it elsewhere. The caller must Close the handle.
//
// The batch arrives and is locked in one step, so that the monitor cannot move it away in between.
func (m *Mover) Acquire(ctx context.Context, b *batch.Batch, to reservation.Strategy) (*batch.Handle, error) {
	return m.bring(ctx, &trip{b: b, to: to, reason: ReasonWork, opens: true})
}

// Consume is Acquire for the last time: b is dropped in the step that locks it, and its data goes
// with the handle.
func (m *Mover) Consume(ctx context.Context, b *batch.Batch, to reservation.Strategy) (*batch.Handle, error) {
	return m.bring(ctx, &trip{b: b, to: to, reason: ReasonWork, opens: true, last: true})
}

// operations are those of a mover that are under way. Closing cancels them and waits for
// them: what they work on is taken apart after that.
type operations struct {
	inside gate.Gate
	life   context.Context // ends with tier.ErrClosed when they are closed
	end    context.CancelCauseFunc
}

func newOperations() *operations {
	o := new(operations)
	o.life, o.end = context.WithCancelCause(context.Background())
	return o
}

// begin starts an operation. The context that it returns ends with ctx and when the
// operations are closed; end must be called once.
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

// close refuses operations from now on, cancels those under way and waits for them. It
// reports whether it was the first.
func (o *operations) close() bool {
	first := o.inside.Shut()
	o.end(tier.ErrClosed)
	o.inside.Wait()
	return first
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
	img, ok := payload.(transfer.Imaged)
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

// Ended returns a context that ends, with tier.ErrClosed, once Close has ended all moves.
func (m inside) Ended() context.Context { return m.ended }

// Speed returns how many bytes a second the last moves between two spaces made, each by itself; 0
// if there was none.
func (m inside) Speed(from, to tier.ID) int64 { return m.stats.speed(from, to) }

// Ahead is Move for a batch that will be needed soon, by whoever brings it before. It waits for
// nothing but the transfer, and takes room that nobody needs: the space must stay below its stop
// mark, without waiters for room, and nothing may have been relieved there for a moment. Otherwise,
// and where there is no room, the error is a *tier.NoSpaceError. A batch stays where it persists:
// tier.ErrNotSupported.
func (m inside) Ahead(ctx context.Context, b *batch.Batch, to reservation.Strategy) error {
	_, err := m.bring(ctx, &trip{b: b, to: to, reason: ReasonAhead, ahead: true})
	return err
}

// DropCopies gives up all copies of batches, so that the next moves are moves of bytes.
func (m inside) DropCopies() {
	for _, s := range m.cfg.Reservations.Spaces().All() {
		s.Inside().DropCopies()
	}
}

// DictionaryBytes returns what the dictionaries that batches in a space share are
// charged there. It is not part of the batches' own bytes.
func (m inside) DictionaryBytes(space tier.ID) int64 { return m.cfg.Builtin.Dicts.Charged(space) }

// VerifyDictionary reads all bytes of a dictionary on disk and compares them with their
// checksums.
func (m inside) VerifyDictionary(ctx context.Context, shared batch.Shared) error {
	return m.verify(ctx, shared.Buffer().Space(), func(ctx context.Context) error {
		return m.cfg.Builtin.VerifyBody(ctx, shared.Descriptor(), shared.Buffer())
	})
}
