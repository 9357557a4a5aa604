package convert

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	exec "runtime/trace"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// trip is one call of a Mover that brings a batch to a space of a strategy. It is a retry loop
// around single moves:
//
//	bring       until the batch is there, or cannot come
//	└─ move     reserves room (see inRoom), once or in several spaces
//	   └─ carry    takes the batch in transit, and commits
//	      └─ transfer   revives a clean image, or converts
//
// The first fields are the caller's request, the others what the trip has found so far. One
// goroutine uses a trip.
type trip struct {
	m      *Mover
	b      *batch.Batch
	to     reservation.Strategy
	form   batch.PayloadType // the form to make; "" means the best one for the space, see Builtin.Form
	reason string            // for Moved
	// relieves is whether the monitor evicts the batch. It waits neither for room nor for the
	// batch.
	relieves bool
	ahead    bool                    // a prefetch: waits for nothing, and takes no room that others need
	given    reservation.Reservation // the caller's, to draw from; zero: the trip reserves
	opens    bool                    // opens a handle on arrival
	last     bool                    // drops the batch in the same step
	beside   bool                    // leaves pending tasks pending

	now    batch.Info    // of the batch, at the last look
	what   takes         // the bytes that it needs in the target
	handle *batch.Handle // the one that was opened
	moved  Moved         // the last move that began
}

// errThere ends a wait that has become useless: another caller has brought the batch to where it is
// wanted, or has dropped it. bring then looks at the batch again.
var errThere = errors.New("convert: another caller brought the batch")

// errNilBatch reports a nil *batch.Batch.
var errNilBatch = errors.New("convert: moving a batch: the batch is nil")

// bring moves the batch until it is in a space of the trip's strategy.
func (m *Mover) bring(ctx context.Context, t *trip) (*batch.Handle, error) {
	if t.b == nil {
		return nil, errNilBatch
	}
	ctx, end, err := m.operations.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	t.m = m
	for {
		t.now = t.b.Info()
		switch err := lostWith(t.now); {
		case t.now.State == batch.Released:
			return nil, &batch.StateError{Batch: t.now.ID, State: t.now.State, Op: "move", Status: batch.MissingData}
		case err != nil:
			return nil, fmt.Errorf("moving batch %d: %w", t.now.ID, err)
		}
		var se *batch.StateError
		if t.there(t.now.Payload) {
			if !t.opens {
				return nil, nil
			}
			h, err := t.open(ctx)
			if errors.As(err, &se) && se.Status == batch.SpaceMismatch {
				continue // moved between the look and the lock
			}
			return h, err
		}
		err := t.move(ctx)
		switch {
		case errors.Is(err, errThere) || errors.Is(err, errGone):
		case t.opens && errors.As(err, &se) && se.State == batch.Processing && !errors.Is(err, batch.ErrUnmovable):
			// The batch itself is in use: a converter's StateError, of another batch, is unmovable.
			if err := t.untilClosed(ctx); err != nil {
				return nil, err
			}
		default:
			return t.handle, err
		}
	}
}

// open opens a handle in the space where the trip last saw the batch.
func (t *trip) open(ctx context.Context) (*batch.Handle, error) {
	if t.beside {
		return t.b.Inside().Read(ctx, t.now.Space)
	}
	return t.b.Open(ctx, t.now.Space, t.last)
}

// there reports whether p is in a space of the strategy, and in the form that was asked for. A nil
// p is not.
func (t *trip) there(p batch.Payload) bool {
	if p == nil || t.form != "" && p.Type() != t.form {
		return false
	}
	var room [16]*tier.Space
	return slices.Contains(t.to.Candidates(t.m.cfg.Reservations.Spaces(), room[:0]), p.Space())
}

func (t *trip) candidates(of reservation.Strategy) []*tier.Space {
	return of.Candidates(t.m.cfg.Reservations.Spaces(), nil)
}

