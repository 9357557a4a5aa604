package test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/compute"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/observe/httpui"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// shown has what the fragments of Go code in docs/ use without declaring it. Each method below
// contains one fragment, line by line; package docstest compares the two.
type shown struct {
	ctx                        context.Context
	eng                        *spillway.Engine
	plan                       *spillway.Plan
	repo, build, probe, groups *spillway.Repository
	runs                       *spillway.Repository // without batches
	scan                       iter.Seq2[arrow.RecordBatch, error]
	b                          *spillway.Batch // of repo
	dir                        string          // for spilled files
}

const partition = 0

// TestPageFragments runs each fragment with an engine of its own, and expects that the fragment
// returns no error and leaves nothing open.
func TestPageFragments(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux: only there batches persist")
	}
	for name, fragment := range map[string]func(shown) error{
		"put": shown.put, "join": shown.join, "probe": shown.probing, "sort": shown.sort, "merge": shown.merge,
		"group": shown.group, "host task": shown.hostTask, "write": shown.write,
		"work": shown.operatorMemory, "reserve": shown.reserve, "hint": shown.hint, "close": shown.closePlan, "explain": shown.explain,
		"events": shown.events, "configure": shown.configure, "persist": shown.persist, "fault": shown.fault, "page": shown.page,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := withShown(t.Context(), t.TempDir(), fragment); err != nil {
				t.Error(err)
			}
		})
	}
}

// withShown calls a fragment with an engine whose repositories have four batches, except runs.
func withShown(ctx context.Context, dir string, fragment func(shown) error) (err error) {
	eng, err := spillway.Open(ctx, spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(256 << 20)}},
		HostMemory: spillway.Bytes(256 << 20),
		Disks:      []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(256 << 20)}},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, eng.Close()) }()
	plan, err := eng.Plan("shown")
	if err != nil {
		return err
	}
	scan := func(yield func(arrow.RecordBatch, error) bool) {
		for range 4 {
			column := array.NewInt64Builder(memory.DefaultAllocator)
			column.AppendValues([]int64{3, 1, 2}, nil)
			schema := arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Int64}}, nil)
			if !yield(array.NewRecordBatch(schema, []arrow.Array{column.NewArray()}, 3), nil) {
				return
			}
		}
	}
	s := shown{ctx: ctx, eng: eng, plan: plan, scan: scan, dir: dir}
	for port, repo := range []**spillway.Repository{&s.repo, &s.build, &s.probe, &s.groups, &s.runs} {
		if *repo, err = plan.Repository("shown", port); err != nil {
			return err
		}
		for rec := range scan {
			if repo == &s.runs {
				break
			}
			if err := (*repo).Put(ctx, partition, rec); err != nil {
				return err
			}
		}
	}
	s.probe.CloseInput()
	s.b = slices.Collect(s.repo.Batches(partition))[0]
	return fragment(s)
}

func (s shown) put() error {
	ctx, build, scan := s.ctx, s.build, s.scan
	for rec, err := range scan {
		if err != nil {
			return err
		}
		err = build.Put(ctx, partition, rec) // copied into the fastest memory with room
		rec.Release()                        // the record stays yours
		if err != nil {
			return err
		}
	}
	build.CloseInput() // consumers that wait for more end
	return nil
}

func (s shown) join() error {
	ctx, eng, build, probe := s.ctx, s.eng, s.build, s.probe
	build.CloseInput()
	left, err := build.ClaimAll(ctx, partition) // io.EOF: the partition is empty
	if err != nil {
		return err
	}
	right, err := probe.ClaimAll(ctx, partition)
	if err != nil {
		return errors.Join(err, left.Restore())
	}
	task := spillway.Task{Operator: "join", Inputs: []*spillway.Claim{left, right}, Output: 64 << 20}
	err = eng.RunTask(ctx, task, func(ctx context.Context, g *spillway.Grant, inputs []*spillway.Handle) error {
		table, err := g.Alloc(16 << 20) // from the task's reservation; an error here tries the task again
		if err != nil {
			return err
		}
		defer table.Release()
		// inputs are on the GPU together: those of left, then those of right.
		g.Produced(48 << 20) // teaches the estimator, for tasks whose Output is 0
		return nil
	})
	return err
}

