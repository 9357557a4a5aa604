// Package repository holds the stores of batches between a plan's operators: one
// operator puts, the next takes, and in between the batches are in any memory that has room.
//
//	Manager ──Key──▶ Repository ──number──▶ partition ──in order of arrival──▶ batch.Batch
//	 one a plan       between two             a queue
//	                  operators
//
// Put lays a record out in the fastest memory with room and queues it. Take returns the oldest
// batch that can move to a state. Drain fetches one batch after the other to a tier, and Reader
// returns them as Arrow records. Claim reserves batches for a task, and gives them back if the task
// fails; ClaimAll does so for a task that needs the whole partition. Counting takes constant time,
// and taking a batch logarithmic time.
//
//	manager.go      the repositories of a plan, their order, and Clear
//	repository.go   Put and PutBatch; notes what the batches' states are (store.BatchChanged)
//	partition.go    the queue: which taker gets which batch
//	take.go         Take; claim, with which every taker begins
//	drain.go        Drain and Reader
//	claim.go        Claim and ClaimAll
//	ahead.go        prefetches what comes next
//	close.go        CloseInput and Close
//
// A repository moves no bytes. Put, Drain and Reader call the Mover of package convert.
//
// # Order
//
// Batches leave a partition in the order of arrival. A taker waits for a batch that the monitor is
// moving. Such a wait is short, because the monitor's moves wait for no memory and for no taker.
// Waits end with their contexts.
// A batch whose move fails, or whose GPU is lost, stays first, and its taker gets the error.
// Several takers of one partition get different batches, each in ascending order. Restored batches
// return to their places. Consumers that need no order pass Unordered, and then skip what is in
// transit.
//
// # Ownership
//
// A repository owns what was put until it is taken; from then on the taker must drop it or hand it
// on. A batch can be in one repository at a time, and in it once (batch.ErrStored). A failure
// on the way out leaves the batch in its place; a failure on the way in leaves nothing behind. The
// manager owns the repositories: closing it wakes all waiters and drops what is left.
//
// # Locks
//
// Each manager has a mutex of rank Manager, and each repository one of rank Repository. A
// repository reads the states of its batches under its mutex. It changes batches, moves bytes and
// calls observers with no lock held. So that no other taker gets the batch meanwhile, a taker first
// claims its entry (claim), and ends the claim with remove or putBack.
//
//	Monitor → [Manager] → [Repository] → Batch → Registry → Reservation → Space → …
package repository

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/google/btree"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// defaultPartitions is how many partitions a repository may have by default.
const defaultPartitions = 1 << 16

// Options configures a repository. The zero value means the defaults.
type Options struct {
	// Schema is the schema of all batches; nil means that of the first batch.
	Schema *arrow.Schema
	// Partitions is the maximum number of partitions, which are numbered from 0. 0 means 65,536. A
	// partition is made when it is first used.
	Partitions int
	// Placement is the spaces where Put lays batches out by default; nil means the fastest tier
	// with room now: GPU, then host, then disk.
	Placement reservation.Strategy
}

// validate checks what Create would refuse.
func (o Options) validate() error {
	if o.Partitions < 0 {
		return fmt.Errorf("repository: Partitions must be at least 0, got %d", o.Partitions)
	}
	return nil
}

// Repository is a partitioned store of batches between two operators: one puts,
// the other takes. In a partition the order is that of arrival. It is safe for
// concurrent use by any number of putters and takers; its Manager makes it.
//
// The repository owns what is put into it until it is taken. Until then batches
// may also be worked on where they are, see Batches.
type Repository struct {
	m    *Manager
	key  Key
	opts Options

	life context.Context // ends, with the reason, when the repository is closed
	end  context.CancelCauseFunc

	ended chan struct{} // closed by CloseInput

	nodes *btree.FreeListG[queued] // nodes of the sets of all partitions, for reuse

	mu struct {
		lockrank.Mutex[lockrank.Repository]
		schema      *arrow.Schema
		learned     chan struct{} // closed when the schema is known or never will be
		parts       map[int]*partition
		entries     map[batch.ID]*entry
		bytes       [tier.Disk + 1]int64 // charged for the batches, by tier
		rank        int                  // position in the plan: 0 for the scans; see batch.Place
		last        bool                 // the plan's output
		inputClosed bool
		closed      bool
		emptied     bool // closed, and no batch is left
	}
}

