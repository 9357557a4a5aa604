// Package repository holds the stores of batches between a plan's operators: one
// operator puts, the next takes, and in between the batches are in any memory that has room.
//
//	Manager --Key--> Repository --number--> partition --in order of arrival--> batch.Batch
//	 one a plan       between two             a queue
//	                  operators
//
// Put lays a record out in the fastest memory with room and queues it. Take returns the oldest
// batch that can move to a state. Drain fetches one batch after the other to a tier, and Reader
// returns them as Arrow records. Claim reserves batches for a task, and gives them back if the task
// fails; ClaimBytes does so by bytes, and ClaimAll for a task that needs the whole partition.
// Cursors read many partitions side by side, some rows at a time. Writer gathers rows into batches.
// Len and Total take constant time. So does taking a batch, except that a taker steps over the
// batches that it skips: those in use, and if it is Unordered those in transit.
//
//	manager.go      the repositories of a plan, their order, and Clear
//	repository.go   Put and PutBatch, and what a repository holds
//	queue.go        the queue of a partition and the line of its takers: who gets which batch
//	take.go         Take, Claim, ClaimBytes and ClaimAll
//	drain.go        Drain and Reader, and prefetching for both
//	cursors.go      Cursors
//	writer.go       Writer
//	close.go        CloseInput, Close and Clear
//
// A repository moves no bytes. Put, Drain, Reader and Cursors call the Mover of package convert.
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
// calls observers with no lock held. So that no other taker gets the batch meanwhile, each taker
// first claims its entry (Repository.claim). It ends the claim with remove or restore.
//
//	Monitor → [Manager] → [Repository] → Batch → Registry → Reservation → Space → …
package repository

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"

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
	// ByRows prepares batches for Cursors: Put and Writer make them with a checksum for each 4 KiB,
	// instead of each 64 KiB, and compress and encrypt pieces as small, so that little more is read
	// than the rows that are used. It costs 0.2 % of their size in Go heap memory, 1 % more where a
	// disk encrypts, and some of the effect of a codec. Batches of PutBatch stay as they were made.
	ByRows bool
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

	mu struct {
		lockrank.Mutex[lockrank.Repository]
		schema      *arrow.Schema
		parts       map[int]*partition
		entries     map[batch.ID]*entry
		place       batch.Place // of each batch, without its partition and seq
		inputClosed bool
		closed      bool
	}
}

func newRepository(m *Manager, key Key, o Options) *Repository {
	r := &Repository{m: m, key: key, opts: o}
	r.opts.Partitions = cmp.Or(o.Partitions, defaultPartitions)
	if o.Placement == nil {
		r.opts.Placement = reservation.AnyInTiers(tier.GPU, tier.Host, tier.Disk)
	}
	r.life, r.end = context.WithCancelCause(context.Background())
	r.mu.schema = o.Schema
	r.mu.parts = make(map[int]*partition)
	r.mu.entries = make(map[batch.ID]*entry)
	r.mu.place = batch.Place{Plan: m.plan, Name: m.name, Operator: key.Operator, Port: key.Port}
	return r
}

// Key returns the operator and port that the repository serves.
func (r *Repository) Key() Key { return r.key }

// closedError is what all callers get once the repository is closed.
func (r *Repository) closedError() error {
	return r.errorf(": %w", tier.ErrClosed)
}

// errorf returns an error about the repository. The format goes on after its name.
func (r *Repository) errorf(format string, args ...any) error {
	return fmt.Errorf("repository %s%w", r.key, fmt.Errorf(format, args...))
}

// within returns a context that also ends, with the reason, when life ends. The caller must call
// done.
func within(ctx, life context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(life, func() {
		labels.Cancel.Set()
		cancel(context.Cause(life))
	})
	return ctx, func() {
		stop()
		cancel(nil)
	}
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
	if !r.m.cfg.Calls.Enter() {
		return r.closedError()
	}
	defer r.m.cfg.Calls.Leave()
	b, err := r.ingest(ctx, partition, rec, opts...)
	if err != nil {
		return err
	}
	if _, err := r.insert(partition, b, true); err != nil {
		return errors.Join(err, b.Discard(r.m.ended))
	}
	return nil
}

// ingest makes a batch of rec for the partition, with its order of arrival, without inserting it
// there. A caller that cannot insert it calls Discard with m.ended: the monitor may be moving the
// batch. It waits for the end of that move, also if its context has ended, because no other code
// would drop the batch. The wait is short: the monitor's moves wait for no memory and no taker.
func (r *Repository) ingest(
	ctx context.Context, partition int, rec arrow.RecordBatch, opts ...PutOption,
) (*batch.Batch, error) {
	o := putOptions{placement: r.opts.Placement}
	for _, opt := range opts {
		opt(&o)
	}
	mover := r.m.cfg.Mover
	if mover == nil {
		return nil, r.errorf(": putting a record needs a mover: %w", tier.ErrNotSupported)
	}
	if rec == nil {
		return nil, r.errorf(": putting into partition %d: the record is nil", partition)
	}
	schema := rec.Schema() // a program's code, so not under the lock
	r.mu.Lock()
	_, err := r.admitLocked(partition, schema) // before the record is copied
	place := r.mu.place
	r.mu.Unlock()
	if err != nil {
		return nil, err
	}
	inside, done := within(ctx, r.life)
	defer done()
	if r.m.cfg.Origins {
		of := events.From(ctx) // of a task, if a task calls Put
		of.Plan, of.Operator, of.Port, of.Partition = place.Name, place.Operator, place.Port, partition
		inside = events.With(inside, of)
	}
	payload, err := mover.IngestAs(inside, rec, o.placement, !o.noWait, r.opts.ByRows)
	if err != nil {
		return nil, r.errorf(": putting into partition %d: %w", partition, err)
	}
	place.Seq, place.Partition = r.m.seq.Add(1), partition
	b, err := batch.New(batch.Options{
		IDs: r.m.cfg.IDs, Payload: payload, Observer: r.m.cfg.Observer, Clock: r.m.cfg.Clock, Place: place,
	})
	if err != nil {
		return nil, errors.Join(err, payload.Release())
	}
	return b, nil
}

