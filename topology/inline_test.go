package topology_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/topology"
)

const gib = 1 << 30

// base is a machine of 16 GiB and 8 CPUs, without cgroups.
const base = `-- proc/meminfo --
MemTotal: 16777216 kB
MemFree: 1024 kB
-- proc/cpuinfo --
model name : test
-- proc/self/status --
Cpus_allowed_list: 0-7
-- sys/devices/system/cpu/online --
0-7
-- sys/block/ --
`

func TestLimits(t *testing.T) {
	const v2 = "-- proc/self/mountinfo --\n30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
	for _, c := range []struct {
		name, tree  string
		memory      int64
		cpus        int
		source      string // of the memory
		version     int
		warnsCgroup bool
	}{
		{name: "none", tree: "-- proc/self/cgroup --\n-- proc/self/mountinfo --\n", memory: 16 * gib, cpus: 8, source: "/proc/meminfo"},
		{name: "above the process alone", version: 2, memory: 4 * gib, cpus: 2, source: "/sys/fs/cgroup/a/memory.max",
			tree: v2 + "-- proc/self/cgroup --\n0::/a/b/c\n-- sys/fs/cgroup/a/memory.max --\n4294967296\n-- sys/fs/cgroup/a/b/memory.max --\n8589934592\n" +
				"-- sys/fs/cgroup/a/b/c/memory.max --\nmax\n-- sys/fs/cgroup/a/cpu.max --\n110000 100000\n-- sys/fs/cgroup/a/b/c/cpu.max --\n700000 100000\n"},
		{name: "more than the machine has", version: 2, memory: 16 * gib, cpus: 8, source: "/proc/meminfo",
			tree: v2 + "-- proc/self/cgroup --\n0::/a\n-- sys/fs/cgroup/a/memory.max --\n68719476736\n-- sys/fs/cgroup/a/cpu.max --\n6400000 100000\n"},
		{name: "less than a CPU", version: 2, memory: 16 * gib, cpus: 1, source: "/proc/meminfo",
			tree: v2 + "-- proc/self/cgroup --\n0::/\n-- sys/fs/cgroup/cpu.max --\n5000 100000\n"},
		{name: "the process's group is gone", version: 2, memory: 2 * gib, cpus: 8, source: "/sys/fs/cgroup/a/memory.max", warnsCgroup: true,
			tree: v2 + "-- proc/self/cgroup --\n0::/a/gone\n-- sys/fs/cgroup/a/memory.max --\n2147483648\n"},
		{name: "outside of the namespace", version: 2, memory: 2 * gib, cpus: 8, source: "/sys/fs/cgroup/memory.max", warnsCgroup: true,
			tree: v2 + "-- proc/self/cgroup --\n0::/../../other\n-- sys/fs/cgroup/memory.max --\n2147483648\n-- sys/fs/cgroup/other/memory.max --\n1\n"},
		{name: "a name that begins alike", version: 2, memory: 2 * gib, cpus: 8, source: "/cg/memory.max", warnsCgroup: true,
			tree: "-- proc/self/mountinfo --\n30 24 0:26 /ab /cg rw - cgroup2 cgroup2 rw\n-- proc/self/cgroup --\n0::/abc\n-- cg/memory.max --\n2147483648\n-- cg/c/memory.max --\n1\n"},
		{name: "the second mount is the one", version: 2, memory: 2 * gib, cpus: 8, source: "/two/c/memory.max",
			tree: "-- proc/self/mountinfo --\n30 24 0:26 /other /one rw - cgroup2 cgroup2 rw\n31 24 0:26 /b /two rw - cgroup2 cgroup2 rw\n" +
				"-- proc/self/cgroup --\n0::/b/c\n-- two/c/memory.max --\n2147483648\n-- one/memory.max --\n1024\n"},
		{name: "both versions", version: 1, memory: 3 * gib, cpus: 4, source: "/cg/memory/x/memory.limit_in_bytes",
			tree: "-- proc/self/mountinfo --\n30 24 0:26 / /cg/unified rw - cgroup2 cgroup2 rw\n31 24 0:27 / /cg/memory rw - cgroup cgroup rw,memory\n" +
				"-- proc/self/cgroup --\n3:memory:/x\n0::/y\n-- cg/memory/x/memory.limit_in_bytes --\n3221225472\n-- cg/unified/y/memory.max --\n1024\n" +
				"-- cg/unified/y/cpu.max --\n400000 100000\n"},
		{name: "version 1 by groups above", version: 1, memory: gib, cpus: 1, source: "/cg/m/x/memory.limit_in_bytes",
			tree: "-- proc/self/mountinfo --\n31 24 0:27 / /cg/m rw - cgroup cgroup rw,memory,cpu\n-- proc/self/cgroup --\n3:memory,cpu:/x/y\n" +
				"-- cg/m/x/memory.limit_in_bytes --\n1073741824\n-- cg/m/x/y/memory.limit_in_bytes --\n9223372036854771712\n" +
				"-- cg/m/x/cpu.cfs_quota_us --\n20000\n-- cg/m/x/cpu.cfs_period_us --\n20000\n-- cg/m/x/y/cpu.cfs_quota_us --\n-1\n"},
		{name: "version 1 without a limit", version: 1, memory: 16 * gib, cpus: 8, source: "/proc/meminfo",
			tree: "-- proc/self/mountinfo --\n31 24 0:27 / /cg/m rw - cgroup cgroup rw,memory\n-- proc/self/cgroup --\n3:memory:/\n-- cg/m/memory.limit_in_bytes --\n9223372036854771712\n"},
		{name: "not mounted", memory: 16 * gib, cpus: 8, source: "/proc/meminfo", warnsCgroup: true,
			tree: "-- proc/self/mountinfo --\n-- proc/self/cgroup --\n3:memory:/x\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			top := discover(t, topology.Options{Root: tree(t, base+c.tree)})
			l := top.Limits
			if l.MemoryBytes != c.memory || l.CPUs != c.cpus || l.MemorySource != c.source || l.CgroupVersion != c.version {
				t.Errorf("got %+v", l)
			}
			warned := slices.ContainsFunc(top.Warnings, func(w diag.Warning) bool { return strings.Contains(w.What, "limits") })
			if warned != c.warnsCgroup {
				t.Errorf("warnings %q", top.Warnings)
			}
		})
	}
}

