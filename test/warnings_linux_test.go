package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/topology"
)

// warning returns the first of a cause.
func warning(all []diag.Warning, c diag.Cause) (diag.Warning, bool) {
	i := slices.IndexFunc(all, func(w diag.Warning) bool { return w.Cause == c })
	if i < 0 {
		return diag.Warning{}, false
	}
	return all[i], true
}

// helps checks that each warning says what to do, or is information.
func helps(all []diag.Warning) error {
	var errs []error
	for _, w := range all {
		if w.Cause == "" || w.What == "" || w.Remedy == "" && !w.Info || strings.Contains(w.String(), "\n") {
			errs = append(errs, fmt.Errorf("%+v", w))
		}
	}
	return errors.Join(errs...)
}

// withWarnings opens an engine in dir on a machine, spills, and returns what it warned of.
func withWarnings(dir string, files disk.FS, top *topology.Topology) (all []diag.Warning, log string, err error) {
	ctx := context.Background()
	var text bytes.Buffer
	cfg := spillConfig(dir, files, top)
	cfg.Logger = slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{Level: slog.LevelDebug}))
	eng, err := spillway.Open(ctx, cfg)
	if err != nil {
		return nil, "", err
	}
	err = eng.Close()
	all = eng.Warnings()
	return all, text.String(), errors.Join(err, helps(all), spillOnce(ctx, dir, files, top, 1, 1))
}

// says checks that there is a warning of a cause, for a space, that says all that it should.
func says(all []diag.Warning, c diag.Cause, space string, info bool, want ...string) error {
	w, ok := warning(all, c)
	if !ok {
		return fmt.Errorf("no warning of %s in %v", c, all)
	}
	if w.Info != info || w.Space != space {
		return fmt.Errorf("%+v: want information %v, space %q", w, info, space)
	}
	for _, s := range want {
		if !strings.Contains(w.String(), s) {
			return fmt.Errorf("%s: does not say %q", w, s)
		}
	}
	return nil
}

// spillUnlocked: a process that may lock no memory at all works, and the warning says what it may
// ask for.
func spillUnlocked(dir string) error {
	if err := mount(dir); err != nil {
		return err
	}
	// The capability that lifts the limit is not the machine's in a name space.
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{}); err != nil {
		return err
	}
	top, err := topology.Discover(context.Background(), topology.Options{})
	if err != nil {
		return err
	}
	top.Memory.SwapBytes = 1 << 30
	all, log, err := withWarnings(dir, nil, top)
	err = errors.Join(err, says(all, causes.MemoryFileSystem, "disk:0", false, dir, "tmpfs", "name a directory on a disk"))
	if !strings.Contains(log, "level=WARN") {
		err = errors.Join(err, fmt.Errorf("nothing is logged: %s", log))
	}
	if testseed.Raced { // memory of the heap is never locked
		return errors.Join(err, says(all, causes.System, "host:0", true))
	}
	return errors.Join(err, says(all, causes.LockLimit, "host:0", false,
		"0 of 524288 bytes are locked", "the limit is 0 bytes", "swapped out", "1073741824 bytes of swap", "ulimit -l", "LimitMEMLOCK=", "--ulimit memlock=", "CAP_IPC_LOCK"))
}

// spillOverMemory: an overlay that writes to memory is memory.
func spillOverMemory(dir string) error {
	if err := mount(dir); err != nil {
		return err
	}
	in := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(in(name), 0o700); err != nil {
			return err
		}
	}
	how := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", in("lower"), in("upper"), in("work"))
	if err := unix.Mount("spillway", in("merged"), "overlay", 0, how); err != nil {
		return fmt.Errorf("%w: %v", errNoMount, err)
	}
	top, err := topology.Discover(context.Background(), topology.Options{})
	if err != nil {
		return err
	}
	all, _, err := withWarnings(in("merged"), nil, top)
	return errors.Join(err, says(all, causes.MemoryFileSystem, "disk:0", false, in("merged"), "overlayfs", "name a directory on a disk"))
}