// admitLocked returns the partition, or an error if no batch of the schema can be put into it.
func (r *Repository) admitLocked(number int, schema *arrow.Schema) (*partition, error) {
	if r.mu.closed || r.mu.inputClosed {
		return nil, fmt.Errorf("the input of repository %s: %w", r.key, tier.ErrClosed)
	}
	if r.mu.schema != nil && schema != nil && !r.mu.schema.Equal(schema) {
		return nil, &SchemaError{Key: r.key, Want: r.mu.schema, Got: schema}
	}
	return r.partitionLocked(number)
}

// PutBatch puts b at the end of the partition, whatever its state, and takes it over; it copies
// nothing. After an error b stays the caller's. Besides the errors of Put, a batch that is already
// in a repository matches batch.ErrStored, a dropped one batch.ErrState, and one whose id the
// repository already has ErrDuplicate. In a plan of an engine, b must have been made by
// Engine.NewBatch or with Engine.Observer: the engine would never evict or persist another, which
// is tier.ErrNotSupported.
func (r *Repository) PutBatch(partition int, b *batch.Batch) error {
	if b == nil {
		return r.errorf(": putting into partition %d: the batch is nil", partition)
	}
	if o, ok := r.m.cfg.Observer.(batch.Registrar); ok && !o.Knows(b) && b.Info().State != batch.Released {
		return r.errorf(": the engine does not know batch %d (make it with Engine.NewBatch): %w",
			b.ID(), tier.ErrNotSupported)
	}
	_, err := r.insert(partition, b, false)
	return err
}

// insert takes b over, and sets its place. An ingested batch has its order of arrival. If the
// partition has a batch with a later one, insert draws a new one: other calls may have seen that
// batch, so it stays before b.
func (r *Repository) insert(partition int, b *batch.Batch, ingested bool) (*entry, error) {
	now := b.Snapshot()
	e := &entry{b: b, size: now.Bytes}
	var schema *arrow.Schema
	if d := now.Descriptor; d != nil { // else the payload is a program's own
		schema, e.size = d.Schema, d.Body
	}
	r.mu.Lock()
	p, err := r.admitLocked(partition, schema)
	if other := r.mu.entries[b.ID()]; err == nil && other != nil && other.b != b {
		err = r.errorf(", batch %d: %w", b.ID(), ErrDuplicate)
	}
	if err != nil {
		r.mu.Unlock()
		return nil, err
	}
	place := r.mu.place
	place.Partition, place.Seq = partition, now.Place.Seq
	if !ingested || place.Seq <= p.last {
		place.Seq = r.m.seq.Add(1)
	}
	e.part, e.seq, p.last = p, place.Seq, place.Seq
	// From here on the batch reports its changes to e, which wait for the lock.
	announce, err := b.Attach(e, place)
	if err != nil {
		r.mu.Unlock()
		return nil, r.errorf(": %w", err)
	}
	e.at = p.queue.PushBack(e)
	if p.free == nil {
		p.free = e.at
	}
	r.mu.entries[b.ID()] = e
	if r.mu.schema == nil && schema != nil {
		r.mu.schema = schema
		for _, other := range r.mu.parts { // readers of other partitions may wait for it, too
			other.serveLocked()
		}
	}
	p.serveLocked()
	r.mu.Unlock()
	announce()
	return e, nil
}

// settle sets the places of all batches again, after the plan's order has changed.
func (r *Repository) settle() {
	r.mu.Lock()
	var announce []func()
	for _, e := range r.mu.entries {
		place := r.mu.place
		place.Partition, place.Seq = e.part.number, e.seq
		if f, err := e.b.Attach(e, place); err == nil { // else the batch was dropped
			announce = append(announce, f)
		}
	}
	r.mu.Unlock()
	for _, f := range announce {
		f()
	}
}

// Len returns how many batches a partition holds: 0 if it is not in use.
func (r *Repository) Len(partition int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.mu.parts[partition]; p != nil {
		return p.queue.Len()
	}
	return 0
}

// Total returns how many batches the repository holds.
func (r *Repository) Total() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.mu.entries)
}

// Bytes returns how many bytes the repository's batches are charged in a tier. It looks at each of
// them. A batch that was dropped does not count, although open handles may keep its memory for a
// while, because no taker can get it.
func (r *Repository) Bytes(k tier.Kind) (n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.mu.entries {
		if now := e.b.Snapshot(); now.Space.Kind == k && now.State != batch.Released {
			n += now.Bytes
		}
	}
	return n
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
	if p == nil || p.queue.Len() == 0 {
		return nil, false
	}
	return p.queue.Front().Value.(*entry).b, true
}

// Batches yields the batches that a partition holds when the iteration begins, oldest first. They
// stay in the partition: a program that makes several passes uses them there, by CreateTask, Lock
// and Close of the handle. Others may take or drop a batch meanwhile, so each of these calls may
// return a *batch.StateError.
func (r *Repository) Batches(partition int) iter.Seq[*batch.Batch] {
	return func(yield func(*batch.Batch) bool) {
		var all []*batch.Batch
		r.mu.Lock()
		if p := r.mu.parts[partition]; p != nil {
			for at := p.queue.Front(); at != nil; at = at.Next() {
				all = append(all, at.Value.(*entry).b)
			}
		}
		r.mu.Unlock()
		slices.Values(all)(yield)
	}
}
