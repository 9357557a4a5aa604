// Command hello moves 4 MiB of Arrow record batches through 2 MiB of memory.
package main

import (
	"context"
	"fmt"
	"log"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/spillway-db/spillway"
)

func main() {
	ctx, mib := context.Background(), spillway.Bytes(1<<20) // Config{} takes what the machine has
	eng, err := spillway.Open(ctx, spillway.Config{GPUMemory: mib, HostMemory: mib})
	check(err)
	plan, err := eng.Plan("query-17") // owns the repositories of one query
	check(err)
	repo, err := plan.Repository("sum", 0) // operator, number of its input
	check(err)
	schema := arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Int64}}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	for range 8 {
		b.Field(0).(*array.Int64Builder).AppendValues(make([]int64, 65536), nil)
		rec := b.NewRecordBatch()
		check(repo.Put(ctx, 0, rec)) // copies it into the fastest memory with room
		rec.Release()
	}
	for h, err := range repo.Drain(ctx, 0, spillway.GPU) { // fetches to the GPU and pins there
		check(err)
		fmt.Println(h.Batch().Info().Rows, "rows in", h.Space().ID())
		check(h.Close()) // drops the batch: Drain consumes
	}
	check(eng.Close()) // reports leaks
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