// spillSmallPages: huge pages are switched off, which madvise does not report.
func spillSmallPages(dir string) error {
	if err := mount(dir); err != nil {
		return err
	}
	const setting = "/sys/kernel/mm/transparent_hugepage/enabled"
	never := filepath.Join(dir, "enabled")
	if err := os.WriteFile(never, []byte("always madvise [never]\n"), 0o600); err != nil {
		return err
	}
	if err := unix.Mount(never, setting, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("%w: %v", errNoMount, err)
	}
	top, err := topology.Discover(context.Background(), topology.Options{})
	if err != nil {
		return err
	}
	all, _, err := withWarnings(dir, nil, top)
	if !testseed.Raced {
		err = errors.Join(err, says(all, causes.HugePagesOff, "host:0", false, "slower", "echo madvise > "+setting))
	}
	return err
}

// spillUnseen: neither /proc nor /sys is there.
func spillUnseen(dir string) error {
	if err := mount(dir); err != nil {
		return err
	}
	for _, d := range []string{"/proc", "/sys"} {
		if err := unix.Mount("spillway", d, "tmpfs", unix.MS_RDONLY, ""); err != nil {
			return fmt.Errorf("%w: %v", errNoMount, err)
		}
	}
	top, err := topology.Discover(context.Background(), topology.Options{})
	if err != nil {
		return err
	}
	all, _, err := withWarnings(dir, nil, top)
	return errors.Join(err,
		says(all, causes.HiddenProc, "", true, "/proc/", "mount /proc"),
		says(all, causes.HiddenSys, "", true, "/sys/", "mount /sys"),
		says(all, causes.UnknownLimits, "", false, "cgroup", "in bytes"))
}

// TestWarningsOfTheTopology: what a machine does not report has its cause, and a machine that is
// limited on purpose is reported as information.
func TestWarningsOfTheTopology(t *testing.T) {
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(math.MaxInt64)) // under the race detector there is one
	const gib = 1 << 30
	two := []topology.Node{{ID: 0, MemoryBytes: 8 * gib, Distances: []int{10, 20}}, {ID: 1, MemoryBytes: 8 * gib, Distances: []int{20, 10}}}
	for name, c := range map[string]struct {
		change func(top *topology.Topology)
		cause  diag.Cause // none: no warning
		space  string
		info   bool
		says   []string
	}{
		"nothing": {change: func(*topology.Topology) {}},
		"no driver": {func(top *topology.Topology) {
			top.Warnings = []diag.Warning{causes.Warn(causes.Driver, "gpus: no driver")}
		}, causes.Driver, "", true, []string{"no driver", "--gpus"}},
		"a device nowhere": {func(top *topology.Topology) {
			top.Warnings = []diag.Warning{causes.Warn(causes.UnknownPlace, "0000:04:00.0 is nowhere")}
		}, causes.UnknownPlace, "", true, []string{"0000:04:00.0", "configuration"}},
		"visible devices": {func(top *topology.Topology) {
			top.Warnings = []diag.Warning{causes.Warn(causes.VisibleDevices, "hides all")}
		},
			causes.VisibleDevices, "", false, []string{"hides all", "unset"}},
		"cgroup": {func(top *topology.Topology) {
			top.Warnings = []diag.Warning{causes.Warn(causes.UnknownLimits, "no cgroup")}
		}, causes.UnknownLimits, "", false, []string{"ends the process", "mount the cgroup file system"}},
		"a node that is not allowed": {func(top *topology.Topology) { top.Nodes, top.Limits.MemoryNodes = two, topology.Set{0} },
			causes.ExcludedNode, "", true, []string{"nodes 1", "8589934592 bytes", "cpuset.mems"}},
		"with a GPU": {func(top *topology.Topology) {
			top.Nodes, top.Limits.MemoryNodes, top.GPUs = two, topology.Set{0}, []topology.GPU{{Index: 3, Node: 1}}
		}, causes.ExcludedNode, "", false, []string{"GPU 3 on node 1", "slower"}},
		"a container that is too small": {func(top *topology.Topology) {
			top.Limits.MemoryBytes, top.Limits.MemorySource = 800<<10, "/sys/fs/cgroup/memory.max"
		}, causes.MemoryLimit, "", false, []string{"786432 of the 819200 bytes of /sys/fs/cgroup/memory.max", "32768 bytes", "can have 0 of them", "has no limit (GOMEMLIMIT)", "--memory"}},
		"a container in which the heap may not double": {func(top *topology.Topology) {
			top.Limits.MemoryBytes, top.Limits.MemorySource = 1500<<10, "/sys/fs/cgroup/memory.max"
		}, causes.MemoryLimit, "", false, []string{"786432 of the 1536000 bytes", "749568 bytes", "can have 653568 of them", "set GOMEMLIMIT"}},
		"a container that is large enough": {change: func(top *topology.Topology) {
			top.Limits.MemoryBytes, top.Limits.MemorySource = 1536<<10, "/sys/fs/cgroup/memory.max"
		}},
		"a machine as small": {change: func(top *topology.Topology) {
			top.Limits.MemoryBytes, top.Limits.MemorySource = 800<<10, "/proc/meminfo"
		}},
	} {
		t.Run(name, func(t *testing.T) {
			top := discover(t)
			top.Warnings, top.GPUs, top.Limits.MemoryNodes = nil, nil, nil
			top.Limits.MemoryBytes, top.Limits.MemorySource = 0, ""
			top.Nodes = []topology.Node{{ID: 0, MemoryBytes: 8 * gib, Distances: []int{10}}}
			c.change(top)
			all, log, err := withWarnings(t.TempDir(), nil, top)
			if err != nil {
				t.Fatal(err)
			}
			if c.cause == "" {
				for _, w := range all {
					if w.Space == "" || w.Cause == causes.MemoryNode || w.Cause == causes.MemoryPolicy {
						t.Errorf("unasked: %s", w)
					}
				}
				return
			}
			if err := says(all, c.cause, c.space, c.info, c.says...); err != nil {
				t.Error(err)
			}
			level := map[bool]string{false: "level=WARN", true: "level=DEBUG"}[c.info]
			if c.cause == causes.Driver {
				level = "level=INFO"
			}
			if !strings.Contains(log, level) || !strings.Contains(log, "remedy=") {
				t.Errorf("no %s with a remedy in %s", level, log)
			}
		})
	}
}

