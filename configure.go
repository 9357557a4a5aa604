package spillway

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// Configure fills in what cfg leaves to the machine that top describes:
//
//   - GPUs, if nil: a space on each GPU that CUDA shows to the process (of those divided into MIG
//     instances one instance, and nothing else), or a simulated one if there is none
//   - Hosts, if nil: spaces on NUMA nodes, or for GPUs, if HostPerGPU is set
//   - Disks, if nil: one in the temporary directory
//   - the node of each space that it makes, and of each disk, so that data goes to what is near
//   - a share of memory in Hosts, in bytes
//
// The fields that describe how nil lists are made are zero in the result. It may be changed and
// given to Open, and a second Configure changes nothing. cfg itself stays as it is. Configure looks
// at top alone, which becomes Topology in the result. An error names the field that the machine
// cannot satisfy.
func Configure(top *topology.Topology, cfg Config) (Config, error) {
	if top == nil || len(top.Nodes) == 0 {
		return Config{}, errors.New("spillway: configure: the topology has no NUMA node: want one of topology.Discover")
	}
	if err := cfg.Validate(); err != nil {
		return Config{}, err
	}
	m, isNil, gpus := newMachine(top), cfg.GPUs == nil, shown(top.GPUs)
	cfg, err := m.configured(cfg, gpus)
	if err == nil {
		err = m.together(&cfg, func(i int) bool {
			g := cfg.GPUs[i]
			return isNil && len(gpus) == 0 || g.Backend == Sim && g.Device == nil && g.Open == nil
		})
	}
	if err != nil {
		return Config{}, fmt.Errorf("spillway: configure: %w", err)
	}
	return cfg, nil
}

// machine is what a configuration is made for.
type machine struct {
	top    *topology.Topology
	memory int64           // that the process may use, in bytes
	known  bool            // the machine reports memory; else it is a guess
	nodes  []int           // whose memory it may use
	held   []leases.Holder // of GPUs, in the node's ledger; Configure does not look there
}

func newMachine(top *topology.Topology) machine {
	m := machine{top: top, memory: 1 << 30}
	for _, n := range [...]int64{top.Memory.TotalBytes, top.Limits.MemoryBytes} {
		if n > 0 {
			m.memory, m.known = n, true
		}
	}
	allowed := top.Limits.MemoryNodes
	for _, n := range top.Nodes {
		if n.MemoryBytes > 0 && (len(allowed) == 0 || allowed.Contains(n.ID)) {
			m.nodes = append(m.nodes, n.ID)
		}
	}
	if len(m.nodes) == 0 {
		m.nodes = []int{top.Nodes[0].ID}
	}
	return m
}

// configured returns cfg, which is valid, as Configure does, with spaces on the GPUs given.
func (m machine) configured(cfg Config, gpus []topology.GPU) (_ Config, err error) {
	if cfg.GPUs == nil {
		if cfg.GPUs, err = m.gpus(cfg, gpus); err != nil {
			return cfg, err
		}
	}
	if cfg.Hosts == nil {
		if cfg.Hosts, err = m.hosts(cfg); err != nil {
			return cfg, err
		}
	}
	cfg.Hosts = slices.Clone(cfg.Hosts) // the program's, in which shares become bytes
	for i := range cfg.Hosts {
		h := &cfg.Hosts[i]
		if _, ok := m.top.Node(h.Node); !ok && h.Node != topology.Unknown {
			return cfg, fmt.Errorf("host:%d: the machine has no NUMA node %d", i, h.Node)
		}
		if h.Memory.Share != 0 {
			n, err := h.Memory.Of(m.memory)
			if err != nil {
				return cfg, fmt.Errorf("host:%d: Memory: %w", i, err)
			}
			h.Memory = Bytes(wholePages(n))
		}
	}
	if cfg.Disks == nil {
		cfg.Disks = []DiskConfig{{}}
	}
	cfg.Disks = slices.Clone(cfg.Disks)
	for i := range cfg.Disks {
		d := &cfg.Disks[i]
		d.Dir = cmp.Or(d.Dir, os.TempDir())
		if d.Node != nil || d.FS != nil { // the topology has only the machine's own file systems
			continue
		}
		dir, err := filepath.Abs(d.Dir)
		if err != nil {
			return cfg, fmt.Errorf("disk:%d: Dir: %w", i, err)
		}
		if node := m.top.NodeOfDir(dir); node != topology.Unknown {
			d.Node = &node
		}
	}
	cfg.Topology = m.top
	cfg.GPUMemory, cfg.MaxGPUs, cfg.HostMemory, cfg.HostPerGPU = Amount{}, 0, Amount{}, false
	return cfg, cfg.check() // what was a share may be too little
}

