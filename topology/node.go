package topology

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/internal/procfs"
	"github.com/spillway-db/spillway/internal/size"
)

func (t *tree) memory() Memory {
	text, ok := t.need(systemMemory)
	if !ok {
		return Memory{}
	}
	values, errs := procfs.Meminfo(text, "MemTotal", "MemFree", "MemAvailable", "SwapTotal")
	t.warn(systemMemory, errs...)
	m := Memory{
		TotalBytes:     values["MemTotal"],
		FreeBytes:      values["MemFree"],
		AvailableBytes: values["MemAvailable"],
		SwapBytes:      values["SwapTotal"],
	}
	if _, ok := values["MemTotal"]; !ok {
		t.warnf(systemMemory, "no MemTotal")
		return m
	}
	m.FreeBytes = t.atMost(systemMemory, "MemFree", m.FreeBytes, m.TotalBytes)
	m.AvailableBytes = t.atMost(systemMemory, "MemAvailable", m.AvailableBytes, m.TotalBytes)
	return m
}

// atMost returns n, or total with a warning if n is more than all there is.
func (t *tree) atMost(p, key string, n, total int64) int64 {
	if n <= total {
		return n
	}
	t.warnf(p, "%s is %d of %d bytes", key, n, total)
	return total
}

// allowed is what the scheduler and the memory policy let the process use; nil
// where that is not known.
type allowed struct{ cpus, nodes Set }

func (t *tree) affinity() allowed {
	text, ok := t.need(selfStatus)
	if !ok {
		return allowed{}
	}
	cpus, nodes, errs := procfs.Status(text)
	t.warn(selfStatus, errs...)
	if cpus == nil && len(errs) == 0 {
		t.warnf(selfStatus, "no Cpus_allowed_list")
	}
	return allowed{cpus, nodes}
}

// cpu returns the CPUs, with those allowed by the sets that are not nil.
func (t *tree) cpu(sets ...Set) CPU {
	info, told := t.need(systemCPUs)
	model, listed := procfs.CPUInfo(info)
	if model == "" && told {
		t.warnf(systemCPUs, "no model name")
	}
	online, ok := t.set(onlineCPUs)
	if !ok || len(online) == 0 {
		online = listed
		t.warnf(onlineCPUs, "no list of CPUs: %d are in %s", len(listed), systemCPUs)
	}
	c := CPU{Model: model, Online: online, Allowed: slices.Clone(online)}
	for _, set := range sets {
		if set != nil {
			c.Allowed = c.Allowed.intersect(set)
		}
	}
	if len(c.Allowed) == 0 && len(online) > 0 {
		t.warnf(selfStatus, "none of the CPUs that run is allowed: all are taken to be")
		c.Allowed = slices.Clone(online)
	}
	return c
}

// nodes returns the NUMA nodes, or if the kernel knows none the one that holds
// all.
func (t *tree) nodes(c CPU, m Memory) []Node {
	ids := t.nodeIDs()
	if len(ids) == 0 {
		return []Node{{CPUs: slices.Clone(c.Online), MemoryBytes: m.TotalBytes, FreeBytes: m.FreeBytes, Distances: []int{10}}}
	}
	nodes := make([]Node, len(ids))
	for i, id := range ids {
		nodes[i] = t.node(id, len(ids))
	}
	return nodes
}

// nodeIDs returns the nodes that are online; none if the kernel knows none.
func (t *tree) nodeIDs() Set {
	names, ok := t.list(systemNodes)
	if !ok {
		return nil
	}
	online := path.Join(systemNodes, "online")
	ids, ok := t.set(online)
	if ok && len(ids) > maxNodes {
		t.warnf(online, "%d nodes: more than any machine has", len(ids))
		ok = false
	}
	if ok && len(ids) > 0 {
		return ids
	}
	ids = Set{}
	for _, name := range names {
		if number, ok := strings.CutPrefix(name, "node"); ok {
			if id, err := procfs.Member(number); err == nil && strconv.Itoa(id) == number {
				ids = append(ids, id)
			}
		}
	}
	slices.Sort(ids)
	if len(ids) > maxNodes {
		t.warnf(systemNodes, "%d nodes: the first %d are listed", len(ids), maxNodes)
		ids = ids[:maxNodes]
	}
	t.warnf(online, "no list of nodes: %d are in %s", len(ids), systemNodes)
	return ids
}

