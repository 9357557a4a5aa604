// Not with the race detector, under which the memory of an engine with all defaults is made and
// filled at once, and takes longer than most tests.

//go:build !race

package spillway_test

import (
	"context"
	"fmt"
	"log"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// What embedding looks like: batches go into a repository, lie in the fastest
// memory with room, and are brought to the GPU when they are worked on.
func Example() {
	ctx := context.Background()
	scan := func(yield func(arrow.RecordBatch, error) bool) {
		b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Int64}}, nil))
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
	rows := int64(0)
	use := func(h *spillway.Handle) { rows += h.Batch().Descriptor().Rows }
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
		for h, err := range build.Drain(ctx, partition, tier.GPU) { // brought back, held, released
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

// A machine with two NUMA nodes, of which the second has the GPU and the disk: each
// space is told its node.
func ExampleConfigure() {
	top := &topology.Topology{ // as topology.Discover returns
		Nodes:  []topology.Node{{ID: 0, MemoryBytes: 32 << 30}, {ID: 1, MemoryBytes: 32 << 30}},
		GPUs:   []topology.GPU{{Name: "a GPU", Node: 1, MemoryNode: 1, MemoryBytes: 16 << 30}},
		Disks:  []topology.Disk{{Name: "nvme0n1", Node: 1, Mounts: []topology.Mount{{Point: "/fast"}}}},
		Limits: topology.Limits{MemoryBytes: 64 << 30},
	}
	cfg, err := spillway.Configure(top, spillway.Config{
		GPUMemory: spillway.Share(0.5),
		Disks:     []spillway.DiskConfig{{Dir: "/fast/spill", Capacity: spillway.Bytes(1 << 40)}},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("GPU:", cfg.GPUs[0].Memory.Bytes>>30, "GiB, node", *cfg.GPUs[0].Node)
	for _, h := range cfg.Hosts {
		fmt.Println("host:", h.Memory.Bytes>>30, "GiB, node", h.Node)
	}
	fmt.Println("disk:", cfg.Disks[0].Dir, "node", *cfg.Disks[0].Node)
	// Output:
	// GPU: 8 GiB, node 1
	// host: 8 GiB, node 0
	// host: 8 GiB, node 1
	// disk: /fast/spill node 1
}
