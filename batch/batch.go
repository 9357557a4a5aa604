// Package batch holds the batch: one Arrow record batch with a stable id, whose
// data may be in any tier and moves between them while the engine works.
//
//	Batch ──residents──▶ Payload         the current image, and clean ones in slower tiers; an
//	 │  ▲                 │              Image, a Table, or what a user's converter makes
//	 │  │                 ├─▶ Descriptor what the bytes mean; shared by all residents
//	 │  │                 └─▶ Shared     a dictionary in that space, which batches share
//	 │  ├── Handle       pins the current image and reads it where it is; many at once
//	 │  └── Transit      moves the batch: replaces the current image; one at a time
//	 ├─▶ Place           where it stands in its plan; set by the repository
//	 └─▶ Observer        is called at every change: the engine's passes it to the monitor's index
//
// batch.go has the types, then what happens to a batch in the order of its life: New, tasks, moves,
// Drop. handle.go has the handles, and when a batch is used next.
//
// All batches of an engine get their ids from one IDs, in Engine.NewBatch. An observer that is a
// Registrar refuses a second batch of an id.
//
// The table at State has the transitions. An operation that the state does not allow returns a
// StateError at once. Methods that take a context wait while the batch is in transit, and for
// nothing else.
//
// # Ownership
//
// A payload owns its memory and one reference to each dictionary that it shares. A batch owns its
// residents. Commit makes another payload current, and releases the old one or keeps it as a clean
// image. Drop releases all, with handles open when the last of them is closed. The holder of a
// batch must hand it over or drop it; the opener of a Handle or a Transit must end it. An
// invariants build panics when the garbage collector finds one that is still open, with the stack
// that took it.
//
// # Locks
//
// Each batch has one mutex, of rank Batch. It may be locked under a repository's mutex, and never
// under a space's. Observers, clocks and payload releases run on the caller's goroutine, with no
// lock held. So a method makes its change under the lock (update), and the change is announced
// afterwards (announce).
//
//	Monitor → Manager → Repository → [Batch] → Registry → Reservation → Space → …
package batch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
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

// State is where a batch is in its life. It is derived: a batch that was dropped is released; else
// it is in transit if a move is in progress, processing if a handle is open, task-created if tasks
// are pending, and else idle.
//
//   - Idle: the data is whole, in one space, and no task is pending. New makes a batch idle, and so
//     does the end of each use. The monitor may evict it.
//   - TaskCreated: a caller has announced work on the batch (pending tasks > 0) that has not begun.
//     The monitor may still evict it, but prefers others.
//   - Processing: handles are open (active > 0). The data stays where it is.
//   - InTransit: the holder of the Transit replaces the payload. Until the Transit ends, readers
//     and new tasks have to wait.
//   - Released: dropped. The batch is empty or, if handles are open, will be when the last is
//     closed. Batches from Repository.Drain are in this state while the consumer works on them.
//
// The transitions, and the methods that make them:
//
//	from                            to                              by                 note
//	idle                            task-created                    CreateTask         pending +1
//	task-created, processing        same                            CreateTask         pending +1
//	task-created, processing        processing                      Lock               pending -1, active +1; see (1)
//	idle, task-created, processing  processing, released            Open               CreateTask, Lock; see (2)
//	idle, task-created, processing  processing                      Read               active +1
//	processing                      idle, task-created              last Handle.Close  see (3)
//	task-created, processing        idle, task-created, processing  CancelTask         pending -1
//	in-transit                      in-transit                      CancelTask         pending -1; see below
//	idle, task-created              in-transit                      Transit
//	in-transit                      idle, task-created              Commit, Abort      see (3)
//	in-transit                      processing, released            Commit with Open   as Commit and Open
//	idle, task-created, processing  released                        Drop               see (4)
//
// The notes:
//
//  1. The data must be in the space that Lock names.
//  2. CreateTask is left out if a task is pending. The last user also drops the batch, as Drop does.
//  3. The batch is task-created afterwards if tasks are pending, or Commit is asked to create one.
//  4. The payload is freed: at once or, with handles open, after the last of them.
//
// While handles are open a created task only counts as pending: the state stays processing. A task
// may be cancelled while the batch is in transit. Otherwise a caller that gives up its work while
// the monitor happens to move the batch would leave a task behind that is never taken. All other
// operations fail with a StateError. Methods with a context wait for the end of a transit, and for
// nothing else. Clean images come and go in any state, and change none.
type State uint8

// The states.
const (
	Idle State = iota
	TaskCreated
	Processing
	InTransit
	Released
)

var stateNames = [...]string{"idle", "task-created", "processing", "in-transit", "released"}

// String returns "idle", "task-created", "processing", "in-transit" or "released".
func (s State) String() string {
	if int(s) >= len(stateNames) {
		return "invalid"
	}
	return stateNames[s]
}