func TestNodes(t *testing.T) {
	node := func(id int, cpus string, kb int) string {
		dir := fmt.Sprintf("sys/devices/system/node/node%d/", id)
		return fmt.Sprintf("-- %scpulist --\n%s\n-- %smeminfo --\nNode %d MemTotal: %d kB\nNode %d MemFree: 0 kB\n-- %sdistance --\n10 20\n", dir, cpus, dir, id, kb, id, dir)
	}
	for _, c := range []struct {
		name, tree string
		nodes      string
		memory     int64
		warns      string
	}{
		{name: "no NUMA", nodes: "0:0-7:17179869184", memory: 16 * gib},
		{name: "gaps and a node without CPUs", tree: "-- sys/devices/system/node/online --\n0,8\n" + node(0, "0-7", 8<<20) + node(8, "", 8<<20),
			nodes: "0:0-7:8589934592 8::8589934592", memory: 16 * gib},
		{name: "thousands of nodes", tree: "-- sys/devices/system/node/online --\n0-65535\n" + node(0, "0-3", 8<<20) + node(1, "4-7", 8<<20),
			nodes: "0:0-7:17179869184", memory: 16 * gib, warns: "more than any machine"},
	} {
		t.Run(c.name, func(t *testing.T) {
			top := discover(t, topology.Options{Root: tree(t, base+c.tree)})
			var got []string
			for _, n := range top.Nodes {
				got = append(got, fmt.Sprintf("%d:%s:%d", n.ID, n.CPUs, n.MemoryBytes))
			}
			if strings.Join(got, " ") != c.nodes || top.Limits.MemoryBytes != c.memory {
				t.Errorf("got %q, %+v", got, top.Limits)
			}
			if all := said(top.Warnings); !strings.Contains(all, c.warns) || c.warns == "" && strings.Contains(all, "node") {
				t.Errorf("warnings %q", top.Warnings)
			}
		})
	}
}

