package repository

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier"
)

// Key names a repository within a plan: the operator that takes from it, and at
// which of its ports.
type Key struct {
	Operator string
	Port     int
}

// String returns the key as "hash-join:0".
func (k Key) String() string { return k.Operator + ":" + strconv.Itoa(k.Port) }

// Mover is what repositories need of what moves batches.
type Mover interface {
	// IngestAs lays rec out in a space of the strategy, for which it waits; without waits it returns a
	// tier.NoSpaceError if there is no room now. byRows is for a batch that is to be read by rows. The
	// payload is the caller's; the record is only read.
	IngestAs(
		ctx context.Context, rec arrow.RecordBatch, to reservation.Strategy, waits, byRows bool,
	) (batch.Payload, error)
	// ReadRows reads the next rows of what h holds into the memory of rows, which is in space, and calls
	// release when the record is released, also on an error. A payload that cannot be read so is
	// tier.ErrNotSupported.
	ReadRows(
		ctx context.Context, h *batch.Handle, rows *image.Rows, space *tier.Space, release func(),
	) (arrow.RecordBatch, error)
	// Consume brings b to a space of the strategy, locks it there, and drops it in the step that
	// locks it. The caller must close the handle. On an error b is whole where it was.
	Consume(ctx context.Context, b *batch.Batch, to reservation.Strategy) (*batch.Handle, error)
	// Record opens what h holds as a record, which may be used beyond h.
	Record(ctx context.Context, h *batch.Handle) (arrow.RecordBatch, error)
	// Move moves b to a space of the strategy. A batch in use is a batch.ErrState.
	Move(ctx context.Context, b *batch.Batch, to reservation.Strategy) error
	// MoveAs is Move to a form, also within a space.
	MoveAs(ctx context.Context, b *batch.Batch, to reservation.Strategy, form batch.PayloadType) error
	// Ahead is Move for a prefetch: only if nobody needs the room, and it waits for nothing but the
	// transfer.
	Ahead(ctx context.Context, b *batch.Batch, to reservation.Strategy) error
	// Ended returns a context that ends when the mover is closed. From then on a batch in transit is
	// in a program's own Transit, which may stay open for ever.
	Ended() context.Context
}

// Config is what the repositories of a plan work with.
type Config struct {
	// Mover is needed to put records, to drain and to read; without one, batches
	// can only be handed over and taken.
	Mover Mover
	// IDs numbers the batches; nil: the manager has numbers of its own, which batches
	// that come otherwise (PutBatch) must not have.
	IDs *batch.IDs
	// Observer is called at every change of the batches that Put makes; may be nil. If it is a
	// batch.Registrar, PutBatch refuses batches that it does not know.
	Observer batch.Observer
	// Clock is what the batches read their last use from; nil for unix
	// nanoseconds.
	Clock func() int64
	// Origins makes each Put note its operator in its context (events.From), so that events can tell
	// its waits for room from others. It costs an allocation.
	Origins bool
	// Calls counts those calls of Put, FanOut and readers that have memory of batches which no
	// repository and no user has. The engine shuts it and waits for them when all plans are closed.
	// Nil means that nobody waits.
	Calls *guard.Gate
	// Reservations is where Writers and Cursors reserve their memory, which they need. Heap counts what
	// a Writer takes from the Go heap for rows that are larger than its batches.
	Reservations *reservation.Manager
	Heap         *arrowmem.HeapCounter
}

// Manager owns the repositories of one plan, and keeps their order. It is safe
// for concurrent use.
type Manager struct {
	name string
	plan uint64
	cfg  Config
	seq  atomic.Uint64 // of the last batch that arrived

	ended context.Context // Mover.Ended; never ends without a mover

	mu struct {
		lockrank.Mutex[lockrank.Manager]
		table   map[Key]*Repository
		order   []*Repository // from the scans to the output
		closed  bool
		emptied bool // closed, and nothing is left
	}
}

// NewManager returns a manager without repositories. The name is for error messages; plan is the
// number by which the batches' places distinguish plans.
func NewManager(name string, plan uint64, cfg Config) *Manager {
	m := &Manager{name: name, plan: plan, cfg: cfg, ended: context.Background()}
	m.cfg.IDs = cmp.Or(cfg.IDs, new(batch.IDs))
	m.cfg.Calls = cmp.Or(cfg.Calls, new(guard.Gate))
	if cfg.Mover != nil {
		m.ended = cfg.Mover.Ended()
	}
	m.mu.table = make(map[Key]*Repository)
	return m
}

func (m *Manager) closedError() error { return fmt.Errorf("plan %q: %w", m.name, tier.ErrClosed) }

// Create makes a repository, which is the last in the plan until Order changes that. A key that is
// in use matches ErrDuplicate.
func (m *Manager) Create(key Key, o Options) (*Repository, error) {
	if key.Operator == "" || key.Port < 0 {
		return nil, fmt.Errorf("repository: the key %q needs an operator and a port from 0", key)
	}
	if o.Partitions < 0 {
		return nil, fmt.Errorf("repository: Partitions must be at least 0, got %d", o.Partitions)
	}
	m.mu.Lock()
	if m.mu.closed {
		m.mu.Unlock()
		return nil, m.closedError()
	}
	if m.mu.table[key] != nil {
		m.mu.Unlock()
		return nil, fmt.Errorf("plan %q, repository %s: %w", m.name, key, ErrDuplicate)
	}
	r := newRepository(m, key, o)
	m.mu.table[key] = r
	m.mu.order = append(m.mu.order, r)
	changed := m.rankLocked(max(0, len(m.mu.order)-2)) // the other ranks stay
	m.mu.Unlock()
	for _, r := range changed {
		r.settle()
	}
	return r, nil
}

