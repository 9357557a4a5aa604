package convert

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Why a batch is moved. The monitor's moves take room that there is and never
// wait for it; work waits.
const (
	ReasonTrigger = "trigger" // a space is at its trigger or above
	ReasonDemand  = "demand"  // somebody waits for room
	ReasonWork    = "work"    // a task needs the batch
)

// MoverConfig says what a Mover works with. Reservations, Registry and Builtin
// are required.
type MoverConfig struct {
	Reservations *reservation.Manager
	Registry     *Registry
	Builtin      *Builtin
	IDs          *batch.IDs // numbers clones; nil: the mover has its own
	Events       Events
}

// Events are told what a Mover does; each may be nil. They are called with no
// lock held, on the goroutine that moves, and must be quick.
type Events struct {
	// Moved is called at the end of a move.
	Moved func(Moved)
	// Oversized is called when a batch was put into a slower tier than asked
	// for, because it can never fit there.
	Oversized func(bytes int64, wanted reservation.Strategy, got tier.ID)
}

// Moved describes a move that has ended.
type Moved struct {
	Batch    batch.ID
	From, To tier.ID
	Bytes    int64 // of the body; 0 if it failed
	Took     time.Duration
	Reason   string
	Err      error
}

// Mover moves batches between spaces. It is the only one that does: everybody
// who wants a batch elsewhere calls it. It is safe for concurrent use.
type Mover struct {
	cfg   MoverConfig
	stats stats
	// clearing is held by the one that makes contiguous room in a fragmented
	// space: two at once could each hold what the other needs.
	clearing chan struct{}
}

// NewMover returns a mover.
func NewMover(cfg MoverConfig) (*Mover, error) {
	if cfg.Reservations == nil || cfg.Registry == nil || cfg.Builtin == nil {
		return nil, errors.New("convert: a mover needs reservations, a registry and the built-in converters")
	}
	if cfg.IDs == nil {
		cfg.IDs = new(batch.IDs)
	}
	return &Mover{cfg: cfg, clearing: make(chan struct{}, 1)}, nil
}

// Registry returns the converters that the mover uses.
func (m *Mover) Registry() *Registry { return m.cfg.Registry }

// Stats returns what was moved so far, one entry for each pair of spaces,
// ordered by them.
func (m *Mover) Stats() []EdgeStats { return m.stats.snapshot() }

// Move brings b to the first space of the strategy that has room: it reserves
// there, locks the batch for transit, converts, commits, and releases the
// source. On any failure the batch is whole where it was and everything taken
// is given back. A batch that is already in a space of the strategy stays.
//
// For ReasonTrigger and ReasonDemand nothing is waited for: no room now is a
// *tier.NoSpaceError, a batch in use a *batch.StateError. Otherwise Move waits for
// room and for a transit that is under way; a batch with open handles is a
// StateError.
func (m *Mover) Move(ctx context.Context, b *batch.Batch, to reservation.Strategy, reason string) error {
	from := b.Info().Space
	if m.reaches(to, from) {
		return nil
	}
	start := time.Now()
	ev := Moved{Batch: b.ID(), From: from, Reason: reason}
	ev.To, ev.Bytes, ev.Err = m.move(ctx, b, to, reason)
	ev.Took = time.Since(start)
	if m.cfg.Events.Moved != nil && (ev.Bytes > 0 || ev.Err != nil) {
		m.cfg.Events.Moved(ev)
	}
	return ev.Err
}

