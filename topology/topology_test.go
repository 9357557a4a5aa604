package topology_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/topology"
)

var update = flag.Bool("update", false, "write the golden files anew")

var machines = []string{"laptop", "vm", "server", "pod", "cgroup-v1", "broken", "dgx-a100", "workstation", "mig", "numa-unknown"}

// unpack makes a recorded machine and returns its root.
func unpack(t testing.TB, machine string) string {
	t.Helper()
	return unpackTo(t, machine, tempDir(t))
}

// tempDir makes a directory for a machine, which lasts as long as the test.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(unpacked.dir, "test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// readOnly returns the files of a machine which no test may change: they are written once.
func readOnly(t testing.TB, name string) string {
	t.Helper()
	unpacked.Lock()
	defer unpacked.Unlock()
	dir := filepath.Join(unpacked.dir, name)
	if err := os.Mkdir(dir, 0o700); errors.Is(err, fs.ErrExist) {
		return dir
	} else if err != nil {
		t.Fatal(err)
	}
	whole := false
	defer func() {
		if !whole {
			_ = os.RemoveAll(dir)
		}
	}()
	unpackTo(t, name, dir)
	whole = true
	return dir
}

var unpacked struct {
	sync.Mutex
	dir string
}

func TestMain(m *testing.M) {
	os.Exit(func() int {
		// Machines are thousands of files. Where there is a file system in memory they are made in
		// a tenth of the time.
		dir, err := os.MkdirTemp("/dev/shm", "machines")
		if err != nil {
			dir, err = os.MkdirTemp("", "machines")
		}
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		unpacked.dir = dir
		return m.Run()
	}())
}

