package repository

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/google/btree"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// DefaultPartitions is how many partitions a repository may have unless its
// Options say otherwise.
const DefaultPartitions = 1 << 16

// Options say what a repository is like. The zero value means the defaults.
type Options struct {
	// Schema is what all batches must have; nil: the first one that is put sets it.
	Schema *arrow.Schema
	// Partitions is how many there may be at most, numbered from 0. They are made
	// when they are first used. 0 means DefaultPartitions.
	Partitions int
	// Placement is where Put lays batches unless told otherwise; nil means the
	// fastest tier with room now: GPU, then host, then disk.
	Placement reservation.Strategy
}

// Validate checks what Create would refuse.
func (o Options) Validate() error {
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

	mu struct {
		lockrank.Mutex[lockrank.Repository]
		schema      *arrow.Schema
		learned     chan struct{} // closed when the schema is known or never will be
		parts       map[int]*partition
		nodes       *btree.FreeListG[*entry] // shared by all partitions
		entries     map[batch.ID]*entry
		bytes       [tier.Disk + 1]int64 // by kind
		rank        int
		last        bool
		inputClosed bool
		closed      bool
		emptied     bool // closed, and nothing is left
	}
}

func newRepository(m *Manager, key Key, o Options) *Repository {
	if o.Partitions == 0 {
		o.Partitions = DefaultPartitions
	}
	if o.Placement == nil {
		o.Placement = reservation.AnyInTiers(tier.GPU, tier.Host, tier.Disk)
	}
	r := &Repository{m: m, key: key, opts: o}
	r.life, r.end = context.WithCancelCause(context.Background())
	r.mu.schema = o.Schema
	r.mu.learned = make(chan struct{})
	if o.Schema != nil {
		close(r.mu.learned)
	}
	r.mu.parts = make(map[int]*partition)
	r.mu.nodes = btree.NewFreeListG[*entry](btree.DefaultFreeListSize)
	r.mu.entries = make(map[batch.ID]*entry)
	return r
}

// Key returns the operator and port that the repository serves.
func (r *Repository) Key() Key { return r.key }

// closedError is what everybody gets once the repository is closed.
func (r *Repository) closedError() error {
	return fmt.Errorf("repository %s: %w", r.key, tier.ErrClosed)
}

// within returns a context that also ends when the repository is closed. The
// caller must call done.
func (r *Repository) within(ctx context.Context) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(r.life, func() { cancel(context.Cause(r.life)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// unlock gives the lock back and then wakes whom s names.
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
		p = newPartition(r.mu.nodes)
		r.mu.parts[n] = p
	}
	return p, nil
}

// PutOption changes what one Put does.
type PutOption func(*putOptions)

type putOptions struct{ placement reservation.Strategy }

// WithPlacement puts the batch into a space of the strategy, for which Put waits.
func WithPlacement(s reservation.Strategy) PutOption {
	return func(o *putOptions) {
		if s != nil {
			o.placement = s
		}
	}
}

// Put copies rec into a batch at the end of the partition. It waits until there
// is room where the placement says: by default for room anywhere, the fastest
// memory first. The record stays the caller's. On an error nothing was put. A
// record of another schema is a *SchemaError, a partition out of range matches
// ErrPartition, and a repository whose input is closed matches tier.ErrClosed.
func (r *Repository) Put(ctx context.Context, partition int, rec arrow.RecordBatch, opts ...PutOption) error {
	b, err := r.ingest(ctx, partition, rec, opts...)
	if err != nil {
		return err
	}
	if err := r.insert(partition, b); err != nil {
		return errors.Join(err, b.Drop())
	}
	return nil
}

// ingest makes a batch of rec that is fit for the partition and not yet in it.
func (r *Repository) ingest(ctx context.Context, partition int, rec arrow.RecordBatch, opts ...PutOption) (*batch.Batch, error) {
	o := putOptions{placement: r.opts.Placement}
	for _, opt := range opts {
		opt(&o)
	}
	if r.m.cfg.Mover == nil {
		return nil, fmt.Errorf("repository %s: putting records needs a mover: %w", r.key, tier.ErrNotSupported)
	}
	place, err := r.admit(partition, rec.Schema())
	if err != nil {
		return nil, err
	}
	ctx, done := r.within(ctx)
	defer done()
	payload, err := r.m.cfg.Mover.Ingest(ctx, rec, o.placement)
	if err != nil {
		return nil, fmt.Errorf("repository %s: putting into partition %d: %w", r.key, partition, err)
	}
	b, err := batch.New(batch.Options{
		ID: r.m.ids.Next(), Payload: payload, Observer: r.m.cfg.Observer, Clock: r.m.cfg.Clock, Place: place,
	})
	if err != nil {
		return nil, errors.Join(err, payload.Release())
	}
	return b, nil
}

// admit checks what can be checked before anything dear is done, and returns
// the place that a batch put now will have.
func (r *Repository) admit(partition int, schema *arrow.Schema) (batch.Place, error) {
	seq := r.m.seq.Add(1)
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := r.admitLocked(partition, schema); err != nil {
		return batch.Place{}, err
	}
	return r.placeLocked(seq), nil
}

func (r *Repository) admitLocked(partition int, schema *arrow.Schema) (*partition_, error) {
	if r.mu.closed || r.mu.inputClosed {
		return nil, r.closedError()
	}
	if r.mu.schema != nil && schema != nil && !r.mu.schema.Equal(schema) {
		return nil, &SchemaError{Key: r.key, Want: r.mu.schema, Got: schema}
	}
	return r.partitionLocked(partition)
}

func (r *Repository) placeLocked(seq uint64) batch.Place {
	return batch.Place{Plan: r.m.plan, Rank: r.mu.rank, Last: r.mu.last, Seq: seq}
}

// PutBatch hands b over, whatever its state, and puts it at the end of the
// partition; nothing is copied. On an error b stays the caller's: besides those of
// Put, a batch that is in a repository already matches batch.ErrKept, one that
// was dropped batch.ErrState, and one whose id the repository has already
// ErrDuplicateBatch.
func (r *Repository) PutBatch(partition int, b *batch.Batch) error {
	place, err := r.admit(partition, schemaOf(b))
	if err != nil {
		return err
	}
	before := b.Place()
	b.SetPlace(place)
	if err := r.insert(partition, b); err != nil {
		b.SetPlace(before)
		return err
	}
	return nil
}
