package topology

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/internal/causes"
)

// cgroups reads the limits of the process's cgroups and of all above them into t.top.Limits: every
// level limits all below it, so the smallest counts; 0 is none. It also reads the mounts, which
// show where the hierarchies are.
//
// A controller may be in either version of cgroups, and on some machines memory and cpu are in
// different ones, so each is looked up by itself. CPUs and nodes that cpusets allow are not read
// here: the kernel has them in /proc/self/status, see affinity.
//
// The formats are in cgroups(7), and in the kernel's Documentation/admin-guide/cgroup-v2.rst and
// cgroup-v1/memory.rst.
func (t *tree) cgroups() {
	text, _ := t.need(selfCgroups)
	groups := t.parseCgroups(text)
	t.readMounts()
	l := &t.top.Limits

	// memory.high is a limit like memory.max here: the kernel slows a process above it down until
	// reclaim brings it below, and pinned memory cannot be reclaimed.
	files := []string{"memory.max", "memory.high"}
	version, dirs := t.hierarchy("memory", groups)
	if l.CgroupVersion = version; version > 0 {
		l.Cgroup = dirs[0]
	}
	if version == 1 {
		files = []string{"memory.limit_in_bytes", "memory.stat"}
	}
	l.MemoryBytes, l.MemorySource = smallest(t, dirs, files, func(file, text string) (int64, error) {
		if path.Base(file) == "memory.stat" {
			// A container's own group is often the top of what it sees, and the limit is set on one
			// above. memory.stat has the smallest limit of all groups above too.
			_, after, ok := strings.Cut("\n"+text, "\nhierarchical_memory_limit ")
			if !ok {
				return 0, errors.New("no hierarchical_memory_limit: " +
					"limits of groups that are not visible here are not known")
			}
			text, _, _ = strings.Cut(after, "\n")
		}
		return parseLimit(text)
	})

	// Then the CPUs. A quota is time per period, and may be less than one CPU.
	_, dirs = t.hierarchy("cpu", groups)
	files = []string{"cpu.max", "cpu.cfs_quota_us"}
	l.CPUQuota, l.CPUSource = smallest(t, dirs, files, func(file, text string) (float64, error) {
		if path.Base(file) == "cpu.cfs_quota_us" { // version 1 has the period in another file
			period, _ := t.want(path.Dir(file), "cpu.cfs_period_us")
			text = strings.TrimSpace(text + " " + period)
		}
		return parseQuota(text)
	})
}

// parseCgroups parses /proc/self/cgroup, whose lines are number:controllers:path. It returns the
// process's path in each hierarchy by controller, as seen from the root of the cgroup namespace.
// The empty name is the hierarchy of version 2, whose line has no controllers.
func (t *tree) parseCgroups(text string) map[string]string {
	groups := map[string]string{}
	for line := range strings.Lines(text) {
		// A path may end with white space, so only the newline is cut.
		if line = strings.TrimRight(line, "\n"); line == "" {
			continue
		}
		fields := strings.SplitN(line, ":", 3)
		if len(fields) != 3 || !strings.HasPrefix(fields[2], "/") {
			t.warnf(selfCgroups, "%s is not a cgroup", quote(line))
			continue
		}
		// The first line of a controller counts.
		for controller := range strings.SplitSeq(fields[1], ",") {
			groups[controller] = cmp.Or(groups[controller], fields[2])
		}
	}
	return groups
}

// parseLimit parses a limit of a cgroup in bytes; 0 is none. "No limit" is "max" in version 2. In
// version 1 it is the largest int64 rounded down to whole pages, so that any number above half of
// that counts as none: no machine has as much.
func parseLimit(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	switch {
	case s == "max":
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("%s is not a limit", quote(s))
	case n == 0:
		// This process runs below the limit, so the file is wrong.
		return 0, errors.New("a limit of 0 bytes, under which nothing could run")
	case n > math.MaxInt64/2:
		return 0, nil
	}
	return int64(n), nil
}

// parseQuota parses the cpu.max of version 2, "quota period" in microseconds or "max period", and
// returns the equivalent number of CPUs; 0 is none. Without a period it is the kernel's default of
// 100 ms. -1 is version 1's word for "max".
func parseQuota(s string) (float64, error) {
	first, second, ok := strings.Cut(s, " ")
	if !ok {
		second = "100000" // the kernel's default period
	}
	quota, err1 := parseCount(first)
	period, err2 := parseCount(second)
	switch none := first == "max" || first == "-1"; {
	case err2 != nil, period == 0, !none && (err1 != nil || quota == 0):
		return 0, fmt.Errorf("%s is not a quota", quote(s))
	case none:
		return 0, nil
	}
	return float64(quota) / float64(period), nil
}

