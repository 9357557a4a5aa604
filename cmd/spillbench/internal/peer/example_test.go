package peer_test

import (
	"context"
	"fmt"
	"os"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/gen"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/peer"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/progress"
)

// A generated table goes through a MiB of memory, by both sides and twice.
func Example() {
	const memory = 1 << 20
	res, err := peer.Run(context.Background(), peer.Config{
		Open: func(ctx context.Context) (*spillway.Engine, error) {
			return spillway.Open(ctx, spillway.Config{GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(memory)})
		},
		Inputs: []job.Input{{Name: "table", Open: func(context.Context) (job.Source, error) {
			return gen.New(gen.Config{Seed: 1, Rows: 10_000, RowsPerBatch: 1000})
		}}},
		Repeat: 1, Rounds: 2, Workers: 2, Dir: os.TempDir(), Progress: new(progress.Bar),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(res.Batches, "batches,", res.Verified, "comparisons,", len(res.Rounds), "rounds")
	// Output: 10 batches, 20 comparisons, 2 rounds
}
