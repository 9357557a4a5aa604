// Package peer implements spillbench compare: it spills the same batches by Spillway and as a Go
// program does without it, by arrow-go's ipc.FileWriter, reads them back, and times both in turns.
//
//	verify    ours -> compare with the source    ipc -> compare with the source
//	round 1   ours: host -> disk -> host, touch  ipc: heap -> file, sync -> drop cache -> heap, touch
//	round 2   the same, the peer first
//
// In each round our side opens an engine of its own and closes it before the peer's turn, so that
// neither holds memory while the other works, and both begin without files. The peer does all its
// work once before it is timed, so that its memory is the machine's already. The batches are read
// from their source again for each side, one at a time. Neither that nor laying them out in host
// memory is part of the comparison; the time of the layout is a figure of its own.
//
// # What is timed
//
// Writing, ours: as many batches are put as the host space takes; moving them to disk is timed;
// then the next are put. Writing, the peer: every Write, the footer, and the sync of the file.
// Reading, both: until every byte of every Arrow buffer has been hashed and the batch is released.
// The digest must be that of the verified pass, in every round. Several goroutines move and read
// our batches, which a Mover allows; a FileWriter and a FileReader belong to one goroutine.
//
// The peer needs memory for a batch and for the page cache; our side has its host space.
//
// # Ownership
//
// Run owns what it opens: engines, goroutines, files without a name. It releases them before it
// returns. The package has no locks.
package peer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/convert"
)

// The names of the sides. ArrowIPC is the peer.
const (
	ourName  = "spillway"
	ArrowIPC = "arrow-ipc"
)

// Config configures a comparison. All fields but Rate and Batches are required.
type Config struct {
	// Open opens an engine with host and disk spaces. Run closes it.
	Open    func(ctx context.Context) (*spillway.Engine, error)
	Inputs  []job.Input // opened again for each side of each round, with the same batches each time
	Repeat  int         // how often each batch is put
	Rounds  int
	Workers int    // goroutines that move our batches
	Dir     string // of the peer's files
	// Rate is how many bytes a second pass to and from the peer's files; 0 means no limit. Open must
	// make our disks as slow.
	Rate int64

	Batches  int64 // how many there will be, for the progress; 0 if unknown
	Progress job.Progress
}

// Times is what one side took in one round.
type Times struct{ Write, Read time.Duration }

// Round is what one round took.
type Round struct {
	Ours      Times         // to an empty disk volume
	Put       time.Duration // laying the batches out in host memory, before Ours
	Rewritten Times         // the same again, to the room that Ours has used
	Peer      Times         // synced, and read without the page cache
	Warm      Times         // not synced, and read from the page cache as far as that holds the file
}

// Result is what Run measured.
type Result struct {
	Rows, Batches int64
	Bytes         int64 // of the Arrow buffers, the same for both sides
	Verified      int64 // batches compared with the source, of both sides
	Rounds        []Round
	// CacheStays means that this system cannot drop the page cache, so the peer read from it.
	CacheStays bool
}

// ErrMismatch reports that a side read back other data than it had spilled.
var ErrMismatch = errors.New("gave back other data than it was given")

// ErrNoBatches reports that there is nothing to compare.
var ErrNoBatches = errors.New("the input holds no batches")

// Run verifies both sides and then measures them. Its error is an ErrMismatch if a side returns
// other data than it was given. Run ends soon after ctx does.
func Run(ctx context.Context, cfg Config) (Result, error) {
	r := &runner{cfg: cfg, digests: make(map[string]uint64)}
	err := r.verify(ctx)
	for i := 0; err == nil && i < cfg.Rounds; i++ {
		var round Round
		sides := []string{ourName, ArrowIPC}
		if i%2 == 1 { // so that neither side always finds the disk and the machine as the other has just left them
			slices.Reverse(sides)
		}
		for _, name := range sides {
			err = r.with(ctx, fmt.Sprintf("round %d, ", i+1), name, 4, func(s side) error {
				return r.measure(ctx, name, s, &round)
			})
			if err != nil {
				return r.res, err
			}
		}
		r.res.Rounds = append(r.res.Rounds, round)
	}
	return r.res, err
}

// side is one of the two programs.
type side interface {
	// write takes all batches to disk and returns how long that took. In the second pass of a round
	// the peer also syncs its files, and part is the time before that; in both passes part of ours is
	// the time of laying the batches out in host memory, which is not in took.
	write(ctx context.Context, second bool) (took, part time.Duration, err error)
	// read calls f with every batch that write has written.
	read(ctx context.Context, f check) error
	close(ctx context.Context) error
}

// check is called with a batch that was read back, which it may use until it returns.
type check func(arrow.RecordBatch) error

// runner is a Run under way.
type runner struct {
	cfg Config
	res Result
	// digests are those of all batches of each side, by its name. Verification sets them, and every
	// later read must match them.
	digests map[string]uint64
}

// with calls f with a side, and closes that. f goes through all batches so many times.
func (r *runner) with(ctx context.Context, phase, name string, passes int64, f func(side) error) (err error) {
	r.cfg.Progress.Begin(phase+name, passes*r.res.Batches)
	debug.FreeOSMemory() // which the other side has left
	s := side(&ipcFiles{r: r})
	if name == ourName {
		eng, err := r.cfg.Open(ctx)
		if err != nil {
			return err
		}
		s = &ours{r: r, eng: eng}
	}
	defer func() { err = errors.Join(err, s.close(context.WithoutCancel(ctx))) }()
	return f(s)
}

