// Package repository holds the stores of batches between a plan's operators: one
// operator puts, the next takes, and in between the batches lie in whatever memory
// has room.
//
//	Manager ──Key──▶ Repository ──number──▶ partition ──in order of arrival──▶ batch.Batch
//	 one a plan       between two             a queue
//	                  operators
//
// Put lays a record out in the fastest memory with room and queues it; Take hands
// the oldest batch over that can move to a state; Drain brings one after the other to
// a tier, and Reader makes Arrow records of them again. Claim sets batches apart for a
// task, which may fail and must leave them where they were; ClaimAll does so for a task
// that needs the whole partition. Taking and counting do not depend on how many batches
// there are.
//
// # Order
//
// Batches leave a partition in the order of arrival. A taker waits for a batch that the monitor is
// moving: a move waits for no memory and for no taker, so this ends. Waits end with their contexts.
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
// Each manager has a mutex of rank Manager, and each repository one of rank Repository. States of
// batches are read under the latter. All that changes a batch, moves bytes, or calls an observer
// happens with no lock held, between a claim, which reserves a batch for one taker, and its end.
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

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/compact"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// defaultPartitions is how many partitions a repository may have unless its
// Options say otherwise.
const defaultPartitions = 1 << 16

// Options say what a repository is like. The zero value means the defaults.
type Options struct {
	// Schema is what all batches must have; nil: the first one that is put sets it.
	Schema *arrow.Schema
	// Partitions is how many there may be at most, numbered from 0. They are made
	// when they are first used. 0 means 65,536.
	Partitions int
	// Placement is where Put lays batches by default; nil means the fastest tier with room now:
	// GPU, then host, then disk.
	Placement reservation.Strategy
}

