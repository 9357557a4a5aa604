package tier_test

import (
	"fmt"
	"log"

	"github.com/spillway-db/spillway/tier"
)

// heap is a pool of Go's own memory. Engines have pinned arenas.
type heap struct{}

// piece is memory of it.
type piece []byte

func (p piece) Size() int64       { return int64(len(p)) }
func (p piece) Extents() [][]byte { return [][]byte{p} }

func (heap) Charge(size int64) int64 { return (size + 63) / 64 * 64 }

func (heap) Alloc(size int64, _ []int64) (tier.Memory, error) { return make(piece, size), nil }

func (heap) Free(_ tier.Memory, reclaimed func()) { reclaimed() }

func (heap) Close() error { return nil }

// A space of host memory: bytes are promised, drawn as a buffer, used, and given back. Programs do
// so by a reservation.Manager.
func Example() {
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID:       tier.ID{Kind: tier.Host},
		Capacity: 1 << 20,
		Pool:     heap{},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer space.Close()

	const text = "held in host memory"
	buf, err := space.DrawNew(int64(len(text)))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %+v\n", space.ID(), space.State().Usage)
	piece := buf.Memory().(tier.HostMemory).Extents()[0]
	copy(piece, text)
	fmt.Printf("%s\n", piece)

	if err := buf.Release(); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %+v\n", space.ID(), space.State().Usage)
	_, err = space.Promise(1 << 20)
	fmt.Println(err)
	// Output:
	// host:0: {Live:64 Retired:0 Reserved:0 Cached:0 Peak:64}
	// held in host memory
	// host:0: {Live:0 Retired:0 Reserved:0 Cached:0 Peak:64}
	// host:0 has no space for 1048576 bytes: 943718 available
}