// smallest returns the smallest value above 0 of the given files in all of the directories, and the
// file that has it; 0 if there is none. Missing files do not count: the root group has no limits.
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
// directories of the process's group and of all above it, the group's first, as far as they are
// mounted.
//
// The path in /proc/self/cgroup is relative to the cgroup namespace, and a mount may show only a
// part of the hierarchy (its root, in mountinfo). Both must be combined: the path below the mount's
// root, at the mount point. A container may have a mount that was made in another namespace, so
// that the path is not below its root, or begins with "/..". Then the mount's top is the nearest
// group that is known to be above the process.
func (t *tree) hierarchy(controller string, groups map[string]string) (version int, dirs []string) {
	version, fileSystem := 1, "cgroup"
	// A controller of version 1 has a line with its name. One that has none is in version 2.
	group, found := groups[controller]
	if !found {
		version, fileSystem = 2, "cgroup2"
		group, found = groups[""]
	}
	if !found {
		return 0, nil
	}

	var top mount
	below, found := "", false
	// Find the first mount that shows the group, or else the first of the hierarchy.
	for _, m := range t.mounts {
		if m.FileSystem != fileSystem || version == 1 && !slices.Contains(m.options, controller) {
			continue
		}
		// A path with ".." is above the root of the namespace, of which nothing can be seen here.
		if below, found = cutDir(group, m.root); found && !strings.Contains(group+"/", "/../") {
			top = m
			break
		}
		found = false
		// Remember the first mount of the hierarchy, in case that none shows the group.
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
			quote(group), quote(top.root), quote(top.Point))
		below = ""
	case len(below) > maxPathBytes:
		t.warn(selfCgroups, errLongPath)
		below = ""
	}
	// List the group and all above it, up to the mount's top.
	for p := path.Clean("/" + below); ; p = path.Dir(p) {
		dirs = append(dirs, path.Join(top.Point, p))
		if p == "/" {
			break
		}
	}
	// A recorded tree, or a mount of another namespace, may lack the directory.
	if !t.isDir(dirs[0]) {
		t.warnOf(causes.UnknownLimits, dirs[0], "the process's cgroup is not there: limits of those above it are used")
	}
	return version, dirs
}

// limit completes t.top.Limits, which has those of the cgroups, with what the machine has and the
// process is allowed: the smallest counts. allowedNodes is what affinity returned, nil if not
// known. Nodes that are a GPU's memory do not count as host memory, unless there are no others.
func (t *tree) limit(allowedNodes Set) {
	top, l := t.top, &t.top.Limits
	allowed := len(top.CPU.Allowed)
	// CPUs: a quota of 1.5 CPUs keeps two threads busy part of the time, hence the rounding up.
	switch n := math.Ceil(l.CPUQuota); {
	case n > 0 && (allowed == 0 || n < float64(allowed)):
		l.CPUs = int(min(n, maxMember)) // and the source is that of the quota
	case allowed == 0:
		l.CPUSource = ""
	case allowed == len(top.CPU.Online):
		l.CPUs, l.CPUSource = allowed, onlineCPUs
	default:
		l.CPUs, l.CPUSource = allowed, selfStatus
	}

	// Then the nodes, which determine how much memory there is.
	all, source := Set{}, selfStatus
	l.MemoryNodes = Set{}
	for _, n := range top.Nodes {
		all = append(all, n.ID)
		if !slices.ContainsFunc(top.GPUs, func(g GPU) bool { return g.OwnNodes.Contains(n.ID) }) {
			l.MemoryNodes = append(l.MemoryNodes, n.ID)
		}
	}
	// On a machine where every node is a GPU's, as in a recorded tree, all count.
	if len(l.MemoryNodes) == 0 {
		l.MemoryNodes = slices.Clone(all)
	} else if len(l.MemoryNodes) < len(all) {
		source = systemNodes
	}
	if allowedNodes != nil {
		l.MemoryNodes = l.MemoryNodes.intersect(allowedNodes)
	}
	if len(l.MemoryNodes) == 0 {
		t.warnf(source, "none of the nodes is allowed: all are taken to be")
		l.MemoryNodes = all
	}
	// Then the bytes. A bound that is equal to an earlier one replaces its source: the machine's
	// total is the better explanation for a limit that is not lower.
	bound := func(n int64, source string) {
		if n > 0 && (l.MemoryBytes == 0 || n <= l.MemoryBytes) {
			l.MemoryBytes, l.MemorySource = n, source
		}
	}
	// Some nodes are excluded, so the memory of the others is a limit.
	if len(l.MemoryNodes) < len(all) {
		sum := int64(0)
		for _, n := range top.Nodes {
			if sum >= 0 && l.MemoryNodes.Contains(n.ID) {
				sum += n.MemoryBytes // below 0 if it is more than a number can be
			}
		}
		bound(sum, source)
	}
	bound(top.Memory.TotalBytes, systemMemory)
}