// together refuses sizes that fit one by one, but not all into the memory of the process. Arenas
// and simulated GPUs are touched ahead: the kernel would end the process instead of saying so.
func (m machine) together(cfg *Config, simulated func(gpu int) bool) error {
	if !m.known {
		return nil
	}
	host, gpus := hostBytes(cfg.Hosts), int64(0)
	for i, g := range cfg.GPUs {
		if !simulated(i) {
			continue
		}
		n := m.simulatedBytes(cfg, g)
		if n < tier.Page { // else Validate would have refused it
			return fmt.Errorf("host memory of %d bytes leaves nothing for a simulated GPU "+
				"of the %d bytes that the process may use (make it smaller): %w",
				host, m.memory, tier.ErrNoSpace)
		}
		gpus += min(n, math.MaxInt64-gpus)
	}
	if host > m.memory || gpus > m.memory-host {
		return fmt.Errorf("host memory of %d bytes and simulated GPU memory of %d are more "+
			"than the %d bytes that the process may use (make them smaller): %w",
			host, gpus, m.memory, tier.ErrNoSpace)
	}
	return nil
}

// simulatedBytes returns how much a simulated GPU has: by default no more than its part of what
// the host spaces leave.
func (m machine) simulatedBytes(cfg *Config, g GPUConfig) int64 {
	most := min(defaultGPUMemory, m.memory/8)
	if m.known {
		most = min(most, max(0, m.memory-hostBytes(cfg.Hosts))/int64(len(cfg.GPUs)))
	}
	most = wholePages(most)
	if g.Memory.IsZero() || g.ID != "" && g.Memory.Bytes > most { // which was meant for a real one
		return most
	}
	return g.Memory.Bytes
}

// hostBytes returns the size of all host spaces, which Validate has added up.
func hostBytes(hosts []HostConfig) (sum int64) {
	for _, h := range hosts {
		sum += h.Memory.Bytes
	}
	return sum
}

// usable reports whether an engine could use the GPU: one that another driver has, such as
// that for virtual machines, is not NVIDIA's to use.
func usable(g topology.GPU) bool { return g.Driver == "" || g.Driver == "nvidia" }

// shown returns the GPUs that CUDA shows to a process. If some are divided it shows one instance,
// the first, which has an id and memory of its own, and no other GPU next to it (NVIDIA's MIG User
// Guide, CUDA Device Enumeration): spaces for others would be simulated ones.
func shown(all []topology.GPU) []topology.GPU {
	var whole []topology.GPU
	for _, g := range all {
		switch {
		case !usable(g):
		case !g.MIGEnabled:
			whole = append(whole, g)
		case len(g.MIG) > 0:
			first := g.MIG[0]
			g.UUID, g.MemoryBytes, g.FreeBytes = cmp.Or(first.UUID, g.UUID), first.MemoryBytes, first.FreeBytes
			return []topology.GPU{g}
		}
	}
	return whole
}

// gpus makes a space on each of the GPUs, or on those of which the fewest bytes are in use; on a
// simulated one if there are none.
func (m machine) gpus(cfg Config, all []topology.GPU) (gpus []GPUConfig, err error) {
	chosen := m.byLoad(all)
	if n := cfg.MaxGPUs; n > 0 {
		chosen = chosen[:min(n, len(chosen))]
	}
	for _, g := range all {
		// A program's own topology may have only one of them.
		is := func(c topology.GPU) bool { return c.Index == g.Index && idOf(c) == idOf(g) }
		if !slices.ContainsFunc(chosen, is) {
			continue
		}
		memory, err := gpuMemory(cfg.GPUMemory, fmt.Sprintf("GPU %d", g.Index), g.MemoryBytes, g.MemoryBytes > 0)
		if err != nil {
			return nil, err
		}
		node := nodeOf(g)
		gpus = append(gpus, GPUConfig{ID: idOf(g), Memory: memory, Node: &node})
	}
	if len(gpus) > 0 {
		return gpus, nil
	}
	memory, err := gpuMemory(cfg.GPUMemory, "the process, where the GPU is simulated,", m.memory, m.known)
	return []GPUConfig{{Memory: memory, Node: &m.nodes[0]}}, err
}