func (s shown) probing() error {
	ctx, eng, build, probe := s.ctx, s.eng, s.build, s.probe
	use := func(*spillway.Handle) {}
	owner := reservation.NewOwner("probe") // who holds and waits, so that deadlocks are found
	ctx = owner.Context(ctx)
	var held []*spillway.Handle
	defer func() {
		for _, h := range held {
			h.Close()
		}
	}()
	for b := range build.Batches(partition) { // they stay in the repository
		h, err := eng.Mover().Acquire(ctx, b, spillway.AnyInTier(spillway.GPU))
		if err != nil {
			return err // ErrDeadlock: close what is held, wait (DeadlockError.Wait), begin again
		}
		held = append(held, h)
	}
	for h, err := range probe.Drain(ctx, partition, spillway.GPU) {
		if err != nil {
			return err
		}
		use(h)
		if err := h.Close(); err != nil {
			return err
		}
	}
	return nil
}

func (s shown) sort() error {
	ctx, eng, build, runs := s.ctx, s.eng, s.build, s.runs
	build.CloseInput()
	for run := 0; ; run++ {
		claim, err := build.Claim(ctx, partition, 8) // up to 8 batches, which nobody else gets
		if err == io.EOF {
			break // the input is closed and empty
		}
		if err != nil {
			return err
		}
		var schema *arrow.Schema
		var keys []int64
		task := spillway.Task{Operator: "sort", Inputs: []*spillway.Claim{claim}}
		if err := eng.RunTask(ctx, task, func(ctx context.Context, g *spillway.Grant, in []*spillway.Handle) error {
			keys = nil // also when it is called again
			for _, h := range in {
				rec, err := eng.Mover().Record(ctx, h) // opens a copy in host memory
				if err != nil {
					return err
				}
				schema = rec.Schema()
				keys = append(keys, rec.Column(0).(*array.Int64).Int64Values()...)
				rec.Release()
			}
			return nil
		}); err != nil {
			return err
		}
		slices.Sort(keys)
		builder := array.NewRecordBuilder(memory.DefaultAllocator, schema)
		builder.Field(0).(*array.Int64Builder).AppendValues(keys, nil)
		sorted := builder.NewRecordBatch()
		builder.Release()
		err = runs.Put(ctx, run, sorted)
		sorted.Release()
		if err != nil {
			return err
		}
	}
	runs.CloseInput()
	for _, run := range runs.Partitions() { // the merge reads all runs side by side
		reader, err := runs.Reader(ctx, run, repository.ReadAhead(2))
		if err != nil {
			return err
		}
		defer reader.Release()
	}
	return nil
}

func (s shown) merge() error {
	ctx, plan, scan, rows := s.ctx, s.plan, s.scan, int64(0)
	runs, err := plan.Manager().Create(repository.Key{Operator: "merge"}, repository.Options{ByRows: true})
	if err != nil {
		return err
	}
	for run := range 3 {
		for rec, err := range scan { // in a sort, the sorted batches of this run
			if err == nil {
				err = runs.Put(ctx, run, rec)
			}
			if err != nil {
				return err
			}
		}
	}
	runs.CloseInput()
	cursors, err := runs.Cursors(ctx, runs.Partitions(), 32<<20) // all of them in 32 MiB
	if err != nil {
		return err
	}
	for _, cursor := range cursors {
		defer cursor.Close()
		for {
			rec, err := cursor.Next(ctx) // as many rows as fit, valid until the next call
			if err == io.EOF {
				break
			}
			if err != nil {
				return err
			}
			rows += rec.NumRows()
		}
	}
	if rows != 3*4*3 {
		return fmt.Errorf("%d rows", rows)
	}
	return nil
}

