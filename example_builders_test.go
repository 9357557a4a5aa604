package spillway_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// A filter looks at one column of a batch that was spilled, and then at all columns of
// the rows that it wants. The batch stays on disk.
func ExampleEngine_Mover() {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "spillway")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	schema := arrow.NewSchema([]arrow.Field{
		{Name: "city", Type: arrow.BinaryTypes.String},
		{Name: "people", Type: arrow.PrimitiveTypes.Int64},
	}, nil)
	rec, _, err := array.RecordFromJSON(memory.DefaultAllocator, schema, strings.NewReader(
		`[{"city":"Ulm","people":128928},{"city":"Bonn","people":335789},{"city":"Trier","people":112737}]`))
	if err != nil {
		log.Fatal(err)
	}
	defer rec.Release()

	err = func() (err error) {
		eng, err := spillway.Open(ctx, spillway.Config{HostMemory: spillway.Bytes(16 << 20), Disks: []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(16 << 20)}}})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, eng.Close()) }()
		plan, err := eng.Plan("query-17")
		if err != nil {
			return err
		}
		scan, err := plan.Repository("scan", 0)
		if err != nil {
			return err
		}
		onDisk := repository.WithPlacement(reservation.AnyInTier(tier.Disk))
		if err := scan.Put(ctx, 0, rec, onDisk); err != nil {
			return err
		}
		scan.CloseInput()
		for h, err := range scan.Drain(ctx, 0, tier.Disk) {
			if err != nil {
				return err
			}
			column, err := eng.Mover().Columns(ctx, h, convert.Selection{Columns: []string{"people"}})
			if err != nil {
				return errors.Join(err, h.Close())
			}
			fmt.Println(column.Schema().Field(0).Name, column.Column(0))
			column.Release()
			rows, err := eng.Mover().Columns(ctx, h, convert.Selection{From: 1, To: 2})
			if err != nil {
				return errors.Join(err, h.Close())
			}
			fmt.Println(rows.Column(0), rows.Column(1))
			rows.Release()
			fmt.Println("the batch lies in", h.Space().ID())
			if err := h.Close(); err != nil {
				return err
			}
		}
		return nil
	}()
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// people [128928 335789 112737]
	// ["Bonn"] [335789]
	// the batch lies in disk:0
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