// gpuMemory returns in bytes what size is of the memory of of, which has total bytes if that is known.
func gpuMemory(size Amount, of string, total int64, known bool) (Amount, error) {
	memory, err := size.Of(total)
	memory = wholePages(memory)
	switch {
	case size.IsZero(): // Open decides
		return size, nil
	case total == 0 && size.Share != 0:
		return size, fmt.Errorf("GPUMemory: a share of %s, whose memory is not known "+
			"(give it in bytes, or see the topology's warnings)", of)
	case known && size.Bytes > total:
		return size, fmt.Errorf("GPUMemory: %d bytes are more than the %d that %s has: %w", size.Bytes, total, of,
			tier.ErrNoSpace)
	case err != nil || memory < tier.Page:
		return size, fmt.Errorf("GPUMemory: %s of %s are %d bytes: want at least %d", size, of, memory, tier.Page)
	}
	return Bytes(memory), nil
}

// nodeOf returns the NUMA node that a GPU is on, or next to; topology.Unknown if it is not known.
func nodeOf(g topology.GPU) int {
	if g.Node == topology.Unknown {
		return g.MemoryNode
	}
	return g.Node
}

// idOf returns the id that the driver has for g.
func idOf(g topology.GPU) string { return cmp.Or(g.UUID, g.PCIAddress) }

// hosts divides the host's memory: each node has a part as large as its memory is of all nodes', so
// that none is filled before the others; or each GPU has an equal part on the node that is nearest to
// it and has memory. A default size is made to fit onto the nodes; any other that does not is refused.
func (m machine) hosts(cfg Config) (hosts []HostConfig, err error) {
	total, err := cfg.HostMemory.Of(m.memory)
	isDefault := cfg.HostMemory.IsZero()
	switch {
	case err != nil:
		return nil, fmt.Errorf("HostMemory: %w", err)
	case total > m.memory && m.known:
		return nil, fmt.Errorf("HostMemory: %d bytes are more than the %d that the process may use: %w", total,
			m.memory, tier.ErrNoSpace)
	case isDefault:
		total = m.memory / defaultHostShare
	}
	var weights []float64
	sum := 0.0
	on := map[int]int64{} // spaces of each node
	add := func(h HostConfig, weight int64) {
		hosts, weights = append(hosts, h), append(weights, float64(weight))
		sum += float64(weight)
		on[h.Node]++
	}
	if cfg.HostPerGPU {
		for i, g := range cfg.GPUs {
			near := m.nodes[i%len(m.nodes)] // of a simulated GPU
			if meant := meantBy(m.top.GPUs, g.ID); len(meant) == 1 {
				near = nodeOf(meant[0])
			}
			if g.Device != nil {
				near = g.Device.Info().Node
			}
			add(HostConfig{Node: m.top.MemoryNode(nodeOr(g.Node, near)), GPUs: []int{i}}, 1)
		}
	} else {
		for _, id := range m.nodes {
			add(HostConfig{Node: id}, m.memoryOn(id))
		}
	}
	for i := range hosts {
		h, part := &hosts[i], 1/float64(len(hosts))
		if sum > 0 {
			part = weights[i] / sum
		}
		h.Memory = Bytes(wholePages(min(total, int64(float64(total)*part))))
		switch has := m.memoryOn(h.Node); {
		case has == 0: // of no node in particular, or not known
		case isDefault:
			h.Memory = Bytes(wholePages(min(h.Memory.Bytes, has/2/on[h.Node])))
		case h.Memory.Bytes > has/on[h.Node]:
			return nil, fmt.Errorf("HostMemory: %d spaces of %d bytes on NUMA node %d, which has %d: "+
				"want less, or spaces on other nodes: %w", on[h.Node], h.Memory.Bytes, h.Node, has, tier.ErrNoSpace)
		}
		if h.Memory.Bytes < smallestHostSpace {
			return nil, fmt.Errorf("HostMemory: it leaves %d bytes for host:%d: want at least %d for each of %d spaces",
				h.Memory.Bytes, i, int64(smallestHostSpace), len(hosts))
		}
	}
	return hosts, nil
}

func wholePages(bytes int64) int64 { return bytes / tier.Page * tier.Page }

// memoryOn returns the bytes of a node; 0 if they are not known.
func (m machine) memoryOn(id int) int64 {
	n, _ := m.top.Node(id)
	return max(0, n.MemoryBytes)
}

// defaultHostShare is the part of the memory that host spaces take: 1/4 leaves room for
// the program, and for the page cache of what it reads.
const defaultHostShare = 4