func (s shown) hostTask() error {
	ctx, eng, build := s.ctx, s.eng, s.build
	build.CloseInput()
	total := int64(0)
	for {
		claim, err := build.ClaimBytes(ctx, partition, 1<<20, 8<<20) // 1 to 8 MiB
		if err == io.EOF {
			break // the input is closed and empty
		}
		if err != nil {
			return err
		}
		sum := int64(0)
		task := spillway.Task{
			Operator: "sum", Inputs: []*spillway.Claim{claim}, In: spillway.AnyInTier(spillway.Host), // for the processor
		}
		if err := eng.RunTask(ctx, task, func(ctx context.Context, g *spillway.Grant, in []*spillway.Handle) error {
			sum = 0
			for _, h := range in {
				rec, err := eng.Mover().Record(ctx, h) // without a copy: the batch is in host memory
				if err != nil {
					return err
				}
				for _, v := range rec.Column(0).(*array.Int64).Int64Values() {
					sum += v
				}
				rec.Release()
			}
			return nil
		}); err != nil {
			return err
		}
		total += sum
	}
	if total != 4*6 {
		return fmt.Errorf("the sum is %d", total)
	}
	return nil
}

func (s shown) write() error {
	ctx, probe, groups := s.ctx, s.probe, s.groups
	before := groups.Len(partition)
	reader, err := probe.Reader(ctx, partition)
	if err != nil {
		return err
	}
	defer reader.Release()
	writer, err := groups.Writer(ctx, partition, reader.Schema(), 4<<20) // batches of about 4 MiB
	if err != nil {
		return err
	}
	defer writer.Close()
	for reader.Next() {
		rec := reader.RecordBatch()
		for row, key := range rec.Column(0).(*array.Int64).Int64Values() {
			if key > 1 { // the rows to keep
				if err := writer.Append(ctx, rec, int64(row), int64(row)+1); err != nil {
					return err
				}
			}
		}
	}
	if err := errors.Join(reader.Err(), writer.Flush(ctx)); err != nil {
		return err
	}
	b := slices.Collect(groups.Batches(partition))[before]
	if rows := b.Info().Descriptor.Rows; rows != 4*2 {
		return fmt.Errorf("the batch has %d rows", rows)
	}
	return nil
}

func (s shown) group() error {
	ctx, eng, groups := s.ctx, s.eng, s.groups
	var rec arrow.RecordBatch
	for rec = range s.scan {
		break
	}
	r, err := eng.Reserve(ctx, spillway.AnyInTier(spillway.Host), 64<<20) // waits for the room
	if err != nil {
		return err
	}
	defer r.Release()
	alloc, err := arrowmem.New(r) // Arrow's allocator, inside the reservation
	if err != nil {
		return err
	}
	defer alloc.Close()
	table := array.NewInt64Builder(alloc)
	defer table.Release()
	err = arrowmem.Guard(func() error { // arrow-go panics without memory; this makes it an error
		table.Append(1)
		return nil
	})
	if errors.Is(err, spillway.ErrExceeded) { // the reservation is used up: put the groups away, go on
		err = groups.Put(ctx, partition, rec)
	}
	return err
}

func (s shown) operatorMemory() error {
	ctx, plan, groups := s.ctx, s.plan, s.groups
	var rec arrow.RecordBatch
	for rec = range s.scan {
		break
	}
	values, indices := rec.Column(0), array.MakeArrayOfNull(memory.DefaultAllocator, arrow.PrimitiveTypes.Int32, 3)
	work, err := plan.Work(ctx, spillway.WorkOptions{
		Operator: "aggregate", In: spillway.AnyInTier(spillway.Host), Min: 1 << 20, Max: 64 << 20,
	})
	if err != nil {
		return err
	}
	defer work.Close()
	sorted, err := compute.TakeArray(compute.WithAllocator(ctx, work.Allocator()), values, indices)
	if err != nil {
		return err
	}
	defer sorted.Release()
	if work.Err() != nil { // the kernel used more than the Work has
		err = work.Grow(ctx, 16<<20)
	}
	if errors.Is(err, spillway.ErrExceeded) || work.Requested() > 0 {
		err = groups.Put(ctx, partition, rec) // then free the state, and call work.Shrink
	}
	return err
}