// Ensure returns the repository of a key, and makes it, with the default options, if there is none.
func (m *Manager) Ensure(key Key) (*Repository, error) {
	r, err := m.Create(key, Options{})
	if errors.Is(err, ErrDuplicate) {
		return m.Lookup(key)
	}
	return r, err
}

// Lookup returns the repository of a key, or an error that matches ErrUnknown.
func (m *Manager) Lookup(key Key) (*Repository, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	found, err := m.lookupLocked([]Key{key}, "")
	if err != nil {
		return nil, err
	}
	return found[0], nil
}

// lookupLocked returns the repositories of the keys, in their order. A key that is there twice is
// an error; in is for its message.
func (m *Manager) lookupLocked(keys []Key, in string) (found []*Repository, _ error) {
	for _, key := range keys {
		r := m.mu.table[key]
		if r == nil {
			return nil, fmt.Errorf("plan %q, repository %s: %w", m.name, key, ErrUnknown)
		}
		if slices.Contains(found, r) {
			return nil, fmt.Errorf("plan %q: repository %s is twice in %s", m.name, key, in)
		}
		found = append(found, r)
	}
	return found, nil
}

// Repositories returns the plan's repositories, from the scans to the output.
func (m *Manager) Repositories() []*Repository {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.mu.order)
}

// Order sets the order in which data flows through the repositories, from the scans
// to the output, whose own is the last. The monitor moves batches by it. Those that
// are not named stay before those that are, in the order they had. An unknown key,
// or one twice, is an error, which changes nothing.
func (m *Manager) Order(keys ...Key) error {
	m.mu.Lock()
	named, err := m.lookupLocked(keys, "the order")
	var changed []*Repository
	if err == nil {
		isNamed := func(r *Repository) bool { return slices.Contains(named, r) }
		m.mu.order = append(slices.DeleteFunc(m.mu.order, isNamed), named...)
		changed = m.rankLocked(0)
	}
	m.mu.Unlock()
	for _, r := range changed {
		r.settle()
	}
	return err
}

// rankLocked sets the ranks of the repositories from that place in the order on, and returns those
// whose rank has changed. The caller settles them once the lock is free.
func (m *Manager) rankLocked(from int) (changed []*Repository) {
	for i, r := range m.mu.order[from:] {
		rank, last := from+i, from+i == len(m.mu.order)-1
		r.mu.Lock()
		if p := &r.mu.place; p.Rank != rank || p.Last != last {
			p.Rank, p.Last = rank, last
			changed = append(changed, r)
		}
		r.mu.Unlock()
	}
	return changed
}

// FanOut puts one record into the same partition of several repositories. Each
// gets a batch of its own, with its own memory, because their consumers go their own
// ways. If one cannot be put, the others are taken back, except for those that a
// consumer has already.
func (m *Manager) FanOut(ctx context.Context, rec arrow.RecordBatch, partition int, keys ...Key) (err error) {
	m.mu.Lock()
	ports, err := m.lookupLocked(keys, "a fan-out")
	m.mu.Unlock()
	if err != nil {
		return err
	}
	if !m.cfg.Calls.Enter() {
		return m.closedError()
	}
	defer m.cfg.Calls.Leave()
	var copies []*batch.Batch // not inserted yet
	var inserted []*entry
	defer func() {
		for _, b := range copies {
			err = errors.Join(err, b.Discard(m.ended))
		}
		for _, e := range inserted {
			if err != nil {
				_, _, failed := e.part.r.drop(context.WithoutCancel(ctx), e, false)
				err = errors.Join(err, failed)
			}
		}
	}()
	for _, r := range ports { // all the copies first: most that can fail fails here
		b, err := r.ingest(ctx, partition, rec)
		if err != nil {
			return err
		}
		copies = append(copies, b)
	}
	for _, r := range ports {
		e, err := r.insert(partition, copies[0], true)
		if err != nil {
			return err
		}
		copies, inserted = copies[1:], append(inserted, e)
	}
	return nil
}

// Leftover is a repository with batches that Clear or Close dropped.
type Leftover struct {
	Key     Key
	Batches int
	Bytes   int64 // charged, in all tiers
}

// Clear drops the batches of all repositories, and returns the repositories that had some, in the
// plan's order: a plan whose work is complete has consumed everything. It waits, until ctx ends,
// for batches that are in transit or that a call is taking. The repositories stay open.
func (m *Manager) Clear(ctx context.Context) (report []Leftover, _ error) {
	var failed []error
	for _, r := range m.Repositories() {
		left, err := r.clear(ctx)
		if left.Batches > 0 {
			report = append(report, left)
		}
		failed = append(failed, err)
	}
	return report, errors.Join(failed...)
}

// Close closes all repositories: it wakes all waiters, drops the batches that are left, and returns
// the repositories that had some, as Clear does. It waits, until ctx ends, for batches that are in
// transit or that a call is taking; if that fails it may be called again. Once the mover is closed,
// the owner of a Transit owns its batch. Calls that are under way end soon, and then free their
// batches; Close does not wait for them, because an event of such a call may be the caller of
// Close. A second Close after one that succeeded returns tier.ErrClosed.
func (m *Manager) Close(ctx context.Context) ([]Leftover, error) {
	m.mu.Lock()
	if m.mu.emptied {
		m.mu.Unlock()
		return nil, m.closedError()
	}
	m.mu.closed = true
	m.mu.Unlock()
	for _, r := range m.Repositories() { // wake all first: one may wait for what another holds
		r.shut()
	}
	report, err := m.Clear(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.emptied = err == nil
	return report, err
}