// validate checks what Create would refuse.
func (o Options) validate() error {
	if o.Partitions < 0 {
		return fmt.Errorf("repository: a repository of %d partitions", o.Partitions)
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

	ended chan struct{} // closed when the input is

	store batch.Observer // *store: what batches have a pointer to

	mu struct {
		lockrank.Mutex[lockrank.Repository]
		schema      *arrow.Schema
		learned     chan struct{} // closed when the schema is known or never will be
		parts       map[int]*partition
		list        []*partition // all of parts, as records name them
		records     compact.Table[*batch.Batch, facts]
		ids         compact.Order                  // of the records, by the batches' ids; empty when it is closed
		changed     map[*batch.Batch]chan struct{} // closed when its record changes
		bytes       [tier.Disk + 1]int64           // by kind
		rank        int
		last        bool
		inputClosed bool
		closed      bool
		emptied     bool // closed, and nothing is left
	}
}

func newRepository(m *Manager, key Key, o Options) *Repository {
	if o.Partitions == 0 {
		o.Partitions = defaultPartitions
	}
	if o.Placement == nil {
		o.Placement = reservation.AnyInTiers(tier.GPU, tier.Host, tier.Disk)
	}
	r := &Repository{m: m, key: key, opts: o, ended: make(chan struct{})}
	r.store = (*store)(r)
	r.life, r.end = context.WithCancelCause(context.Background())
	r.mu.schema = o.Schema
	r.mu.learned = make(chan struct{})
	if o.Schema != nil {
		close(r.mu.learned)
	}
	r.mu.parts = make(map[int]*partition)
	r.mu.records.Moved = r.movedLocked
	r.mu.ids.Block = func(n uint32) *uint32 { return &r.mu.records.At(n).named }
	r.mu.changed = make(map[*batch.Batch]chan struct{})
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

// unlock releases the lock and then wakes the waiters in s.
func (r *Repository) unlock(s *signals) {
	r.mu.Unlock()
	s.fire()
}

// partitionLocked returns a partition, and makes it if it is new.
func (r *Repository) partitionLocked(n int) (*partition, error) {
	if n < 0 || n >= r.opts.Partitions {
		return nil, fmt.Errorf("repository %s, partition %d of %d: %w", r.key, n, r.opts.Partitions, ErrPartition)
	}
	p := r.mu.parts[n]
	if p == nil {
		p = newPartition(r, n, uint32(len(r.mu.list)))
		r.mu.parts[n] = p
		r.mu.list = append(r.mu.list, p)
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

// Put copies rec into a batch at the end of the partition. It waits until there is room where the
// placement says: by default for room anywhere, the fastest memory first. When all memories are
// full, consumers go first: what comes up to them keeps room for one batch in each, and Put waits
// until they have freed more. It returns a tier.NoSpaceError if nobody does for Config.StuckAfter.
// The record stays the caller's. On an error nothing was put. A record of another schema is a
// *SchemaError, a partition out of range matches ErrPartition, and a repository whose input is
// closed matches tier.ErrClosed.
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

// discard drops a batch that no taker can get. The monitor knows it and may be moving it just now.
// discard waits for that, whatever contexts of callers say, because no other code would drop it. It
// is not long: the monitor's moves wait for nothing. Once the mover is closed, only a program has
// batches in transit. Such a batch is left to the owner of the Transit, and the error is the cause
// of m.ended.
func (m *Manager) discard(b *batch.Batch) error { return b.Discard(m.ended) }

// ingest makes a batch of rec that is fit for the partition and not yet in it, and returns the
// order of its arrival.
func (r *Repository) ingest(ctx context.Context, partition int, rec arrow.RecordBatch, opts ...PutOption) (_ *batch.Batch, seq uint64, _ error) {
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
		of := events.From(ctx) // a task's, if it puts what it has made
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

// admit refuses what cannot be put into the partition. Else it returns the place of a batch there,
// without its seq.
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

// PutBatch hands b over, whatever its state, and puts it at the end of the
// partition; nothing is copied. On an error b stays the caller's: besides those of
// Put, a batch that is in a repository already matches batch.ErrStored, one that
// was dropped batch.ErrState, and one whose id the repository has already
// ErrDuplicate. In a plan of an engine's a batch must be known to the engine, as one
// that is made by Engine.NewBatch or with Engine.Observer is: another would never be moved or
// kept, and is tier.ErrNotSupported.
func (r *Repository) PutBatch(partition int, b *batch.Batch) error {
	if b == nil {
		return fmt.Errorf("repository %s: putting into partition %d: the batch is nil", r.key, partition)
	}
	if o, ok := r.m.cfg.Observer.(batch.Registrar); ok && !o.Knows(b) && b.Info().State != batch.Released {
		return fmt.Errorf("repository %s: the engine does not know batch %d (make it with Engine.NewBatch): %w", r.key, b.ID(), tier.ErrNotSupported)
	}
	return r.insert(partition, b, 0)
}

// insert takes b over, and sets its place. seq is its order of arrival. Another is drawn if a batch
// of the partition has a later one: that may have been seen there, and stays before b.
func (r *Repository) insert(partition int, b *batch.Batch, seq uint64) error {
	tell, err := r.insertUntold(partition, b, seq)
	if err != nil {
		return err
	}
	tell()
	return nil
}

// insertUntold is insert. The caller calls tell once the lock is free.
func (r *Repository) insertUntold(partition int, b *batch.Batch, seq uint64) (tell func(), err error) {
	var schema *arrow.Schema
	if d := b.Info().Descriptor; d != nil {
		schema = d.Schema
	}
	var s signals
	r.mu.Lock()
	defer r.unlock(&s)
	p, err := r.admitLocked(partition, schema)
	if err != nil {
		return nil, err
	}
	id := compact.Key{uint64(b.ID())}
	if n := r.mu.ids.Find(id); n != 0 && r.mu.records.Of(n) != b {
		return nil, fmt.Errorf("repository %s, batch %d: %w", r.key, b.ID(), ErrDuplicate)
	}
	if seq <= p.last {
		seq = r.m.seq.Add(1)
	}
	now, tell, err := b.Inside().Store(&r.store, r.placeLocked(seq, partition)) // changes from here on come through BatchChanged
	if err != nil {
		return nil, fmt.Errorf("repository %s: %w", r.key, err)
	}
	p.last = seq
	n := r.mu.records.Add(b)
	b.Inside().Slot().Store(n)
	rec := r.mu.records.At(n)
	*rec = facts{seq: seq, part: p.index, class: class(now.State), kind: now.Space.Kind, bytes: now.Bytes, told: uint32(now.Version)}
	r.mu.ids.Insert(n, id)
	r.mu.bytes[rec.kind] += rec.bytes
	p.n++
	p.listLocked(n, rec)
	if r.mu.schema == nil && schema != nil {
		r.mu.schema = schema
		s.add(r.mu.learned)
	}
	p.matchLocked(r, &s)
	return tell, nil
}

// setRank sets the repository's position in its plan. The caller then calls settleAll, with no lock
// held.
func (r *Repository) setRank(rank int, last bool) (changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed = rank != r.mu.rank || last != r.mu.last
	r.mu.rank, r.mu.last = rank, last
	return changed
}

// settleAll gives the batches their places.
func (r *Repository) settleAll() {
	r.mu.Lock()
	var tells []func()
	for b := range r.mu.records.All() {
		rec := r.mu.records.At(r.numberLocked(b))
		tells = append(tells, b.Inside().StoreAt(&r.store, r.placeLocked(rec.seq, r.mu.list[rec.part].number)))
	}
	r.mu.Unlock()
	for _, tell := range tells {
		tell()
	}
}

// all returns what the repository holds, by partition.
func (r *Repository) all() (entries []entry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range slices.Sorted(maps.Keys(r.mu.parts)) {
		entries = append(entries, r.mu.parts[n].allLocked()...)
	}
	return entries
}

// store is a Repository as the batches in it know it.
type store Repository

// BatchChanged notes what state a batch is in.
func (st *store) BatchChanged(b *batch.Batch, now batch.Info) {
	r := (*Repository)(st)
	var s signals
	r.mu.Lock()
	defer r.unlock(&s)
	n := r.numberLocked(b)
	if n == 0 {
		return
	}
	rec := r.mu.records.At(n)
	p := r.mu.list[rec.part]
	if int32(uint32(now.Version)-rec.told) > 0 && r.noteLocked(n, now, rec.class == claimed, &s) {
		p.matchLocked(r, &s)
	}
}

// numberLocked returns the number of a batch's record; 0 if the repository does not hold it.
func (r *Repository) numberLocked(b *batch.Batch) uint32 {
	if n := b.Inside().Slot().Load(); r.mu.records.Of(n) == b {
		return n
	}
	return 0
}

// recordLocked returns the number and the record of an entry; 0 and nil if it is gone.
func (r *Repository) recordLocked(e entry) (n uint32, rec *facts) {
	if n = r.numberLocked(e.b); n == 0 {
		return 0, nil
	}
	if rec = r.mu.records.At(n); rec.seq != e.seq { // it was taken, and put again
		return 0, nil
	}
	return n, rec
}

// movedLocked is told that a record has another number. Its batch is the repository's, and so is
// the batch's slot.
func (r *Repository) movedLocked(b *batch.Batch, from, to uint32) {
	b.Inside().Slot().Store(to)
	rec := r.mu.records.At(to)
	if !r.mu.closed {
		r.mu.ids.Renumber(from, to)
	}
	r.mu.list[rec.part].sets[rec.class].Renumber(from, to)
}

// noteLocked records a cut through the batch of a record. It leaves it to the caller to serve the
// waiters, and reports whether that must be done. A dropped batch is removed, unless it is claimed
// and its claimer will find out.
func (r *Repository) noteLocked(n uint32, now batch.Info, isClaimed bool, s *signals) bool {
	rec := r.mu.records.At(n)
	r.mu.bytes[rec.kind] -= rec.bytes
	rec.kind, rec.bytes, rec.told = now.Space.Kind, now.Bytes, uint32(now.Version)
	if now.State == batch.Released { // there may be no further call, when its memory is free
		rec.bytes = 0
	}
	r.mu.bytes[rec.kind] += rec.bytes
	r.signalLocked(r.mu.records.Of(n), s)
	switch c := class(now.State); {
	case isClaimed:
		return false
	case now.State == batch.Released:
		r.takeOutLocked(n, s)
	case c == rec.class:
		return false
	default:
		r.mu.list[rec.part].moveLocked(n, rec, c)
	}
	return true
}

// unclaimLocked ends a claim whose taker has failed: the batch is where it was, unless it was
// dropped. It leaves it to the caller to serve the waiters.
func (r *Repository) unclaimLocked(e entry, s *signals) {
	if n, _ := r.recordLocked(e); n != 0 {
		r.noteLocked(n, e.b.Inside().Cut(), false, s)
	}
}

// putBack ends the claim of a call that has failed.
func (r *Repository) putBack(e entry) {
	var s signals
	r.mu.Lock()
	defer r.unlock(&s)
	if _, rec := r.recordLocked(e); rec != nil {
		p := r.mu.list[rec.part]
		r.unclaimLocked(e, &s)
		p.matchLocked(r, &s)
	}
}

// remove ends a claim whose taker has the batch now.
func (r *Repository) remove(e entry) {
	var s signals
	r.mu.Lock()
	if n, rec := r.recordLocked(e); n != 0 {
		p := r.mu.list[rec.part]
		r.takeOutLocked(n, &s)
		p.matchLocked(r, &s)
	}
	r.unlock(&s)
	e.b.Inside().Unstore(&r.store)
}

// takeOutLocked forgets a record. Others may get its number, or have other ones from then on.
func (r *Repository) takeOutLocked(n uint32, s *signals) {
	b, rec := r.mu.records.Of(n), r.mu.records.At(n)
	p := r.mu.list[rec.part]
	p.sets[rec.class].Remove(n)
	p.n--
	if !r.mu.closed {
		r.mu.ids.Remove(n)
	}
	r.mu.bytes[rec.kind] -= rec.bytes
	r.mu.records.Remove(n)
	r.signalLocked(b, s)
}

// signalLocked wakes who waits for a change of a batch's record.
func (r *Repository) signalLocked(b *batch.Batch, s *signals) {
	if len(r.mu.changed) > 0 {
		s.add(r.mu.changed[b])
		delete(r.mu.changed, b)
	}
}

// awaitLocked returns what is closed when the record of a batch changes.
func (r *Repository) awaitLocked(b *batch.Batch) <-chan struct{} {
	ch := r.mu.changed[b]
	if ch == nil {
		ch = make(chan struct{})
		r.mu.changed[b] = ch
	}
	return ch
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
	return r.mu.records.Len()
}

// Bytes returns how many bytes the repository's batches are charged in a tier. A batch that was
// dropped counts nothing, although open handles may keep its memory for a while: it is not data
// that a taker could get.
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

// Peek returns the oldest batch of a partition, which stays in it, and whether
// there is one. By then another may have taken it.
func (r *Repository) Peek(partition int) (*batch.Batch, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.mu.parts[partition]
	if p == nil {
		return nil, false
	}
	e := p.oldestLocked(idle, taskCreated, processing, inTransit, claimed)
	return e.b, e.b != nil
}

// Batches goes through the batches that a partition holds when the iteration
// begins, oldest first. They stay where they are: an engine that makes several passes works
// on them in place, by creating a task, locking, and closing the handle. Others may
// take or drop a batch meanwhile, so that any step on it may be a *batch.StateError.
func (r *Repository) Batches(partition int) iter.Seq[*batch.Batch] {
	return func(yield func(*batch.Batch) bool) {
		r.mu.Lock()
		var entries []entry
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