// traced begins a region of an execution trace (runtime/trace) for the move of a batch, if one is
// recorded, and returns its end.
func traced(ctx context.Context, from, to *tier.Space) (end func()) {
	if !exec.IsEnabled() {
		return func() {}
	}
	return exec.StartRegion(ctx, "spillway "+from.ID().String()+" to "+to.ID().String()).End
}

// quiet is for how long nothing is prefetched to a space after the monitor has evicted a batch from
// it.
const quiet = 100 * time.Millisecond

// errNeeded is the cause of a prefetch that fails because others need the room.
var errNeeded = errors.New("convert: nothing is brought ahead where the room is needed")

// needed returns the spaces of the strategy whose room others need, or may need soon.
func (t *trip) needed() []*tier.Space { return t.m.needed(t.to, &t.what) }

func (m *Mover) needed(to reservation.Strategy, what *takes) (spaces []*tier.Space) {
	demand := m.cfg.Reservations.Demand(nil)
	for _, s := range to.Candidates(m.cfg.Reservations.Spaces(), nil) {
		waits := slices.ContainsFunc(demand, func(d reservation.Demand) bool { return d.Space == s.ID() })
		if waits || s.PressureBytes()+what.in(s) > s.Stop() || time.Since(m.begun)-time.Duration(m.relieved[s.ID()].Load()) < quiet {
			spaces = append(spaces, s)
		}
	}
	return spaces
}

