// Package peer is what spillbench compare does: it spills the same batches by
// Spillway and as a Go program does without it, by arrow-go's ipc.FileWriter, reads
// them back, and times both alternately.
//
//	verify    ours ─▶ compare with the source        ipc ─▶ compare with the source
//	round 1   ours: host ─▶ disk ─▶ host, touch      ipc: heap ─▶ file, sync ─▶ drop cache ─▶ heap, touch
//	round 2   the same, the peer first
//
// In each round an engine of its own is opened for our side, and closed before the peer's turn. So
// the memory of one is not held while the other works, and both begin with files that do not exist
// yet. The peer does everything once before it is timed, so that its memory is the machine's
// already. The batches are read from their source anew, one at a time, and put as often as
// requested. Neither that nor laying them out in host memory is part of the comparison. The time of
// the layout is printed beside it.
//
// # What is timed
//
// Writing, ours: as many batches as the host space takes without the monitor acting
// are put there; moving them to disk is timed; then come the next. The peer:
// every Write, the footer, and the sync of the file. Reading, both: until every byte
// of every Arrow buffer has been hashed and the batch is given up; the digest must be
// that of the verified pass, in every round. Our batches
// are moved and read by several goroutines, which a Mover allows; a FileWriter and a
// FileReader belong to one.
//
// The peer's heap may grow by as much as our host space has: the runtime's memory
// limit is set for that while it works, which is the process's, so one Run at a time.
//
// # Ownership
//
// Run owns what it opens: engines, goroutines, files without a name. All of it is
// gone when it returns. The package takes no locks.
package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/convert"
)

// ArrowIPC is the name of the one peer that there is.
const ArrowIPC = "arrow-ipc"

// Config says what to compare. All fields but Rate, Batches and
// Progress are required.
type Config struct {
	// Open opens an engine with host and disk spaces. Run closes it.
	Open    func(ctx context.Context) (*spillway.Engine, error)
	Inputs  []job.Input // opened anew for each side of each round, and the same each time
	Repeat  int         // how often each batch is put, above 0
	Rounds  int         // above 0
	Workers int         // goroutines that move our batches, above 0
	Dir     string      // where the peer's files are
	Memory  int64       // bytes by which the peer's heap may grow: what our host space has

	// Rate is how many bytes a second reach the peer's files and come from them; 0 is unlimited.
	// Ours is the engine's: the code that opens it makes its disks as slow.
	Rate int64

	Batches  int64 // how many there will be, for the progress; 0 if that is not known
	Progress job.Progress
}

// Times is what one round took.
type Times struct{ Write, Read time.Duration }

// Result is what was measured; each slice has one element a round.
type Result struct {
	Rows, Batches int64
	Bytes         int64 // of the Arrow buffers, the same for both sides

	Ours      []Times         // to a disk volume that is empty
	Rewritten []Times         // the same again, in the room that the first took
	Put       []time.Duration // laying the batches out in host memory, before Ours
	Peer      []Times         // synced, and read without the page cache
	Warm      []Times         // not synced, and read from the page cache, as far as that holds the file

	Verified int64 // batches compared with the source, of both sides
	// CacheStays says that the page cache could not be dropped on this system, so
	// that Peer was read from it, as far as it was there.
	CacheStays bool
}

// MismatchError reports that what was read back is not what was spilled.
type MismatchError struct {
	Side string // "spillway", or the peer's name
	What string // which of the batches
	Err  error
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("%s gave back other data than it was given: %s: %v", e.Side, e.What, e.Err)
}

// Unwrap returns the difference.
func (e *MismatchError) Unwrap() error { return e.Err }

// ErrNoBatches reports that there is nothing to compare.
var ErrNoBatches = errors.New("the input holds no batches")

// Run verifies both sides and then measures them. What they give back that is not
// what they were given is a *MismatchError. It ends soon after ctx does.
func Run(ctx context.Context, cfg Config) (Result, error) {
	return newRunner(cfg).run(ctx)
}

