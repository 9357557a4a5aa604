package batch_test

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// heap is the smallest pool there is: memory of the Go heap.
type heap struct{}

type memory []byte

func (m memory) Size() int64 { return int64(len(m)) }

func (heap) Charge(size int64) int64                          { return size }
func (heap) Alloc(size int64, _ []int64) (tier.Memory, error) { return make(memory, size), nil }
func (heap) Free(_ tier.Memory, reclaimed func())             { reclaimed() }
func (heap) Close() error                                     { return nil }

// image takes the memory for an image of 4096 bytes. Engines do so through a
// reservation.
func image(s *tier.Space, d *batch.Descriptor) (*batch.Image, error) {
	buf, err := s.DrawNew(d.Body)
	if err != nil {
		return nil, err
	}
	return batch.NewImage(d, buf, s), nil
}

// A batch is brought from the GPU to host memory and read there.
func Example() {
	ctx := context.Background()
	gpu, _ := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU}, Capacity: 1 << 20, Pool: heap{}})
	host, _ := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.Host}, Capacity: 1 << 20, Pool: heap{}})

	d := &batch.Descriptor{Rows: 1000, Body: 4096}
	first, _ := image(gpu, d)
	var ids batch.IDs
	b, err := batch.New(batch.Options{ID: ids.Next(), Payload: first})
	if err != nil {
		fmt.Println(err)
		return
	}

	t, _ := b.Transit(ctx)      // nobody else moves or reads it now
	second, _ := image(host, d) // and here its bytes would be copied
	if err := t.Commit(second, true); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(b.Info().Payload.Type(), b.Info().State,
		"gpu bytes:", gpu.State().Used(), "host bytes:", host.State().Used())

	if _, err := b.Lock(ctx, gpu.ID()); err != nil {
		fmt.Println(err)
	}
	h, _ := b.Lock(ctx, host.ID())
	fmt.Println(b.Info().State, "in", h.Space().ID())
	_ = b.Drop() // its memory stays until the handle is closed
	_ = h.Close()
	fmt.Println(b.Info().State, "host bytes:", host.State().Used())
	// Output:
	// image task-created gpu bytes: 0 host bytes: 4096
	// batch 1, task-created: lock failed: space-mismatch: it is in host:0, not in gpu:0
	// processing in host:0
	// released host bytes: 0
}
