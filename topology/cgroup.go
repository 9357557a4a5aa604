package topology

import (
	"errors"
	"math"
	"path"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/procfs"
)

// bounds holds the limits of the process's cgroups; 0 is none. Each source is the file that has the
// limit. The kernel adds the CPUs and nodes that cgroups allow to those in /proc/self/status.
type bounds struct {
	version int    // of the hierarchy that controls memory
	dir     string // the process's directory in it

	memory       int64
	memorySource string
	quota        float64 // CPUs
	quotaSource  string
}

// cgroups reads the limits of the process's cgroups and of all above them: the smallest counts. A
// controller may be in either version; some machines have both.
func (t *tree) cgroups() (b bounds) {
	text, ok := t.need(selfCgroups)
	if !ok {
		return b
	}
	groups, errs := procfs.Cgroup(text)
	t.warn(selfCgroups, errs...)

	// memory.high is a limit like memory.max: the kernel slows a process above it down until it is
	// below, which pinned memory never allows.
	files := []string{"memory.max", "memory.high"}
	version, dirs := t.hierarchy("memory", groups)
	if b.version = version; version > 0 {
		b.dir = dirs[0]
	}
	if version == 1 {
		files = []string{"memory.limit_in_bytes", "memory.stat"}
	}
	b.memory, b.memorySource = smallest(t, dirs, files, func(file, text string) (int64, error) {
		if path.Base(file) == "memory.stat" {
			// It has the limit of all groups above, of which a container sees none.
			_, after, ok := strings.Cut("\n"+text, "\nhierarchical_memory_limit ")
			if !ok {
				return 0, errors.New("no hierarchical_memory_limit: " +
					"limits of groups that are not visible here are not known")
			}
			text, _, _ = strings.Cut(after, "\n")
		}
		return procfs.Limit(text)
	})

	_, dirs = t.hierarchy("cpu", groups)
	files = []string{"cpu.max", "cpu.cfs_quota_us"}
	b.quota, b.quotaSource = smallest(t, dirs, files, func(file, text string) (float64, error) {
		if path.Base(file) == "cpu.cfs_quota_us" { // version 1 has the period in another file
			period, _ := t.want(path.Dir(file), "cpu.cfs_period_us")
			text = strings.TrimSpace(text + " " + period)
		}
		return procfs.Quota(text)
	})

	return b
}

// smallest returns the smallest value above 0 of the files in the directories, and the file that has
// it.
func smallest[T int64 | float64](t *tree, dirs, files []string, parse func(file, text string) (T, error)) (least T,
	source string) {
	for _, dir := range dirs {
		for _, name := range files {
			file := path.Join(dir, name)
			v, ok := parsed(t, file, t.want, func(text string) (T, error) { return parse(file, text) })
			if ok && v > 0 && (least == 0 || v < least) {
				least, source = v, file
			}
		}
	}
	return least, source
}

// hierarchy returns the version of the hierarchy that has a controller, 0 if there is none, and the
// process's directory in it with those above it as far as they are visible.
func (t *tree) hierarchy(controller string, groups []procfs.Group) (version int, dirs []string) {
	version, fileSystem := 1, "cgroup"
	i := slices.IndexFunc(groups, func(g procfs.Group) bool { return slices.Contains(g.Controllers, controller) })
	if i < 0 {
		version, fileSystem = 2, "cgroup2"
		i = slices.IndexFunc(groups, func(g procfs.Group) bool { return len(g.Controllers) == 0 })
	}
	if i < 0 {
		return 0, nil
	}

	group := groups[i].Path
	var top procfs.Mount
	below, found := "", false
	for _, m := range t.mounts() {
		if m.FileSystem != fileSystem || version == 1 && !slices.Contains(m.Options, controller) {
			continue
		}
		if below, found = procfs.CutDir(group, m.Root); found && !strings.Contains(group+"/", "/../") {
			top = m
			break
		}
		found = false
		if top.Point == "" {
			top = m
		}
	}
	switch {
	case top.Point == "":
		t.warnOf(causes.UnknownLimits, selfMounts, "%s for %s is not mounted: its limits are not known", fileSystem,
			controller)
		return 0, nil
	case !found: // a mount made for another namespace: its top is the nearest there is
		t.warnf(selfCgroups, "the group %s is not below %s, which is mounted at %s: limits of the latter are used",
			procfs.Quote(group), procfs.Quote(top.Root), procfs.Quote(top.Point))
		below = ""
	case len(below) > maxPathBytes:
		t.warn(selfCgroups, errLongPath)
		below = ""
	}
	for p := path.Clean("/" + below); ; p = path.Dir(p) {
		dirs = append(dirs, path.Join(top.Point, p))
		if p == "/" {
			break
		}
	}
	if !t.isDir(dirs[0]) {
		t.warnOf(causes.UnknownLimits, dirs[0], "the process's cgroup is not there: limits of those above it are used")
	}
	return version, dirs
}