func (m *Mover) move(ctx context.Context, b *batch.Batch, to reservation.Strategy, reason string) (_ tier.ID, moved int64, err error) {
	waits := reason != ReasonTrigger && reason != ReasonDemand
	size := b.Descriptor().Body
	var r *reservation.Reservation
	if waits {
		r, err = m.cfg.Reservations.Reserve(ctx, to, size)
	} else {
		r, err = m.cfg.Reservations.TryReserve(to, size)
	}
	if err != nil {
		return tier.ID{}, 0, err
	}
	defer func() { err = errors.Join(err, r.Release()) }()
	target := r.Space().ID()

	var t *batch.Transit
	if waits {
		t, err = b.Transit(ctx)
	} else {
		t, err = b.TryTransit()
	}
	if err != nil {
		return target, 0, err
	}
	src := t.Payload().Space().ID()
	if m.reaches(to, src) { // somebody else brought it while we waited
		return src, 0, t.Abort()
	}
	start := time.Now()
	var out batch.Payload
	err = m.withRoom(ctx, r, waits, func() (err error) {
		out, err = m.cfg.Registry.Convert(ctx, t, batch.ImageType(r.Space().Kind()), r)
		return err
	})
	if err != nil {
		var c *CorruptError
		if errors.As(err, &c) {
			c.Batch = b.ID()
		}
		err = fmt.Errorf("moving batch %d from %s to %s: %w", b.ID(), src, target, err)
		return target, 0, errors.Join(err, t.Abort())
	}
	took := time.Since(start)
	if err := t.Commit(out, false); err != nil {
		return target, 0, err
	}
	m.stats.add(src, target, size, took, reason)
	return target, size, nil
}

// reaches says whether a space is one of the strategy's.
func (m *Mover) reaches(s reservation.Strategy, id tier.ID) bool {
	var room [16]*tier.Space
	return slices.ContainsFunc(s.Candidates(m.cfg.Reservations.Spaces(), room[:0]),
		func(c *tier.Space) bool { return c.ID() == id })
}

// Acquire brings b to a space of the strategy and locks it there for
// processing: it uses a pending task, or makes one if there is none. It waits
// for room, and for others who move the batch or hold it elsewhere. While it waits
// the monitor leaves the batch alone. The caller must Close the handle.
func (m *Mover) Acquire(ctx context.Context, b *batch.Batch, to reservation.Strategy) (_ *batch.Handle, err error) {
	defer b.Subscribe()()
	created := false
	defer func() {
		if err != nil && created {
			err = errors.Join(err, b.CancelTask())
		}
	}()
	for {
		changed := b.Changed()
		if at := b.Info().Space; m.reaches(to, at) {
			h, err := b.Lock(ctx, at)
			var se *batch.StateError
			switch {
			case err == nil:
				created = false // the handle has it
				return h, nil
			case !errors.As(err, &se):
				return nil, err
			case se.Status == batch.TaskNotCreated && !created:
				if err := b.CreateTask(ctx); err != nil {
					return nil, err
				}
				created = true
				continue
			case se.Status != batch.SpaceMismatch:
				return nil, err
			}
			continue // moved between the look and the lock
		}
		err := m.Move(ctx, b, to, ReasonWork)
		var se *batch.StateError
		switch {
		case err == nil:
		case errors.As(err, &se) && se.State == batch.Processing:
			select { // held elsewhere: until a handle closes
			case <-changed:
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		default:
			return nil, err
		}
	}
}

// Ingest lays rec out as an image in the first space of the strategy that has
// room, waiting for it, and returns the image, which is the caller's. What can
// never fit in a space of the strategy goes to the first slower tier where it
// fits, and Events.Oversized is told. The record is only read.
func (m *Mover) Ingest(ctx context.Context, rec arrow.RecordBatch, to reservation.Strategy) (_ batch.Payload, err error) {
	l, err := NewLayout(rec)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	r, err := m.reserveOrSlower(ctx, to, l.Size())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Release()) }()
	var buf *tier.Buffer
	err = m.withRoom(ctx, r, true, func() (err error) {
		buf, err = r.AllocCuts(l.Size(), l.Cuts())
		return err
	})
	if err != nil {
		return nil, err
	}
	if buf != nil {
		if err := m.cfg.Builtin.lay(ctx, l, buf); err != nil {
			return nil, errors.Join(err, buf.Release())
		}
	}
	desc, err := l.Descriptor()
	if err != nil {
		return nil, errors.Join(err, buf.Release())
	}
	return batch.NewImage(desc, buf, r.Space()), nil
}

