package topology_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/topology"
)

// looks ends a context when it was asked more often than looking at a small machine needs: who follows
// each way through a ring would be at it for years.
type looks struct {
	context.Context
	left int
}

var errManyLooks = errors.New("looked too often")

func (l *looks) Err() error {
	if l.left--; l.left < 0 {
		return errManyLooks
	}
	return nil
}

// TestRings: devices and file systems that stand on themselves, in many ways at once, are followed once.
func TestRings(t *testing.T) {
	var b strings.Builder
	b.WriteString(strings.Replace(base, "-- sys/block/ --\n", "", 1))
	b.WriteString("-- proc/self/cgroup --\n-- sys/block/sda -> ../devices/sda --\n-- sys/class/block/sda -> ../../devices/sda --\n-- sys/devices/sda/size --\n8\n-- sys/devices/sda/queue/rotational --\n0\n")
	b.WriteString("-- sys/dev/block/253:0 -> ../../devices/virtual/block/dm-0 --\n-- sys/dev/block/253:1 -> ../../devices/virtual/block/dm-1 --\n")
	for i := range 20 { // dm-0 is on dm-0 by twenty names and on sda; dm-1 on loop devices whose files are on dm-1
		fmt.Fprintf(&b, "-- sys/devices/virtual/block/dm-0/slaves/a%d -> ../../dm-0 --\n", i)
		fmt.Fprintf(&b, "-- sys/devices/virtual/block/dm-1/slaves/loop%d -> ../../loop%d --\n", i, i)
		fmt.Fprintf(&b, "-- sys/class/block/loop%d -> ../../devices/virtual/block/loop%d --\n", i, i)
		fmt.Fprintf(&b, "-- sys/devices/virtual/block/loop%d/loop/backing_file --\n/ring/file%d\n", i, i)
	}
	b.WriteString("-- sys/devices/virtual/block/dm-0/slaves/sda -> ../../../../sda --\n-- ring/ --\n")
	b.WriteString("-- proc/self/mountinfo --\n1 0 253:0 / / rw - ext4 /dev/dm-0 rw\n2 1 253:1 / /ring rw - ext4 /dev/dm-1 rw\n")
	root := tree(t, b.String())
	few := func() *looks { return &looks{t.Context(), 20_000} }

	top, err := topology.Discover(few(), topology.Options{Root: root})
	if err != nil || len(top.Disks) != 1 || len(top.Disks[0].Mounts) != 1 || !strings.Contains(strings.Join(top.Warnings, "\n"), "stacked on itself") {
		t.Fatalf("got %+v, %v", top, err)
	}
	for dir, disks := range map[string]int{"/x": 1, "/ring": 0} {
		l, err := topology.DiskOf(few(), dir, topology.Options{Root: root})
		if err != nil || len(l.Disks) != disks || !strings.Contains(strings.Join(l.Warnings, "\n"), "stacked on itself") {
			t.Errorf("%s: %+v, %v", dir, l, err)
		}
	}
}
