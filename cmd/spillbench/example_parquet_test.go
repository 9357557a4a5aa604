package main_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"

	"github.com/spillway-db/spillway"
)

// A Parquet file is put into a repository, and read again as Arrow records by a Reader, which any
// library takes that takes an array.RecordReader.
func Example_parquet() {
	ctx := context.Background()
	err := func() (err error) {
		f, err := file.OpenParquetFile("../../testdata/flights.parquet", false)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		parquet, err := pqarrow.NewFileReader(f, pqarrow.ArrowReadProperties{BatchSize: 250}, memory.DefaultAllocator)
		if err != nil {
			return err
		}
		scan, err := parquet.GetRecordReader(ctx, nil, nil) // all columns, all row groups
		if err != nil {
			return err
		}
		defer scan.Release()

		eng, err := spillway.Open(ctx, spillway.Config{
			GPUs:       []spillway.GPUConfig{}, // none, not even a simulated one
			HostMemory: spillway.Bytes(16 << 20),
			Disks:      []spillway.DiskConfig{{Capacity: spillway.Bytes(64 << 20)}},
		})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, eng.Close()) }()
		plan, err := eng.Plan("flights")
		if err != nil {
			return err
		}
		repo, err := plan.Repository("scan", 0)
		if err != nil {
			return err
		}
		for rec, err := range array.IterFromReader(scan) {
			if err != nil {
				return err
			}
			if err := repo.Put(ctx, 0, rec); err != nil {
				return err
			}
		}
		repo.CloseInput()

		rows, late := int64(0), 0
		reader, err := repo.Reader(ctx, 0)
		if err != nil {
			return err
		}
		defer reader.Release()
		for reader.Next() {
			rec := reader.RecordBatch()
			rows += rec.NumRows()
			for _, minutes := range rec.Column(1).(*array.Int64).Int64Values() {
				if minutes > 60 {
					late++
				}
			}
		}
		fmt.Println(rows, "flights,", late, "of them more than an hour late")
		return reader.Err()
	}()
	if err != nil {
		log.Fatal(err)
	}
	// Output: 1000 flights, 48 of them more than an hour late
}