// measure writes and reads everything twice.
//
// The peer's first pass is timed for reading alone, from the page cache. The peer takes new memory of
// the page cache and of the heap each time; after the pass that memory is not new to the machine. A
// virtual machine returns memory that is free for some seconds to its host, and touching it again
// costs ten times as much as copying into it (measured: 0.45 GiB/s against 4.7 of a core's time). That
// would count the host's time as the peer's. Our side uses memory that the arena has touched.
func (r *runner) measure(ctx context.Context, name string, s side, round *Round) (err error) {
	var times [2]Times
	var part [2]time.Duration
	for i := range times {
		if times[i].Write, part[i], err = s.write(ctx, i == 1); err != nil {
			return err
		}
		var sum atomic.Uint64
		start := time.Now()
		err = s.read(ctx, func(rec arrow.RecordBatch) error {
			sum.Add(touch(rec))
			return nil
		})
		times[i].Read = time.Since(start)
		if got, want := sum.Load(), r.digests[name]; err == nil && got != want {
			err = fmt.Errorf("%s %w: the digest of all batches is %016x, and was %016x when they were verified",
				name, ErrMismatch, got, want)
		}
		if err != nil {
			return err
		}
	}
	if name == ourName {
		round.Ours, round.Put, round.Rewritten = times[0], part[0], times[1]
	} else {
		round.Peer, round.Warm = times[1], Times{Write: part[1], Read: times[0].Read}
	}
	return nil
}

// verify counts the input, spills it once by each side, and compares the batches that come back with
// the source, value by value. That warms both sides up, too.
func (r *runner) verify(ctx context.Context) error {
	r.cfg.Progress.Begin("read", cmp.Or(r.cfg.Batches, -1))
	err := r.each(ctx, func(_ int, rec arrow.RecordBatch) error {
		r.res.Rows += rec.NumRows()
		r.res.Bytes += convert.LogicalBytes(rec)
		r.res.Batches++
		r.cfg.Progress.Step()
		return nil
	})
	if err == nil && r.res.Batches == 0 {
		err = ErrNoBatches
	}
	defer func(workers int) { r.cfg.Workers = workers }(r.cfg.Workers)
	r.cfg.Workers = 1 // so that our batches come in order
	for _, name := range []string{ourName, ArrowIPC} {
		if err != nil {
			return err
		}
		err = r.with(ctx, "verify ", name, 2, func(s side) error {
			if _, _, err := s.write(ctx, false); err != nil {
				return err
			}
			return r.compare(ctx, name, s)
		})
	}
	return err
}

// compare reads the source again, beside the batches of a side, which must come in order, and compares
// them. It sets the side's digest.
func (r *runner) compare(ctx context.Context, name string, s side) error {
	next, stop := iter.Pull2(func(yield func(arrow.RecordBatch, error) bool) {
		err := r.each(ctx, func(_ int, rec arrow.RecordBatch) error {
			if !yield(rec, nil) {
				return context.Canceled
			}
			return nil
		})
		if err != nil {
			yield(nil, err)
		}
	})
	defer stop()
	n := 0
	mismatch := func(err error) error { return fmt.Errorf("%s %w: batch %d: %w", name, ErrMismatch, n, err) }
	err := s.read(ctx, func(got arrow.RecordBatch) error {
		n++
		want, err, ok := next()
		switch {
		case err != nil:
			return err
		case !ok:
			return mismatch(errors.New("there was none"))
		}
		if err := convert.Equal(want, got); err != nil {
			return mismatch(err)
		}
		r.digests[name] += touch(got)
		r.res.Verified++
		return nil
	})
	if err != nil {
		return err
	}
	n++
	_, err, more := next()
	if more && err == nil {
		err = mismatch(errors.New("it is missing"))
	}
	return err
}

// each calls f with every batch of every input, each as often as it is to be put. f may use a batch
// only until it returns.
func (r *runner) each(ctx context.Context, f func(input int, rec arrow.RecordBatch) error) error {
	for i, in := range r.cfg.Inputs {
		src, err := in.Open(ctx)
		if err != nil {
			return err
		}
		for number := 1; err == nil; number++ {
			var rec arrow.RecordBatch
			if rec, err = src.Next(ctx); err != nil {
				break
			}
			for n := 0; n < r.cfg.Repeat && err == nil; n++ {
				if err = context.Cause(ctx); err == nil {
					err = f(i, rec)
				}
			}
			rec.Release()
			if err != nil {
				err = fmt.Errorf("%s, batch %d: %w", in.Name, number, err)
			}
		}
		if err == io.EOF {
			err = nil
		}
		if err := errors.Join(err, src.Close()); err != nil {
			return err
		}
	}
	return nil
}

// touch reads every byte of every Arrow buffer of rec and returns a digest of them, so that a side
// cannot postpone work until the data is read. It hashes with XXH3, which costs less than reading
// the memory does.
func touch(rec arrow.RecordBatch) uint64 {
	d := uint64(rec.NumRows())
	var add func(arrow.ArrayData)
	add = func(data arrow.ArrayData) {
		for _, b := range data.Buffers() {
			d *= 0x9e3779b97f4a7c15 // odd, so that the place of each buffer counts and nothing is lost
			if b != nil {
				d += xxh3.Hash(b.Bytes())
			}
		}
		for _, child := range data.Children() {
			add(child)
		}
		if data.DataType().ID() == arrow.DICTIONARY {
			add(data.Dictionary())
		}
	}
	for _, col := range rec.Columns() {
		add(col.Data())
	}
	return d
}