// mounts returns the mounts of this process, read once.
func (t *tree) mounts() []procfs.Mount {
	if !t.hasMount {
		t.hasMount = true
		if text, ok := t.need(selfMounts); ok {
			mounts, errs := procfs.Mountinfo(text)
			t.warn(selfMounts, errs...)
			t.mounted = mounts
		}
	}
	return t.mounted
}

// limits combines what was found: the smallest of all limits counts.
func (t *tree) limits(top *Topology, ofGPUs, allowedNodes Set, b bounds) Limits {
	l := Limits{
		MemoryBytes:   top.Memory.TotalBytes,
		CPUs:          len(top.CPU.Allowed),
		CPUQuota:      b.quota,
		MemoryNodes:   idsOf(top.Nodes),
		CgroupVersion: b.version,
		Cgroup:        b.dir,
	}
	if l.MemoryBytes > 0 {
		l.MemorySource = systemMemory
	}
	switch {
	case l.CPUs == 0:
	case l.CPUs == len(top.CPU.Online):
		l.CPUSource = onlineCPUs
	default:
		l.CPUSource = selfStatus
	}
	if n := math.Ceil(b.quota); n > 0 && (l.CPUs == 0 || n < float64(l.CPUs)) {
		l.CPUs, l.CPUSource = int(min(n, procfs.MaxMember)), b.quotaSource
	}

	source, all := selfStatus, len(l.MemoryNodes)
	// Memory of a GPU is no host memory, unless there is no other.
	host := slices.DeleteFunc(slices.Clone(l.MemoryNodes), ofGPUs.Contains)
	if len(host) > 0 && len(host) < all {
		l.MemoryNodes, source = host, systemNodes
	}
	if allowedNodes != nil {
		l.MemoryNodes = l.MemoryNodes.intersect(allowedNodes)
	}
	if len(l.MemoryNodes) == 0 {
		t.warnf(source, "none of the nodes is allowed: all are taken to be")
		l.MemoryNodes = idsOf(top.Nodes)
	}
	if n := memoryOf(top.Nodes, l.MemoryNodes); len(l.MemoryNodes) < all && n > 0 && (l.MemoryBytes == 0 ||
		n < l.MemoryBytes) {
		l.MemoryBytes, l.MemorySource = n, source
	}
	if b.memory > 0 && b.memory < procfs.NoLimit && (l.MemoryBytes == 0 || b.memory < l.MemoryBytes) {
		l.MemoryBytes, l.MemorySource = b.memory, b.memorySource
	}
	return l
}

// idsOf returns the numbers of the nodes.
func idsOf(nodes []Node) Set {
	ids := Set{}
	for _, n := range nodes {
		ids = append(ids, n.ID)
	}
	return ids
}

// memoryOf adds up the memory of some nodes; 0 if that is more than a number can be.
func memoryOf(nodes []Node, of Set) (sum int64) {
	for _, n := range nodes {
		if of.Contains(n.ID) {
			if sum += n.MemoryBytes; sum < 0 {
				return 0
			}
		}
	}
	return sum
}
