package volumes_test

import (
	"context"
	"fmt"
	"os"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// A volume behind a space: bytes are promised, drawn, written, read and released.
func Example() {
	dir, err := os.MkdirTemp("", "spill")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.Remove(dir) // the volume leaves it empty
	volume, err := volumes.Open(volumes.Config{Dir: dir, Capacity: 64 << 20})
	if err != nil {
		fmt.Println(err)
		return
	}
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Disk}, Capacity: 64 << 20, Node: -1, Backend: "disk", Pool: volume,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer space.Close() // closes the volume
	buf, err := space.DrawNew(1 << 20)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer buf.Release()

	ctx := context.Background()
	memory := buf.Memory().(tier.FileMemory)
	page := make([]byte, tier.Page)
	copy(page, "spilled")
	if err := memory.WriteAt(ctx, page, 4096); err != nil {
		fmt.Println(err)
		return
	}
	back := make([]byte, 7)
	if err := memory.ReadAt(ctx, back, 4096); err != nil {
		fmt.Println(err)
		return
	}
	_, file, offset := memory.Locate(4096)
	fmt.Printf("%s, at %d of %s\n", back, offset, file)
	// Output: spilled, at 4096 of segment-0000
}