// A node that the policy forbids takes its memory off the limit.
func TestMemoryNodes(t *testing.T) {
	text := strings.Replace(base, "Cpus_allowed_list: 0-7", "Cpus_allowed_list: 0-1\nMems_allowed_list: 1", 1) +
		"-- sys/devices/system/node/online --\n0-1\n" +
		"-- sys/devices/system/node/node0/meminfo --\nMemTotal: 12582912 kB\n-- sys/devices/system/node/node1/meminfo --\nMemTotal: 4194304 kB\n"
	l := discover(t, topology.Options{Root: tree(t, text)}).Limits
	if l.MemoryNodes.String() != "1" || l.MemoryBytes != 4*gib || l.MemorySource != "/proc/self/status" || l.CPUs != 2 || l.CPUSource != "/proc/self/status" {
		t.Errorf("got %+v", l)
	}
}

func TestGPUsOfTheBus(t *testing.T) {
	text := base
	for i, c := range []string{"0x10de 0x030000", "0x10de 0x030200", "0x10de 0x040300", "0x1002 0x030000", "0x10de 0x030200 virtual", "0x10de 0x068000"} {
		f := strings.Fields(c)
		dir := fmt.Sprintf("sys/bus/pci/devices/0000:0%d:00.0/", i)
		text += fmt.Sprintf("-- %svendor --\n%s\n-- %sdevice --\n0x2330\n-- %sclass --\n%s\n", dir, f[0], dir, dir, f[1])
		if len(f) > 2 {
			text += "-- " + dir + "physfn -> ../0000:01:00.0 --\n"
		}
	}
	top := discover(t, topology.Options{Root: tree(t, text)})
	var got []string
	for _, g := range top.GPUs {
		got = append(got, fmt.Sprint(g.Index, " ", g.PCIAddress, " ", g.Node))
	}
	if strings.Join(got, ", ") != "0 0000:00:00.0 0, 1 0000:01:00.0 0" {
		t.Errorf("got %q", got)
	}
}

func TestDiskKinds(t *testing.T) {
	var text strings.Builder
	text.WriteString(strings.Replace(base, "-- sys/block/ --\n", "", 1))
	want := map[string]topology.DiskKind{}
	for path, kind := range map[string]topology.DiskKind{
		"pci0000:00/0000:00:01.0/nvme/nvme0/nvme0n1 0 ":                                 topology.NVMe,
		"pci0000:00/0000:00:02.0/ata1/sda 0 Samsung SSD 860":                            topology.SSD,
		"pci0000:00/0000:00:02.0/ata2/sdb 1 ST4000":                                     topology.HDD,
		"pci0000:00/0000:00:02.0/ata3/sdc 1 QEMU HARDDISK":                              topology.VirtualDisk,
		"pci0000:00/0000:00:03.0/host0/sdd 0 Virtual disk":                              topology.VirtualDisk,
		"pci0000:00/0000:00:04.0/virtio3/host2/sde 0 PersistentDisk":                    topology.VirtualDisk,
		"pci0000:00/0000:00:05.0/virtio4/block/vda 1 ":                                  topology.VirtualDisk,
		"vbd-51712/block/xvda 0 ":                                                       topology.VirtualDisk,
		"virtual/block/rbd0 0 ":                                                         topology.VirtualDisk,
		"platform/mmc/mmcblk0 0 ":                                                       topology.SSD,
		"pci0000:00/0000:00:06.0/sdf ? Thing":                                           topology.UnknownDisk,
		"virtual/block/loop3 0 ":                                                        "",
		"virtual/block/zram0 0 ":                                                        "",
		"virtual/block/dm-4 0 ":                                                         "",
		"virtual/block/md0 0 ":                                                          "",
		"pci0000:00/0000:00:02.0/ata4/sr0 1 DVD":                                        "",
		"pci0000:00/0000:00:01.0/nvme/nvme0/nvme0c0n1 0 hidden":                         "",
		"pci0000:00/0000:00:14.0/usb1/sdg 1 empty":                                      "",
		"virtual/block/bcache0 0 stacked":                                               "",
		"virtual/nvme-fabrics/ctl/nvme7/nvme7n1 0 Linux":                                topology.VirtualDisk,
		"pci0000:00/0000:00:1f.0/nvme/nvme8/nvme8n1 0 Amazon Elastic Block Store":       topology.VirtualDisk,
		"pci0000:00/0000:00:1f.1/nvme/nvme9/nvme9n1 0 Amazon EC2 NVMe Instance Storage": topology.NVMe,
		"pci10000:e0/10000:e0:06.0/10000:e1:00.0/nvme/nvme5/nvme5n1 0 x":                topology.NVMe,
	} {
		f := strings.SplitN(path, " ", 3)
		dir, name := f[0], f[0][strings.LastIndex(f[0], "/")+1:]
		want[name] = kind
		fmt.Fprintf(&text, "-- sys/block/%s -> ../devices/%s --\n", name, dir)
		size := "1000"
		if f[2] == "empty" {
			size = "0"
		}
		fmt.Fprintf(&text, "-- sys/devices/%s/size --\n%s\n-- sys/devices/%s/device/model --\n%s\n", dir, size, dir, f[2])
		if f[1] != "?" {
			fmt.Fprintf(&text, "-- sys/devices/%s/queue/rotational --\n%s\n", dir, f[1])
		}
		if f[2] == "stacked" {
			fmt.Fprintf(&text, "-- sys/devices/%s/slaves/sda -> ../../../../nowhere --\n", dir)
		}
		if f[2] == "hidden" {
			fmt.Fprintf(&text, "-- sys/devices/%s/hidden --\n1\n", dir)
		}
	}
	top := discover(t, topology.Options{Root: tree(t, text.String())})
	for name, kind := range want {
		d, ok := diskOf(top, name)
		if ok != (kind != "") || d.Kind != kind {
			t.Errorf("%s: %q, want %q", name, d.Kind, kind)
		}
	}
	if d, _ := diskOf(top, "nvme5n1"); d.PCIAddress != "10000:e1:00.0" || d.SizeBytes != 512000 {
		t.Errorf("got %+v", d)
	}
}