func unpackTo(t testing.TB, machine, dir string) string {
	t.Helper()
	if err := testfs.UnpackTree(filepath.Join("testdata", machine+".txtar"), dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// tree makes a machine out of a text.
func tree(t testing.TB, text string) string {
	t.Helper()
	entries, err := testfs.ParseTree(text)
	if err != nil {
		t.Fatal(err)
	}
	dir := tempDir(t)
	if err := testfs.WriteTree(dir, entries); err != nil {
		t.Fatal(err)
	}
	return dir
}

func discover(t testing.TB, o topology.Options) *topology.Topology {
	t.Helper()
	top, err := topology.Discover(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return top
}

func golden(t *testing.T, file, got string) {
	t.Helper()
	file = filepath.Join("testdata", file)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("not what %s holds (write it anew with -update if it should be); got:\n%s", file, got)
	}
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return string(b) + "\n"
}

func TestGolden(t *testing.T) {
	for _, machine := range machines {
		t.Run(machine, func(t *testing.T) {
			top := discover(t, topology.Options{Root: readOnly(t, machine)})
			text := asJSON(t, top)
			golden(t, machine+".json", text)
			golden(t, machine+".table", top.String())

			var back topology.Topology
			if err := json.Unmarshal([]byte(text), &back); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(&back, top) {
				t.Errorf("read back: %+v, want %+v", back, top)
			}
			if strings.Contains(text, "null") {
				t.Error("an empty list is marshalled as null")
			}
		})
	}
}

// What the recorded machines are meant to show, beside the golden files.
func TestMachines(t *testing.T) {
	const kib, gib = 1 << 10, 1 << 30
	type facts struct {
		nodes, cpus, disks, gpus string
		memory                   int64
		memorySource             string
		cpuCount                 int
		memoryNodes              string
		cgroup                   int
		warnings                 int
	}
	for machine, want := range map[string]facts{
		"laptop": {nodes: "0:0-7", cpus: "0-7", disks: "nvme0n1 nvme 0", gpus: "0000:01:00.0@0",
			memory: 16166952 * kib, memorySource: "/proc/meminfo", cpuCount: 8, memoryNodes: "0", cgroup: 2},
		"vm": {nodes: "0:0-1", cpus: "0-1", disks: "vda virtual 0, vdb virtual 0",
			memory: 4026532 * kib, memorySource: "/proc/meminfo", cpuCount: 2, memoryNodes: "0", cgroup: 2},
		"server": {nodes: "0:0-31,64-95 1:32-61,96-125", cpus: "0-61,64-125",
			disks: "nvme0n1 nvme 0, nvme1n1 nvme 1, nvme2n1 nvme 0, sda hdd 0, sdb ssd 0",
			gpus:  "0000:18:00.0@0 0000:9a:00.0@1 0000:c1:00.0@-1",
			// The process's own memory.high is below the slice's memory.max.
			memory: 480 * gib, memorySource: "/sys/fs/cgroup/system.slice/analytics.slice/engine.service/memory.high",
			cpuCount: 48, memoryNodes: "0-1", cgroup: 2, warnings: 1},
		"pod": {nodes: "0:0-7 1:8-15", cpus: "8-15", disks: "nvme0n1 nvme 1",
			memory: 8 * gib, memorySource: "/sys/fs/cgroup/memory.max", cpuCount: 3, memoryNodes: "1", cgroup: 2},
		"cgroup-v1": {nodes: "0:0-3", cpus: "0-3", disks: "nvme0n1 virtual 0", // over a network

			memory: 6 * gib, memorySource: "/sys/fs/cgroup/memory/memory.stat", cpuCount: 2, memoryNodes: "0", cgroup: 1},
	} {
		t.Run(machine, func(t *testing.T) {
			top := discover(t, topology.Options{Root: readOnly(t, machine)})
			var nodes, disks, gpus []string
			for _, n := range top.Nodes {
				nodes = append(nodes, fmt.Sprintf("%d:%s", n.ID, n.CPUs))
			}
			for _, d := range top.Disks {
				disks = append(disks, fmt.Sprintf("%s %s %d", d.Name, d.Kind, d.Node))
			}
			for _, g := range top.GPUs {
				gpus = append(gpus, fmt.Sprintf("%s@%d", g.PCIAddress, g.Node))
			}
			got := facts{strings.Join(nodes, " "), top.CPU.Allowed.String(), strings.Join(disks, ", "), strings.Join(gpus, " "),
				top.Limits.MemoryBytes, top.Limits.MemorySource, top.Limits.CPUs, top.Limits.MemoryNodes.String(),
				top.Limits.CgroupVersion, len(top.Warnings)}
			if got != want {
				t.Errorf("got  %+v\nwant %+v\nwarnings: %q", got, want, top.Warnings)
			}
		})
	}
}

func TestDiskOf(t *testing.T) {
	roots := map[string]string{}
	for _, machine := range machines {
		roots[machine] = readOnly(t, machine)
	}
	for _, c := range []struct {
		machine, dir string
		real, mount  string
		disks        string
		node         int
		warns        string // in one of them; empty: there is none
	}{
		{machine: "laptop", dir: "/home/user/data", real: "/home/user/data", mount: "/", disks: "nvme0n1"},
		{machine: "laptop", dir: "/home/user/../user//data/", real: "/home/user/data", mount: "/", disks: "nvme0n1"},
		{machine: "laptop", dir: "/spill", real: "/var/spill", mount: "/", disks: "nvme0n1"},
		{machine: "laptop", dir: "/spill/new/dir", real: "/var/spill/new/dir", mount: "/", disks: "nvme0n1", warns: "would be made"},
		{machine: "laptop", dir: "/boot/efi", real: "/boot/efi", mount: "/boot/efi", disks: "nvme0n1"},
		{machine: "laptop", dir: "/mnt/with space", real: "/mnt/with space", mount: "/mnt/with space", disks: "nvme0n1"},
		{machine: "laptop", dir: "/snap/core20", real: "/snap/core20", mount: "/snap/core20", disks: "nvme0n1", warns: "loop0 is a file"},
		{machine: "laptop", dir: "/dev/shm", real: "/dev/shm", mount: "/dev/shm", node: -1, warns: "memory, not a disk"},
		{machine: "vm", dir: "/srv/data", real: "/srv/data", mount: "/srv/data", disks: "vdb"},
		{machine: "vm", dir: "/srv", real: "/srv", mount: "/", disks: "vda"},
		{machine: "server", dir: "/data/spill", real: "/data/spill", mount: "/data", disks: "nvme0n1"},
		{machine: "server", dir: "/scratch/spill", real: "/scratch/spill", mount: "/scratch", disks: "nvme1n1 nvme2n1", node: -1},
		{machine: "server", dir: "/home/user", real: "/home/user", mount: "/home", disks: "sdb"},
		{machine: "server", dir: "/backup", real: "/backup", mount: "/backup", disks: "sda"},
		{machine: "server", dir: "/mnt/nfs", real: "/mnt/nfs", mount: "/mnt/nfs", node: -1, warns: "on no block device that is known"},
		{machine: "pod", dir: "/app", real: "/app", mount: "/", node: -1, warns: "not visible here"},
		{machine: "pod", dir: "/var/spill", real: "/var/spill", mount: "/var/spill", disks: "nvme0n1", node: 1},
		{machine: "cgroup-v1", dir: "/etc", real: "/etc", mount: "/", node: -1, warns: "not visible here"},
		{machine: "broken", dir: "/", real: "/", mount: "/", node: -1, warns: "stacked"},
		{machine: "broken", dir: "/b", real: "/b", mount: "/b", node: -1, warns: "not there"},
		{machine: "broken", dir: "/c", real: "/c", mount: "/c", node: -1, warns: "not visible here"},
		{machine: "broken", dir: "/loop", real: "/loop", mount: "/", node: -1, warns: "too many links"},
	} {
		t.Run(c.machine+c.dir, func(t *testing.T) {
			l, err := topology.DiskOf(t.Context(), c.dir, topology.Options{Root: roots[c.machine]})
			if err != nil {
				t.Fatal(err)
			}
			var disks []string
			for _, d := range l.Disks {
				disks = append(disks, d.Name)
			}
			if l.Dir != c.real || l.Mount != c.mount || strings.Join(disks, " ") != c.disks || l.Node != c.node || l.FreeBytes != -1 {
				t.Errorf("got  %s", asJSON(t, l))
			}
			if c.warns == "" && len(l.Warnings) > 0 || !strings.Contains(said(l.Warnings), c.warns) {
				t.Errorf("warnings %q, want one with %q", l.Warnings, c.warns)
			}
		})
	}
}

func TestOptions(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, root := range []string{file, filepath.Join(dir, "missing"), "a\x00b"} {
		if _, err := topology.Discover(t.Context(), topology.Options{Root: root}); err == nil || !strings.HasPrefix(err.Error(), "topology: root: ") {
			t.Errorf("Discover(%q): %v", root, err)
		}
		if _, err := topology.DiskOf(t.Context(), "/", topology.Options{Root: root}); err == nil {
			t.Errorf("DiskOf(%q): want an error", root)
		}
	}
	for _, name := range []string{"", "relative", "./x"} {
		if _, err := topology.DiskOf(t.Context(), name, topology.Options{Root: dir}); err == nil {
			t.Errorf("DiskOf of %q: want an error", name)
		}
	}
}

func TestContext(t *testing.T) {
	cause := errors.New("no time")
	ctx, cancel := context.WithCancelCause(t.Context())
	root := readOnly(t, "laptop")
	source := func(context.Context) ([]topology.GPU, error) {
		cancel(cause) // in the midst of it
		return nil, ctx.Err()
	}
	if _, err := topology.Discover(ctx, topology.Options{Root: root, GPUs: source}); !errors.Is(err, cause) {
		t.Errorf("ended while under way: %v, want the cause", err)
	}
	if _, err := topology.Discover(ctx, topology.Options{Root: root}); !errors.Is(err, cause) {
		t.Errorf("ended before: %v, want the cause", err)
	}
	if _, err := topology.DiskOf(ctx, "/", topology.Options{Root: root}); !errors.Is(err, cause) {
		t.Errorf("DiskOf, ended before: %v, want the cause", err)
	}
}

// An empty machine is one node of which nothing is known, and says so.
func TestEmptyRoot(t *testing.T) {
	root := t.TempDir()
	top := discover(t, topology.Options{Root: root})
	if len(top.Nodes) != 1 || top.Limits.MemoryBytes != 0 || top.Limits.CPUs != 0 || top.Limits.MemorySource != "" || len(top.GPUs)+len(top.Disks) != 0 {
		t.Errorf("got %s", asJSON(t, top))
	}
	for _, file := range []string{"/proc/meminfo", "/proc/cpuinfo", "/proc/self/status", "/proc/self/cgroup", "/sys/block", "/sys/devices/system/cpu/online"} {
		if !slices.ContainsFunc(top.Warnings, func(w diag.Warning) bool { return strings.HasPrefix(w.What, file+": ") }) {
			t.Errorf("no warning for %s in %q", file, top.Warnings)
		}
	}
	l, err := topology.DiskOf(t.Context(), "/x", topology.Options{Root: root})
	if err != nil || l.Node != topology.Unknown || l.FreeBytes != -1 || l.Disks == nil || len(l.Warnings) == 0 {
		t.Errorf("got %+v, %v", l, err)
	}
}

// Nothing above the root may be read, whatever the links in it say.
func TestStaysBelowRoot(t *testing.T) {
	outside := t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "meminfo"), []byte("MemTotal: 1024 kB\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{
		"absolute": filepath.Join(outside, "meminfo"),
		"relative": strings.Repeat("../", 40) + filepath.Join(outside, "meminfo")[1:],
	} {
		t.Run(name, func(t *testing.T) {
			root := tree(t, "-- proc/meminfo -> "+target+" --\n")
			top := discover(t, topology.Options{Root: root})
			if top.Memory.TotalBytes != 0 || !strings.Contains(said(top.Warnings), "/proc/meminfo: ") {
				t.Errorf("got %+v, warnings %q", top.Memory, top.Warnings)
			}
		})
	}
}

func TestPipeDoesNotBlock(t *testing.T) {
	root := unpack(t, "laptop")
	file := filepath.Join(root, "proc/meminfo")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(file, 0o644); err != nil {
		t.Fatal(err)
	}
	top := discover(t, topology.Options{Root: root})
	if w := causes.Warn(causes.HiddenProc, "/proc/meminfo: not a regular file"); !slices.Contains(top.Warnings, w) {
		t.Errorf("warnings %q", top.Warnings)
	}
}

// Every file of a machine is broken in every way, one at a time: Discover and
// DiskOf never fail, and never make up more memory or CPUs than there are.
func TestEveryFileBroken(t *testing.T) {
	breaks := map[string]func(file string) error{
		"missing": func(string) error { return nil },
		"empty":   func(file string) error { return os.WriteFile(file, nil, 0o644) },
		"garbage": func(file string) error { return os.WriteFile(file, []byte("\x00\xff::,,--\n: kB\n- - -\n"), 0o644) },
		"huge":    func(file string) error { return os.WriteFile(file, []byte("18446744073709551615\n"), 0o644) },
		"dangles": func(file string) error { return os.Symlink("nowhere", file) },
		"loops":   func(file string) error { return os.Symlink(filepath.Base(file), file) },
		"is dir":  func(file string) error { return os.Mkdir(file, 0o755) },
	}
	for _, machine := range []string{"pod", "cgroup-v1"} {
		root := unpack(t, machine)
		whole := discover(t, topology.Options{Root: root})
		var files []string
		if err := filepath.WalkDir(root, func(p string, e os.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				files = append(files, p)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			for name, damage := range breaks {
				saved := file + ".saved"
				if err := errors.Join(os.Rename(file, saved), damage(file)); err != nil {
					t.Fatal(err)
				}
				top, err := topology.Discover(t.Context(), topology.Options{Root: root})
				if err != nil {
					t.Fatalf("%s: %s: %v", file, name, err)
				}
				if top.Memory.TotalBytes > whole.Memory.TotalBytes || len(top.CPU.Online) > len(whole.CPU.Online) || len(top.Nodes) == 0 {
					t.Errorf("%s: %s: got %s", file, name, asJSON(t, top))
				}
				if l := top.Limits; l.MemoryBytes < 0 || l.CPUs < 0 || l.CPUs > max(1, len(top.CPU.Online)) {
					t.Errorf("%s: %s: limits %+v", file, name, l)
				}
				if _, err := topology.DiskOf(t.Context(), "/etc", topology.Options{Root: root}); err != nil {
					t.Fatalf("%s: %s: %v", file, name, err)
				}
				if err := errors.Join(os.RemoveAll(file), os.Rename(saved, file)); err != nil {
					t.Fatal(err)
				}
			}
		}
		if again := discover(t, topology.Options{Root: root}); !reflect.DeepEqual(again, whole) {
			t.Errorf("%s: something was not put back: %s", machine, asJSON(t, again))
		}
	}
}

// TestCauses: a warning's cause says what the file is for.
func TestCauses(t *testing.T) {
	const nowhere = "-- sys/bus/pci/devices/0000:04:00.0/class --\n0x030200\n-- sys/bus/pci/devices/0000:04:00.0/vendor --\n0x10de\n-- sys/devices/system/node/online --\n0-1\n"
	for about, c := range map[string]struct {
		tree  string
		o     topology.Options
		cause diag.Cause
	}{
		"/proc/meminfo: no MemTotal":              {"-- proc/meminfo --\n", topology.Options{}, causes.HiddenProc},
		"/sys/devices/system/cpu/online: ":        {"", topology.Options{}, causes.HiddenSys},
		"/sys/block: ":                            {"", topology.Options{}, causes.HiddenSys},
		"/sys/bus/pci/devices/0000:04:00.0/":      {nowhere, topology.Options{}, causes.UnknownPlace},
		"/proc/self/cgroup: ":                     {"", topology.Options{}, causes.UnknownLimits},
		"/proc/self/mountinfo: cgroup for memory": {"-- proc/self/mountinfo --\n-- proc/self/cgroup --\n3:memory:/x\n", topology.Options{}, causes.UnknownLimits},
		"/proc/self/mountinfo: ":                  {"-- proc/self/cgroup --\n3:memory:/x\n", topology.Options{}, causes.HiddenProc},
		"gpus: the driver's list: no driver":      {"", topology.Options{GPUs: func(context.Context) ([]topology.GPU, error) { return nil, errors.New("no driver") }}, causes.Driver},
		"CUDA_VISIBLE_DEVICES: ":                  {"", topology.Options{LookupEnv: func(string) (string, bool) { return "0", true }}, causes.VisibleDevices},
	} {
		t.Run(about, func(t *testing.T) {
			c.o.Root = tree(t, c.tree)
			top := discover(t, c.o)
			i := slices.IndexFunc(top.Warnings, func(w diag.Warning) bool { return strings.HasPrefix(w.What, about) })
			if i < 0 || top.Warnings[i].Cause != c.cause || top.Warnings[i].Remedy != causes.Remedy(c.cause) {
				t.Errorf("warning %d of %+v, want %s", i, top.Warnings, c.cause)
			}
		})
	}
}

// diskOf returns the disk of that name.
func diskOf(top *topology.Topology, name string) (topology.Disk, bool) {
	i := slices.IndexFunc(top.Disks, func(d topology.Disk) bool { return d.Name == name })
	if i < 0 {
		return topology.Disk{}, false
	}
	return top.Disks[i], true
}

// said returns the texts of the warnings, a line each.
func said(all []diag.Warning) string {
	var b strings.Builder
	for _, w := range all {
		b.WriteString(w.What + "\n")
	}
	return b.String()
}

func TestManyWarnings(t *testing.T) {
	var b strings.Builder
	b.WriteString("-- proc/self/cgroup --\n0::/\n-- proc/self/mountinfo --\n")
	for i := range 1000 {
		fmt.Fprintf(&b, "no mount %d\n", i)
	}
	top := discover(t, topology.Options{Root: tree(t, b.String())})
	if n := len(top.Warnings); n != 201 || !strings.HasPrefix(top.Warnings[n-1].What, "and ") {
		t.Errorf("%d warnings, the last %q", n, top.Warnings[n-1])
	}
}

// Discover has no state of its own: the same machine read by many at a time
// is the same machine.
func TestConcurrent(t *testing.T) {
	root := readOnly(t, "server")
	want := discover(t, topology.Options{Root: root})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			got, err := topology.Discover(t.Context(), topology.Options{Root: root})
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("got %+v, %v", got, err)
			}
			if _, err := topology.DiskOf(t.Context(), "/scratch", topology.Options{Root: root}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestLookups(t *testing.T) {
	top := discover(t, topology.Options{Root: readOnly(t, "server")})
	for _, c := range []struct{ a, b, want int }{{0, 0, 10}, {0, 1, 21}, {1, 0, 21}, {0, 7, 20}, {7, 7, 10}, {-1, -1, 20}, {-1, 0, 20}, {0, -1, 20}} {
		if got := top.Distance(c.a, c.b); got != c.want {
			t.Errorf("Distance(%d, %d) = %d, want %d", c.a, c.b, got, c.want)
		}
	}
	if n, ok := top.Node(1); !ok || n.ID != 1 {
		t.Errorf("Node(1) = %+v, %v", n, ok)
	}
	if _, ok := top.Node(2); ok {
		t.Error("there is no node 2")
	}
	if d, ok := diskOf(top, "sda"); !ok || d.Kind != topology.HDD {
		t.Errorf("Disk(sda) = %+v, %v", d, ok)
	}
	if _, ok := diskOf(top, "sdz"); ok {
		t.Error("there is no sdz")
	}
}

// TestNodeOfDir: what is mounted over a disk's directory, be it memory, hides the disk.
func TestNodeOfDir(t *testing.T) {
	root := tree(t, strings.Replace(base, "-- sys/block/ --\n", "", 1)+`-- proc/self/cgroup --
-- sys/block/sda -> ../devices/sda --
-- sys/dev/block/8:1 -> ../../devices/sda --
-- sys/devices/sda/size --
8
-- sys/devices/sda/queue/rotational --
0
-- etc/hosts --
-- proc/self/mountinfo --
1 0 8:1 / / rw - ext4 /dev/sda rw
2 1 0:21 / /proc rw - proc proc rw
3 1 0:22 / /tmp rw - tmpfs tmpfs rw
4 1 0:23 / /mnt/nfs rw - nfs4 host:/x rw
5 4 8:1 / /mnt/nfs/disk rw - ext4 /dev/sda rw
6 1 8:1 /h /etc/hosts rw - ext4 /dev/sda rw
`)
	top := discover(t, topology.Options{Root: root})
	for dir, want := range map[string]int{"/": 0, "/tmpdir": 0, "/tmp": -1, "/tmp/x": -1, "/mnt": 0, "/mnt/nfs": -1, "/mnt/nfs/x": -1, "/mnt/nfs/disk/x": 0, "/proc": 0} {
		if got := top.NodeOfDir(dir); got != want {
			t.Errorf("%s is on node %d, want %d", dir, got, want)
		}
	}
	if n := len(top.OtherMounts); n != 2 {
		t.Errorf("other mounts %+v", top.OtherMounts)
	}
	l, err := topology.DiskOf(t.Context(), "/", topology.Options{Root: root})
	if err != nil || len(l.Disks) != 1 || len(l.Disks[0].Mounts) != 2 || len(top.Disks[0].Mounts) != 2 {
		t.Errorf("got %+v, %v; %+v", l, err, top.Disks)
	}
}

func TestGPUSource(t *testing.T) {
	root := readOnly(t, "server")
	given := []topology.GPU{
		{Index: 0, Name: "H100\x1b[0m", UUID: "GPU-1", PCIAddress: "00000000:9A:00.0", MemoryBytes: 80 << 30, FreeBytes: 79 << 30},
		{Index: 1, PCIAddress: "18:00.0", MemoryBytes: 1, FreeBytes: 2, PCIeWidth: 8, CPUs: topology.Set{1}},
		{Index: 2, PCIAddress: "../../proc", MemoryBytes: -1, Node: 5},
	}
	source := func(context.Context) ([]topology.GPU, error) { return given, nil }
	top := discover(t, topology.Options{Root: root, GPUs: source})
	want := []topology.GPU{
		{Index: 0, Name: "H100[0m", UUID: "GPU-1", PCIAddress: "0000:9a:00.0", DeviceID: "10de:2330", Driver: "nvidia", Node: 1, MemoryNode: 1,
			Bus: []string{"pci0000:97", "0000:97:01.0", "0000:98:00.0", "0000:99:00.0", "0000:9a:00.0"}, Links: []topology.Link{}, OwnNodes: topology.Set{}, MIG: []topology.MIGInstance{},
			CPUs: top.Nodes[1].CPUs, MemoryBytes: 80 << 30, FreeBytes: 79 << 30, PCIeGeneration: 5, PCIeWidth: 16},
		{Index: 1, PCIAddress: "0000:18:00.0", DeviceID: "10de:2330", Driver: "nvidia", Node: 0,
			Bus: []string{"pci0000:15", "0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:18:00.0"}, Links: []topology.Link{}, OwnNodes: topology.Set{}, MIG: []topology.MIGInstance{},
			CPUs: topology.Set{1}, MemoryBytes: 1, FreeBytes: 1, PCIeGeneration: 5, PCIeWidth: 8},
		{Index: 2, Node: topology.Unknown, MemoryNode: topology.Unknown, CPUs: topology.Set{}, Bus: []string{}, Links: []topology.Link{}, OwnNodes: topology.Set{}, MIG: []topology.MIGInstance{}},
	}
	if !reflect.DeepEqual(top.GPUs, want) {
		t.Errorf("got  %+v\nwant %+v", top.GPUs, want)
	}
	if len(top.Warnings) != 3 {
		t.Errorf("warnings %q", top.Warnings)
	}
	if given[0].Node != 0 || given[2].PCIAddress != "../../proc" {
		t.Errorf("the source's own list was changed: %+v", given)
	}

	source = func(context.Context) ([]topology.GPU, error) { return nil, errors.New("no driver") }
	top = discover(t, topology.Options{Root: root, GPUs: source})
	if len(top.GPUs) != 3 || !strings.Contains(said(top.Warnings), "no driver") {
		t.Errorf("without a driver: %+v, warnings %q", top.GPUs, top.Warnings)
	}
}
