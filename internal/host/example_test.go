package host_test

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/tier"
)

// An arena behind a space: bytes are promised, drawn and released.
func Example() {
	arena, err := host.NewArena(host.Config{Capacity: 8 << 20, Node: -1})
	if err != nil {
		fmt.Println(err)
		return
	}
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Host}, Capacity: 8 << 20, Node: -1, Backend: "host", Pool: arena,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer space.Close() // closes the arena
	buf, err := space.DrawNew(10000)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer buf.Release()
	for _, extent := range buf.Memory().(tier.HostMemory).Extents() {
		fmt.Println(len(extent), "bytes; charged", buf.Charge())
	}
	// Output: 10000 bytes; charged 12288
}

// A staging buffer lent out in chunks.
func ExampleStaging() {
	arena, err := host.NewArena(host.Config{Capacity: 1 << 20, Node: -1})
	if err != nil {
		fmt.Println(err)
		return
	}
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Host}, Capacity: 1 << 20, Node: -1, Backend: "host", Pool: arena,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer space.Close()
	const chunk = 128 << 10
	buf, err := space.DrawNew(512<<10, chunk, 2*chunk, 3*chunk)
	if err != nil {
		fmt.Println(err)
		return
	}
	staging := host.NewStaging(buf, chunk)
	defer staging.Close() // releases the buffer
	c, err := staging.Borrow(context.Background(), true)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("a chunk of", len(c))
	staging.Return(c)
	// Output: a chunk of 131072
}
