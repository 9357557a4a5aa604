package topology

import (
	"cmp"
	"fmt"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
)

// meminfo reads the memory of the machine, or of a node, from file: /proc/meminfo, or a node's
// meminfo, whose lines begin with "Node 0". A key that is missing leaves its field 0; only MemTotal
// is needed. The numbers are not all of one moment, so a part may exceed the total: it is
// corrected, with a warning.
func (t *tree) meminfo(file string) (m Memory) {
	text, ok := t.need(file)
	if !ok {
		return m
	}
	// A key leaves the map when its value was read, so what remains is missing, and a second line
	// of a key does not count.
	missing := map[string]*int64{
		"MemTotal": &m.TotalBytes, "MemFree": &m.FreeBytes,
		"MemAvailable": &m.AvailableBytes, "SwapTotal": &m.SwapBytes,
	}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		// The last word is the key in both files.
		if words := strings.Fields(key); len(words) > 0 {
			key = words[len(words)-1]
		}
		to := missing[key]
		if to == nil {
			continue // another key, or one that the file has twice
		}
		value = strings.TrimSpace(value)
		number, unit, _ := strings.Cut(value, " ")
		n, err := parseCount(number)
		switch {
		case err != nil:
			t.warnf(file, "%s: %v", key, err)
		case strings.TrimSpace(unit) != "kB": // of 1024 bytes
			t.warnf(file, "%s: %s is not a number of kB", key, quote(value))
		case n > math.MaxInt64>>10:
			t.warnf(file, "%s: %s is out of range", key, quote(number))
		default:
			*to = n << 10
			delete(missing, key)
		}
	}
	if missing["MemTotal"] != nil {
		t.warnf(file, "no MemTotal")
		return m
	}
	if m.FreeBytes > m.TotalBytes {
		t.warnf(file, "MemFree is %d of %d bytes", m.FreeBytes, m.TotalBytes)
		m.FreeBytes = m.TotalBytes
	}
	if m.AvailableBytes > m.TotalBytes {
		t.warnf(file, "MemAvailable is %d of %d bytes", m.AvailableBytes, m.TotalBytes)
		m.AvailableBytes = m.TotalBytes
	}
	return m
}

// affinity returns the CPUs and nodes that the scheduler and the memory policy allow this process,
// from /proc/self/status; nil if they are not known. The kernel has already intersected them with
// the cpusets of the cgroups. Mems_allowed_list is missing in kernels without NUMA, which is no
// warning.
func (t *tree) affinity() (cpus, nodes Set) {
	text, ok := t.need(selfStatus)
	if !ok {
		return nil, nil
	}
	lists, failed := map[string]*Set{"Cpus_allowed_list": &cpus, "Mems_allowed_list": &nodes}, false
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		if lists[key] == nil {
			continue
		}
		set, err := parseSet(value)
		if err != nil {
			t.warnf(selfStatus, "%s: %v", key, err)
			failed = true
		} else if len(set) > 0 {
			*lists[key] = set
		}
	}
	if cpus == nil && !failed {
		t.warnf(selfStatus, "no Cpus_allowed_list")
	}
	return cpus, nodes
}

// parseCPUInfo returns the first processor's model and the numbers of all processors, from
// /proc/cpuinfo. Its keys differ between architectures.
func parseCPUInfo(text string) (model string, cpus Set) {
	cpus = Set{}
	arm := map[string]string{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		switch key, value = strings.TrimSpace(key), strings.TrimSpace(value); key {
		case "processor":
			// Each logical CPU has a paragraph, which begins with its number.
			if n, err := parseMember(value); err == nil {
				cpus = append(cpus, n)
			}
		case "model name", "cpu model", "cpu": // x86 and ARM; MIPS; POWER
			model = cmp.Or(model, label(value))
		case "CPU implementer", "CPU part":
			arm[key] = value
		}
	}
	if model == "" && arm["CPU implementer"] != "" { // all that arm64 has
		model = label("ARM implementer " + arm["CPU implementer"] + " part " + arm["CPU part"])
	}
	slices.Sort(cpus)
	return model, slices.Compact(cpus)
}

// cpu returns the CPUs. allowed is what affinity returned; nil means all. CPUs that are allowed and
// not online do not count, so the result may be smaller than allowed. If nothing remains, the files
// contradict each other, and all online CPUs count.
func (t *tree) cpu(allowed Set) CPU {
	info, ok := t.need(systemCPUs)
	model, listed := parseCPUInfo(info)
	if model == "" && ok {
		t.warnf(systemCPUs, "no model name")
	}
	// /sys may be hidden in a container; then /proc/cpuinfo lists the CPUs that are online.
	online, ok := t.set(onlineCPUs)
	if !ok || len(online) == 0 {
		online = listed
		t.warnf(onlineCPUs, "no list of CPUs: %d are in %s", len(listed), systemCPUs)
	}
	c := CPU{Model: model, Online: online, Allowed: slices.Clone(online)}
	if allowed != nil {
		c.Allowed = c.Allowed.intersect(allowed)
	}
	// The process runs, so it may run somewhere.
	if len(c.Allowed) == 0 && len(online) > 0 {
		t.warnf(selfStatus, "none of the CPUs that run is allowed: all are taken to be")
		c.Allowed = slices.Clone(online)
	}
	return c
}