func newRunner(cfg Config) *runner {
	if cfg.Progress == nil {
		cfg.Progress = silent{}
	}
	return &runner{cfg: cfg, newFile: newFile, mem: memory.NewGoAllocator(), tidy: debug.FreeOSMemory}
}

func (r *runner) run(ctx context.Context) (Result, error) {
	if err := r.verify(ctx); err != nil {
		return r.res, err
	}
	for i := range r.cfg.Rounds {
		if err := r.round(ctx, i+1); err != nil {
			return r.res, err
		}
	}
	return r.res, nil
}

// runner is a Run under way.
type runner struct {
	cfg Config
	res Result

	// What the peer works on. Tests have others, to see what it does with them.
	newFile func(dir string) (file, error)
	mem     memory.Allocator // what it reads into

	// tidy gives back the memory that the other side has left. Tests with little data leave it out.
	tidy func()

	// What touching all batches of a side must come to: what it came to when they were
	// compared with the source.
	oursDigest, peerDigest uint64
}

// silent is a Progress that does nothing.
type silent struct{}

func (silent) Begin(string, int64) {}
func (silent) Step()               {}

// begin starts a phase in which all batches are gone through so many times.
func (r *runner) begin(phase string, passes int64) {
	steps := int64(-1)
	if n := max(r.cfg.Batches, r.res.Batches); n > 0 {
		steps = n * passes
	}
	r.cfg.Progress.Begin(phase, steps)
}

// verify spills everything once by each side and compares what is read back with the
// source, value by value. It warms both up, too.
func (r *runner) verify(ctx context.Context) error {
	if err := r.count(ctx); err != nil {
		return err
	}
	r.begin("verify ours", 2) // written and compared
	err := r.withOurs(ctx, func(o *ours) error {
		if _, _, err := o.write(ctx); err != nil {
			return err
		}
		return r.compare(ctx, "spillway", o.open, &r.oursDigest)
	})
	if err != nil {
		return err
	}
	r.begin("verify "+ArrowIPC, 2)
	return r.withPeer(func(p *ipcFiles) error {
		if _, err := p.write(ctx); err != nil {
			return err
		}
		in, err := p.reader()
		if err != nil {
			return err
		}
		return errors.Join(r.compare(ctx, ArrowIPC, in.record, &r.peerDigest), in.close())
	})
}

// count reads the input once for its sizes.
func (r *runner) count(ctx context.Context) error {
	r.begin("read", 1)
	err := r.each(ctx, func(_ int, rec arrow.RecordBatch) error {
		r.res.Rows += rec.NumRows()
		r.res.Bytes += convert.LogicalBytes(rec)
		r.res.Batches++
		r.cfg.Progress.Step()
		return nil
	}, nil)
	if err == nil && r.res.Batches == 0 {
		return ErrNoBatches
	}
	return err
}

// compare reads the source again, and beside it what next gives back, in the
// order in which it was spilled.
func (r *runner) compare(ctx context.Context, side string, next func(context.Context) (arrow.RecordBatch, func() error, error), digest *uint64) error {
	n := int64(0)
	err := r.each(ctx, func(_ int, want arrow.RecordBatch) (err error) {
		n++
		what := fmt.Sprintf("batch %d", n)
		got, done, err := next(ctx)
		if err == io.EOF {
			return &MismatchError{side, what, errors.New("it is missing")}
		}
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, done()) }()
		if err := convert.Equal(want, got); err != nil {
			return &MismatchError{side, what, err}
		}
		*digest += touch(got)
		r.res.Verified++
		r.cfg.Progress.Step()
		return nil
	}, nil)
	if err != nil {
		return err
	}
	switch _, done, err := next(ctx); err {
	case io.EOF:
		return nil
	case nil:
		return errors.Join(&MismatchError{side, fmt.Sprintf("batch %d", n+1), errors.New("there was none")}, done())
	default:
		return err
	}
}