// TestHeapBesideTheSpaces: the warning depends on whether Go's heap, as far as it may grow, fits
// beside the spaces into the memory of a cgroup, by the cgroup's files.
func TestHeapBesideTheSpaces(t *testing.T) {
	for name, c := range map[string]struct {
		limit, heap int64 // MiB
		files       disk.FS
		says        []string
	}{
		// 1 MiB of spaces, and a sixteenth is for the rest.
		"fits":                   {32, 29, nil, nil},
		"a byte too large":       {32, 29*mib + 1, nil, []string{"host spaces and simulated GPUs take 1048576 of the 33554432 bytes", "can have 30408704 of them", "may grow to 30408705 bytes"}},
		"no limit, much is left": {32, math.MaxInt64, nil, nil},
		// 4 MiB of files besides.
		"fits beside files": {32, 25, filesInMemory{disk.OS()}, nil},
		"a byte too large beside files": {32, 25*mib + 1, filesInMemory{disk.OS()},
			[]string{"spill directories in memory take 5242880 of the 33554432 bytes", "can have 26214400 of them", "may grow to 26214401 bytes"}},
		"files that are too large": {4, math.MaxInt64, filesInMemory{disk.OS()}, []string{"5242880 of the 4194304 bytes", "what is left, 0 bytes"}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.heap < mib {
				c.heap *= mib
			}
			defer debug.SetMemoryLimit(debug.SetMemoryLimit(-1))
			top, err := topology.Discover(t.Context(), topology.Options{Root: cgroupTree(t, c.limit*mib)})
			if err != nil {
				t.Fatal(err)
			}
			debug.SetMemoryLimit(c.heap)
			cfg := spillConfig(t.TempDir(), c.files, top)
			cfg.GPUs = []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(mib / 2)}}
			cfg.HostMemory = spillway.Bytes(mib / 2)
			cfg.Logger = slog.New(slog.DiscardHandler)
			eng, err := spillway.Open(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer eng.Close()
			if w, ok := warning(eng.Warnings(), causes.MemoryLimit); ok != (c.says != nil) {
				t.Errorf("warned: %v %s", ok, w)
			} else if ok {
				if err := says(eng.Warnings(), causes.MemoryLimit, "", false, c.says...); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// filesInMemory is a file system that the volume takes for memory.
type filesInMemory struct{ disk.FS }

func (f filesInMemory) Usage(dir string) (disk.Usage, error) {
	u, err := f.FS.Usage(dir)
	u.Memory = true
	return u, err
}

// cgroupTree is a machine whose process is in a cgroup, of version 2, with so much memory.
func cgroupTree(t *testing.T, limit int64) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range map[string]string{
		"proc/self/cgroup":                       "0::/\n",
		"proc/self/mountinfo":                    "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
		"proc/self/status":                       "Cpus_allowed_list:\t0-1\nMems_allowed_list:\t0\n",
		"proc/meminfo":                           "MemTotal:       33554432 kB\nSwapTotal:             0 kB\n",
		"sys/fs/cgroup/memory.max":               fmt.Sprintln(limit),
		"sys/devices/system/cpu/online":          "0-1\n",
		"sys/devices/system/node/online":         "0\n",
		"sys/devices/system/node/node0/cpulist":  "0-1\n",
		"sys/devices/system/node/node0/distance": "10\n",
		"sys/devices/system/node/node0/meminfo":  "Node 0 MemTotal:       33554432 kB\n",
		"sys/devices/system/node/has_memory":     "0\n",
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// TestNodesThatAreNotThere: an arena that cannot be bound works, and says so with its space.
func TestNodesThatAreNotThere(t *testing.T) {
	if testseed.Raced {
		t.Skip("needs a build without the race detector, in which arenas are memory of the heap and bound to no node")
	}
	top := discover(t)
	top.Nodes = []topology.Node{{ID: 0, MemoryBytes: 1 << 33, Distances: []int{10, 20}}, {ID: 999, MemoryBytes: 1 << 33, Distances: []int{20, 10}}}
	top.Limits.MemoryNodes = nil
	all, _, err := withWarnings(t.TempDir(), nil, top)
	if err := errors.Join(err, says(all, causes.MemoryNode, "host:1", false, "NUMA node 999", "slower", "cpuset")); err != nil {
		t.Error(err)
	}
}

// TestWarningsAreLoggedOnce: each when it comes up, those that come later when the engine
// is closed, and none again.
func TestWarningsAreLoggedOnce(t *testing.T) {
	top := discover(t)
	top.Warnings = []diag.Warning{causes.Warn(causes.Driver, "gpus: no driver")}
	files := faultfs.New(buffered{disk.OS(), ""}, 1, faultfs.Rule{Ops: []string{"allocate"}, Effect: faultfs.Fail(syscall.EOPNOTSUPP)})
	var log bytes.Buffer
	cfg := spillConfig(t.TempDir(), files, top)
	cfg.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	s := openSpill(t, cfg)
	for _, want := range []string{"no driver", "no direct I/O"} {
		if n := strings.Count(log.String(), want); n != 1 {
			t.Errorf("%q is logged %d times: %s", want, n, log.String())
		}
	}
	s.putAndMove(t.Context())
	all := s.eng.Warnings()
	s.close()
	if err := errors.Join(helps(all), says(all, causes.Sparse, "disk:0", true, "reserve room")); err != nil {
		t.Error(err)
	}
	for _, w := range all {
		if n := strings.Count(log.String(), w.What); n != 1 {
			t.Errorf("%q is logged %d times: %s", w.What, n, log.String())
		}
	}
	if after := s.eng.Warnings(); !slices.Equal(after, all) {
		t.Errorf("closed, it warns of %v, not of %v", after, all)
	}
}
