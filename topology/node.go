package topology

import (
	"fmt"
	"path"
	"slices"
	"strconv"

	"github.com/spillway-db/spillway/internal/procfs"
)

// meminfo reads the memory of the machine, or of a node, from its file.
func (t *tree) meminfo(file string) (m Memory) {
	text, ok := t.need(file)
	if !ok {
		return m
	}
	values, errs := procfs.Meminfo(text, "MemTotal", "MemFree", "MemAvailable", "SwapTotal")
	t.warn(file, errs...)
	m = Memory{values["MemTotal"], values["MemFree"], values["MemAvailable"], values["SwapTotal"]}
	if _, ok := values["MemTotal"]; !ok {
		t.warnf(file, "no MemTotal")
		return m
	}
	for i, n := range []*int64{&m.FreeBytes, &m.AvailableBytes} {
		if *n > m.TotalBytes {
			t.warnf(file, "%s is %d of %d bytes", []string{"MemFree", "MemAvailable"}[i], *n, m.TotalBytes)
			*n = m.TotalBytes
		}
	}
	return m
}

// affinity returns the CPUs and nodes that the scheduler and the memory policy allow; nil if they are
// not known.
func (t *tree) affinity() (cpus, nodes Set) {
	text, ok := t.need(selfStatus)
	if !ok {
		return nil, nil
	}
	cpus, nodes, errs := procfs.Status(text)
	t.warn(selfStatus, errs...)
	if cpus == nil && len(errs) == 0 {
		t.warnf(selfStatus, "no Cpus_allowed_list")
	}
	return cpus, nodes
}

// cpu returns the CPUs, with those allowed; nil is all.
func (t *tree) cpu(allowed Set) CPU {
	info, ok := t.need(systemCPUs)
	model, listed := procfs.CPUInfo(info)
	if model == "" && ok {
		t.warnf(systemCPUs, "no model name")
	}
	online, ok := t.set(onlineCPUs)
	if !ok || len(online) == 0 {
		online = listed
		t.warnf(onlineCPUs, "no list of CPUs: %d are in %s", len(listed), systemCPUs)
	}
	c := CPU{Model: model, Online: online, Allowed: slices.Clone(online)}
	if allowed != nil {
		c.Allowed = c.Allowed.intersect(allowed)
	}
	if len(c.Allowed) == 0 && len(online) > 0 {
		t.warnf(selfStatus, "none of the CPUs that run is allowed: all are taken to be")
		c.Allowed = slices.Clone(online)
	}
	return c
}

// readNodes returns the NUMA nodes, or one that holds all if the kernel knows none.
func (t *tree) readNodes(c CPU, m Memory) []Node {
	ids, _ := t.set(systemNodes, "online")
	if len(ids) > maxNodes {
		t.warnf(systemNodes+"/online", "%d nodes: more than any machine has", len(ids))
		ids = nil
	}
	if len(ids) == 0 {
		return []Node{{CPUs: slices.Clone(c.Online), MemoryBytes: m.TotalBytes, FreeBytes: m.FreeBytes,
			Distances: []int{10}}}
	}
	nodes := make([]Node, len(ids))
	for i, id := range ids {
		dir := path.Join(systemNodes, "node"+strconv.Itoa(id))
		n := Node{ID: id, CPUs: Set{}, Distances: []int{}}
		if t.isDir(dir) {
			if set, ok := parsed(t, path.Join(dir, "cpulist"), t.need, parseSet); ok {
				n.CPUs = set
			}
			memory := t.meminfo(path.Join(dir, "meminfo"))
			n.MemoryBytes, n.FreeBytes = memory.TotalBytes, min(memory.FreeBytes, memory.TotalBytes)
			parse := func(s string) ([]int, error) { return procfs.Distances(s, len(ids)) }
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

// node returns the node with the given number.
func (t *tree) node(id int) (Node, bool) {
	i := slices.IndexFunc(t.nodes, func(n Node) bool { return n.ID == id })
	if i < 0 {
		return Node{}, false
	}
	return t.nodes[i], true
}

// nowhere returns the node of a device without one: the only node, or Unknown.
func (t *tree) nowhere() int {
	if len(t.nodes) == 1 {
		return t.nodes[0].ID
	}
	return Unknown
}

// nodeOf reads the node of the device in dir. The firmware of many machines with one node says -1;
// with several that is a device whose place is unknown.
func (t *tree) nodeOf(dir string) int {
	node, ok := parsed(t, path.Join(dir, "numa_node"), t.want, func(text string) (int, error) {
		n, err := strconv.ParseInt(text, 10, 32)
		switch _, known := t.node(int(n)); {
		case err != nil:
			return 0, fmt.Errorf("%s is not a node", procfs.Quote(text))
		case n == Unknown && len(t.nodes) > 1:
			return 0, fmt.Errorf("the firmware does not say which of %d nodes the device is on", len(t.nodes))
		case n != Unknown && !known:
			return 0, fmt.Errorf("there is no node %d", n)
		}
		return int(n), nil
	})
	if !ok || node == Unknown {
		return t.nowhere()
	}
	return node
}

// nearTo returns the node that the driver says a GPU is on: the only one whose memory is near, or
// else the only one whose CPUs are.
func (t *tree) nearTo(g *GPU) (near Node, ok bool) {
	if len(g.NodeAffinity) == 1 {
		if near, ok = t.node(g.NodeAffinity[0]); ok {
			return near, true
		}
	}
	for _, n := range t.nodes {
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
