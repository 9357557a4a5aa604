package job

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// load puts every batch of every input. Each input has its own repository, because the batches of a
// repository have one schema.
func (j *job) load(ctx context.Context) error {
	for i, in := range j.cfg.Inputs {
		repo, err := j.plan.Repository("load", i)
		if err != nil {
			return err
		}
		if err := j.loadInput(ctx, repo, in); err != nil {
			return err
		}
	}
	slices.SortFunc(j.items, func(a, b item) int { return cmp.Compare(a.seq, b.seq) })
	return nil
}

// loader loads one input. It has one goroutine that decodes, or several if the source is a Divided.
type loader struct {
	*job
	repo    *repository.Repository
	in      Input
	seq     int64 // of the input's first put
	held    *semaphore.Weighted
	most    int64    // the size of held: the maximum of decoded bytes that wait to be put
	shelves [][]item // the items that were put into each partition, in order
	// turns has a channel for each worker's partitions, which has an element during a put. So a partition
	// has one put at a time, and the order of its items is that of its batches.
	turns []chan struct{}
}

func (j *job) loadInput(ctx context.Context, repo *repository.Repository, in Input) (err error) {
	src, err := in.Open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	n := min(j.cfg.Workers, j.cfg.Partitions)
	l := &loader{
		job: j, repo: repo, in: in, seq: int64(len(j.items)), most: cmp.Or(j.cfg.Held, math.MaxInt64),
		shelves: make([][]item, j.cfg.Partitions), turns: make([]chan struct{}, n),
	}
	for i := range l.turns {
		l.turns[i] = make(chan struct{}, 1)
	}
	l.held = semaphore.NewWeighted(l.most)
	group, ctx := errgroup.WithContext(ctx)
	if d, ok := src.(Divided); ok {
		of := int64(min(n, runtime.GOMAXPROCS(0)))
		for number := range of {
			group.Go(func() error { return l.decode(ctx, group, d.Part(number, of), number, of, d.BatchBytes()) })
		}
	} else {
		group.Go(func() error { return l.decode(ctx, group, src, 0, 1, 0) })
	}
	err = group.Wait()
	return errors.Join(err, l.collect(err == nil))
}

// decode reads a part of the source: every of-th batch, beginning with batch number. It reserves, in
// held, the size of the previous batch before it decodes the next, and corrects that afterwards. size is
// the expected size of the first one; 0: not known.
func (l *loader) decode(ctx context.Context, group *errgroup.Group, src Source, number, of, size int64) error {
	piece := make([]byte, 1<<20)
	for ; ; number += of {
		held := min(size, l.most) // a larger batch waits until it is alone
		if err := l.held.Acquire(ctx, held); err != nil {
			return context.Cause(ctx)
		}
		rec, err := src.Next(ctx)
		if err == io.EOF {
			l.held.Release(held)
			return nil
		}
		if err != nil {
			return err
		}
		size = convert.LogicalBytes(rec)
		if more := min(size, l.most) - held; more <= 0 || l.held.TryAcquire(more) {
			l.held.Release(max(0, -more))
			held += more
		}
		it := item{name: l.in.Name, number: number + 1, repo: l.repo}
		it.digest, err = digest(rec, piece)
		left := new(atomic.Int64) // puts of the batch
		left.Store(int64(l.cfg.Repeat))
		for i := 0; err == nil && i < l.cfg.Repeat; i++ {
			it.seq = l.seq + number*int64(l.cfg.Repeat) + int64(i)
			it.partition = int(it.seq % int64(l.cfg.Partitions))
			turn := l.turns[it.partition%len(l.turns)]
			select {
			case turn <- struct{}{}:
			case <-ctx.Done():
				err = context.Cause(ctx)
				continue
			}
			rec.Retain()
			put := it
			group.Go(func() error {
				err := l.put(ctx, rec, put)
				rec.Release()
				if left.Add(-1) == 0 {
					l.held.Release(held)
				}
				<-turn
				return err
			})
		}
		rec.Release()
		if err != nil {
			return it.named(err)
		}
	}
}

func (l *loader) put(ctx context.Context, rec arrow.RecordBatch, it item) error {
	var opts []repository.PutOption
	if !l.cfg.Fits {
		opts = append(opts, repository.WithPlacement(reservation.AnyInTier(tier.GPU)))
	}
	if err := l.repo.Put(ctx, it.partition, rec, opts...); err != nil {
		return it.named(err)
	}
	l.shelves[it.partition] = append(l.shelves[it.partition], it)
	l.cfg.Progress.Step()
	return nil
}

// collect counts the batches that were put. If all of them were, it adds the batches to their items.
func (l *loader) collect(all bool) error {
	for partition, items := range l.shelves {
		batches := slices.Collect(l.repo.Batches(partition))
		for _, b := range batches {
			if d := b.Info().Descriptor; d != nil { // else its data is gone
				l.res.Rows += d.Rows
				l.res.Bytes += d.Body
			}
			l.res.Batches++
		}
		if !all {
			continue
		}
		if len(batches) != len(items) {
			return fmt.Errorf("partition %d holds %d batches, and %d were put", partition, len(batches), len(items))
		}
		for i := range items {
			items[i].b = batches[i]
		}
		l.items = append(l.items, items...)
	}
	return nil
}

// digest returns the digest of rec's image: of its body, followed by its dictionaries. It lays them out
// piece by piece, because no space accounts for the memory of a whole batch.
func digest(rec arrow.RecordBatch, piece []byte) (sum tier.Digest, err error) {
	l, err := convert.NewLayout(rec)
	if err != nil {
		return tier.Digest{}, err
	}
	defer l.Close()
	at := int64(0)
	for _, part := range append([]*convert.Layout{l}, l.Dictionaries...) {
		for off := int64(0); off < part.Desc.Body; {
			p := piece[:min(int64(len(piece)), part.Desc.Body-off)]
			if err := part.Write(p, off); err != nil {
				return tier.Digest{}, err
			}
			sum = sum.Add(tier.DigestBytes(p, at/8))
			off += int64(len(p))
			at += int64(len(p))
		}
	}
	return sum, nil
}
