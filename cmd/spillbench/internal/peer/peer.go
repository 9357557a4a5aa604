// Package peer implements spillbench compare: it spills the same batches by Spillway and as a Go
// program does without it, by arrow-go's ipc.FileWriter, reads them back, and times both in turns.
//
//	verify    ours ─▶ compare with the source    ipc ─▶ compare with the source
//	round 1   ours: host ─▶ disk ─▶ host, touch  ipc: heap ─▶ file, sync ─▶ drop cache ─▶ heap, touch
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
// The peer's heap may grow by as much as our host space has. For that Run sets the memory limit of
// the process while the peer works, so only one Run may be under way.
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
	"sync/atomic"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/convert"
)

// ArrowIPC is the name of the peer.
const ArrowIPC = "arrow-ipc"

// Config configures a comparison. All fields but Rate and Batches are required.
type Config struct {
	// Open opens an engine with host and disk spaces. Run closes it.
	Open    func(ctx context.Context) (*spillway.Engine, error)
	Inputs  []job.Input // opened again for each side of each round, with the same batches each time
	Repeat  int         // how often each batch is put
	Rounds  int
	Workers int    // goroutines that move our batches
	Dir     string // of the peer's files
	Memory  int64  // bytes by which the peer's heap may grow: what our host space has
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
	r := &runner{cfg: cfg}
	err := r.verify(ctx)
	for i := 0; err == nil && i < cfg.Rounds; i++ {
		var round Round
		ours := func() error {
			return r.withOurs(ctx, fmt.Sprintf("round %d, ours", i+1), 4, func(o *ours) (err error) {
				if round.Ours, round.Put, err = o.measure(ctx); err == nil {
					round.Rewritten, _, err = o.measure(ctx)
				}
				return err
			})
		}
		peers := func() error {
			return r.withPeer(fmt.Sprintf("round %d, %s", i+1, ArrowIPC), 4, func(p *ipcFiles) error {
				return p.measure(ctx, &round)
			})
		}
		if i%2 == 1 { // so that neither side always finds the disk and the machine as the other has just left them
			ours, peers = peers, ours
		}
		if err = ours(); err == nil {
			err = peers()
		}
		if err == nil {
			r.res.Rounds = append(r.res.Rounds, round)
		}
	}
	return r.res, err
}

// runner is a Run under way.
type runner struct {
	cfg Config
	res Result
	// digests are those of all batches of each side, by its name. Verification sets them, and every
	// later read must match them.
	digests map[string]uint64
}

// check is called with a batch that was read back, which it may use until it returns.
type check func(arrow.RecordBatch) error

// verify counts the input, spills it once by each side, and compares what is read back with the
// source, value by value. That warms both sides up, too.
func (r *runner) verify(ctx context.Context) error {
	r.digests = make(map[string]uint64)
	r.cfg.Progress.Begin("read", cmp.Or(r.cfg.Batches, -1))
	err := r.each(ctx, func(_ int, rec arrow.RecordBatch) error {
		r.res.Rows += rec.NumRows()
		r.res.Bytes += convert.LogicalBytes(rec)
		r.res.Batches++
		r.cfg.Progress.Step()
		return nil
	})
	if err != nil {
		return err
	}
	if r.res.Batches == 0 {
		return ErrNoBatches
	}
	err = r.withOurs(ctx, "verify ours", 2, func(o *ours) error {
		if _, _, err := o.write(ctx); err != nil {
			return err
		}
		return r.compare(ctx, "spillway", func(f check) error { return o.read(ctx, 1, f) })
	})
	if err != nil {
		return err
	}
	return r.withPeer("verify "+ArrowIPC, 2, func(p *ipcFiles) error {
		if _, err := p.write(ctx); err != nil {
			return err
		}
		return r.compare(ctx, ArrowIPC, func(f check) error { return p.read(ctx, false, f) })
	})
}

// compare reads the source again, beside the batches of read, which must come in order, and compares
// them. It sets the side's digest.
func (r *runner) compare(ctx context.Context, side string, read func(check) error) error {
	var failed error // of the source
	source, stop := iter.Pull(func(yield func(arrow.RecordBatch) bool) {
		failed = r.each(ctx, func(_ int, rec arrow.RecordBatch) error {
			if !yield(rec) {
				return context.Canceled
			}
			return nil
		})
	})
	defer stop()
	n := 0
	mismatch := func(err error) error { return fmt.Errorf("%s %w: batch %d: %w", side, ErrMismatch, n, err) }
	err := read(func(got arrow.RecordBatch) error {
		n++
		want, ok := source()
		if failed != nil {
			return failed
		}
		if !ok {
			return mismatch(errors.New("there was none"))
		}
		if err := convert.Equal(want, got); err != nil {
			return mismatch(err)
		}
		r.digests[side] += touch(got)
		r.res.Verified++
		return nil
	})
	if err != nil {
		return err
	}
	n++
	if _, ok := source(); ok {
		return mismatch(errors.New("it is missing"))
	}
	return failed
}

// timed reads all batches of a side, touches them, and returns how long that took. Their digest must
// be that of the verified pass.
func (r *runner) timed(side string, read func(check) error) (took time.Duration, err error) {
	var sum atomic.Uint64
	start := time.Now()
	err = read(func(rec arrow.RecordBatch) error {
		sum.Add(touch(rec))
		return nil
	})
	took = time.Since(start)
	if got, want := sum.Load(), r.digests[side]; err == nil && got != want {
		err = fmt.Errorf("%s %w: all batches together: digest %016x, and %016x when they were compared with the source",
			side, ErrMismatch, got, want)
	}
	return took, err
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