// Status is why an operation on a batch failed.
type Status uint8

// The reasons.
const (
	TaskNotCreated Status = iota + 1 // there is no pending task to lock for or to cancel
	InvalidState                     // the state does not allow it
	SpaceMismatch                    // the data is in another space than the one named
	MissingData                      // the batch was dropped, or the payload offered lacks its data
)

var statusNames = [...]string{"unknown", "task-not-created", "invalid-state", "space-mismatch", "missing-data"}

// String returns "task-not-created", "invalid-state", "space-mismatch" or "missing-data".
func (s Status) String() string {
	if int(s) >= len(statusNames) {
		s = 0
	}
	return statusNames[s]
}

// Errors to compare with errors.Is.
var (
	// ErrState is matched by every StateError.
	ErrState = errors.New("batch: not possible in its state")
	// ErrStored: the batch is in a repository already.
	ErrStored = errors.New("in a repository already")
	// ErrDuplicateID reports that New was given the id of another batch that the observer already
	// has.
	ErrDuplicateID = errors.New("another batch has this id")
	// ErrUnmovable is matched by every UnmovableError.
	ErrUnmovable = errors.New("batch: it cannot be converted")
)

// StateError reports that a batch's state did not allow an operation, which changed
// nothing. It matches ErrState, and tier.ErrReleased if the batch was dropped.
type StateError struct {
	Batch  ID
	State  State  // at that moment
	Op     string // what was refused, such as "create task" or "drop"
	Status Status

	Space, Want tier.ID // with SpaceMismatch: where the data is, and where it was wanted
}

func (e *StateError) Error() string {
	s := fmt.Sprintf("batch %d, %s: %s failed: %s", e.Batch, e.State, e.Op, e.Status)
	if e.Status == SpaceMismatch {
		s += fmt.Sprintf(": it is in %s, not in %s", e.Space, e.Want)
	}
	return s
}

// Is matches ErrState, and tier.ErrReleased if the batch was dropped.
func (e *StateError) Is(target error) bool {
	return target == ErrState || target == tier.ErrReleased && e.State == Released
}

// UnmovableError reports that a batch could not be given another form for a reason that is its
// own: no converter takes its form, its bytes are corrupt, or a converter refused it or
// panicked. The batch is as it was, and other batches can still be moved between the same
// spaces. It matches ErrUnmovable, and what Err matches.
type UnmovableError struct {
	Batch ID // 0 where it is not known
	Err   error
}

func (e *UnmovableError) Error() string {
	if e.Batch == 0 {
		return e.Err.Error()
	}
	return fmt.Sprintf("batch %d cannot be converted: %v", e.Batch, e.Err)
}

// Unwrap returns ErrUnmovable and Err.
func (e *UnmovableError) Unwrap() []error { return []error{ErrUnmovable, e.Err} }

// PayloadType names a type of payload. Converters are registered by pairs of a type and a tier
// (convert.Form); users may bring types of their own.
type PayloadType = payload.Type

// The types of an Image. The Arrow buffers of a scattered one are at separate
// places of a device's memory, as GPU libraries make them.
const (
	PlainImage      = payload.PlainImage
	CompressedImage = payload.CompressedImage
	ScatteredImage  = payload.ScatteredImage
)

// Payload is the form that a batch has now. It is immutable except for its release,
// and owned by one batch, which releases it. Implementations are comparable (a
// pointer, as a rule) and safe for concurrent use.
//
// A payload may have a method Descriptor() *Descriptor that returns the batch's schema and rows. It
// may have the methods Leased() int and OnUnleased(func()). They show that readers still hold its
// memory, which its release will then not free at once, and when that is over; see
// tier.Buffer.OnUnleased.
type Payload interface {
	Type() PayloadType
	// Space returns where the bytes are; never nil.
	Space() *tier.Space
	// Bytes returns what the payload is charged in its space.
	Bytes() int64
	// Release gives the memory up. All device work that uses it must be done.
	// The only error is tier.ErrReleased, for a second call.
	Release() error
}

// leased is an optional part of a Payload.
type leased interface {
	Leased() int
	OnUnleased(f func())
}

// The types of the built-in payload and of its description.
type (
	// Image is the bytes of a batch in the one layout that all tiers share, in a buffer of any
	// space: the payload of all built-in types.
	Image = payload.Image
	// Descriptor describes the bytes of an image. It is immutable once made, and one descriptor is
	// shared by all forms that a batch takes in its life.
	Descriptor = payload.Descriptor
	// Shared is the image of a dictionary in one space, of which the batches there that use the
	// dictionary hold a reference each.
	Shared = payload.Shared
)

