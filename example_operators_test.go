package spillway_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
)

// What docs/embedding.md shows of operators, run.

// operators opens an engine with little memory, and a repository for each input of an operator,
// into which it puts batches.
func operators(ctx context.Context, dir string, batches int) (*spillway.Engine, []*spillway.Repository) {
	eng := check(spillway.Open(ctx, spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}}, HostMemory: spillway.Bytes(1 << 20),
		Disks: []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(64 << 20)}},
	}))
	plan := check(eng.Plan("query-17"))
	var inputs []*spillway.Repository
	for port := range 2 {
		repo := check(plan.Repository("join", port))
		for range batches {
			for rec, err := range numbers {
				check(0, errors.Join(err, repo.Put(ctx, 0, rec)))
			}
		}
		repo.CloseInput()
		inputs = append(inputs, repo)
	}
	return eng, inputs
}

// A hash join holds the build side on the GPU while the batches of the probe side pass by. With its
// owner the engine finds deadlocks with others, and Holders shows it as the holder of the memory.
func ExampleEngine_Holders() {
	ctx := context.Background()
	dir := check(os.MkdirTemp("", "spillway"))
	defer os.RemoveAll(dir)
	eng, inputs := operators(ctx, dir, 4)
	build, probe := inputs[0], inputs[1]

	owner := reservation.NewOwner("probe")
	own := owner.Context(ctx)
	var held []*spillway.Handle
	for b := range build.Batches(0) { // they stay in the repository
		held = append(held, check(eng.Mover().Acquire(own, b, spillway.AnyInTier(spillway.GPU))))
	}
	probed := 0
	for h, err := range probe.Drain(own, 0, spillway.GPU) {
		check(0, err)
		probed++
		if probed == 1 {
			holders, _ := eng.Holders(h.Space().ID())
			of := holders.Holders[0]
			fmt.Printf("%d %ss of %s:%d, owner %s\n", of.Count, of.What, of.Operator, of.Port, of.Owner)
		}
		check(0, h.Close())
	}
	for _, h := range held {
		check(0, h.Close())
	}
	fmt.Println("probed", probed)
	check(0, eng.Close())
	// Output:
	// 4 handles of join:0, owner probe
	// probed 4
}

// A sort makes a sorted run of each claim. It opens the batches in host memory, because Arrow's
// arrays cannot be in GPU memory. It puts a run away after RunTask has returned, because RunTask
// may call the function again. The merge reads all runs side by side.
func ExampleEngine_RunTask_sort() {
	ctx := context.Background()
	dir := check(os.MkdirTemp("", "spillway"))
	defer os.RemoveAll(dir)
	eng, inputs := operators(ctx, dir, 10)
	runs := check(check(eng.Plan("sorted")).Repository("merge", 0))
	for run := 0; ; run++ {
		claim, err := inputs[0].Claim(ctx, 0, 8)
		if err == io.EOF {
			break
		}
		check(0, err)
		var schema *arrow.Schema
		var keys []int64
		task := spillway.Task{
			Operator: "sort", Inputs: []*spillway.Claim{claim}, Output: spillway.None, Overhead: spillway.None,
		}
		check(0, eng.RunTask(ctx, task, func(ctx context.Context, _ *spillway.Grant, in []*spillway.Handle) error {
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
		}))
		slices.Sort(keys)
		builder := array.NewRecordBuilder(memory.DefaultAllocator, schema)
		builder.Field(0).(*array.Int64Builder).AppendValues(keys, nil)
		sorted := builder.NewRecordBatch()
		builder.Release()
		check(0, runs.Put(ctx, run, sorted))
		sorted.Release()
		fmt.Println("run", run, "of", len(keys), "rows")
	}
	runs.CloseInput()
	var readers []array.RecordReader
	var heads [][]int64 // the rest of each run
	for _, run := range runs.Partitions() {
		reader := check(runs.Reader(ctx, run))
		defer reader.Release()
		if reader.Next() {
			readers, heads = append(readers, reader), append(heads, keysOf(reader))
		}
	}
	var merged []int64
	for len(heads) > 0 {
		least := 0
		for i := range heads {
			if heads[i][0] < heads[least][0] {
				least = i
			}
		}
		merged = append(merged, heads[least][0])
		if heads[least] = heads[least][1:]; len(heads[least]) > 0 {
			continue
		}
		if readers[least].Next() {
			heads[least] = keysOf(readers[least])
		} else {
			check(0, readers[least].Err())
			readers, heads = slices.Delete(readers, least, least+1), slices.Delete(heads, least, least+1)
		}
	}
	fmt.Println("merged", len(merged), "rows, sorted:", slices.IsSorted(merged), merged[:12])
	check(0, eng.Close())
	// Output:
	// run 0 of 65536 rows
	// run 1 of 16384 rows
	// merged 81920 rows, sorted: true [0 0 0 0 0 0 0 0 0 0 1 1]
}

