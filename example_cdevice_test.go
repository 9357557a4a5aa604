package spillway_test

import (
	"context"
	"fmt"
	"log"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert/cdevice"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// check ends the program on an error.
func check[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}

// A batch on the GPU is given away by the Arrow C device data interface and comes back, as if
// another program had had it in between.
func ExampleEngine_NewBatch() {
	ctx := context.Background()
	eng := check(spillway.Open(ctx, spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(16 << 20)}}, HostMemory: spillway.Bytes(16 << 20), Disks: []spillway.DiskConfig{},
	}))
	onGPU := reservation.AnyInTier(tier.GPU)
	gpu, _ := eng.Reservations().Spaces().ByID(tier.ID{Kind: tier.GPU})

	schema := arrow.NewSchema([]arrow.Field{{Name: "city", Type: arrow.BinaryTypes.String}}, nil)
	rec, _, err := array.RecordFromJSON(memory.DefaultAllocator, schema, strings.NewReader(`[{"city":"Ulm"},{"city":"Bonn"}]`))
	check(0, err)
	ours := check(eng.NewBatch(check(eng.Mover().Ingest(ctx, rec, onGPU))))

	var arr cdevice.DeviceArray
	var of cdevice.Schema
	check(0, cdevice.Export(check(eng.Mover().Acquire(ctx, ours, onGPU)), &arr, &of, cdevice.Config{}))
	fmt.Println("exported:", arr.Array.Length, "rows,", arr.Array.NChildren, "column, device type", arr.DeviceType)

	table := check(cdevice.Import(ctx, eng.Mover(), gpu, &arr, &of, cdevice.Config{}))
	theirs := check(eng.NewBatch(table))
	fmt.Println("imported:", theirs.Info().Payload.Type(), "and ours is", ours.Info().State)

	h := check(eng.Mover().Acquire(ctx, theirs, onGPU))
	back := check(eng.Mover().Record(ctx, h))
	fmt.Println(back.Column(0))
	back.Release()
	check(0, h.Close())
	check(0, theirs.Drop())
	check(0, ours.Drop())
	check(0, eng.Close())
	// Output:
	// exported: 2 rows, 1 column, device type 1
	// imported: scattered and ours is processing
	// ["Ulm" "Bonn"]
}
