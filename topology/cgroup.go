package topology

import (
	"math"
	"path"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/procfs"
)

// bounds is what the process's cgroups allow.
type bounds struct {
	version int    // of the hierarchy that controls memory
	dir     string // the process's directory in it

	memory       int64 // noLimit: none
	memorySource string
	quota        float64 // CPUs; 0: none
	quotaSource  string
	cpus, nodes  Set // nil: not known
	cpusSource   string
	nodesSource  string
}

// hierarchy is where one controller's files for this process are.
type hierarchy struct {
	version int      // 1 or 2; 0: the controller is not found
	dirs    []string // the process's directory, and those above it as far as they are visible
}

// cgroups reads the limits of the process's cgroups and of all above them: the
// smallest counts. A controller may be in either version; some machines have
// both.
func (t *tree) cgroups() bounds {
	b := bounds{memory: procfs.NoLimit}
	text, ok := t.need(selfCgroups)
	if !ok {
		return b
	}
	groups, errs := procfs.Cgroup(text)
	t.warn(selfCgroups, errs...)

	h := t.hierarchy("memory", groups)
	if b.version = h.version; b.version > 0 {
		b.dir = h.dirs[0]
	}
	t.memoryLimit(h, &b)
	t.cpuQuota(t.hierarchy("cpu", groups), &b)
	t.cpusets(t.hierarchy("cpuset", groups), &b)
	return b
}

func (t *tree) hierarchy(controller string, groups []procfs.Group) hierarchy {
	version, fileSystem := 1, "cgroup"
	i := slices.IndexFunc(groups, func(g procfs.Group) bool { return slices.Contains(g.Controllers, controller) })
	if i < 0 {
		version, fileSystem = 2, "cgroup2"
		i = slices.IndexFunc(groups, func(g procfs.Group) bool { return len(g.Controllers) == 0 })
	}
	if i < 0 {
		return hierarchy{}
	}
	group := groups[i].Path

	var outside *procfs.Mount
	for _, m := range t.mounts() {
		if m.FileSystem != fileSystem || version == 1 && !slices.Contains(m.Options, controller) {
			continue
		}
		below, ok := strings.CutPrefix(group, strings.TrimSuffix(m.Root, "/"))
		if ok && (below == "" || below[0] == '/') && !slices.Contains(strings.Split(group, "/"), "..") {
			return hierarchy{version: version, dirs: t.upwards(m.Point, below)}
		}
		if outside == nil {
			outside = &m
		}
	}
	if outside != nil {
		// A mount made for another namespace: its top is the nearest there is.
		t.warnf(selfCgroups, "the group %s is not below %s, which is mounted at %s: limits of the latter are used",
			procfs.Quote(group), procfs.Quote(outside.Root), procfs.Quote(outside.Point))
		return hierarchy{version: version, dirs: t.upwards(outside.Point, "/")}
	}
	t.warnOf(causes.UnknownLimits, selfMounts, "%s for %s is not mounted: its limits are not known", fileSystem, controller)
	return hierarchy{}
}

// upwards returns the directory below top and all those above it to top.
func (t *tree) upwards(top, below string) []string {
	if len(below) > maxPathBytes {
		t.warn(selfCgroups, errLongPath)
		below = "/"
	}
	var dirs []string
	for p := path.Clean("/" + below); ; p = path.Dir(p) {
		dirs = append(dirs, path.Join(top, p))
		if p == "/" {
			break
		}
	}
	if !t.isDir(dirs[0]) {
		t.warnOf(causes.UnknownLimits, dirs[0], "the process's cgroup is not there: limits of those above it are used")
	}
	return dirs
}

func (t *tree) memoryLimit(h hierarchy, b *bounds) {
	// memory.high is no less a limit than memory.max: a process above it is
	// made to wait until it is below, which pinned memory never allows.
	files := []string{"memory.max", "memory.high"}
	if h.version == 1 {
		files = []string{"memory.limit_in_bytes"}
	}
	for i, dir := range h.dirs {
		for _, f := range files {
			file := path.Join(dir, f)
			if text, ok := t.want(file); ok {
				t.lowerMemory(b, file, text)
			}
		}
		if h.version == 1 && i == 0 {
			t.hierarchicalLimit(b, path.Join(dir, "memory.stat"))
		}
	}
}

// hierarchicalLimit reads from version 1's memory.stat the limit of all groups
// above, of which a container sees none.
func (t *tree) hierarchicalLimit(b *bounds, file string) {
	text, ok := t.want(file)
	if !ok {
		return
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, "hierarchical_memory_limit "); ok {
			t.lowerMemory(b, file, strings.TrimSpace(value))
			return
		}
	}
	t.warnf(file, "no hierarchical_memory_limit: limits of groups that are not visible here are not known")
}

