// Package batch holds the batch: one Arrow record batch with a stable id, whose
// data may be in any tier and moves between them while the engine works.
//
//	Batch ──payload──▶ Payload          the form that the data has now: an Image in some
//	 │  ▲                │              space, a Table, or what a user's converter makes
//	 │  │                ├─▶ Descriptor  what the bytes mean; shared by all forms
//	 │  │                └─▶ Shared      a dictionary in that space, which batches share
//	 │  ├── Handle       reads the data where it is; many at once
//	 │  └── Transit      gives the data another form; one at a time
//	 ├─▶ Place           where it stands in its plan; set by the repository
//	 └─▶ Observer        is called at every change: the engine's passes it to the monitor's index
//
//	state.go     the states, and the table of their transitions
//	batch.go     New, Info, tasks, Drop; announces changes to the observers
//	handle.go    Lock, Open, Read and Handle.Close; when a batch is used next
//	transit.go   Transit, Commit and CommitOpen
//	copies.go    clean images: earlier payloads that are still valid in other spaces
//	payload.go   what a payload must implement; the built-in ones are in internal/payload
//	inside.go    Inside: methods for this module's packages
//
// Ids come from one IDs for all batches that meet: an engine's, by its NewBatch. An
// observer that is a Registrar refuses a second batch of an id.
//
// The table at State has the transitions. An operation that the state does not allow returns a
// StateError at once. Methods that take a context wait while the batch is in transit, and for
// nothing else.
//
// # Ownership
//
// A payload owns its memory and one reference to each dictionary that it shares. A batch owns its
// payload. Commit swaps it for another and releases the old one; Drop releases it, with handles
// open when the last of them is closed. The holder of a batch must hand it over or drop it; the
// opener of a Handle or a Transit must end it. An invariants build panics when the garbage
// collector finds one that is still open, with the stack that took it.
//
// # Locks
//
// Each batch has one mutex, of rank Batch. It may be locked under a repository's mutex, and never
// under a space's. Observers, clocks and payload releases run on the caller's goroutine, with no
// lock held. So a method makes its change under the lock (changeLocked), and announces it
// afterwards (announce).
//
//	Monitor → Manager → Repository → [Batch] → Registry → Reservation → Space → …
package batch

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// ID names a batch for its whole life, whatever tier its data is in. The zero
// value is invalid.
type ID uint64

// IDs hands out ids: unique and increasing, without a lock. The zero value is
// ready and begins at 1.
type IDs struct{ last atomic.Uint64 }

// Next returns the next id.
func (ids *IDs) Next() ID { return ID(ids.last.Add(1)) }

// ErrStored: the batch is in a repository already.
var ErrStored = errors.New("in a repository already")

// ErrDuplicateID reports that New was given the id of another batch that the observer already has.
var ErrDuplicateID = errors.New("another batch has this id")

// Observer is called at changes. The engine's passes them to the monitor; a repository is one for
// the batches that it holds. A wrapper of an Observer should have a method Unwrap() Observer.
// Panics of payloads and observers are then logged by the engine whose observer it wraps; otherwise
// by slog.Default.
type Observer interface {
	// BatchChanged is called after b was made and after every change of its state, counts, payload,
	// subscribers or place, on the goroutine that made the change and with no lock held. It must be
	// quick and must not block. It is not called again for a batch that was dropped.
	//
	// now is b right after the change. Calls for one batch may overlap and come out of order. An
	// observer that keeps cuts must ignore one whose Version is lower than that of the last one.
	BatchChanged(b *Batch, now Info)
}

// Registrar is an Observer that knows its batches, and refuses a second one of an id. The
// monitor's index and an engine's observer are such.
type Registrar interface {
	Observer
	// Register is called once by New, in place of the first BatchChanged and under
	// its rules. ErrDuplicateID: the observer knows another batch of that id, which
	// has not been dropped. After any error the observer must not know b.
	Register(b *Batch, now Info) error
	// Knows reports whether b was made known to the observer, and has not been dropped. It is
	// called with no lock held.
	Knows(b *Batch) bool
}