func (s shown) reserve() error {
	ctx, eng := s.ctx, s.eng
	larger := &reservation.Options{Policy: reservation.Increase(1.25)}
	r, err := eng.Reservations().Reserve(ctx, spillway.AnyInTier(spillway.GPU), 1<<20, larger)
	if err != nil {
		return err
	}
	defer r.Release()
	buffer, err := r.Alloc(4 << 20) // device memory
	if err != nil {
		return err
	}
	defer buffer.Release()
	return nil
}

func (s shown) hint() error {
	b := s.b
	b.Hint(time.Now().Add(time.Second).UnixNano())
	b.Hint(batch.Never) // it leaves first
	b.Hint(batch.Stay)  // it leaves last
	return nil
}

func (s shown) closePlan() error {
	plan := s.plan
	left, err := plan.Close() // drops the batches that are left
	if err != nil {
		return err
	}
	for _, l := range left {
		fmt.Println(l.Key, "had", l.Batches, "batches of", l.Bytes, "bytes")
	}
	return nil
}

func (s shown) explain() error {
	eng, b := s.eng, s.b
	if held, ok := eng.Holders(spillway.SpaceID{Kind: spillway.GPU}); ok {
		fmt.Println(held) // who has the bytes of gpu:0: handles, reservations, batches at rest, by plan and operator
	}
	fmt.Println(eng.Explain(b)) // where a batch is, why, since when, and what it takes to bring it
	fmt.Println(eng.Stats())    // all figures as tables: spaces, edges, operators, tasks that waited
	return nil
}

func (s shown) events() error {
	log := slog.Default()
	cfg := spillway.Config{Events: spillway.Tee(
		spillway.LogEvents(log), // failing and full disks, corruption and lost GPUs as warnings
		func(e spillway.Event) {
			if e.Kind == events.WaitEnded && e.Took > time.Second {
				fmt.Println(e.Plan, e.Operator, "waited", e.Took, "for", e.To)
			}
		},
	)}
	return cfg.Validate()
}

func (s shown) configure() error {
	shared, err := spillway.NewBudget(1<<30, "shared")
	if err != nil {
		return err
	}
	cfg := spillway.Config{
		GPUMemory:  spillway.Share(0.8),      // of each GPU that the driver shows
		HostMemory: spillway.Bytes(32 << 30), // of host memory, in parts
		HostPerGPU: true,                     // not over the NUMA nodes, but beside each GPU
		Disks:      []spillway.DiskConfig{{Dir: "/fast/spill", Capacity: spillway.Share(0.5)}},
		Limits:     spillway.Limits{Budgets: []*spillway.Budget{shared}}, // of all GPUs, also of other engines
	}
	return cfg.Validate()
}

func (s shown) persist() error {
	ctx, dir := s.ctx, s.dir
	repo := s.repo
	cfg := spillway.Config{Disks: []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(1 << 30), Persist: true}}}
	eng, err := spillway.Open(ctx, cfg)
	if err != nil {
		return err
	}
	for _, k := range eng.Persisted() { // what an engine before this one had on that disk when its process ended
		b, err := eng.Adopt(ctx, k) // all its bytes compared with their checksums
		if err != nil {
			return err
		}
		if err := repo.PutBatch(k.Partition, b); err != nil { // where it stood: k.Plan, k.Operator, k.Port
			return err
		}
	}
	return eng.Close()
}

func (s shown) fault() error {
	ctx := s.ctx
	files := faultfs.New(disk.OS(), 1)
	files.Add(faultfs.Rule{Ops: []string{"write"}, Skip: 19, Times: 1, Effect: faultfs.Fail(syscall.EIO)})
	eng, err := spillway.Open(ctx, spillway.Config{Disks: []spillway.DiskConfig{{FS: files}}})
	return errors.Join(err, eng.Close())
}

func (s shown) page() error {
	ctx := s.ctx
	http := http.NewServeMux() // not the process's own, on which a second run would panic
	ui := httpui.New()
	eng, err := spillway.Open(ctx, spillway.Config{Events: ui.Event})
	defer ui.Watch(eng)()
	http.Handle("/spillway/", ui)
	return errors.Join(err, eng.Close())
}
