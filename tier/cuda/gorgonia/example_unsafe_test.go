//go:build gorgonia && cgo && linux && (amd64 || arm64)

package gorgonia_test

import (
	"context"
	_ "embed"
	"encoding/binary"
	"fmt"
	"log"
	"strings"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"gorgonia.org/cu"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert/cdevice"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/tier/cuda/gorgonia"
)

// addPTX has the kernel spillway_example_add(out, in, n, addend).
//
//go:embed testdata/add.ptx
var addPTX string

// check ends the program on an error.
func check[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}

// A program has a context of cu's, in which an engine works, too. It runs a kernel of its own on
// the batches that a Drain brings to the GPU.
func Example() {
	ctx := context.Background()
	mine := cu.NewContext(cu.Device(0), cu.SchedAuto) // it has a thread, on which its methods work
	var module cu.Module
	check(0, mine.Do(func() (err error) { module, err = cu.LoadData(addPTX); return err }))
	add := check(mine.ModuleFunction(module, "spillway_example_add"))

	dev := check(gorgonia.Open(mine.CUDAContext(), cuda.Config{Memory: 16 << 20}))
	eng := check(spillway.Open(ctx, spillway.Config{
		GPUs:       []spillway.GPUConfig{{Device: dev, Own: true}},
		HostMemory: spillway.Bytes(16 << 20), Disks: []spillway.DiskConfig{},
	}))
	plan := check(eng.Plan("query-17"))
	scan := check(plan.Repository("scan", 0))
	schema := arrow.NewSchema([]arrow.Field{{Name: "people", Type: arrow.PrimitiveTypes.Int64}}, nil)
	for _, text := range []string{`[{"people":128928},{"people":335789}]`, `[{"people":112737}]`} {
		rec, _, err := array.RecordFromJSON(memory.DefaultAllocator, schema, strings.NewReader(text))
		check(0, err)
		check(0, scan.Put(ctx, 0, rec))
		rec.Release()
	}
	scan.CloseInput()

	// The stream is Spillway's, so what Spillway puts there is behind the kernel that cu puts
	// there.
	stream := check(dev.NewStream())
	queue := check(gorgonia.Stream(stream))
	for h, err := range scan.Drain(ctx, 0, tier.GPU) {
		check(0, err)
		var batch cdevice.DeviceArray
		var of cdevice.Schema
		check(0, cdevice.Export(h, &batch, &of, cdevice.Config{})) // it closes h when it is released
		people := batch.Array.Child(0)
		n := people.Length
		in := cu.DevicePtr(people.Buffer(1)) + 8*cu.DevicePtr(batch.Array.Offset+people.Offset)

		room := check(eng.Reserve(ctx, reservation.AnyInTier(tier.GPU), 8*n))
		result := check(room.Alloc(8 * n))
		out := check(gorgonia.DevicePtr(result))
		addend := int64(1_000_000)
		mine.LaunchKernel(add, int(n+255)/256, 1, 1, 256, 1, 1, 0, queue, []unsafe.Pointer{
			unsafe.Pointer(&out), unsafe.Pointer(&in), unsafe.Pointer(&n), unsafe.Pointer(&addend),
		})
		check(0, mine.Error())

		sums := make([]byte, 8*n)
		check(0, dev.CopyRegions(stream, []tier.Region{{HostDst: sums, Src: gorgonia.Addr(out)}}))
		check(0, stream.Sync()) // the kernel and the copy are done, or have failed
		for ; len(sums) > 0; sums = sums[8:] {
			fmt.Println(binary.LittleEndian.Uint64(sums))
		}
		batch.Release()
		of.Close()
		check(0, result.Release())
		check(0, room.Release())
	}
	check(0, stream.Close())
	check(0, eng.Close())
	mine.Unload(module)
	check(0, mine.Error())
	check(0, mine.Close()) // after the engine
	// Output:
	// 1128928
	// 1335789
	// 1112737
}