// Place is a batch's position in a plan. The repository that holds it sets it; the monitor orders
// victims by it.
type Place struct {
	Plan uint64 // the plan's number; 0 if it is in none
	Name string // the plan's name, for messages
	Rank int    // the repository's position: 0 for the scans, rising towards the output
	Last bool   // it is in the plan's output repository
	Seq  uint64 // order of arrival within the plan

	// The repository, and where in it.
	Operator  string
	Port      int
	Partition int
}

// Options is what New needs: Payload, and either ID or IDs.
type Options struct {
	ID       ID           // the batch's, if it is not 0
	IDs      *IDs         // else the next of these that Observer, a Registrar, does not know
	Payload  Payload      // taken over
	Observer Observer     // may be nil
	Clock    func() int64 // what LastUse is read from; nil for unix nanoseconds. Must not block
	Place    Place        // as SetPlace; zero is no plan
}

// Info is what a batch was like at one moment; all fields are from the same moment.
type Info struct {
	ID      ID
	Version uint64 // rises with every change
	State   State
	// Payload is the form that the batch has; nil when it is gone. The batch owns it and may give
	// it up at any moment. A caller with neither a handle nor the transit may read its kind. It may
	// use its memory only under a lease (tier.Buffer.TryLease).
	Payload Payload
	Form    PayloadType // the payload's; "" when it is gone
	// Descriptor is what the bytes mean; nil if no payload had one. It stays known when the
	// batch is dropped.
	Descriptor *Descriptor
	Space      tier.ID // where the data is; zero when it is gone
	Bytes      int64   // charged there
	Rows       int64   // 0 if the payload has no descriptor
	Pending    int     // tasks created and not yet begun
	// Task is the number of the oldest of them, in the order in which tasks of all batches were
	// created; 0 if there is none. When the oldest has begun, the others get the number of the
	// latest of all batches: only the oldest's own is kept. One that is cancelled changes nothing,
	// unless it was the last.
	Task        uint64
	Active      int // open handles
	Subscribers int
	Leased      bool // records opened in place hold the memory: a move would not free it at once
	Place       Place
	LastUse     int64 // by Options.Clock: when it was made, or a handle was last opened or closed
	// NextUse is when the batch will be used again: as Hint has set, or else after as long as
	// between the uses so far. 0: there were fewer than two. Never and Stay come from Hint alone.
	NextUse int64
	Uses    uint8 // how many handles were opened so far while no other was; 255 at most
}

// A Batch is one Arrow record batch with a stable id, whose data is in one space at a time. All
// that happens to it follows the table at State. It is safe for concurrent use. Its creator owns it
// until it is handed to a repository or dropped.
type Batch struct {
	id       ID
	observer Observer
	clock    func() int64
	entry    atomic.Value // see inside.Entry

	mu struct {
		lockrank.Mutex[lockrank.Batch]
		payload     Payload       // nil when it is gone
		traits      payloadTraits // of the payload; zero when it is gone
		desc        *Descriptor
		version     uint64   // changes so far
		store       Observer // the repository that holds the batch; nil if none does
		place       Place
		tasks       tasks
		subscribers int
		state       State
		over        bool          // dropped: the observers get no further call
		changed     chan struct{} // closed at the next change; nil without waiters
		copies      []copyOf      // in other spaces, some of which may be gone; copied on write

		uses    uint8 // see Info.Uses
		lastUse int64
		gap     int64 // between uses, on average; 0 before the second
		hint    int64 // 0 if there is none

		// See Arrival and Unread.
		why    string
		since  int64
		unread bool
	}
}

// tasks are the pending tasks of a batch, and those that have begun.
type tasks struct {
	first   uint64 // number of the oldest that is pending; 0 if there is none
	pending int
	active  int // open handles
}

// created is the number of the last task of any batch.
var created atomic.Uint64

func (t *tasks) add() {
	made := created.Add(1)
	if t.pending == 0 {
		t.first = made
	}
	t.pending++
}

func (t *tasks) cancel() { t.first, t.pending = 0, 0 }

// remove takes one away. No numbers are kept of the others: without the oldest, they count as young
// as can be. A task that is cancelled may be any, so the oldest counts still.
func (t *tasks) remove(oldest bool) {
	t.pending--
	switch {
	case t.pending == 0:
		t.first = 0
	case oldest:
		t.first = created.Load()
	}
}

