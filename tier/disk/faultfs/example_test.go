package faultfs_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// A volume whose second write fails. An engine takes the same file system as
// spillway.DiskConfig.FS.
func Example() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.Remove(dir)
	files := faultfs.New(disk.OS(), 1)
	volume, err := disk.OpenVolume(disk.Config{Dir: dir, Capacity: 1 << 20, FS: files})
	if err != nil {
		fmt.Println(err)
		return
	}
	files.Add(faultfs.Rule{ // from here on: to open a volume writes, too
		Ops: []string{"write"}, Skip: 1, Times: 1,
		Effect: faultfs.Fail(syscall.EIO),
	})
	mem, err := volume.Alloc(4096, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 3 {
		err := mem.(tier.FileMemory).WriteAt(context.Background(), make([]byte, 4096), 0)
		fmt.Println("input/output error:", errors.Is(err, syscall.EIO))
	}
	volume.Free(mem, func() {})
	if err := volume.Close(); err != nil {
		fmt.Println(err)
	}
	fmt.Println("files left open:", files.Open())
	// Output:
	// input/output error: false
	// input/output error: true
	// input/output error: false
	// files left open: 0
}