// Sorted runs are merged in 1 MiB of host memory: each cursor has the next rows of its run there, and a
// writer makes batches of the merged rows.
func ExampleRepository_Cursors() {
	ctx := context.Background()
	dir := check(os.MkdirTemp("", "spillway"))
	defer os.RemoveAll(dir)
	eng := check(spillway.Open(ctx, spillway.Config{
		HostMemory: spillway.Bytes(16 << 20),
		Disks:      []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(64 << 20)}},
	}))
	plan := check(eng.Plan("query-17"))
	runs := check(plan.Manager().Create(repository.Key{Operator: "merge"}, repository.Options{ByRows: true}))
	merged := check(plan.Repository("output", 0))
	var schema *arrow.Schema
	for run := range int64(20) {
		builder := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{
			{Name: "key", Type: arrow.PrimitiveTypes.Int64},
		}, nil))
		for i := range int64(20_000) {
			builder.Field(0).(*array.Int64Builder).Append(20*i + run)
		}
		rec := builder.NewRecordBatch()
		schema = rec.Schema()
		check(0, runs.Put(ctx, int(run), rec, spillway.WithPlacement(spillway.AnyInTier(spillway.Disk))))
		rec.Release()
		builder.Release()
	}
	runs.CloseInput()

	writer := check(merged.Writer(ctx, 0, schema, 1<<20))
	cursors := check(runs.Cursors(ctx, runs.Partitions(), 1<<20))
	heads, rows := make([]arrow.RecordBatch, len(cursors)), make([]int, len(cursors))
	keyOf := func(i int) int64 { return heads[i].Column(0).(*array.Int64).Value(rows[i]) }
	for least := 0; least >= 0; {
		for i, cursor := range cursors { // read on where the rows have ended
			if cursor == nil || heads[i] != nil && rows[i] < int(heads[i].NumRows()) {
				continue
			}
			check(0, writer.Copy(ctx)) // the rows that were appended are overwritten now
			rec, err := cursor.Next(ctx)
			if heads[i], rows[i] = rec, 0; err == io.EOF {
				check(0, cursor.Close())
				cursors[i] = nil
			} else {
				check(0, err)
			}
		}
		least = -1
		for i := range cursors {
			if cursors[i] != nil && (least < 0 || keyOf(i) < keyOf(least)) {
				least = i
			}
		}
		if least >= 0 {
			check(0, writer.Append(ctx, heads[least], int64(rows[least]), int64(rows[least])+1))
			rows[least]++
		}
	}
	check(0, errors.Join(writer.Flush(ctx), writer.Close()))
	merged.CloseInput()

	n, sorted := int64(0), true
	reader := check(merged.Reader(ctx, 0))
	for reader.Next() {
		for _, key := range keysOf(reader) {
			sorted = sorted && key == n
			n++
		}
	}
	reader.Release()
	fmt.Println(n, "rows, sorted:", sorted)
	check(0, eng.Close())
	// Output: 400000 rows, sorted: true
}

// Rows are partitioned by their keys in host memory: each claim has batches of at most 128 KiB, and
// each partition has a writer, which makes batches of about 32 KiB.
func ExampleRepository_Writer() {
	ctx := context.Background()
	dir := check(os.MkdirTemp("", "spillway"))
	defer os.RemoveAll(dir)
	eng := check(spillway.Open(ctx, spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
		HostMemory: spillway.Bytes(16 << 20),
		Disks:      []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(64 << 20)}},
	}))
	plan := check(eng.Plan("query-17"))
	scan, join := check(plan.Repository("partition", 0)), check(plan.Repository("join", 0))
	for range 4 {
		for rec, err := range numbers {
			check(0, errors.Join(err, scan.Put(ctx, 0, rec)))
		}
	}
	scan.CloseInput()
	var writers []*repository.Writer
	for {
		claim, err := scan.ClaimBytes(ctx, 0, 64<<10, 128<<10)
		if err == io.EOF {
			break
		}
		check(0, err)
		var records []arrow.RecordBatch
		task := spillway.Task{
			Operator: "partition", Inputs: []*spillway.Claim{claim}, In: spillway.AnyInTier(spillway.Host),
			Output: spillway.None, Overhead: spillway.None,
		}
		check(0, eng.RunTask(ctx, task, func(ctx context.Context, _ *spillway.Grant, in []*spillway.Handle) error {
			records = nil // also when it is called again
			for _, h := range in {
				records = append(records, check(eng.Mover().Record(ctx, h))) // without a copy
			}
			return nil
		}))
		for _, rec := range records {
			for len(writers) < 2 {
				writers = append(writers, check(join.Writer(ctx, len(writers), rec.Schema(), 32<<10)))
			}
			for row, key := range rec.Column(0).(*array.Int64).Int64Values() {
				check(0, writers[key%2].Append(ctx, rec, int64(row), int64(row)+1))
			}
			rec.Release()
		}
	}
	for _, w := range writers {
		check(0, w.Flush(ctx))
		check(0, w.Close())
	}
	join.CloseInput()
	for partition := range writers {
		rows, odd := int64(0), int64(0)
		reader := check(join.Reader(ctx, partition))
		for reader.Next() {
			rows += reader.RecordBatch().NumRows()
			for _, key := range keysOf(reader) {
				odd += key % 2
			}
		}
		reader.Release()
		fmt.Printf("partition %d: %d rows, %d of them odd\n", partition, rows, odd)
	}
	check(0, eng.Close())
	// Output:
	// partition 0: 16384 rows, 0 of them odd
	// partition 1: 16384 rows, 16384 of them odd
}