// New returns an idle batch that owns o.Payload. On an error, such as a panic of the payload's, the
// payload stays the caller's. An id that o.Observer, a Registrar, knows of another batch is
// ErrDuplicateID.
func New(o Options) (*Batch, error) {
	switch {
	case o.ID == 0 && o.IDs == nil:
		return nil, errors.New("batch: an id above 0, or where ids come from, is required")
	case o.Payload == nil:
		err := &StateError{Batch: o.ID, Op: "new", Status: MissingData}
		return nil, fmt.Errorf("batch: the payload is nil: %w", err)
	}
	traits, err := inspect(o.Payload)
	if err != nil {
		return nil, err
	}
	b := &Batch{id: o.ID, observer: o.Observer, clock: o.Clock}
	b.holdLocked(o.Payload, traits)
	b.mu.place = o.Place
	b.mu.lastUse = b.now()
	b.mu.why, b.mu.since = put, b.mu.lastUse
	for {
		if o.ID == 0 {
			b.id = o.IDs.Next()
		}
		leased, err := b.register()
		if err == nil {
			b.watch(o.Payload)
			if leased && !b.Info().Leased { // the last lease may have ended before it was watched
				b.unleased()
			}
			return b, nil
		}
		if o.ID != 0 || !errors.Is(err, ErrDuplicateID) {
			return nil, fmt.Errorf("batch %d: %w", b.id, err)
		}
	}
}

// register makes a new batch known to its observer, and returns whether it is noted there as
// leased.
func (b *Batch) register() (leased bool, err error) {
	r, ok := b.observer.(Registrar)
	if !ok {
		return b.announce(b.changeLocked()).Leased, nil // no other goroutine has it
	}
	now := b.Info()
	lockrank.AssertNone("a batch's observers are called")
	defer guard.Error(&err, "an observer of batches")
	return now.Leased, r.Register(b, now)
}

// watch makes the end of the last lease on p's memory a change of the batch, which can be
// moved from then on.
func (b *Batch) watch(p Payload) {
	if l, ok := p.(leased); ok {
		b.panics().Do("Payload.OnUnleased", func() { l.OnUnleased(b.unleased) })
	}
}

func (b *Batch) unleased() {
	b.mu.Lock()
	c := b.changeLocked()
	b.mu.Unlock()
	b.announce(c)
}

func (b *Batch) now() int64 {
	now := time.Now().UnixNano()
	if b.clock != nil {
		b.panics().Do("a clock of batches", func() { now = b.clock() })
	}
	return now
}

// ID returns the batch's id.
func (b *Batch) ID() ID { return b.id }

// Info returns a consistent cut. It asks the payload for its leases, which may be a program's own
// function, so the caller must hold no lock.
func (b *Batch) Info() Info { return b.withLeases(b.Inside().Cut()) }

func (b *Batch) infoLocked() Info {
	info := Info{
		ID: b.id, Version: b.mu.version, State: b.mu.state,
		Payload: b.mu.payload, Form: b.mu.traits.form, Bytes: b.mu.traits.bytes,
		Pending: b.mu.tasks.pending, Task: b.mu.tasks.first, Active: b.mu.tasks.active,
		Subscribers: b.mu.subscribers, Place: b.mu.place,
		LastUse: b.mu.lastUse, NextUse: b.nextUseLocked(), Uses: b.mu.uses,
	}
	if s := b.mu.traits.space; s != nil {
		info.Space = s.ID()
	}
	if b.mu.desc != nil {
		info.Descriptor, info.Rows = b.mu.desc, b.mu.desc.Rows
	}
	return info
}

// withLeases adds whether the payload is leased. The payload is called with no lock held.
func (b *Batch) withLeases(i Info) Info {
	lockrank.AssertNone("a payload is asked for its leases")
	if l, ok := i.Payload.(leased); ok {
		i.Leased = b.leases(l) > 0
	}
	return i
}

// leases is 0 if the payload panics, because the batch has changed by then.
func (b *Batch) leases(l leased) (n int) {
	defer b.panics().Recover("Payload.Leased")
	return l.Leased()
}

// Subscribe marks the batch as wanted where it is: the monitor does not choose
// it. The returned function ends the subscription; calling it again does nothing.
func (b *Batch) Subscribe() (cancel func()) {
	b.subscribe(1)
	var ended atomic.Bool
	return func() {
		if ended.CompareAndSwap(false, true) {
			b.subscribe(-1)
		}
	}
}