// TestBtrfsOnSeveral: what was mounted names one disk of several.
func TestBtrfsOnSeveral(t *testing.T) {
	text := strings.Replace(base, "-- sys/block/ --\n", "", 1) + "-- proc/self/cgroup --\n-- proc/self/mountinfo --\n1 0 0:33 /sub /data rw - btrfs /dev/sda1 rw\n-- data/ --\n"
	for _, name := range []string{"sda", "sdb", "sdc"} {
		text += fmt.Sprintf("-- sys/block/%s -> ../devices/%[1]s --\n-- sys/class/block/%[1]s1 -> ../../devices/%[1]s/%[1]s1 --\n-- sys/class/block/%[1]s -> ../../devices/%[1]s --\n", name) +
			fmt.Sprintf("-- sys/devices/%s/size --\n8\n-- sys/devices/%[1]s/queue/rotational --\n0\n-- sys/devices/%[1]s/%[1]s1/partition --\n1\n", name)
	}
	text += "-- sys/fs/btrfs/features/raid56 --\n0\n"
	for _, name := range []string{"one/devices/sda1", "one/devices/sdb1", "two/devices/sdc1"} {
		device := name[len(name)-4:]
		text += fmt.Sprintf("-- sys/fs/btrfs/%s -> ../../../../devices/%s/%s --\n", name, device[:3], device)
	}
	root := tree(t, text)
	top := discover(t, topology.Options{Root: root})
	var with []string
	for _, d := range top.Disks {
		if len(d.Mounts) == 1 {
			with = append(with, d.Name)
		}
	}
	l, err := topology.DiskOf(t.Context(), "/data", topology.Options{Root: root})
	if err != nil || strings.Join(with, " ") != "sda sdb" || len(l.Disks) != 2 || len(top.Warnings)+len(l.Warnings) > 0 {
		t.Errorf("mounted of %q, on %+v, %v, warnings %q", with, l.Disks, err, top.Warnings)
	}
}

