// Not with the race detector, under which the memory of an engine with all defaults is made and
// filled at once, and takes longer than most tests.

//go:build !race

package spillway_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
)

// scan yields three batches of two rows.
func scan(yield func(arrow.RecordBatch, error) bool) {
	schema := arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Int64}}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	for i := range 3 {
		b.Field(0).(*array.Int64Builder).AppendValues([]int64{int64(i), int64(i) * 10}, nil)
		rec := b.NewRecordBatch()
		ok := yield(rec, nil)
		rec.Release()
		if !ok {
			return
		}
	}
}

// What embedding looks like: batches go into a repository, lie in the fastest
// memory with room, and are brought to the GPU when they are worked on.
func Example() {
	ctx := context.Background()
	rows := int64(0)
	use := func(h *spillway.Handle) { rows += h.Batch().Info().Descriptor.Rows }
	const partition = 0

	err := func() error {
		eng, err := spillway.Open(ctx, spillway.Config{}) // finds GPUs, NUMA nodes and a temporary disk; every part can be set
		if err != nil {
			return err
		}
		defer eng.Close()
		plan, err := eng.Plan("query-17") // owns a query's repositories and their order
		if err != nil {
			return err
		}
		build, err := plan.Repository("hash-join", 0) // (operator, port)
		if err != nil {
			return err
		}
		for rec, err := range scan { // arrow.RecordBatch from anywhere
			if err != nil {
				return err
			}
			if err := build.Put(ctx, partition, rec); err != nil { // lands in the fastest memory with room
				return err
			}
		}
		for h, err := range build.Drain(ctx, partition, spillway.GPU) { // brought back, held, released
			if err != nil {
				return err
			}
			use(h)
			if err := h.Close(); err != nil {
				return err
			}
		}
		return nil
	}()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(rows, "rows")
	// Output: 6 rows
}

// A task waits until a GPU has room for its inputs and for what it makes of them. It is run again
// if it runs out of memory, and its inputs are gone when it has succeeded.
func ExampleEngine_RunTask() {
	ctx := context.Background()
	err := func() (err error) {
		eng, err := spillway.Open(ctx, spillway.Config{
			GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(16 << 20)}},
			HostMemory: spillway.Bytes(16 << 20),
			Disks:      []spillway.DiskConfig{{Capacity: spillway.Bytes(64 << 20)}},
		})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, eng.Close()) }()
		plan, err := eng.Plan("query-17")
		if err != nil {
			return err
		}
		input, err := plan.Repository("aggregate", 0)
		if err != nil {
			return err
		}
		onDisk := spillway.WithPlacement(spillway.AnyInTier(spillway.Disk))
		for rec, err := range scan {
			if err != nil {
				return err
			}
			if err := input.Put(ctx, 0, rec, onDisk); err != nil {
				return err
			}
		}
		input.CloseInput()
		claim, err := input.Claim(ctx, 0, 2) // two batches, which nobody else gets
		if err != nil {
			return err
		}
		task := spillway.Task{Operator: "aggregate", Inputs: []*spillway.Claim{claim}, Output: 4096, Overhead: spillway.None}
		err = eng.RunTask(ctx, task, func(ctx context.Context, g *spillway.Grant, inputs []*spillway.Handle) error {
			for _, h := range inputs {
				fmt.Println(h.Batch().Info().Descriptor.Rows, "rows in", h.Space().ID())
			}
			g.Produced(16) // bytes of output, for the estimates of later tasks
			return nil
		})
		if err != nil {
			return err
		}
		fmt.Println(input.Len(0), "batch is left")
		return nil
	}()
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// 2 rows in gpu:0
	// 2 rows in gpu:0
	// 1 batch is left
}
