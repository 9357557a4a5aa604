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