// untilClosed waits until the batch, on which handles are open in another space, changes.
func (t *trip) untilClosed(ctx context.Context) error {
	changed := t.b.Changed()
	if t.b.Info().State != batch.Processing {
		return nil
	}
	defer reservation.Waits(ctx)()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// move reserves room and moves the batch once.
func (t *trip) move(ctx context.Context) error {
	m := t.m
	waits := !t.relieves && !t.ahead
	if t.relieves {
		ctx = transfer.ForMonitor(ctx)
	}
	if t.ahead && m.cfg.Persists != nil && m.cfg.Persists(t.now.Space) {
		return fmt.Errorf("moving batch %d ahead from %s, where it persists: %w", t.now.ID, t.now.Space, tier.ErrNotSupported)
	}
	if m.cfg.Events != nil {
		ctx = events.With(ctx, originOf(ctx, t.now.Place))
	}
	t.what = m.takes(t.now, t.form)
	origin, to := reservation.MovedFrom(t.now.Space.Kind), t.toCopies()
	switch {
	case t.opens:
		origin = reservation.Consuming()
	case t.ahead:
		origin = reservation.Early() // it is not the next to consume
		needed := t.needed()
		if to = (without{to, needed}); len(needed) > 0 && len(t.candidates(to)) == 0 {
			return &tier.NoSpaceError{Space: needed[0].ID(), Requested: t.what.in(needed[0]), Available: needed[0].Available(), Cause: errNeeded}
		}
	}
	carry := func(r reservation.Reservation) error { return t.carry(ctx, waits, r) }
	var err error
	if t.given.IsZero() {
		err = m.inRoom(ctx, &errand{to: to, what: &t.what, origin: origin, waits: waits, until: t.vain, do: carry})
	} else if err = carry(t.given); errors.Is(err, errGone) {
		err = m.tooLittle(t.given, &t.what)
	}
	if errors.Is(err, errLost) {
		if err = errThere; lostWith(t.b.Info()) != nil {
			err = fmt.Errorf("moving batch %d: %w", t.now.ID, lostWith(t.b.Info()))
		}
	}
	return err
}

// toCopies returns the strategy. If it is AnyInTier of host memory or disk, the spaces that have a
// clean image of the batch come first, because a move there copies no bytes.
func (t *trip) toCopies() reservation.Strategy {
	if t.to == reservation.AnyInTier(tier.Disk) || t.to == reservation.AnyInTier(tier.Host) {
		if in := t.b.Copies(); len(in) > 0 {
			return copiesFirst{t.to, in}
		}
	}
	return t.to
}

// vain returns a context that ends when waiting for room has become useless. Its cause is errThere
// if another caller has brought or dropped the batch, or errLost if the batch's space was lost. The
// caller must call done.
func (t *trip) vain(ctx context.Context) (_ context.Context, done func()) {
	there := func(now batch.Info) bool { return t.there(now.Payload) }
	return t.m.untilVain(ctx, t.b, t.now.Payload.Space(), there, errThere)
}

// untilVain returns a context that ends with cause when is returns true or b was dropped, with
// errLost when space is lost, and with the error of a panic of is. A goroutine watches b until the
// caller calls done.
func (m *Mover) untilVain(ctx context.Context, b *batch.Batch, space *tier.Space, is func(batch.Info) bool, cause error) (_ context.Context, done func()) {
	ctx, end := m.untilLost(ctx, space)
	ctx, cancel := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	vain := func() (_ bool, err error) { // is may call strategies and payloads of the program
		defer guard.Error(&err, "a strategy or a payload")
		now := b.Info()
		return now.State == batch.Released || is(now), nil
	}
	go func() {
		labels.Watch.Set()
		defer close(watched)
		for {
			changed := b.Changed()
			if over, err := vain(); over || err != nil {
				cancel(cmp.Or(err, cause))
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, func() {
		cancel(nil)
		end()
		<-watched
	}
}

// carry moves the batch once, into r: it takes the batch in transit, makes the new payload, and
// commits it. If waits is set it waits for another transit to end.
func (t *trip) carry(ctx context.Context, waits bool, r reservation.Reservation) (err error) {
	m, to := t.m, r.Space()
	var transit *batch.Transit
	if waits {
		transit, err = t.b.Transit(ctx)
	} else {
		transit, err = t.b.TryTransit()
	}
	if err != nil {
		return err
	}
	defer func() { _ = transit.Abort() }() // changes nothing after a Commit
	src := transit.Payload()
	from := src.Space()
	if t.there(src) { // another caller brought it while we waited
		return errThere
	}
	out, err := t.transfer(ctx, transit, r)
	if err != nil {
		return err
	}
	var left *copied
	if to.Kind() < from.Kind() && !t.last {
		left = m.copies(ctx, t.now, to.ID(), from.ID(), t.what.body, false)
		t.b.Inside().Keep(transit, left.whenEnded())
	}
	t.b.Inside().Arrives(transit, t.reason, to.Kind() > from.Kind())
	t.countAhead(ctx, from, to, t.moved.Copy)
	switch {
	case !t.opens:
		err = transit.Commit(out, false)
	case t.beside:
		t.handle, err = t.b.Inside().CommitRead(ctx, transit, out)
	default:
		t.handle, err = transit.CommitOpen(ctx, out, t.last)
	}
	if err != nil { // Commit did not take out over
		return unfit(t.b, out, err)
	}
	if t.b.Inside().Kept(transit) {
		left.made()
	}
	m.stats.add(&t.moved, t.what.body, t.moved.Took, t.now.Place)
	if t.relieves {
		m.relieved[from.ID()].Store(int64(time.Since(m.begun)))
	}
	return nil
}

// transfer returns the new payload of the batch, drawn from r: a clean image that is in r's space,
// or else what a converter makes. It emits MoveBegun and, before it returns, MoveEnded, so the
// batch is in transit for both.
func (t *trip) transfer(
	ctx context.Context, transit *batch.Transit, r reservation.Reservation,
) (out batch.Payload, err error) {
	m, src, to := t.m, transit.Payload(), r.Space()
	from := src.Space()
	t.moved = Moved{Batch: t.now.ID, From: from.ID(), To: to.ID(), Reason: t.reason}
	m.emitBegun(ctx, &t.moved, t.what.body)
	start := time.Now()
	defer func() {
		t.moved.Took, t.moved.Err = time.Since(start), err
		m.emitEnded(ctx, &t.moved)
	}()
	defer traced(ctx, from, to)()
	if out = t.revive(src, r); out != nil {
		t.moved.Copy = true
	} else if out, err = m.convert(ctx, src, t.form, &t.what, r); err != nil {
		err = ofLost(err, from, to)
		distrust(ctx, err, from, to)
		err = m.ofBatch(ctx, err, t.b)
		return nil, fmt.Errorf("moving batch %d from %s to %s: %w", t.now.ID, from.ID(), to.ID(), err)
	}
	if err := t.b.Inside().Fits(transit, out); err != nil {
		return nil, unfit(t.b, out, err)
	}
	if !t.moved.Copy {
		t.moved.Bytes = t.what.body
	}
	return out, nil
}

// unfit releases a form that b cannot have, and returns the error.
func unfit(b *batch.Batch, out batch.Payload, why error) error {
	return errors.Join(&batch.UnmovableError{Batch: b.ID(), Err: why}, release(out))
}

// countAhead counts a prefetch, or the end of one that was wasted because the batch is evicted
// again. The caller has the batch in transit, so nobody uses it yet.
func (t *trip) countAhead(ctx context.Context, from, to *tier.Space, revived bool) {
	switch {
	case t.ahead && !revived:
		t.m.early.add(t.b, t.m.ahead(ctx, t.now, from.ID(), to.ID(), t.what.body))
	case to.Kind() > from.Kind() && !t.opens:
		t.m.early.end(t.b, false)
	}
}

// revive returns the clean image of the batch in r's space, now drawn from r; nil if there is none.
// In host memory it must have the form that a move would make there.
func (t *trip) revive(src batch.Payload, r reservation.Reservation) batch.Payload {
	form := t.form
	if form == "" && r.Space().Kind() == tier.Host {
		form = t.m.cfg.Builtin.Form(src, r.Space(), t.m.cfg.Registry.has)
	}
	return t.b.Inside().Revive(form, r)
}

// distrust drops all clean images in both spaces of a move that found corrupt bytes, and those on a
// disk that returned an I/O error, because they may be damaged too. Other failures, such as a
// GPU's, are no reason to distrust them.
func distrust(ctx context.Context, err error, between ...*tier.Space) {
	var corrupt *image.CorruptError
	var failed *disk.IOError
	bad := errors.As(err, &corrupt)
	broken := errors.As(err, &failed) && !errors.Is(err, tier.ErrNoSpace) && ctx.Err() == nil
	for _, s := range between {
		if bad || broken && failed.Space == s.ID() {
			s.DropAllClean()
		}
	}
}

// convert makes a payload of that form out of src, drawn from r; "" means the best form for r's
// space.
func (m *Mover) convert(ctx context.Context, src batch.Payload, form batch.PayloadType, what *takes, r reservation.Reservation) (out batch.Payload, err error) {
	if form == "" {
		form = m.cfg.Builtin.Form(src, r.Space(), m.cfg.Registry.has)
	}
	err = m.pinned(r, what, func() (err error) {
		out, err = m.cfg.Registry.convert(ctx, src, form, r)
		return err
	})
	if err == nil {
		if err = misplaced(out, r.Space()); err != nil {
			err = errors.Join(err, release(out))
		}
	}
	return out, err
}

// misplaced returns an error if a converter's payload is in another space than the one it was
// given.
func misplaced(out batch.Payload, space *tier.Space) error {
	at, err := spaceOf(out)
	switch {
	case err != nil:
		return &batch.UnmovableError{Err: err}
	case at == nil:
		return &batch.UnmovableError{Err: errors.New("the converter's payload lies in no space")}
	case at != space:
		return &batch.UnmovableError{Err: fmt.Errorf("the converter's payload lies in %s", at.ID())}
	}
	return nil
}

// spaceOf returns p.Space(). A panic of a program's payload is an error.
func spaceOf(p batch.Payload) (_ *tier.Space, err error) {
	defer guard.Error(&err, "Payload.Space")
	return p.Space(), nil
}

// release releases p. A panic of a program's payload is an error.
func release(p batch.Payload) (err error) {
	defer guard.Error(&err, "Payload.Release")
	return p.Release()
}
