package job

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow"
	"golang.org/x/sync/errgroup"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// load puts every batch of every input. Each input has a repository of its own,
// for a repository holds batches of one schema.
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
	slices.SortFunc(j.items, func(a, b item) int { return cmp.Compare(a.want.seq, b.want.seq) })
	return nil
}

// parcel is a record on its way into a partition. The receiver calls done.
type parcel struct {
	rec  arrow.RecordBatch
	want expectation
	put  func() // what is held of it is so no more
}

func (p parcel) done() {
	p.rec.Release()
	p.put()
}

// loadInput puts on one goroutine for each partition, at most Workers at once: a partition's
// batches arrive in the order of its putter, which is how the expectations find their batches again.
func (j *job) loadInput(ctx context.Context, repo *repository.Repository, in Input) error {
	group, ctx := errgroup.WithContext(ctx)
	putters := min(j.cfg.Workers, j.cfg.Partitions)
	queues := make([]chan parcel, putters)
	wants := make([][]expectation, j.cfg.Partitions) // by partition; each is written by one putter
	for i := range queues {
		queue := make(chan parcel) // not buffered: what waits to be put is memory that no space counts
		queues[i] = queue
		group.Go(func() error { return j.put(ctx, repo, queue, wants, i) })
	}
	group.Go(func() error {
		defer func() {
			for _, q := range queues {
				close(q)
			}
		}()
		return j.decodeAll(ctx, in, queues)
	})
	if err := group.Wait(); err != nil {
		for partition := range wants {
			for b := range repo.Batches(partition) {
				j.loaded(b)
			}
		}
		return err
	}
	return j.collect(repo, wants)
}

// loaded counts a batch that was put.
func (j *job) loaded(b *batch.Batch) {
	if d := b.Info().Descriptor; d != nil { // else its data is gone
		j.res.Rows += d.Rows
		j.res.Bytes += d.Body
	}
	j.res.Batches++
}

// decodeAll reads the input once: on one goroutine, or one for each putter and processor where the
// source can be divided.
func (j *job) decodeAll(ctx context.Context, in Input, queues []chan parcel) (err error) {
	src, err := in.Open(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if e := src.Close(); err == nil {
			err = e
		}
	}()
	of := int64(1)
	divided, ok := src.(Divided)
	if ok {
		of = int64(min(len(queues), runtime.GOMAXPROCS(0)))
	}
	group, ctx := errgroup.WithContext(ctx)
	var batches atomic.Int64
	for number := range of {
		part, size := src, int64(0)
		if ok {
			part, size = divided.Part(number, of), divided.BatchBytes()
		}
		group.Go(func() error {
			d := decoder{j: j, src: part, name: in.Name, number: number, of: of, size: size, piece: make([]byte, 1<<20)}
			for {
				switch err := d.next(ctx, queues); err {
				case nil:
					batches.Add(1)
				case io.EOF:
					return nil
				default:
					return err
				}
			}
		})
	}
	err = group.Wait()
	j.puts += batches.Load() * int64(j.cfg.Repeat)
	return err
}

// decoder reads a part of a source: every of-th batch from number on. It belongs to one goroutine.
type decoder struct {
	j          *job
	src        Source
	name       string // of the input
	number, of int64
	size       int64 // of the last batch: the next will be about as large; 0 if that is not known
	piece      []byte
}

// next reads a batch, works out what it must digest to, and hands it out as often as asked for. It
// returns io.EOF at the end.
func (d *decoder) next(ctx context.Context, queues []chan parcel) error {
	j := d.j
	if err := j.held.wait(ctx, d.size); err != nil {
		return err
	}
	rec, err := d.src.Next(ctx)
	if err != nil {
		j.held.add(-d.size)
		return err
	}
	waited := d.size
	d.size = convert.LogicalBytes(rec)
	p := parcel{rec: rec, put: j.held.take(d.size, waited, j.cfg.Repeat+1)}
	defer p.done()
	p.want = expectation{name: d.name, number: d.number + 1}
	if p.want.digest, err = digest(rec, d.piece); err != nil {
		return named(err, p.want)
	}
	for i := range int64(j.cfg.Repeat) {
		p.want.seq = j.puts + d.number*int64(j.cfg.Repeat) + i
		rec.Retain()
		select {
		case queues[p.want.partition(j.cfg.Partitions)%len(queues)] <- p:
		case <-ctx.Done():
			rec.Release()
			return named(context.Cause(ctx), p.want)
		}
	}
	d.number += d.of
	return nil
}

// digest returns the digest of rec as an image: of its body and its dictionaries, one
// behind the other. They are laid out piece by piece, because a whole batch is memory that no
// space counts.
func digest(rec arrow.RecordBatch, piece []byte) (sum tier.Digest, err error) {
	l, err := convert.NewLayout(rec)
	if err != nil {
		return tier.Digest{}, err
	}
	defer l.Close()
	at := int64(0)
	for _, part := range append([]*convert.Layout{l}, l.Dictionaries()...) {
		for {
			n, err := part.Next(piece)
			if err == io.EOF {
				break
			}
			if err != nil {
				return tier.Digest{}, err
			}
			sum = sum.Add(tier.DigestBytes(piece[:n], at/8))
			at += int64(n)
		}
	}
	return sum, nil
}

// put is the only putter of its partitions. After an error it goes on receiving,
// so that every parcel is released.
func (j *job) put(ctx context.Context, repo *repository.Repository, queue <-chan parcel, wants [][]expectation, putter int) (err error) {
	var opts []repository.PutOption
	if !j.cfg.Fits {
		opts = append(opts, repository.WithPlacement(reservation.AnyInTier(tier.GPU)))
	}
	for p := range queue {
		if err == nil {
			partition := p.want.partition(j.cfg.Partitions)
			if err = repo.Put(ctx, partition, p.rec, opts...); err == nil {
				wants[partition] = append(wants[partition], p.want)
				j.cfg.Progress.Step()
			} else {
				err = named(err, p.want)
			}
		}
		p.done()
	}
	return err
}

// collect pairs what was put with what it must digest to.
func (j *job) collect(repo *repository.Repository, wants [][]expectation) error {
	for partition, want := range wants {
		i := 0
		for b := range repo.Batches(partition) {
			if i == len(want) {
				return fmt.Errorf("partition %d holds more batches than the %d that were put", partition, len(want))
			}
			j.items = append(j.items, item{b: b, repo: repo, want: want[i]})
			j.loaded(b)
			i++
		}
		if i < len(want) {
			return fmt.Errorf("partition %d holds %d batches of the %d that were put", partition, i, len(want))
		}
	}
	return nil
}

// partition deals batches out evenly.
func (e expectation) partition(of int) int { return int(e.seq % int64(of)) }

// named says which batch an error is about.
func named(err error, e expectation) error { return fmt.Errorf("%s: %w", e, err) }