func newRepository(m *Manager, key Key, o Options) *Repository {
	if o.Partitions == 0 {
		o.Partitions = defaultPartitions
	}
	if o.Placement == nil {
		o.Placement = reservation.AnyInTiers(tier.GPU, tier.Host, tier.Disk)
	}
	r := &Repository{m: m, key: key, opts: o, ended: make(chan struct{}), nodes: btree.NewFreeListG[queued](32)}
	r.life, r.end = context.WithCancelCause(context.Background())
	r.mu.schema = o.Schema
	r.mu.learned = make(chan struct{})
	if o.Schema != nil {
		close(r.mu.learned)
	}
	r.mu.parts = make(map[int]*partition)
	r.mu.entries = make(map[batch.ID]*entry)
	return r
}

// Key returns the operator and port that the repository serves.
func (r *Repository) Key() Key { return r.key }

// closedError is what all callers get once the repository is closed.
func (r *Repository) closedError() error {
	return fmt.Errorf("repository %s: %w", r.key, tier.ErrClosed)
}

// within returns a context that also ends when the repository is closed. The
// caller must call done.
func (r *Repository) within(ctx context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(r.life, func() {
		labels.Cancel.Set()
		cancel(context.Cause(r.life))
	})
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// partitionLocked returns a partition, and makes it if it is new.
func (r *Repository) partitionLocked(n int) (*partition, error) {
	if n < 0 || n >= r.opts.Partitions {
		return nil, fmt.Errorf("repository %s, partition %d of %d: %w", r.key, n, r.opts.Partitions, ErrPartition)
	}
	p := r.mu.parts[n]
	if p == nil {
		p = newPartition(r, n)
		r.mu.parts[n] = p
	}
	return p, nil
}

// PutOption changes what one Put does.
type PutOption func(*putOptions)

type putOptions struct {
	placement reservation.Strategy
	noWait    bool
}

// WithPlacement puts the batch into a space of the strategy, for which Put waits.
func WithPlacement(s reservation.Strategy) PutOption {
	return func(o *putOptions) {
		if s != nil {
			o.placement = s
		}
	}
}

// WithoutWait makes Put return a tier.NoSpaceError where it would wait for room.
func WithoutWait() PutOption { return func(o *putOptions) { o.noWait = true } }

// Put copies rec into a batch at the end of the partition. It waits for room in the spaces of the
// placement: by default anywhere, the fastest memory first. When all memories are full, Put leaves
// headroom in each: room for one batch, so that consumers can still fetch theirs. It then waits
// until they have freed more, and returns a tier.NoSpaceError if nothing changes for
// Config.StallTimeout. The record stays the caller's. After an error nothing was put. A record of
// another schema is a *SchemaError, a partition out of range matches ErrPartition, and a repository
// whose input is closed matches tier.ErrClosed.
func (r *Repository) Put(ctx context.Context, partition int, rec arrow.RecordBatch, opts ...PutOption) error {
	if !r.m.calls.Enter() {
		return r.closedError()
	}
	defer r.m.calls.Leave()
	b, seq, err := r.ingest(ctx, partition, rec, opts...)
	if err != nil {
		return err
	}
	if err := r.insert(partition, b, seq); err != nil {
		return errors.Join(err, r.m.discard(b))
	}
	return nil
}

// discard drops a batch that no taker can get. The monitor may be moving it. discard waits for the
// end of that move, also if the caller's context has ended, because no other code would drop the
// batch. The wait is short: the monitor's moves wait for nothing. Once the mover is closed, only a
// program has batches in transit. Such a batch is left to the owner of the Transit, and the error
// is the cause of m.ended.
func (m *Manager) discard(b *batch.Batch) error { return b.Discard(m.ended) }

// ingest makes a batch of rec for the partition, without inserting it there, and returns its order
// of arrival.
func (r *Repository) ingest(
	ctx context.Context, partition int, rec arrow.RecordBatch, opts ...PutOption,
) (_ *batch.Batch, seq uint64, _ error) {
	o := putOptions{placement: r.opts.Placement}
	for _, opt := range opts {
		opt(&o)
	}
	mover := r.m.cfg.Mover
	if mover == nil {
		return nil, 0, fmt.Errorf("repository %s: putting a record needs a mover: %w", r.key, tier.ErrNotSupported)
	}
	if rec == nil {
		return nil, 0, fmt.Errorf("repository %s: putting into partition %d: the record is nil", r.key, partition)
	}
	place, err := r.admit(partition, rec.Schema()) // before the record is copied
	if err != nil {
		return nil, 0, err
	}
	inside, done := r.within(ctx)
	defer done()
	if r.m.cfg.Origins {
		of := events.From(ctx) // of a task, if a task calls Put
		of.Plan, of.Operator, of.Port, of.Partition = place.Name, place.Operator, place.Port, partition
		inside = events.With(inside, of)
	}
	ingest := mover.Ingest
	if o.noWait {
		ingest = mover.TryIngest
	}
	payload, err := ingest(inside, rec, o.placement)
	if err != nil {
		return nil, 0, fmt.Errorf("repository %s: putting into partition %d: %w", r.key, partition, err)
	}
	place.Seq = r.m.seq.Add(1)
	b, err := batch.New(batch.Options{
		IDs: r.m.ids, Payload: payload, Observer: r.m.cfg.Observer, Clock: r.m.cfg.Clock, Place: place,
	})
	if err != nil {
		return nil, 0, errors.Join(err, payload.Release())
	}
	return b, place.Seq, nil
}

// admit returns an error if a batch of the schema cannot be put into the partition, and otherwise
// the place of a batch there, without its seq.
func (r *Repository) admit(partition int, schema *arrow.Schema) (batch.Place, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, err := r.admitLocked(partition, schema)
	return r.placeLocked(0, partition), err
}

func (r *Repository) admitLocked(partition int, schema *arrow.Schema) (*partition, error) {
	if r.mu.closed || r.mu.inputClosed {
		return nil, fmt.Errorf("the input of repository %s: %w", r.key, tier.ErrClosed)
	}
	if r.mu.schema != nil && schema != nil && !r.mu.schema.Equal(schema) {
		return nil, &SchemaError{Key: r.key, Want: r.mu.schema, Got: schema}
	}
	return r.partitionLocked(partition)
}

func (r *Repository) placeLocked(seq uint64, partition int) batch.Place {
	return batch.Place{
		Plan: r.m.plan, Name: r.m.name, Rank: r.mu.rank, Last: r.mu.last, Seq: seq,
		Operator: r.key.Operator, Port: r.key.Port, Partition: partition,
	}
}

// PutBatch puts b at the end of the partition, whatever its state, and takes it over; it copies
// nothing. After an error b stays the caller's. Beside the errors of Put, a batch that is already
// in a repository matches batch.ErrStored, a dropped one batch.ErrState, and one whose id the
// repository already has ErrDuplicate. In a plan of an engine, b must have been made by
// Engine.NewBatch or with Engine.Observer: the engine would never evict or persist another, which
// is tier.ErrNotSupported.
func (r *Repository) PutBatch(partition int, b *batch.Batch) error {
	if b == nil {
		return fmt.Errorf("repository %s: putting into partition %d: the batch is nil", r.key, partition)
	}
	if o, ok := r.m.cfg.Observer.(batch.Registrar); ok && !o.Knows(b) && b.Info().State != batch.Released {
		return fmt.Errorf("repository %s: the engine does not know batch %d (make it with Engine.NewBatch): %w",
			r.key, b.ID(), tier.ErrNotSupported)
	}
	return r.insert(partition, b, 0)
}

// insert takes b over, and sets its place. seq is its order of arrival. If the partition has a
// batch with a later one, insert draws a new seq: other calls may have seen that batch, so it stays
// before b.
func (r *Repository) insert(partition int, b *batch.Batch, seq uint64) error {
	var schema *arrow.Schema
	if d := b.Inside().Cut().Descriptor; d != nil {
		schema = d.Schema
	}
	r.mu.Lock()
	announce, err := r.insertLocked(partition, b, seq, schema)
	r.mu.Unlock()
	if err == nil {
		announce()
	}
	return err
}

// insertLocked returns the function that announces the batch's place, to be called with no lock
// held.
func (r *Repository) insertLocked(
	partition int, b *batch.Batch, seq uint64, schema *arrow.Schema,
) (announce func(), err error) {
	p, err := r.admitLocked(partition, schema)
	if err != nil {
		return nil, err
	}
	if e := r.mu.entries[b.ID()]; e != nil && e.b != b {
		return nil, fmt.Errorf("repository %s, batch %d: %w", r.key, b.ID(), ErrDuplicate)
	}
	if seq <= p.last {
		seq = r.m.seq.Add(1)
	}
	// From here on the batch reports its changes to e, with a later Version than now has.
	e := &entry{b: b, seq: seq, part: p}
	now, announce, err := b.Inside().Store(e, r.placeLocked(seq, partition))
	if err != nil {
		return nil, fmt.Errorf("repository %s: %w", r.key, err)
	}
	e.version, e.class, e.kind, e.bytes = now.Version, class(now.State), now.Space.Kind, now.Bytes
	r.mu.entries[b.ID()] = e
	r.mu.bytes[e.kind] += e.bytes
	p.last = seq
	p.n++
	p.sets[e.class].ReplaceOrInsert(queued{seq, e})
	if r.mu.schema == nil && schema != nil {
		r.mu.schema = schema
		close(r.mu.learned)
	}
	p.matchLocked()
	return announce, nil
}

// settleAll sets the places of all batches again, after the plan's order has changed.
func (r *Repository) settleAll() {
	r.mu.Lock()
	var announce []func()
	for _, e := range r.mu.entries {
		announce = append(announce, e.b.Inside().StoreAt(e, r.placeLocked(e.seq, e.part.number)))
	}
	r.mu.Unlock()
	for _, f := range announce {
		f()
	}
}

// BatchChanged moves the entry to the set of the batch's new state, and gives it to a waiting
// taker. It implements batch.Observer.
func (e *entry) BatchChanged(_ *batch.Batch, now batch.Info) {
	r := e.part.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.class != gone && now.Version > e.version && r.noteLocked(e, now, e.class == claimed) {
		e.part.matchLocked()
	}
}

// noteLocked records what a batch is like now in its entry. It reports whether the caller must call
// matchLocked. It removes a dropped batch, unless it is claimed: then the claimer does.
func (r *Repository) noteLocked(e *entry, now batch.Info, isClaimed bool) bool {
	r.mu.bytes[e.kind] -= e.bytes
	e.kind, e.bytes, e.version = now.Space.Kind, now.Bytes, now.Version
	if now.State == batch.Released { // the batch makes no further call when its memory is freed
		e.bytes = 0
	}
	r.mu.bytes[e.kind] += e.bytes
	e.signalLocked()
	switch c := class(now.State); {
	case isClaimed:
		return false
	case now.State == batch.Released:
		r.takeOutLocked(e)
	case c == e.class:
		return false
	default:
		e.part.moveLocked(e, c)
	}
	return true
}

// unclaimLocked ends the claim of a taker that has failed. The entry returns to its place in the
// order, unless its batch was dropped. The caller calls matchLocked.
func (r *Repository) unclaimLocked(e *entry) {
	if e.class != gone {
		r.noteLocked(e, e.b.Inside().Cut(), false)
	}
}

// putBack is unclaimLocked with the lock. A waiting taker may then get the entry.
func (r *Repository) putBack(e *entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unclaimLocked(e)
	e.part.matchLocked()
}

// remove ends the claim of a taker that owns the batch from now on: the batch leaves the
// repository.
func (r *Repository) remove(e *entry) {
	r.mu.Lock()
	if e.class != gone {
		r.takeOutLocked(e)
		e.part.matchLocked()
	}
	r.mu.Unlock()
	e.b.Inside().Unstore(e)
}

// takeOutLocked removes an entry. The caller calls matchLocked.
func (r *Repository) takeOutLocked(e *entry) {
	e.part.moveLocked(e, gone)
	e.part.n--
	r.mu.bytes[e.kind] -= e.bytes
	delete(r.mu.entries, e.b.ID())
	e.signalLocked()
}

// Len returns how many batches a partition holds: 0 if it is not in use.
func (r *Repository) Len(partition int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.mu.parts[partition]; p != nil {
		return p.n
	}
	return 0
}

// Total returns how many batches the repository holds.
func (r *Repository) Total() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.mu.entries)
}