// NewImage returns the image that d describes, whose body is in buf. It takes
// buf over: Release releases it. buf is nil if, and only if, the body is empty;
// then space is where the image counts, and else it must be the
// buffer's. shared are d's AllDictionaries in their order, in the same space: one
// reference to each, which the image takes over and releases with itself. NewImage
// panics on arguments that break this, because that is a bug in a converter.
func NewImage(d *Descriptor, buf *tier.Buffer, space *tier.Space, shared ...Shared) *Image {
	return payload.NewImage(d, buf, space, shared...)
}

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
	// observer that keeps an Info must ignore one whose Version is lower than that of the last one.
	BatchChanged(b *Batch, now Info)
}

// Registrar is an Observer that keeps its batches by id, and refuses a second one of an id. The
// monitor's index and an engine's observer are Registrars.
type Registrar interface {
	Observer
	// Register is called once by New, in place of the first BatchChanged and under
	// its rules. It returns ErrDuplicateID if the observer has another batch of that id,
	// which has not been dropped. After any error the observer must not keep b.
	Register(b *Batch, now Info) error
	// Knows reports whether b was registered, and has not been dropped. It is called with no lock
	// held.
	Knows(b *Batch) bool
}

// engine is the observer of an engine. Engine returns the function that gets the events of batches,
// nil if there is none, and the log of panics of observers, clocks and payloads. The function is called
// with no lock held.
type engine interface {
	Engine() (emit func(events.Event), panics *guard.Log)
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

// Origin returns the origin of events about a batch at the place, without a task.
func (p Place) Origin() events.Origin {
	return events.Origin{Plan: p.Name, Operator: p.Operator, Port: p.Port, Partition: p.Partition}
}

// Options describes a new batch. Payload, and either ID or IDs, are required.
type Options struct {
	ID       ID           // the batch's, if it is not 0
	IDs      *IDs         // else its id is the next of these that Observer, a Registrar, does not have
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
	// Payload is the current form of the batch; nil when it is gone. The batch owns it and may give
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

	Why    string // the reason of the last move; "put": it has not moved
	Since  int64  // by Options.Clock: when that was
	Unread bool   // it has moved to a slower tier since it was used
}

// A Batch is one Arrow record batch with a stable id. Its data is in at most one image per tier:
// the residents. One resident is current, and a use of the batch reads it. The others are clean
// images, in slower tiers as a rule: a batch that moves down onto one keeps those in between. They
// have the same bytes, because a batch's bytes never change, so a move onto one copies none. Their
// room counts as free (tier.Usage.Cached): their spaces drop them when others need it. The batch
// drops them when it is dropped, gets other bytes, or becomes current in their tier.
//
// All that happens to a batch follows the table at State. It is safe for concurrent use. Its
// creator owns it until it is handed to a repository or dropped.
type Batch struct {
	id       ID
	state    atomic.Uint32 // mu.State, for readers that need nothing else
	observer Observer
	clock    func() int64
	emit     func(events.Event) // of the engine of the observer, or of one that it wraps; may be nil
	panics   *guard.Log         // the engine's, or one to slog.Default

	mu struct {
		lockrank.Mutex[lockrank.Batch]
		Info                   // without Leased; update computes State and NextUse
		space    *tier.Space   // of the current resident; nil when it is gone
		clean    []cleanImage  // the fastest tier first; some may be gone; copied on write
		store    Observer      // the repository that holds the batch; nil if none does
		changed  chan struct{} // closed at the next change; nil without waiters
		moving   bool          // a Transit is open
		released bool          // dropped
		over     bool          // the drop was announced, and the observers get no further call
		gap      int64         // between uses, on average; 0 before the second
		hint     int64         // see Hint; 0 if there is none

		ahead func(events.Kind) // see CommitOptions.Ahead; nil if the batch was not prefetched
	}
}

// traits is what the methods of a payload have returned. They do not change.
type traits struct {
	form  PayloadType
	space *tier.Space
	bytes int64
	desc  *Descriptor // nil if the payload has none
}

// setPayloadLocked makes p, which has the traits t, the current resident; nil: it is gone.
func (b *Batch) setPayloadLocked(p Payload, t traits) {
	now := &b.mu.Info
	now.Payload, now.Form, now.Bytes, now.Space, b.mu.space = p, t.form, t.bytes, tier.ID{}, t.space
	if t.space != nil {
		now.Space = t.space.ID()
	}
	if t.desc != nil {
		now.Descriptor, now.Rows = t.desc, t.desc.Rows
	}
}

// inspect calls the methods of a payload that is offered to New, or to a commit of t, before
// anything changes. A panic is an error, and a payload without data, or with another number of rows
// than the batch, is a StateError.
func (b *Batch) inspect(t *Transit, p Payload) (s traits, err error) {
	defer guard.Error(&err, "a method of a payload")
	if p != nil {
		if d, ok := p.(interface{ Descriptor() *Descriptor }); ok {
			s.desc = d.Descriptor()
		}
		s.form, s.space, s.bytes = p.Type(), p.Space(), p.Bytes()
	}
	switch {
	case t == nil && s.space == nil:
		return s, &StateError{Batch: b.id, Op: "new", Status: MissingData}
	case s.space == nil || t != nil && s.desc != nil && t.desc != nil && s.desc.Rows != t.desc.Rows:
		return s, &StateError{Batch: b.id, State: InTransit, Op: "commit", Status: MissingData}
	}
	return s, nil
}

// cleanImage is a resident that is not current.
type cleanImage struct {
	payload Payload
	memory  *tier.Clean       // from its space's list one goroutine takes it, to use or to drop it
	changed func(events.Kind) // see CommitOptions.Retained
}

// created is the number of the last task of any batch.
var created atomic.Uint64

// New returns an idle batch that owns o.Payload. On an error, such as a panic of the payload's, the
// payload stays the caller's. If o.Observer is a Registrar and has another batch of the id, the error
// is ErrDuplicateID.
func New(o Options) (*Batch, error) {
	if o.ID == 0 && o.IDs == nil {
		return nil, errors.New("batch: an id above 0, or where ids come from, is required")
	}
	b := &Batch{id: o.ID, observer: o.Observer, clock: func() int64 { return time.Now().UnixNano() }}
	has, err := b.inspect(nil, o.Payload)
	if o.Payload == nil {
		err = fmt.Errorf("batch: the payload is nil: %w", err)
	}
	if err != nil {
		return nil, err
	}
	for of := o.Observer; of != nil && b.panics == nil; {
		if e, ok := of.(engine); ok {
			b.emit, b.panics = e.Engine()
		}
		wrapper, ok := of.(interface{ Unwrap() Observer })
		if !ok {
			break
		}
		of = wrapper.Unwrap()
	}
	if b.panics == nil {
		b.panics = new(guard.Log)
	}
	if _, own := o.Observer.(engine); !own && o.Observer != nil {
		b.observer = guarded{o.Observer, b.panics}
	}
	if o.Clock != nil {
		b.clock = func() (now int64) {
			now = time.Now().UnixNano() // if the clock panics
			b.panics.Do("a clock of batches", func() { now = o.Clock() })
			return now
		}
	}
	b.setPayloadLocked(o.Payload, has)    // no other goroutine has b
	b.mu.Place, b.mu.Version = o.Place, 1 // and the state is Idle
	b.mu.LastUse = b.clock()
	b.mu.Why, b.mu.Since = "put", b.mu.LastUse
	registrar, _ := o.Observer.(Registrar)
	for {
		if o.ID == 0 {
			b.id = o.IDs.Next()
		}
		b.mu.ID = b.id
		now, made := b.Info(), time.Now() // from when it is registered on the monitor can move it
		switch {
		case registrar != nil:
			err = register(registrar, b, now)
		case o.Observer != nil:
			b.observer.BatchChanged(b, now)
		}
		if err == nil {
			if b.emit != nil && registrar != nil {
				b.emit(events.Event{
					Kind: events.BatchPut, At: made, Origin: now.Place.Origin(), Batch: uint64(b.id),
					To: now.Space, Bytes: now.Bytes,
				})
			}
			b.watchLeases(o.Payload)
			if now.Leased && !b.leased(o.Payload) { // the last lease may have ended before it was watched
				b.announce()
			}
			return b, nil
		}
		if o.ID != 0 || !errors.Is(err, ErrDuplicateID) {
			return nil, fmt.Errorf("batch %d: %w", b.id, err)
		}
	}
}

// leased reports whether readers hold the memory of p, which is called with no lock held. A payload
// that panics, because the batch has changed by then, is not leased.
func (b *Batch) leased(p Payload) (is bool) {
	lockrank.AssertNone("a payload is asked for its leases")
	if l, ok := p.(leased); ok {
		defer b.panics.Recover("Payload.Leased")
		is = l.Leased() > 0
	}
	return is
}

// watchLeases has changes announced when the last lease of p ends: the batch can then be moved.
func (b *Batch) watchLeases(p Payload) {
	if l, ok := p.(leased); ok {
		defer b.panics.Recover("Payload.OnUnleased")
		l.OnUnleased(b.announce)
	}
}

// guarded is an observer of a program: its panics are logged.
type guarded struct {
	Observer
	panics *guard.Log
}

func (g guarded) BatchChanged(b *Batch, now Info) {
	defer g.panics.Recover("an observer of batches")
	g.Observer.BatchChanged(b, now)
}

func register(with Registrar, b *Batch, now Info) (err error) {
	defer guard.Error(&err, "an observer of batches")
	return with.Register(b, now)
}

// ID returns the batch's id.
func (b *Batch) ID() ID { return b.id }

// Info returns what the batch is like at one moment. It asks the payload for its leases, which may be
// a program's own function, so the caller must hold no lock.
func (b *Batch) Info() Info {
	now := b.Snapshot()
	now.Leased = b.leased(now.Payload)
	return now
}

// Copies lists the spaces that hold a clean image of the batch, the fastest tier first: a move
// there moves no bytes. Its room counts as free (tier.Usage.Cached). It goes when the room is
// needed, and with the batch.
func (b *Batch) Copies() (in []tier.ID) {
	b.EachClean(func(p Payload) { in = append(in, p.Space().ID()) })
	return in
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

// change is what a change entails. update does it after the change.
type change struct {
	old     Payload           // to release; nil if there is none
	images  bool              // the current image is another, or there is a new clean one
	made    *cleanImage       // the new one
	stale   bool              // clean images have other bytes than the current one
	ahead   func(events.Kind) // to call with outcome: the prefetch was useful or not; may be nil
	outcome events.Kind       // AheadUsed or AheadWasted
	event   events.Kind       // BatchUsed or BatchHinted; 0 for neither
	hint    int64             // of BatchHinted
}

// update makes a change under the lock, raises the version, and computes the state and the next use.
// Then, with no lock held, it frees the images that the batch no longer has, calls the observers (the
// repository before the batch's own), emits events and wakes waiters. An error of apply means that
// apply has changed nothing; other errors are those of a payload's release.
//
// A batch has at most one image in each tier: a new clean image replaces the one in its tier, and the
// current image makes one in its tier superfluous. A batch that was dropped loses its clean images
// and, when no handle is open, its payload.
func (b *Batch) update(apply func() (change, error)) error {
	b.mu.Lock()
	space, bytes := b.mu.Space, b.mu.Bytes
	c, err := apply()
	if err != nil {
		b.mu.Unlock()
		return err
	}
	now := &b.mu.Info
	now.Version++
	switch {
	case b.mu.released:
		now.State = Released
	case b.mu.moving:
		now.State = InTransit
	case now.Active > 0:
		now.State = Processing
	case now.Pending > 0:
		now.State = TaskCreated
	default:
		now.State = Idle
	}
	b.state.Store(uint32(now.State))
	if now.NextUse = b.mu.hint; b.mu.hint == 0 && b.mu.gap > 0 {
		now.NextUse = min(now.LastUse, Never-1-b.mu.gap) + b.mu.gap
	}
	store, over, waiting := b.mu.store, b.mu.over, b.mu.changed
	b.mu.changed, b.mu.over = nil, b.mu.released
	if b.mu.released { // an open handle keeps the batch, but no longer its repository
		b.mu.store = nil
	}
	var superfluous, keep []cleanImage
	if c.images || b.mu.released {
		if c.made != nil {
			keep = append(keep, *c.made)
		}
		for _, r := range b.mu.clean {
			in := r.payload.Space().Kind()
			if c.stale || in == now.Space.Kind || c.made != nil && in == c.made.payload.Space().Kind() {
				superfluous = append(superfluous, r)
			} else {
				keep = append(keep, r)
			}
		}
		slices.SortFunc(keep, func(a, b cleanImage) int {
			return cmp.Compare(a.payload.Space().Kind(), b.payload.Space().Kind())
		})
		b.mu.clean = keep
	}
	if b.mu.released {
		superfluous, b.mu.clean = append(superfluous, keep...), nil
		if now.Active == 0 {
			c.old = now.Payload
			b.setPayloadLocked(nil, traits{})
		}
	}
	info := *now
	b.mu.Unlock()

	lockrank.AssertNone("a batch's observers are called")
	err = release(c.old)
	for _, r := range superfluous {
		r.memory.Drop()
	}
	if !over { // else the drop was announced before
		info.Leased = b.leased(info.Payload)
		if store != nil {
			store.BatchChanged(b, info)
		}
		if b.observer != nil {
			b.observer.BatchChanged(b, info)
		}
	}
	if c.ahead != nil {
		c.ahead(c.outcome)
	}
	if isDropped := info.State == Released && !over; b.emit != nil && (c.event != 0 || isDropped) {
		ev := events.Event{
			Kind: c.event, Origin: info.Place.Origin(), Batch: uint64(b.id), To: info.Space, Bytes: info.Bytes,
			Hint: c.hint,
		}
		if c.event != 0 {
			b.emit(ev)
		}
		if isDropped {
			ev.Kind, ev.Hint, ev.To, ev.Bytes = events.BatchDropped, 0, space, bytes
			b.emit(ev)
		}
	}
	if waiting != nil {
		close(waiting)
	}
	return err
}

// announce calls the observers and wakes waiters, after a change that was made without update.
func (b *Batch) announce() { _ = b.update(func() (c change, _ error) { return c, nil }) }

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

func (b *Batch) errorLocked(op string, s Status) error {
	return &StateError{Batch: b.id, State: b.mu.State, Op: op, Status: s}
}

// barLocked returns an error if the batch is in transit or was dropped, for operations that need
// neither; nil in other states.
func (b *Batch) barLocked(op string) error {
	switch {
	case b.mu.released:
		return b.errorLocked(op, MissingData)
	case b.mu.moving:
		return b.errorLocked(op, InvalidState)
	}
	return nil
}

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

// Subscribe marks the batch as wanted where it is: the monitor does not choose
// it. The returned function ends the subscription; calling it again does nothing.
func (b *Batch) Subscribe() (cancel func()) {
	add := func(n int) {
		_ = b.update(func() (c change, err error) {
			b.mu.Subscribers += n
			return c, nil
		})
	}
	add(1)
	var ended atomic.Bool // not a sync.Once, because an observer that add calls may call cancel, too
	return func() {
		if !ended.Swap(true) {
			add(-1)
		}
	}
}

// SetPlace sets the batch's place in its plan, for a batch that no repository keeps.
func (b *Batch) SetPlace(p Place) {
	_ = b.update(func() (c change, err error) {
		if b.mu.Place == p {
			return c, errUnchanged
		}
		b.mu.Place = p
		return c, nil
	})
}

// errUnchanged reports that there is nothing to change.
var errUnchanged = errors.New("batch: it is so already")

// CreateTask announces work that needs the batch. While the batch is in transit
// it waits, until ctx ends. The caller must either Lock or CancelTask for it, or
// Drop the batch.
func (b *Batch) CreateTask(ctx context.Context) error { return b.await(ctx, b.TryCreateTask) }

// TryCreateTask is CreateTask, but fails while the batch is in transit.
func (b *Batch) TryCreateTask() error {
	return b.update(func() (c change, err error) {
		if err = b.barLocked("create task"); err == nil {
			b.addTaskLocked()
		}
		return c, err
	})
}

func (b *Batch) addTaskLocked() {
	made := created.Add(1)
	if b.mu.Pending == 0 {
		b.mu.Task = made
	}
	b.mu.Pending++
}

// CancelTask takes one pending task back.
func (b *Batch) CancelTask() error {
	const op = "cancel task"
	return b.update(func() (c change, err error) {
		switch {
		case b.mu.released:
			return c, b.errorLocked(op, MissingData)
		case b.mu.Pending == 0:
			return c, b.errorLocked(op, TaskNotCreated)
		}
		b.mu.Pending-- // it may be any of them, so the oldest counts still
		if b.mu.Pending == 0 {
			b.mu.Task = 0
		}
		return c, nil
	})
}

// A Transit is the right to replace a batch's payload, in this or another space. No other code
// reads, moves or drops the batch until the Transit ends by Commit or Abort, of which exactly one
// takes effect. It is safe for concurrent use.
type Transit struct {
	b       *Batch
	payload Payload     // the batch's, until the commit
	desc    *Descriptor // the batch's
	ended   atomic.Bool
	lost    runtime.Cleanup // see onForgotten
}

// Transit takes the batch in transit. It waits only while another caller has it in transit, until
// ctx ends; open handles are a StateError at once. The caller must Commit or Abort; a deferred
// Abort after a Commit does nothing.
func (b *Batch) Transit(ctx context.Context) (t *Transit, err error) {
	err = b.await(ctx, func() (err error) {
		t, err = b.TryTransit()
		return err
	})
	return t, err
}

// TryTransit is Transit, but fails while another has the batch in transit.
func (b *Batch) TryTransit() (*Transit, error) {
	t := &Transit{b: b}
	err := b.update(func() (c change, err error) {
		if err = b.barLocked("transit"); err == nil && b.mu.Active > 0 {
			err = b.errorLocked("transit", InvalidState)
		}
		if err != nil {
			return c, err
		}
		b.mu.moving = true
		t.payload, t.desc = b.mu.Payload, b.mu.Descriptor
		return c, nil
	})
	if err != nil {
		return nil, err
	}
	if invariants.Enabled {
		t.lost = onForgotten(t, "transit", b.id, invariants.Stack())
	}
	return t, nil
}

// Payload returns the batch's present payload, which stays the batch's and is valid until the
// transit ends; nil afterwards.
func (t *Transit) Payload() Payload {
	if t.ended.Load() {
		return nil
	}
	return t.payload
}

// Commit makes p the batch's payload and ends the transit. With createTask it also creates a task
// in the same step, so that nobody can move the batch away in between. Then it releases the old
// payload, so all device work that reads it must be done.
//
// After an error nothing has changed: the transit is still open, and p is the caller's. A p without
// data, or with another number of rows than the batch, is a StateError; a panic of p is an error; a
// transit that has ended is tier.ErrReleased. Committing the batch's present payload is allowed and
// releases nothing.
func (t *Transit) Commit(p Payload, createTask bool) error {
	_, err := t.b.Commit(context.Background(), t, p, CommitOptions{CreateTask: createTask})
	return err
}

// CommitOptions is what a commit does besides making a payload current.
type CommitOptions struct {
	CreateTask  bool // creates a task
	Open        bool // opens a handle, as Batch.Open does, so that the batch is not at rest in between
	Last        bool // with Open: drops the batch
	KeepPending bool // with Open: leaves pending tasks to their callers

	// Reason is that of a move, for Info.Why; "" changes nothing there. Slower is whether the move
	// goes to a slower tier.
	Reason string
	Slower bool

	// Ahead, if it is not nil, means that the move is a prefetch. It is called once, with no lock
	// held: with AheadUsed when the batch is used, or moved ahead again, and with AheadWasted when
	// it is dropped, or moves to a slower tier, before that.
	Ahead func(events.Kind)

	// Retained, if it is not nil, keeps the old payload as a clean image, if that is in a slower
	// tier and its space keeps it. Then Retained is called, with no lock held: with CopyMade before
	// any other goroutine can find the clean image, and once with CopyUsed or CopyDropped when it
	// is used or dropped.
	Retained func(events.Kind)
}

// Commit is Transit.Commit of a transit of b, with all its options.
func (b *Batch) Commit(ctx context.Context, t *Transit, p Payload, o CommitOptions) (h *Handle, err error) {
	if t.ended.Load() {
		return nil, tier.ErrReleased
	}
	has, err := b.inspect(t, p)
	if err != nil {
		return nil, err
	}
	if !t.ended.CompareAndSwap(false, true) {
		return nil, tier.ErrReleased
	}
	t.lost.Stop()
	now := b.clock()
	b.watchLeases(p)
	// With another descriptor the bytes may differ, and clean images have the old ones.
	stale := has.desc != nil && t.desc != nil && has.desc != t.desc
	var retained *cleanImage
	if o.Retained != nil && !stale {
		retained = retain(t.payload, has.space.Kind(), o.Retained)
	}
	err = b.update(func() (c change, err error) {
		b.setPayloadLocked(p, has)
		b.mu.moving = false
		if p != t.payload && retained == nil {
			c.old = t.payload
		}
		c.images, c.made, c.stale = true, retained, stale
		if o.Reason != "" {
			b.mu.Why, b.mu.Since, b.mu.Unread = o.Reason, now, b.mu.Unread || o.Slower
		}
		switch {
		case o.Ahead != nil:
			c.ahead, c.outcome, b.mu.ahead = b.mu.ahead, events.AheadUsed, o.Ahead
		case o.Slower && !o.Open:
			c.ahead, c.outcome, b.mu.ahead = b.mu.ahead, events.AheadWasted, nil
		}
		if o.CreateTask {
			b.addTaskLocked()
		}
		if o.Open {
			h = b.pinLocked(&c, opening{keepPending: o.KeepPending, last: o.Last, owner: reservation.OwnerOf(ctx)}, now)
		}
		return c, nil
	})
	// The batch already has its new payload, and the caller must get the handle. So an error of the
	// old one's release, which means that other code has released it or that it panicked, is none
	// of the commit.
	if err != nil && invariants.Enabled {
		panic("batch: releasing the old payload: " + err.Error())
	}
	if panicked, ok := errors.AsType[*guard.PanicError](err); ok {
		b.panics.Write(panicked)
	}
	return h, nil
}

// Fits returns the error that a commit of a transit of b would return for p, and changes nothing.
func (b *Batch) Fits(t *Transit, p Payload) error {
	_, err := b.inspect(t, p)
	return err
}

// Abort ends the transit and leaves the batch as it was. It returns
// tier.ErrReleased if the transit has ended.
func (t *Transit) Abort() error {
	if !t.ended.CompareAndSwap(false, true) {
		return tier.ErrReleased
	}
	t.lost.Stop()
	return t.b.update(func() (c change, err error) {
		t.b.mu.moving = false
		return c, nil
	})
}

// retain makes a payload in a slower tier than above a clean image, and returns nil if that is not
// possible. A program's payload never becomes one, even if it embeds one of ours, because it may
// have a Release of its own; nor does a scattered image, whose memory may be a program's. Host memory
// does not keep images that share dictionaries, because these would stay in use.
func retain(p Payload, above tier.Kind, changed func(events.Kind)) *cleanImage {
	img, ok := p.(*payload.Image)
	if !ok || img.Parts.Type == payload.ScatteredImage || len(img.Buffers()) == 0 {
		return nil
	}
	in, shares := p.Space().Kind(), len(img.Parts.Shared) > 0
	if in <= above || shares && !in.IsStorage() {
		return nil
	}
	made := func() { changed(events.CopyMade) }
	memory := p.Space().KeepClean(img.Buffers(), shares, made, func() {
		_ = p.Release() // the memory is the image's alone
		changed(events.CopyDropped)
	})
	if memory == nil {
		return nil
	}
	return &cleanImage{p, memory, changed}
}

// AddClean makes p a clean image of b, in place of one in the same tier; the state of b does not
// matter. of is p's descriptor, and changed is as CommitOptions.Retained. AddClean reports whether
// it took p over. It did not if p's space does not keep p. If b was dropped, has another descriptor
// or is current in p's tier, p is freed at once.
func (b *Batch) AddClean(p Payload, of *Descriptor, changed func(events.Kind)) (taken bool) {
	r := retain(p, tier.GPU, changed)
	if r == nil {
		return false
	}
	err := b.update(func() (c change, err error) {
		if b.mu.released || b.mu.Descriptor != of || b.mu.space.Kind() == p.Space().Kind() {
			return c, errUnchanged
		}
		c.images, c.made = true, r
		return c, nil
	})
	if err != nil {
		r.memory.Drop()
	}
	return true
}

// EachClean calls f with each clean image, with no lock held. It may be freed at any moment, so f
// may use its memory only under leases.
func (b *Batch) EachClean(f func(Payload)) {
	b.mu.Lock()
	all := b.mu.clean
	b.mu.Unlock()
	for _, r := range all {
		if r.memory.Listed() {
			f(r.payload)
		}
	}
}

// Promote makes the clean image of b in r's space a payload again, drawn from r, so that a move
// there copies no bytes. b must be in transit. The clean image must have the given form, unless
// that is "". The caller must commit or release the payload. Promote returns nil if there is none,
// or if r does not have the room.
func (b *Batch) Promote(form PayloadType, r *reservation.Reservation) Payload {
	b.mu.Lock()
	all := b.mu.clean
	b.mu.Unlock()
	for _, c := range all {
		if c.payload.Space() != r.Space() || form != "" && c.payload.Type() != form || !c.memory.Take() {
			continue
		}
		if err := r.Promote(c.memory); err != nil {
			c.memory.Release()
			return nil
		}
		c.changed(events.CopyUsed)
		return c.payload
	}
	return nil
}

// Drop ends the batch: its payload is freed, at once or, with handles open, when the last is
// closed. Pending tasks are gone with it. While the batch is in transit Drop fails with a
// StateError, and the caller may wait for Changed and try again. An error of the payload's is
// wrapped, and the batch is dropped.
func (b *Batch) Drop() error {
	return b.update(func() (c change, err error) {
		if err := b.barLocked("drop"); err != nil {
			return c, err
		}
		b.mu.released, b.mu.Pending, b.mu.Task = true, 0, 0
		c.ahead, c.outcome, b.mu.ahead = b.mu.ahead, events.AheadWasted, nil
		return c, nil
	})
}

// Discard is Drop for an owner whose batch the monitor may be moving: it waits until the transit,
// or ctx, ends.
func (b *Batch) Discard(ctx context.Context) error { return b.await(ctx, b.Drop) }

// The methods below, and Read, TryRead, Commit, Fits, AddClean, EachClean and Promote, are for this
// module's packages: repositories, the mover, the monitor, and lists of holders. Programs have no use
// for them. Callers must keep the rules in their comments.

// Snapshot is Info for callers that hold a lock which comes before a batch's in the lock order. It calls
// no method of the payload, so Leased is false.
func (b *Batch) Snapshot() Info {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.Info
}

// State returns the state of the batch. It takes no lock, for repositories that look at many batches.
func (b *Batch) State() State { return State(b.state.Load()) }

// Space returns the space that holds the batch, nil if it is gone. It calls no method of a
// program's payload.
func (b *Batch) Space() *tier.Space {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.space
}

// Attach makes store, a repository, the holder of the batch, and sets the batch's place; if store is
// the holder already, it sets the place alone. A batch that has another holder is ErrStored, so it
// cannot be in two repositories, or in one twice. From then on the batch calls store at each change,
// before its own observer. The caller may hold its own lock, and must call announce with no lock held.
func (b *Batch) Attach(store Observer, p Place) (announce func(), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.mu.released:
		return nil, b.errorLocked("store", MissingData)
	case b.mu.store != nil && b.mu.store != store:
		return nil, fmt.Errorf("batch %d: %w", b.id, ErrStored)
	}
	b.mu.store, announce = store, func() {}
	if b.mu.Place != p {
		b.mu.Place, announce = p, b.announce
	}
	return announce, nil
}

// Detach ends what Attach began; the batch keeps its place. If store does not hold
// the batch, nothing happens.
func (b *Batch) Detach(store Observer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.store == store {
		b.mu.store = nil
	}
}

// Describe fills in the batch and its place, for lists of holders such as tier.Space.Leaks.
func (b *Batch) Describe(h *tier.Holding) {
	place := b.Info().Place
	h.Batch, h.Plan = uint64(b.id), place.Name
	h.Operator, h.Port, h.Partition = place.Operator, place.Port, place.Partition
}