// round measures both sides. The first side changes from round to round, so that neither always
// comes to a disk and a machine that the other has just left.
func (r *runner) round(ctx context.Context, number int) error {
	sides := []func(context.Context, int) error{r.roundOfOurs, r.roundOfPeer}
	if number%2 == 0 {
		slices.Reverse(sides)
	}
	for _, side := range sides {
		if err := side(ctx, number); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) roundOfOurs(ctx context.Context, number int) error {
	r.begin(fmt.Sprintf("round %d, ours", number), 4) // written and read, twice
	return r.withOurs(ctx, func(o *ours) error {
		t, put, err := o.measure(ctx, r.oursDigest)
		if err != nil {
			return err
		}
		r.res.Ours, r.res.Put = append(r.res.Ours, t), append(r.res.Put, put)
		t, _, err = o.measure(ctx, r.oursDigest)
		r.res.Rewritten = append(r.res.Rewritten, t)
		return err
	})
}

func (r *runner) roundOfPeer(ctx context.Context, number int) error {
	r.begin(fmt.Sprintf("round %d, %s", number, ArrowIPC), 4) // written and read, twice
	return r.withPeer(func(p *ipcFiles) error {
		warm, err := p.warmUp(ctx, r.peerDigest)
		if err != nil {
			return err
		}
		t, written, err := p.measure(ctx, r.peerDigest)
		r.res.Peer, r.res.Warm = append(r.res.Peer, t), append(r.res.Warm, Times{Write: written, Read: warm})
		return err
	})
}

// each calls f with every batch of every input, each as often as is to be put, and
// ended, if there is one, behind each input. A batch is f's only while it runs.
func (r *runner) each(ctx context.Context, f func(input int, rec arrow.RecordBatch) error, ended func(input int) error) error {
	for i, in := range r.cfg.Inputs {
		if err := r.eachOf(ctx, in, func(rec arrow.RecordBatch) error { return f(i, rec) }); err != nil {
			return err
		}
		if ended == nil {
			continue
		}
		if err := ended(i); err != nil {
			return err
		}
	}
	return nil
}

func (r *runner) eachOf(ctx context.Context, in job.Input, f func(arrow.RecordBatch) error) (err error) {
	src, err := in.Open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	for number := 1; ; number++ {
		rec, err := src.Next(ctx)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for range r.cfg.Repeat {
			if err = context.Cause(ctx); err == nil {
				err = f(rec)
			}
			if err != nil {
				break
			}
		}
		rec.Release()
		if err != nil {
			return fmt.Errorf("%s, batch %d: %w", in.Name, number, err)
		}
	}
}

// limitHeap lets the Go heap grow by at most more bytes from what it is now, and
// returns what ends that. A lower limit that is set already stays.
func limitHeap(more int64) (end func()) {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	now := int64(min(m.Sys-m.HeapReleased, math.MaxInt64/2))
	before := debug.SetMemoryLimit(-1)
	debug.SetMemoryLimit(min(before, now+min(more, math.MaxInt64/2)))
	return func() { debug.SetMemoryLimit(before) }
}

// touch reads every byte of every Arrow buffer of rec and returns a digest of them. So a side
// cannot postpone work until the data is read. It hashes with XXH3, which costs less than reading
// the memory does.
func touch(rec arrow.RecordBatch) uint64 {
	d := uint64(rec.NumRows())
	for _, col := range rec.Columns() {
		d = touchData(d, col.Data())
	}
	return d
}

func touchData(d uint64, data arrow.ArrayData) uint64 {
	for _, b := range data.Buffers() {
		d *= 0x9e3779b97f4a7c15 // odd, so that the place of each buffer counts and nothing is lost
		if b != nil {
			d += xxh3.Hash(b.Bytes())
		}
	}
	for _, child := range data.Children() {
		d = touchData(d, child)
	}
	// The interface of a missing dictionary may hold a nil pointer; the type reports whether there
	// is one.
	if dict, ok := data.DataType().(*arrow.DictionaryType); ok && dict != nil {
		d = touchData(d, data.Dictionary())
	}
	return d
}

// checkDigest compares what a measured pass touched with what the verified one did.
func checkDigest(side string, got, want uint64) error {
	if got == want {
		return nil
	}
	return &MismatchError{side, "all batches together", fmt.Errorf("digest %016x, and %016x when they were compared with the source", got, want)}
}