// Bytes returns how many bytes the repository's batches are charged in a tier. A batch that was
// dropped does not count, although open handles may keep its memory for a while, because no taker
// can get it.
func (r *Repository) Bytes(k tier.Kind) int64 {
	if !k.Valid() {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.bytes[k]
}

// Partitions returns the numbers of the partitions that are in use, ascending.
func (r *Repository) Partitions() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Sorted(maps.Keys(r.mu.parts))
}

// Peek returns the oldest batch of a partition, and whether there is one. The batch stays in the
// partition, so another caller may take it at any moment.
func (r *Repository) Peek(partition int) (*batch.Batch, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.mu.parts[partition]
	if p == nil {
		return nil, false
	}
	e := p.oldestLocked(idle, taskCreated, processing, inTransit, claimed)
	if e == nil {
		return nil, false
	}
	return e.b, true
}

// Batches yields the batches that a partition holds when the iteration begins, oldest first. They
// stay in the partition: a program that makes several passes uses them there, by CreateTask, Lock
// and Close of the handle. Others may take or drop a batch meanwhile, so each of these calls may
// return a *batch.StateError.
func (r *Repository) Batches(partition int) iter.Seq[*batch.Batch] {
	return func(yield func(*batch.Batch) bool) {
		r.mu.Lock()
		var entries []*entry
		if p := r.mu.parts[partition]; p != nil {
			entries = p.allLocked()
		}
		r.mu.Unlock()
		for _, e := range entries {
			if !yield(e.b) {
				return
			}
		}
	}
}
