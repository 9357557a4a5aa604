package topology_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/topology"
)

// looks ends a context after more queries than a small machine needs. Following each way through a
// ring would take years.
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

// TestRings: devices that stand on themselves, in many ways at once, are followed once, and file
// systems a few times.
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
	if err != nil || len(top.Disks) != 1 || len(top.Disks[0].Mounts) != 1 {
		t.Fatalf("got %+v, %v", top, err)
	}
	for dir, disks := range map[string]int{"/x": 1, "/ring": 0} {
		l, err := topology.DiskOf(few(), dir, topology.Options{Root: root})
		if err != nil || len(l.Disks) != disks || (disks == 0) != strings.Contains(said(l.Warnings), "stacked on itself") {
			t.Errorf("%s: %+v, %v", dir, l, err)
		}
	}
}

// TestLarge: what is too long to be followed in a moment is reported, and the rest is as it is. Devices
// are followed however many are stacked.
func TestLarge(t *testing.T) {
	long := strings.Repeat("/a", 4000)
	chain := strings.Replace(base, "-- sys/block/ --\n", "", 1) + "-- sys/block/sda/size --\n8\n-- sys/dev/block/253:0 -> ../../devices/virtual/block/dm-0 --\n-- proc/self/cgroup --\n"
	for i := range 9 {
		chain += fmt.Sprintf("-- sys/devices/virtual/block/dm-%d/slaves/x -> ../../dm-%d --\n", i, i+1)
	}
	chain += "-- sys/devices/virtual/block/dm-9/size --\n8\n-- proc/self/mountinfo --\n1 0 253:0 / / rw - ext4 x rw\n"
	var addresses, routes strings.Builder
	for i := range 5000 {
		fmt.Fprintf(&addresses, "|-- 10.1.%d.%d\n/32 host LOCAL\n", i/250, i%250)
		fmt.Fprintf(&routes, "ib0 %02X%02X010A 00000000 0001 0 0 0 FFFFFFFF 0 0 0\n", i%250, i/250)
	}
	for name, c := range map[string]struct{ text, warns string }{
		"cgroup":       {base + "-- proc/self/cgroup --\n0::" + long + "\n-- proc/self/mountinfo --\n1 0 0:1 / /cg rw - cgroup2 x rw\n-- cg/ --\n", "/proc/self/cgroup: a path longer"},
		"backing file": {base + "-- proc/self/mountinfo --\n1 0 7:0 / / rw - ext4 /dev/loop0 rw\n-- sys/dev/block/7:0 -> ../../devices/virtual/block/loop0 --\n-- sys/class/block/loop0 -> ../../devices/virtual/block/loop0 --\n-- sys/devices/virtual/block/loop0/loop/backing_file --\n" + long + "\n", "…"},
		"devices":      {chain, "/sys/block/dm-9: it is not a disk"},
		"addresses":    {nicTree("4: ACTIVE", "InfiniBand") + "-- proc/net/fib_trie --\n" + addresses.String() + "-- proc/net/route --\n" + routes.String(), ""},
	} {
		root := tree(t, c.text)
		top := discover(t, topology.Options{Root: root})
		l, err := topology.DiskOf(t.Context(), "/", topology.Options{Root: root})
		if all := said(append(top.Warnings, l.Warnings...)); err != nil || !strings.Contains(all, c.warns) {
			t.Errorf("%s: warnings %.600q, %v; want %q", name, all, err, c.warns)
		}
		for _, w := range append(top.Warnings, l.Warnings...) {
			if len(w.What) > 1100 || strings.HasPrefix(w.What, ":") {
				t.Errorf("%s: a warning of %d bytes: %.40q", name, len(w.What), w.What)
			}
		}
		if name == "addresses" && len(top.NICs[0].Ports[0].Addresses) != 5000 {
			t.Errorf("%d addresses, want 5000", len(top.NICs[0].Ports[0].Addresses))
		}
		if top.Limits.MemoryBytes != 16*gib {
			t.Errorf("%s: limits %+v", name, top.Limits)
		}
	}
}

// TestDeep: what is below more directories than are open at a time is found, and none stays open.
func TestDeep(t *testing.T) {
	deep := strings.Repeat("/a", 100)
	root := tree(t, base+"-- proc/self/cgroup --\n0::"+deep+"\n-- proc/self/mountinfo --\n1 0 0:1 / /cg rw - cgroup2 x rw\n-- cg"+deep+"/memory.max --\n1073741824\n")
	l := discover(t, topology.Options{Root: root}).Limits
	if l.MemoryBytes != gib || l.MemorySource != "/cg"+deep+"/memory.max" {
		t.Errorf("got %+v", l)
	}
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(to, root) {
			t.Errorf("%s is open", to)
		}
	}
}

// TestSeveralLoops: a file system on a disk and on files of several file systems is on all their disks,
// and in memory if one of them is.
func TestSeveralLoops(t *testing.T) {
	text := strings.Replace(base, "-- sys/block/ --\n", "", 1) + "-- sys/dev/block/9:0 -> ../../devices/virtual/block/md0 --\n" +
		"-- proc/self/mountinfo --\n1 0 9:0 / / rw - ext4 /dev/md0 rw\n2 1 8:0 / /a rw - ext4 /dev/sda rw\n" +
		"3 1 0:9 / /m rw - tmpfs tmpfs rw\n4 1 8:16 / /b rw - ext4 /dev/sdb rw\n-- a/ --\n-- m/ --\n-- b/ --\n" +
		"-- sys/devices/virtual/block/md0/slaves/sdc -> ../../../../sdc --\n"
	for i, disk := range []string{"sda", "sdb", "sdc"} {
		text += fmt.Sprintf("-- sys/devices/%s/size --\n8\n-- sys/block/%s -> ../devices/%s --\n"+
			"-- sys/dev/block/8:%d -> ../../devices/%s --\n-- sys/class/block/%s -> ../../devices/%s --\n",
			disk, disk, disk, 16*i, disk, disk, disk)
	}
	for i, file := range []string{"/a/1", "/m/2", "/b/3", "/a/4"} {
		text += fmt.Sprintf("-- sys/devices/virtual/block/md0/slaves/loop%d -> ../../loop%d --\n"+
			"-- sys/class/block/loop%d -> ../../devices/virtual/block/loop%d --\n"+
			"-- sys/devices/virtual/block/loop%d/loop/backing_file --\n%s\n", i, i, i, i, i, file)
	}
	l, err := topology.DiskOf(t.Context(), "/x", topology.Options{Root: tree(t, text)})
	var names []string
	for _, d := range l.Disks {
		names = append(names, d.Name)
	}
	if err != nil || strings.Join(names, " ") != "sda sdb sdc" || !l.InMemory() {
		t.Errorf("on %q, in memory: %v, %v, %s", names, l.InMemory(), err, said(l.Warnings))
	}
}