func (b *Batch) subscribe(n int) {
	b.mu.Lock()
	b.mu.subscribers += n
	c := b.changeLocked()
	b.mu.Unlock()
	b.announce(c)
}

// SetPlace sets the batch's place in its plan, for a batch that no repository keeps.
func (b *Batch) SetPlace(p Place) {
	b.mu.Lock()
	announce := b.setPlaceLocked(p)
	b.mu.Unlock()
	announce()
}

// setPlaceLocked returns the function that announces the change.
func (b *Batch) setPlaceLocked(p Place) (announce func()) {
	if b.mu.place == p {
		return func() {}
	}
	b.mu.place = p
	c := b.changeLocked()
	return func() { b.announce(c) }
}

// Changed returns a channel that is closed at the next change. To wait for a
// condition, take the channel first, then look, then wait.
func (b *Batch) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.changed == nil {
		b.mu.changed = make(chan struct{})
	}
	return b.mu.changed
}

// change is a change that was made under the lock and is to be announced without it.
type change struct {
	now     Info
	waiting chan struct{} // to be closed; nil without waiters
	store   Observer      // the repository; nil if there is none
	over    bool          // the observers are not to be called: the batch was dropped before
	event   events.Kind   // BatchUsed or BatchHinted; 0 for neither
	hint    int64         // of BatchHinted
	was     payloadTraits // of BatchDropped: the payload that was dropped
	copies  []copyOf      // clean images to drop
}

// changeLocked counts a change and returns it. The caller passes it to announce after unlocking.
func (b *Batch) changeLocked() change {
	b.mu.version++
	c := change{now: b.infoLocked(), store: b.mu.store, over: b.mu.over, waiting: b.mu.changed}
	b.mu.changed = nil
	if b.mu.over = b.mu.state == Released; b.mu.over {
		c.copies, b.mu.copies = b.mu.copies, nil
	}
	return c
}

// announce calls the observers of a change, with no lock held, and returns the Info that they got.
// The repository comes before the batch's own observer.
func (b *Batch) announce(c change) (now Info) {
	lockrank.AssertNone("a batch's observers are called")
	dropCopies(c.copies)
	if !c.over {
		now = b.withLeases(c.now)
		for _, o := range []Observer{c.store, b.observer} {
			if o != nil {
				b.notify(o, now)
			}
		}
	}
	if c.event != 0 {
		b.emit(c.event, c.now, c.hint)
	}
	if c.now.State == Released && !c.over {
		if c.was.space != nil {
			c.now.Space, c.now.Bytes = c.was.space.ID(), c.was.bytes
		}
		b.emit(events.BatchDropped, c.now, 0)
	}
	if c.waiting != nil {
		close(c.waiting)
	}
	return now
}

// emitter is an observer that emits events of batches: an engine's. It is called with no lock held.
type emitter interface {
	EmitEvent(kind events.Kind, now Info, hint int64)
}

// emit calls the first of the observers that is an emitter.
func (b *Batch) emit(kind events.Kind, now Info, hint int64) {
	for o := range observers(b.observer) {
		if o, ok := o.(emitter); ok {
			o.EmitEvent(kind, now, hint)
			return
		}
	}
}

// unobserved is the log of batches whose observer has none.
var unobserved guard.Log

// observers yields an observer and those that it wraps. An engine's has methods of its own.
func observers(o Observer) iter.Seq[Observer] {
	return func(yield func(Observer) bool) {
		for o != nil && yield(o) {
			w, ok := o.(interface{ Unwrap() Observer })
			if !ok {
				return
			}
			o = w.Unwrap()
		}
	}
}

// panics returns where panics of observers, clocks and payloads are logged, which end there: the
// change has been made, and its waiters must be woken. It is the log of the first of the observers
// that has one.
func (b *Batch) panics() *guard.Log {
	for o := range observers(b.observer) {
		if l, ok := o.(interface{ Panics() *guard.Log }); ok {
			return l.Panics()
		}
	}
	return &unobserved
}

func (b *Batch) notify(o Observer, now Info) {
	defer b.panics().Recover("an observer of batches")
	o.BatchChanged(b, now)
}

