package cdevice_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/convert/cdevice"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/host"
	"github.com/spillway-db/spillway/tier/sim"
)

func must[T any](v T, err error) T {
	if err != nil {
		slog.Error("the example failed", "err", err)
		os.Exit(1)
	}
	return v
}

// A batch on the GPU is given away and comes back, as if another program had had it in
// between. The engine has the spaces and the mover, and makes batches (Engine.NewBatch);
// here they are made by hand.
func Example() {
	ctx := context.Background()
	dev := must(sim.New(sim.Config{Memory: 1 << 20}))
	gpu := must(tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU}, Capacity: 1 << 20, Pool: must(tier.NewDevicePool(dev)), Backend: "sim"}))
	arena := must(host.NewArena(host.Config{Capacity: 1 << 20, Node: -1}))
	pinned := must(tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.Host}, Capacity: 1 << 20, Pool: arena, Backend: "host"}))
	reservations := must(reservation.NewManager(reservation.Config{Spaces: []*tier.Space{gpu, pinned}}))
	streams := must(tier.NewStreamPool(dev, 2))
	room := must(reservations.TryReserve(reservation.AnyInTier(tier.Host), 1<<18))
	staging := host.NewStaging(must(room.Alloc(1<<18)), 1<<16)
	builtin := &convert.Builtin{
		Streams: func(tier.ID) (*tier.StreamPool, error) { return streams, nil },
		Staging: func(int) (convert.Staging, error) { return staging, nil },
		Permits: must(permit.New(permit.Config{})),
	}
	var registry convert.Registry
	must(0, builtin.Register(&registry))
	mover := must(convert.NewMover(convert.MoverConfig{Reservations: reservations, Registry: &registry, Builtin: builtin}))

	b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{{Name: "city", Type: arrow.BinaryTypes.String}}, nil))
	b.Field(0).(*array.StringBuilder).AppendValues([]string{"Ulm", "Bonn"}, nil)
	var ids batch.IDs
	onGPU := reservation.AnyInTier(tier.GPU)
	ours := must(batch.New(batch.Options{ID: ids.Next(), Payload: must(mover.Ingest(ctx, b.NewRecordBatch(), onGPU))}))

	var arr cdevice.DeviceArray
	var schema cdevice.Schema
	must(0, cdevice.Export(must(mover.Acquire(ctx, ours, onGPU)), &arr, &schema, cdevice.Config{}))
	fmt.Println("exported:", arr.Array.Length, "rows,", arr.Array.NChildren, "column, device type", arr.DeviceType)

	table := must(cdevice.Import(ctx, mover, gpu, &arr, &schema, cdevice.Config{}))
	theirs := must(batch.New(batch.Options{ID: ids.Next(), Payload: table}))
	fmt.Println("imported:", theirs.PayloadType(), "and ours is", ours.State())

	rec := must(mover.Record(ctx, must(mover.Acquire(ctx, theirs, onGPU))))
	fmt.Println(rec.Column(0))
	// Output:
	// exported: 2 rows, 1 column, device type 1
	// imported: gpu-table and ours is processing
	// ["Ulm" "Bonn"]
}