// readNodes returns the NUMA nodes that are online, by number. If the kernel knows none (it was
// built without NUMA, or /sys is not mounted), there is one node with the number 0, the CPUs of c
// and the memory m.
func (t *tree) readNodes(c CPU, m Memory) []Node {
	ids, _ := t.set(systemNodes, "online")
	// Each node costs three files, so a broken list must not be believed.
	if len(ids) > maxNodes {
		t.warnf(systemNodes+"/online", "%d nodes: more than any machine has", len(ids))
		ids = nil
	}
	// Without NUMA in the kernel the machine is one node.
	if len(ids) == 0 {
		return []Node{{CPUs: slices.Clone(c.Online), MemoryBytes: m.TotalBytes, FreeBytes: m.FreeBytes,
			Distances: []int{10}}}
	}
	nodes := make([]Node, len(ids))
	for i, id := range ids {
		dir := path.Join(systemNodes, "node"+strconv.Itoa(id))
		// A node whose directory is missing is still listed: other files refer to its number, and
		// distances have a place for it.
		n := Node{ID: id, CPUs: Set{}, Distances: []int{}}
		if t.isDir(dir) {
			if set, ok := parsed(t, path.Join(dir, "cpulist"), t.need, parseSet); ok {
				n.CPUs = set
			}
			memory := t.meminfo(path.Join(dir, "meminfo"))
			n.MemoryBytes, n.FreeBytes = memory.TotalBytes, min(memory.FreeBytes, memory.TotalBytes)
			parse := func(s string) ([]int, error) { return parseDistances(s, len(ids)) }
			if d, ok := parsed(t, path.Join(dir, "distance"), t.need, parse); ok {
				n.Distances = d
			}
		} else {
			t.warnf(dir, "not there, though node %d is online", id)
		}
		nodes[i] = n
	}
	return nodes
}

// parseDistances parses the distances of a node to all nodes, of which there must be n.
func parseDistances(s string, n int) ([]int, error) {
	fields := strings.Fields(s)
	if len(fields) != n {
		return nil, fmt.Errorf("%d distances for %d nodes", len(fields), n)
	}
	distances := make([]int, n)
	for i, f := range fields {
		d, err := strconv.ParseUint(f, 10, 8) // the firmware's table has a byte for each
		if err != nil || d == 0 {
			return nil, fmt.Errorf("%s is not a distance", quote(f))
		}
		distances[i] = int(d)
	}
	return distances, nil
}

// nowhere returns the node of a device whose place is not known: the only node if there is one, or
// Unknown. A machine with one node needs no placement, so nothing is lost there.
func (t *tree) nowhere() int {
	if len(t.top.Nodes) == 1 {
		return t.top.Nodes[0].ID
	}
	return Unknown
}

// nodeOf reads the node of the PCI device in dir, from its numa_node. The firmware of many machines
// with one node reports -1, which then means that node. With several nodes it is a device whose
// place is unknown, which is a warning, because buffers for it cannot be placed near to it.
func (t *tree) nodeOf(dir string) int {
	node, ok := parsed(t, path.Join(dir, "numa_node"), t.want, func(text string) (int, error) {
		n, err := strconv.ParseInt(text, 10, 32)
		switch _, known := t.top.Node(int(n)); {
		case err != nil:
			return 0, fmt.Errorf("%s is not a node", quote(text))
		case n == Unknown && len(t.top.Nodes) > 1:
			return 0, fmt.Errorf("the firmware does not say which of %d nodes the device is on", len(t.top.Nodes))
		case n != Unknown && !known:
			// A device may be on a node that is offline, or the recorded tree is incomplete.
			return 0, fmt.Errorf("there is no node %d", n)
		}
		return int(n), nil
	})
	if !ok || node == Unknown {
		return t.nowhere()
	}
	return node
}

// nearTo returns the node that the driver reports a GPU to be on: the only one whose memory is
// near, or else the only one whose CPUs are. ok is false if the driver names none or several, as it
// does for interleaved nodes.
func (t *tree) nearTo(g *GPU) (near Node, ok bool) {
	// A GPU that is near to the memory of several nodes is on none in particular.
	if len(g.NodeAffinity) == 1 {
		if near, ok = t.top.Node(g.NodeAffinity[0]); ok {
			return near, true
		}
	}
	for _, n := range t.top.Nodes {
		if len(n.CPUs.intersect(g.CPUAffinity)) == 0 {
			continue
		}
		if ok {
			return Node{}, false // a second one
		}
		near, ok = n, true
	}
	return near, ok
}