// restLocked returns the state of a batch that is neither read nor moved: idle or task created.
func (b *Batch) restLocked() State {
	if b.mu.tasks.pending > 0 {
		return TaskCreated
	}
	return Idle
}

func (b *Batch) errorLocked(op string, s Status) *StateError {
	return &StateError{Batch: b.id, State: b.mu.state, Op: op, Status: s}
}

// barLocked returns an error if the batch is in transit or was dropped, for operations that need
// neither; nil in other states.
func (b *Batch) barLocked(op string) error {
	switch b.mu.state {
	case InTransit:
		return b.errorLocked(op, InvalidState)
	case Released:
		return b.errorLocked(op, MissingData)
	}
	return nil
}

// CreateTask announces work that needs the batch. While the batch is in transit
// it waits, until ctx ends. The caller must either Lock or CancelTask for it, or
// Drop the batch.
func (b *Batch) CreateTask(ctx context.Context) error { return b.await(ctx, b.TryCreateTask) }

// await repeats op while it fails because the batch is in transit. Only an unwrapped StateError is
// the batch's own: an error that wraps one comes from the payload that op released.
func (b *Batch) await(ctx context.Context, op func() error) error {
	var changed <-chan struct{}
	for {
		err := op()
		if se, ok := err.(*StateError); !ok || se.State != InTransit || se.Status != InvalidState {
			return err
		}
		if changed != nil {
			select {
			case <-changed:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		changed = b.Changed() // and then look again
	}
}

// TryCreateTask is CreateTask, but fails while the batch is in transit.
func (b *Batch) TryCreateTask() error {
	b.mu.Lock()
	if err := b.barLocked("create task"); err != nil {
		b.mu.Unlock()
		return err
	}
	if b.mu.state == Idle {
		b.mu.state = TaskCreated
	}
	b.mu.tasks.add()
	c := b.changeLocked()
	b.mu.Unlock()
	b.announce(c)
	return nil
}

// CancelTask takes one pending task back.
func (b *Batch) CancelTask() error {
	const op = "cancel task"
	b.mu.Lock()
	switch {
	case b.mu.state == Released:
		defer b.mu.Unlock()
		return b.errorLocked(op, MissingData)
	case b.mu.tasks.pending == 0:
		defer b.mu.Unlock()
		return b.errorLocked(op, TaskNotCreated)
	}
	b.mu.tasks.remove(false)
	if b.mu.state == TaskCreated {
		b.mu.state = b.restLocked()
	}
	c := b.changeLocked()
	b.mu.Unlock()
	b.announce(c)
	return nil
}

// Drop ends the batch: its payload is freed, at once or, with handles open, when the last is
// closed. Pending tasks are gone with it. While the batch is in transit Drop fails with a
// StateError, and the caller may wait for Changed and try again. An error of the payload's is
// wrapped, and the batch is dropped.
func (b *Batch) Drop() error {
	b.mu.Lock()
	if err := b.barLocked("drop"); err != nil {
		b.mu.Unlock()
		return err
	}
	b.mu.state = Released
	b.mu.tasks.cancel()
	was := b.mu.traits
	payload := b.takePayloadLocked()
	c := b.changeLocked()
	c.was = was
	b.mu.Unlock()
	defer b.announce(c)
	return release(payload)
}

// Discard is Drop for an owner whose batch the monitor may be moving: it waits until the transit,
// or ctx, ends.
func (b *Batch) Discard(ctx context.Context) error { return b.await(ctx, b.Drop) }

// takePayloadLocked returns the payload of a dropped batch, without which the batch is empty, or
// nil while handles are open. The caller releases it after unlocking.
func (b *Batch) takePayloadLocked() Payload {
	if b.mu.tasks.active > 0 {
		return nil
	}
	payload := b.mu.payload
	b.holdLocked(nil, payloadTraits{})
	return payload
}

// release releases p, which may be nil. A panic of a program's payload is an error, so that callers
// can finish their own work. release wraps the payload's errors, so that nobody takes a StateError
// among them for the batch's.
func release(p Payload) (err error) {
	if p == nil {
		return nil
	}
	lockrank.AssertNone("a payload is released")
	defer guard.Error(&err, "Payload.Release")
	if err := p.Release(); err != nil {
		return fmt.Errorf("releasing a payload: %w", err)
	}
	return nil
}
