package faultfs_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// A file system on which the second write fails. An engine takes it as spillway.DiskConfig.FS.
func Example() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	files := faultfs.New(disk.OS(), 1)
	files.Add(faultfs.Rule{
		Ops: []string{"write"}, Skip: 1, Times: 1,
		Effect: faultfs.Fail(syscall.EIO),
	})
	file, err := files.Create(filepath.Join(dir, "spilled"), false)
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 3 {
		_, err := file.WriteAt(make([]byte, 4096), 0)
		fmt.Println("input/output error:", errors.Is(err, syscall.EIO))
	}
	if err := file.Close(); err != nil {
		fmt.Println(err)
	}
	fmt.Println("files left open:", files.Open())
	// Output:
	// input/output error: false
	// input/output error: true
	// input/output error: false
	// files left open: 0
}