// compare warns if the nodes have much less memory than the machine says that
// it has: memory that was plugged in, or a table of the firmware that leaves some
// out. A machine's only node has all of it. The other way round is usual in
// containers that are shown a smaller machine.
func (t *tree) compare(nodes []Node, m Memory) {
	const tolerated = 8 // an eighth
	sum := memoryOf(nodes, idsOf(nodes))
	switch {
	case sum <= 0 || sum >= m.TotalBytes-m.TotalBytes/tolerated:
	case len(nodes) == 1:
		nodes[0].MemoryBytes, nodes[0].FreeBytes = m.TotalBytes, m.FreeBytes
	default:
		t.warnf(systemNodes, "the nodes have %s of the %s of memory that %s has", size.Approx(sum), size.Approx(m.TotalBytes), systemMemory)
	}
}

// node reads one of count nodes.
func (t *tree) node(id, count int) Node {
	dir := path.Join(systemNodes, "node"+strconv.Itoa(id))
	n := Node{ID: id, CPUs: Set{}, Distances: []int{}}
	if !t.isDir(dir) {
		t.warnf(dir, "not there, though node %d is online", id)
		return n
	}

	file := path.Join(dir, "cpulist")
	text, ok := t.need(file)
	if set, ok := parsed(t, file, text, ok, parseSet); ok {
		n.CPUs = set
	}

	file = path.Join(dir, "meminfo")
	if text, ok := t.need(file); ok {
		values, errs := procfs.Meminfo(text, "MemTotal", "MemFree")
		t.warn(file, errs...)
		if total, ok := values["MemTotal"]; ok {
			n.MemoryBytes = total
			n.FreeBytes = t.atMost(file, "MemFree", values["MemFree"], total)
		} else {
			t.warnf(file, "no MemTotal")
		}
	}

	file = path.Join(dir, "distance")
	text, ok = t.need(file)
	if d, ok := parsed(t, file, text, ok, func(s string) ([]int, error) { return procfs.Distances(s, count) }); ok {
		n.Distances = d
	}
	return n
}

// placing says on which node a device is.
type placing struct {
	nodes Set // all there are
	cpus  map[int]Set
}

func newPlacing(nodes []Node) placing {
	w := placing{nodes: idsOf(nodes), cpus: map[int]Set{}}
	for _, n := range nodes {
		w.cpus[n.ID] = n.CPUs
	}
	return w
}

// nowhere is the node of a device that does not say: the only one, or Unknown.
func (w placing) nowhere() int {
	if len(w.nodes) == 1 {
		return w.nodes[0]
	}
	return Unknown
}

// near returns the node that the driver says a GPU is on: the only one whose memory is
// near, or else the only one whose CPUs are.
func (w placing) near(g *GPU) (node int, ok bool) {
	if nodes := w.nodes.intersect(g.NodeAffinity); len(nodes) == 1 && len(g.NodeAffinity) == 1 {
		return nodes[0], true
	}
	node = Unknown
	for _, n := range w.nodes {
		if len(w.cpus[n].intersect(g.CPUAffinity)) == 0 {
			continue
		}
		if ok {
			return Unknown, false // a second one
		}
		node, ok = n, true
	}
	return node, ok
}

// nodeOfGPU is nodeOf for a GPU, of which the driver may know more than the kernel.
func (t *tree) nodeOfGPU(w placing, dir string, g *GPU) int {
	text, told := t.want(path.Join(dir, "numa_node"))
	node, ok := w.near(g)
	if !ok || told && text != strconv.Itoa(Unknown) {
		return t.nodeOf(w, dir)
	}
	if g.CPUs == nil {
		g.CPUs = append(Set{}, w.cpus[node]...) // the kernel calls all CPUs near
	}
	return node
}

// nodeOf reads the node of the device in dir. The firmware of many machines
// with one node says -1; with several that is a device whose place is unknown.
func (t *tree) nodeOf(w placing, dir string) int {
	file := path.Join(dir, "numa_node")
	text, ok := t.want(file)
	if !ok {
		return w.nowhere()
	}
	n, err := strconv.ParseInt(text, 10, 32)
	switch {
	case err != nil:
		t.warnf(file, "%s is not a node", procfs.Quote(text))
	case n == Unknown:
		if len(w.nodes) > 1 {
			t.warnf(file, "the firmware does not say which of %d nodes the device is on", len(w.nodes))
		}
	case !w.nodes.Contains(int(n)):
		t.warnf(file, "there is no node %d", n)
	default:
		return int(n)
	}
	return w.nowhere()
}