func (t *tree) lowerMemory(b *bounds, file, text string) {
	n, err := procfs.Limit(text)
	if err != nil {
		t.warn(file, err)
	} else if n < b.memory {
		b.memory, b.memorySource = n, file
	}
}

func (t *tree) cpuQuota(h hierarchy, b *bounds) {
	for _, dir := range h.dirs {
		file := path.Join(dir, "cpu.max")
		var text string
		var ok bool
		if h.version == 1 {
			file = path.Join(dir, "cpu.cfs_quota_us")
			if text, ok = t.want(file); ok {
				period, _ := t.want(path.Join(dir, "cpu.cfs_period_us"))
				text += " " + period
			}
		} else {
			text, ok = t.want(file)
		}
		if quota, ok := parsed(t, file, text, ok, procfs.Quota); ok && quota > 0 && (b.quota == 0 || quota < b.quota) {
			b.quota, b.quotaSource = quota, file
		}
	}
}

func (t *tree) cpusets(h hierarchy, b *bounds) {
	// A group without the controller has what the nearest above it has.
	first := func(files ...string) (set Set, source string) {
		for _, dir := range h.dirs {
			for _, f := range files {
				file := path.Join(dir, f)
				if s, ok := t.set(file); ok && len(s) > 0 {
					return s, file
				}
			}
		}
		return nil, ""
	}
	if h.version == 1 {
		b.cpus, b.cpusSource = first("cpuset.effective_cpus", "cpuset.cpus")
		b.nodes, b.nodesSource = first("cpuset.effective_mems", "cpuset.mems")
		return
	}
	b.cpus, b.cpusSource = first("cpuset.cpus.effective")
	b.nodes, b.nodesSource = first("cpuset.mems.effective")
}

// mounts returns what is mounted, read once.
func (t *tree) mounts() []procfs.Mount {
	if t.hasMount {
		return t.mounted
	}
	t.hasMount = true
	text, err := t.read(selfMounts)
	if err != nil {
		t.warn(selfMounts, err)
		return nil
	}
	mounts, errs := procfs.Mountinfo(text)
	t.warn(selfMounts, errs...)
	t.mounted = mounts
	return mounts
}

// limits puts together what was found: the smallest of all counts.
func (t *tree) limits(top *Topology, ofGPUs Set, a allowed, b bounds) Limits {
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
	switch n := len(top.CPU.Allowed); {
	case n == 0:
	case n == len(top.CPU.Online):
		l.CPUSource = onlineCPUs
	case a.cpus != nil && n == len(top.CPU.Online.intersect(a.cpus)):
		l.CPUSource = selfStatus // the kernel takes the cpuset into account there
	default:
		l.CPUSource = b.cpusSource
	}
	if b.quota > 0 {
		if n := math.Ceil(b.quota); l.CPUs == 0 || n < float64(l.CPUs) {
			l.CPUs, l.CPUSource = int(min(n, procfs.MaxMember)), b.quotaSource
		}
	}

	source := selfStatus
	all := len(l.MemoryNodes)
	// What is taken from a GPU's own memory is no room beside it.
	if host := slices.DeleteFunc(slices.Clone(l.MemoryNodes), ofGPUs.Contains); len(host) > 0 && len(host) < all {
		l.MemoryNodes, source = host, systemNodes
	}
	if a.nodes != nil {
		l.MemoryNodes = l.MemoryNodes.intersect(a.nodes)
	}
	if b.nodes != nil {
		if both := l.MemoryNodes.intersect(b.nodes); len(both) < len(l.MemoryNodes) {
			l.MemoryNodes, source = both, b.nodesSource
		}
	}
	if len(l.MemoryNodes) == 0 {
		t.warnf(source, "none of the nodes is allowed: all are taken to be")
		l.MemoryNodes = idsOf(top.Nodes)
	}
	if n := memoryOf(top.Nodes, l.MemoryNodes); len(l.MemoryNodes) < all && n > 0 && (l.MemoryBytes == 0 || n < l.MemoryBytes) {
		l.MemoryBytes, l.MemorySource = n, source
	}
	if b.memory < procfs.NoLimit && (l.MemoryBytes == 0 || b.memory < l.MemoryBytes) {
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

// memoryOf adds up the memory of some nodes; 0 if that is more than a number
// can be.
func memoryOf(nodes []Node, of Set) int64 {
	var sum int64
	for _, n := range nodes {
		if of.Contains(n.ID) {
			if sum += n.MemoryBytes; sum < 0 {
				return 0
			}
		}
	}
	return sum
}
