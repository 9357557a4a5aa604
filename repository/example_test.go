package repository_test

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/tier"
)

// none is a pool for empty bodies.
type none struct{}

func (none) Charge(size int64) int64                   { return size }
func (none) Alloc(int64, []int64) (tier.Memory, error) { return nil, tier.ErrNotSupported }
func (none) Free(_ tier.Memory, reclaimed func())      { reclaimed() }
func (none) Close() error                              { return nil }

// A scan hands batches to a join. With a Mover, Put and Drain take the place of
// PutBatch and Take.
func Example() {
	ctx := context.Background()
	host, _ := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.Host}, Capacity: 1 << 20, Pool: none{}})
	plan := repository.NewManager("query-17", 1, repository.Config{})
	join, err := plan.Create(repository.Key{Operator: "hash-join", Port: 0}, repository.Options{Partitions: 8})
	if err != nil {
		fmt.Println(err)
		return
	}

	var ids batch.IDs
	for rows := range int64(4) {
		d := &batch.Descriptor{Rows: rows}
		b, _ := batch.New(batch.Options{ID: ids.Next(), Payload: batch.NewImage(d, nil, host)})
		if err := join.PutBatch(3, b); err != nil {
			fmt.Println(err)
			return
		}
	}

	for range 3 {
		b, err := join.Take(ctx, 3, batch.TaskCreated)
		if err != nil {
			fmt.Println(err)
			return
		}
		h, _ := b.Open(ctx, tier.ID{}, false)
		fmt.Println(h.Batch().Info().Descriptor.Rows, "rows in", h.Space().ID())
		_ = b.Drop() // takes effect when the handle is closed
		_ = h.Close()
	}

	left, _ := plan.Clear(ctx)
	for _, l := range left {
		fmt.Println("not consumed:", l.Batches, "of", l.Key)
	}
	_, _ = plan.Close(ctx)
	_, err = join.Take(ctx, 3, batch.Idle, repository.NoWait())
	fmt.Println(err)
	// Output:
	// 0 rows in host:0
	// 1 rows in host:0
	// 2 rows in host:0
	// not consumed: 1 of hash-join:0
	// repository hash-join:0: closed
}