// keysOf returns the keys of a reader's batch.
func keysOf(r array.RecordReader) []int64 {
	return r.RecordBatch().Column(0).(*array.Int64).Int64Values()
}

// A group-by builds its groups in a reservation, with Arrow's own builders. When the reservation is
// used up it gets an error, and puts the groups away.
func ExampleEngine_Reserve() {
	ctx := context.Background()
	dir := check(os.MkdirTemp("", "spillway"))
	defer os.RemoveAll(dir)
	eng, _ := operators(ctx, dir, 0)
	promise := check(eng.Reserve(ctx, spillway.AnyInTier(spillway.Host), 64<<10))
	alloc := check(arrowmem.New(promise))
	groups := array.NewInt64Builder(alloc)
	err := arrowmem.Guard(func() error {
		for i := int64(0); ; i++ {
			groups.Append(i)
		}
	})
	fmt.Println(errors.Is(err, spillway.ErrExceeded), groups.Len(), "groups")
	groups.Release()
	check(0, alloc.Close())
	check(0, promise.Release())
	check(0, eng.Close())
	// Output: true 4096 groups
}

// A group-by has its groups in a Work, which grows with them. While another request waits for memory,
// Reclaim puts the groups on the disk and gives their memory back.
func ExamplePlan_Work() {
	ctx := context.Background()
	dir := check(os.MkdirTemp("", "spillway"))
	defer os.RemoveAll(dir)
	eng := check(spillway.Open(ctx, spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
		HostMemory: spillway.Bytes(32 << 20),
		Disks:      []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(64 << 20)}},
	}))
	plan := check(eng.Plan("query-17"))
	g := &groupBy{spilled: check(plan.Repository("group-by", 0))}
	g.mu.Lock()
	g.work = check(plan.Work(ctx, spillway.WorkOptions{
		Operator: "group-by", In: spillway.AnyInTier(spillway.Host), Min: 8 << 20, Reclaim: g.putAway,
	}))
	g.mu.Unlock()

	g.mu.Lock()
	groups := array.NewRecordBuilder(g.work.Allocator(), arrow.NewSchema([]arrow.Field{
		{Name: "group", Type: arrow.PrimitiveTypes.Int64},
	}, nil))
	for i := range int64(1 << 20) {
		groups.Field(0).(*array.Int64Builder).Append(i)
	}
	g.groups = groups.NewRecordBatch()
	groups.Release()
	fmt.Println("more than was reserved:", errors.Is(g.work.Err(), spillway.ErrExceeded))
	check(0, g.work.Grow(ctx, 8<<20))
	fmt.Println("after Grow:", g.work.Err())
	g.mu.Unlock()

	another := check(eng.Reserve(ctx, spillway.AnyInTier(spillway.Host), 20<<20)) // waits for the group-by
	check(0, another.Release())
	check(0, g.work.Close())
	check(plan.Close())
	check(0, eng.Close())
	// Output:
	// more than was reserved: true
	// after Grow: <nil>
	// put 1048576 groups away
}

// groupBy is the state of an operator.
type groupBy struct {
	mu      sync.Mutex // guards work and groups
	work    *spillway.Work
	groups  arrow.RecordBatch
	spilled *spillway.Repository
}

// putAway is the Reclaim of the Work.
func (g *groupBy) putAway(ctx context.Context, want int64) (freed int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.groups == nil {
		return 0
	}
	onDisk := spillway.WithPlacement(spillway.AnyInTier(spillway.Disk))
	// After a second ctx ends, and the request may ask another Work. Put ignores that, because the
	// memory helps later, too.
	if err := g.spilled.Put(context.WithoutCancel(ctx), 0, g.groups, onDisk); err != nil {
		return 0 // the request asks another Work, or fails
	}
	fmt.Println("put", g.groups.NumRows(), "groups away")
	g.groups.Release()
	g.groups = nil
	check(0, g.work.Shrink(16<<20))
	return 16 << 20
}

// numbers yields one batch of 8,192 rows.
func numbers(yield func(arrow.RecordBatch, error) bool) {
	b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Int64}}, nil))
	defer b.Release()
	for i := range int64(8192) {
		b.Field(0).(*array.Int64Builder).Append(i)
	}
	rec := b.NewRecordBatch()
	defer rec.Release()
	yield(rec, nil)
}