// Mounts at one place hide each other, and the deepest counts.
func TestMountsHideEachOther(t *testing.T) {
	text := `-- proc/self/mountinfo --
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 8:2 / /data rw - ext4 /dev/sda2 rw
3 1 0:9 / /data rw - tmpfs tmpfs rw
4 1 8:3 / /data/deep ro - xfs /dev/sda3 rw
-- data/deep/ --
-- database/ --
`
	root := tree(t, text)
	for dir, want := range map[string]string{"/": "ext4", "/data": "tmpfs", "/data/x": "tmpfs", "/data/deep": "xfs", "/data/deep/y": "xfs", "/data/deeper": "tmpfs", "/database": "ext4"} {
		l, err := topology.DiskOf(t.Context(), dir, topology.Options{Root: root})
		if err != nil || l.FileSystem != want || l.ReadOnly != (want == "xfs") || l.InMemory() != (want == "tmpfs") {
			t.Errorf("%s: %+v, %v; want %s", dir, l, err, want)
		}
	}
}

func TestOverlays(t *testing.T) {
	const disks = `-- sys/block/sda -> ../devices/sda --
-- sys/block/sdb -> ../devices/sdb --
-- sys/class/block/sda -> ../../devices/sda --
-- sys/class/block/sdb -> ../../devices/sdb --
-- sys/dev/block/8:0 -> ../../devices/sda --
-- sys/dev/block/8:16 -> ../../devices/sdb --
-- sys/devices/sda/size --
8
-- sys/devices/sdb/size --
8
-- proc/self/mountinfo --
`
	inMemory := func(name string) bool { return strings.HasPrefix(name, "in memory") }
	for name, c := range map[string]struct{ mounts, disk string }{
		"in memory":               {"1 0 8:0 / / rw - ext4 /dev/sda rw\n2 1 0:8 / /ram rw - tmpfs tmpfs rw\n3 1 0:9 / /merged rw - overlay overlay rw,upperdir=/ram/upper\n-- ram/upper/ --\n", ""},
		"in memory, stacked":      {"1 0 8:0 / / rw - ext4 /dev/sda rw\n2 1 0:8 / /ram rw - tmpfs tmpfs rw\n3 1 0:9 / /lower rw - overlay overlay rw,upperdir=/ram/upper\n4 1 0:10 / /merged rw - overlay overlay rw,upperdir=/lower/upper\n-- ram/upper/ --\n-- lower/upper/ --\n", ""},
		"read from memory":        {"1 0 8:0 / / rw - ext4 /dev/sda rw\n2 1 0:8 / /ram rw - tmpfs tmpfs rw\n3 1 0:9 / /merged rw - overlay overlay rw,lowerdir=/ram/lower,upperdir=/upper\n-- ram/lower/ --\n-- upper/ --\n", "sda"},
		"seen from the host":      {"1 0 8:0 / / rw - ext4 /dev/sda rw\n2 1 8:16 / /lib rw - ext4 /dev/sdb rw\n3 1 0:9 / /merged rw - overlay overlay rw,upperdir=/lib/upper\n-- lib/upper/ --\n", "sdb"},
		"in a container":          {"3 1 0:9 / /merged rw - overlay overlay rw,upperdir=/var/lib/docker/overlay2/1/diff\n4 3 8:0 /srv/vol /vol rw - ext4 /dev/sda rw\n5 3 8:16 /var/lib/docker/containers/1/hosts /etc/hosts rw - ext4 /dev/sdb rw\n", ""},
		"nothing else is mounted": {"3 1 0:9 / /merged rw - overlay overlay rw,upperdir=/u\n", ""},
		"not written to":          {"3 1 0:9 / /merged ro - overlay overlay ro,lowerdir=/a:/b\n4 3 8:0 /a /a rw - ext4 /dev/sda rw\n", ""},
		"on itself":               {"3 1 0:9 / /merged rw - overlay overlay rw,upperdir=/merged/up\n-- merged/up/ --\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := topology.DiskOf(t.Context(), "/merged", topology.Options{Root: tree(t, disks+c.mounts+"-- merged/ --\n")})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, d := range l.Disks {
				got = append(got, d.Name)
			}
			if strings.Join(got, " ") != c.disk {
				t.Errorf("got %q, want %q; warnings %q", got, c.disk, l.Warnings)
			}
			if l.InMemory() != inMemory(name) {
				t.Errorf("in memory: %v", l.InMemory())
			}
			if len(l.Warnings) == 0 {
				t.Error("a guess without a warning")
			}
		})
	}
}