func (m *Mover) reserveOrSlower(ctx context.Context, to reservation.Strategy, size int64) (*reservation.Reservation, error) {
	r, err := m.cfg.Reservations.Reserve(ctx, to, size)
	if !errors.Is(err, reservation.ErrExceeded) {
		return r, err
	}
	var room [16]*tier.Space
	slowest := tier.Kind(0)
	for _, s := range to.Candidates(m.cfg.Reservations.Spaces(), room[:0]) {
		slowest = max(slowest, s.Kind())
	}
	for k := slowest + 1; slowest.Valid() && k <= tier.Disk; k++ {
		if len(m.cfg.Reservations.Spaces().InTier(k)) == 0 {
			continue
		}
		r, e := m.cfg.Reservations.Reserve(ctx, reservation.AnyInTier(k), size)
		if errors.Is(e, reservation.ErrExceeded) {
			err = e // the last tier's word is the one that matters
			continue
		}
		if e == nil && m.cfg.Events.Oversized != nil {
			m.cfg.Events.Oversized(size, to, r.Space().ID())
		}
		return r, e
	}
	return nil, err
}

// withRoom runs f, which allocates from r. If the space has the bytes but not in
// one piece, and the caller may wait, room is reserved beside r and doubled until f succeeds:
// waiting demand makes the monitor move batches out, and in the end the whole
// space is one piece.
func (m *Mover) withRoom(ctx context.Context, r *reservation.Reservation, waits bool, f func() error) (err error) {
	err = f()
	if !waits || !fragmented(err) {
		return err
	}
	select {
	case m.clearing <- struct{}{}:
		defer func() { <-m.clearing }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	space := r.Space()
	for extra := r.Bytes(); fragmented(err); extra *= 2 {
		most := space.Limit() - r.Bytes()
		if most <= 0 {
			return err
		}
		room, e := m.cfg.Reservations.Reserve(ctx, reservation.Specific(space.ID()), min(extra, most))
		if e != nil {
			return errors.Join(err, e)
		}
		err = errors.Join(f(), room.Release())
		if extra >= most {
			return err
		}
	}
	return err
}

func fragmented(err error) bool {
	var full *tier.NoSpaceError
	return errors.As(err, &full) && full.Largest > 0
}

// lay puts the layout's bytes into a buffer of any tier.
func (b *Builtin) lay(ctx context.Context, l *Layout, buf *tier.Buffer) error {
	switch d := buf.Memory().(type) {
	case tier.HostMemory:
		return l.WriteTo(d.Extents())
	case tier.DeviceMemory:
		return b.onStream(ctx, buf.Space(), func(dev tier.Device, s tier.Stream) error {
			return b.staged(ctx, buf.Space().Node(), l.Size(), fetchLayout(l), drainDevice(dev, s, d), nil)
		})
	case tier.FileMemory:
		return b.staged(ctx, buf.Space().Node(), l.Size(), fetchLayout(l), drainFile(ctx, d), nil)
	}
	return fmt.Errorf("convert: laying out into %T: %w", buf.Memory(), tier.ErrNotSupported)
}

// fetchLayout lays the next bytes out on the calling goroutine: fetches are
// started in order, which is the order that a layout needs.
func fetchLayout(l *Layout) func([]byte, int64) (stage, error) {
	return func(p []byte, _ int64) (stage, error) {
		n, err := l.Next(p)
		if err == nil && n != len(p) {
			err = fmt.Errorf("convert: a layout ended after %d of %d bytes", n, len(p))
		}
		if err != nil {
			return nil, err
		}
		return finished{}, nil
	}
}

// Record opens the batch that h holds as an Arrow record. A host image is
// opened in place: the record's buffers are the arena's, and its memory stays leased
// until the record and all that was taken from it are released, also after h is
// closed. From another tier the image is first copied to host memory, for
// which Record waits.
func (m *Mover) Record(ctx context.Context, h *batch.Handle) (arrow.RecordBatch, error) {
	src, ok := h.Payload().(*batch.Image)
	if !ok {
		return nil, fmt.Errorf("convert: %s cannot be opened as a record", h.Payload().Type())
	}
	if src.Space().Kind() == tier.Host {
		return openImage(src, nil)
	}
	r, err := m.cfg.Reservations.Reserve(ctx, reservation.AnyInTier(tier.Host), src.Descriptor().Body)
	if err != nil {
		return nil, err
	}
	p, err := m.copyTo(ctx, src, batch.HostImage, r)
	if err := errors.Join(err, r.Release()); err != nil {
		return nil, err
	}
	img, ok := p.(*batch.Image)
	if !ok {
		return nil, errors.Join(fmt.Errorf("convert: %s cannot be opened as a record", p.Type()), p.Release())
	}
	return openImage(img, img)
}

// copyTo makes a payload of type to beside src, and waits for room in one piece.
func (m *Mover) copyTo(ctx context.Context, src batch.Payload, to batch.PayloadType, r *reservation.Reservation) (out batch.Payload, err error) {
	err = m.withRoom(ctx, r, true, func() (err error) {
		out, err = m.cfg.Registry.convert(ctx, src, to, r)
		return err
	})
	return out, err
}

// openImage opens a host image. owned, if not nil, is released as soon as the
// record's lease is taken.
func openImage(img, owned *batch.Image) (arrow.RecordBatch, error) {
	var extents [][]byte
	release := func() {}
	if buf := img.Buffer(); buf != nil {
		mem, ok := buf.Memory().(tier.HostMemory)
		if !ok {
			return nil, fmt.Errorf("convert: %T cannot be opened in place", buf.Memory())
		}
		extents, release = mem.Extents(), buf.Lease()
	}
	rec, err := Open(img.Descriptor(), extents, release)
	if owned != nil {
		err = errors.Join(err, owned.Release())
	}
	return rec, err
}

// Clone copies b to memory of its own in the same space, and returns a new
// batch with a new id. It waits for room, without holding b. observer is the
// clone's; it may be nil.
func (m *Mover) Clone(ctx context.Context, b *batch.Batch, observer batch.Observer) (*batch.Batch, error) {
	for {
		p, err := m.clone(ctx, b, b.Info().Space)
		if errors.Is(err, errMoved) {
			continue
		}
		if err != nil {
			return nil, err
		}
		c, err := batch.New(batch.Options{ID: m.cfg.IDs.Next(), Payload: p, Observer: observer})
		if err != nil {
			return nil, errors.Join(err, p.Release())
		}
		return c, nil
	}
}

var errMoved = errors.New("convert: the batch was moved meanwhile")

// clone copies b's payload in the space at, if b is there once there is room.
func (m *Mover) clone(ctx context.Context, b *batch.Batch, at tier.ID) (out batch.Payload, err error) {
	desc := b.Descriptor()
	if desc == nil || !at.Valid() {
		return nil, &batch.StateError{Batch: b.ID(), State: b.State(), Op: "clone", Status: batch.MissingData}
	}
	r, err := m.cfg.Reservations.Reserve(ctx, reservation.Specific(at), desc.Body)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Release()) }()
	err = m.withRoom(ctx, r, true, func() (err error) {
		if err := b.CreateTask(ctx); err != nil {
			return err
		}
		h, err := b.LockAny(ctx)
		if err != nil {
			return errors.Join(err, b.CancelTask())
		}
		defer func() { err = errors.Join(err, h.Close()) }()
		if h.Space().ID() != at {
			return errMoved
		}
		out, err = m.cfg.Registry.convert(ctx, h.Payload(), h.Payload().Type(), r)
		return err
	})
	return out, err
}
