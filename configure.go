package spillway

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// Amount is a number of bytes or a share of what there is. The zero value is neither,
// and means the default.
type Amount struct {
	Bytes int64
	Share float64 // above 0, up to 1
}

func (a Amount) isZero() bool { return a == Amount{} }

// validate names the field in its error.
func (a Amount) validate(field string) error {
	switch {
	case a.Bytes != 0 && a.Share != 0:
		return fmt.Errorf("%s: Bytes and Share are both set", field)
	case a.Bytes < 0:
		return fmt.Errorf("%s: Bytes is %d: want a number above 0", field, a.Bytes)
	case !(a.Share >= 0 && a.Share <= 1): // NaN is neither
		return fmt.Errorf("%s: Share is %v: want one above 0, up to 1", field, a.Share)
	}
	return nil
}

// of returns the bytes that a is of total, which is known.
func (a Amount) of(total int64) int64 {
	if a.Share != 0 {
		return min(total, int64(float64(total)*a.Share)) // a float64 may round upwards
	}
	return a.Bytes
}

// HostPer says how the host's memory is divided into spaces.
type HostPer int

// The divisions.
const (
	HostPerNode HostPer = iota // one space a NUMA node whose memory the process may use
	HostPerGPU                 // one space a GPU, on the node nearest to it
)

// Sizing says how Configure shares out a machine. The zero value means the defaults,
// which work on a laptop, in a virtual machine without a GPU, and on a server with eight.
type Sizing struct {
	// HostPer divides the host's memory; the zero value is one space a NUMA node.
	HostPer HostPer
	// HostMemory is how much all host spaces take together, as a share of what the process
	// may use. The default is a quarter, and no more than half of any node's memory.
	HostMemory Amount
	// GPUMemory is the size of each GPU space, as a share of the GPU's memory, or of what the
	// process may use of the host's where the GPU is simulated. The default is what is
	// free when the engine is opened; see GPUConfig.Memory.
	GPUMemory Amount
	// MostGPUs is how many GPUs are used at most: those of which the fewest bytes are in use, in the order of
	// the topology; 0 means all.
	MostGPUs int
	// Disks are the directories to spill to. Nil means one, os.TempDir; an empty list,
	// which is not nil, means none.
	Disks []DiskSizing
}

// DiskSizing is one directory to spill to.
type DiskSizing struct {
	// Dir is the directory; empty means os.TempDir.
	Dir string
	// Capacity is the most that may lie there, as a share of what its file system has free
	// when the engine is opened, less Reserve. The default is half of that.
	Capacity Amount
	// Reserve is how many bytes of the file system must stay free.
	Reserve int64
}

// Validate says what is wrong with s, for everything that can be told without the
// machine. Configure calls it.
func (s Sizing) Validate() error {
	errs := []error{s.HostMemory.validate("HostMemory"), s.GPUMemory.validate("GPUMemory")}
	if s.HostPer != HostPerNode && s.HostPer != HostPerGPU {
		errs = append(errs, fmt.Errorf("HostPer is %d: want HostPerNode or HostPerGPU", s.HostPer))
	}
	if s.MostGPUs < 0 {
		errs = append(errs, fmt.Errorf("MostGPUs is %d: want a number above 0, or 0 for all", s.MostGPUs))
	}
	if s.GPUMemory.Bytes > 0 && s.GPUMemory.Bytes < tier.Page {
		errs = append(errs, fmt.Errorf("GPUMemory: Bytes is %d: want at least %d", s.GPUMemory.Bytes, tier.Page))
	}
	for i, d := range s.Disks {
		errs = append(errs, d.Capacity.validate(fmt.Sprintf("Disks[%d].Capacity", i)))
		if d.Reserve < 0 {
			errs = append(errs, fmt.Errorf("Disks[%d].Reserve is %d: want 0 or more", i, d.Reserve))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("spillway: sizing: %w", err)
	}
	return nil
}

// Configure makes the configuration of an engine for a machine: a GPU space on each GPU
// that CUDA shows to the process (of those divided into MIG instances one instance, and nothing else), or a
// simulated one if there is none; host spaces on NUMA nodes, or for
// GPUs; and disks. Each is told its node, so that data goes to what is near. What of it
// does not suit may be changed before it is given to Open. It looks at top only, which the
// configuration keeps, and changes nothing. An error names the field of s that the
// machine cannot satisfy.
func Configure(top *topology.Topology, s Sizing) (Config, error) {
	if top == nil || len(top.Nodes) == 0 {
		return Config{}, errors.New("spillway: configure: the topology has no NUMA node: want one of topology.Discover")
	}
	if err := s.Validate(); err != nil {
		return Config{}, err
	}
	m := machine{top: top, memory: memoryOf(top), nodes: memoryNodes(top)}
	m.known = top.Limits.MemoryBytes > 0 || top.Memory.TotalBytes > 0
	cfg := Config{Topology: top}
	var errs [3]error
	cfg.GPUs, errs[0] = m.gpus(s)
	cfg.Hosts, errs[1] = m.hosts(s, cfg.GPUs)
	cfg.Disks, errs[2] = m.disks(s)
	if err := errors.Join(errs[:]...); err != nil {
		return Config{}, fmt.Errorf("spillway: configure: %w", err)
	}
	if err := m.together(cfg); err != nil {
		return Config{}, fmt.Errorf("spillway: configure: %w", err)
	}
	return cfg, cfg.Validate()
}

// together refuses a simulated GPU and host spaces that fit one by one, but not both into the memory that they share.
func (m machine) together(cfg Config) error {
	gpu := cfg.GPUs[0]
	if gpu.ID != "" || gpu.Memory == 0 || !m.known {
		return nil // a real one, or a size that Open chooses
	}
	left := m.memory - gpu.Memory
	for _, h := range cfg.Hosts {
		left -= h.Memory
	}
	if left < 0 {
		return fmt.Errorf("GPUMemory and HostMemory: together they are %d bytes more than the %d that the process may use, and the GPU is simulated", -left, m.memory)
	}
	return nil
}

// machine is what a configuration is made for.
type machine struct {
	top    *topology.Topology
	memory int64 // that the process may use, in bytes
	known  bool  // memory is what the machine tells, and not a guess
	nodes  []int // whose memory it may use
}

// usable says whether an engine could use the GPU: one that another driver has, such as
// that for virtual machines, is not NVIDIA's to use.
func usable(g topology.GPU) bool { return g.Driver == "" || g.Driver == "nvidia" }

// shown returns the GPUs that CUDA shows to a process. If some are divided it shows one instance, the first, and no other
// GPU beside it (NVIDIA's MIG User Guide, CUDA Device Enumeration): spaces for others would be simulated ones.
func shown(all []topology.GPU) []topology.GPU {
	var whole []topology.GPU
	for _, g := range all {
		switch {
		case !usable(g):
		case !g.MIGEnabled:
			whole = append(whole, g)
		case len(g.MIG) > 0:
			return []topology.GPU{g}
		}
	}
	return whole
}

func (m machine) gpus(s Sizing) ([]GPUConfig, error) {
	var gpus []GPUConfig
	for _, g := range leastUsed(shown(m.top.GPUs), s.MostGPUs) {
		memory, err := gpuMemoryOf(g, s.GPUMemory)
		if err != nil {
			return nil, err
		}
		node := g.Node
		if node == topology.Unknown {
			node = g.MemoryNode
		}
		gpus = append(gpus, GPUConfig{ID: idOf(g), Memory: memory, Node: &node})
	}
	if len(gpus) > 0 {
		return gpus, nil
	}
	memory := s.GPUMemory.of(m.memory) / tier.Page * tier.Page
	switch {
	case memory > m.memory && m.known:
		return nil, fmt.Errorf("GPUMemory: %d bytes are more than the %d that the process may use, and the GPU is simulated", memory, m.memory)
	case memory < tier.Page && !s.GPUMemory.isZero():
		return nil, fmt.Errorf("GPUMemory: %v of the process's memory is less than the least, %d bytes", s.GPUMemory.Share, tier.Page)
	}
	node := m.nodes[0]
	return []GPUConfig{{Memory: memory, Node: &node}}, nil
}

// idOf returns what the driver knows g by: of a GPU that is divided, the instance that CUDA works on.
func idOf(g topology.GPU) string {
	switch {
	case g.MIGEnabled && len(g.MIG) > 0 && g.MIG[0].UUID != "":
		return g.MIG[0].UUID
	case g.UUID != "":
		return g.UUID
	}
	return g.PCIAddress
}

// gpuMemoryOf returns the size of the space on g; 0 leaves it to Open.
func gpuMemoryOf(g topology.GPU, a Amount) (int64, error) {
	total := g.MemoryBytes
	if g.MIGEnabled && len(g.MIG) > 0 {
		total = g.MIG[0].MemoryBytes // CUDA works on one instance, the first
	}
	switch {
	case a.isZero():
		return 0, nil
	case total == 0 && a.Share != 0:
		return 0, fmt.Errorf("GPUMemory: a share of GPU %d, whose memory is not known (give it in bytes, or see the topology's warnings)", g.Index)
	case total > 0 && a.Bytes > total:
		return 0, fmt.Errorf("GPUMemory: %d bytes are more than the %d that GPU %d has", a.Bytes, total, g.Index)
	}
	memory := a.of(total) / tier.Page * tier.Page
	if memory < tier.Page {
		return 0, fmt.Errorf("GPUMemory: %v of GPU %d are %d bytes: want at least %d", a.Share, g.Index, memory, tier.Page)
	}
	return memory, nil
}

// hosts divides the host's memory.
func (m machine) hosts(s Sizing, gpus []GPUConfig) ([]HostConfig, error) {
	if s.HostMemory.Bytes > m.memory && m.known {
		return nil, fmt.Errorf("HostMemory: %d bytes are more than the %d that the process may use", s.HostMemory.Bytes, m.memory)
	}
	total := s.HostMemory.of(m.memory)
	if s.HostMemory.isZero() {
		total = m.memory / defaultHostShare
	}
	var hosts []HostConfig
	if s.HostPer == HostPerGPU {
		hosts = m.perGPU(total, gpus)
	} else {
		hosts = m.perNode(total)
	}
	return hosts, m.fit(hosts, s.HostMemory)
}

// perNode gives each node a part as large as its memory is of all nodes', so that none is
// filled before the others.
func (m machine) perNode(total int64) []HostConfig {
	sum := 0.0
	for _, id := range m.nodes {
		sum += float64(m.memoryOn(id))
	}
	hosts := make([]HostConfig, len(m.nodes))
	for i, id := range m.nodes {
		part := 1 / float64(len(m.nodes))
		if sum > 0 {
			part = float64(m.memoryOn(id)) / sum
		}
		hosts[i] = HostConfig{Node: id, Memory: min(total, int64(float64(total)*part)) / tier.Page * tier.Page}
	}
	return hosts
}

// perGPU gives each GPU an equal part on the node that is nearest to it and has memory.
func (m machine) perGPU(total int64, gpus []GPUConfig) []HostConfig {
	hosts := make([]HostConfig, len(gpus))
	for i, g := range gpus {
		hosts[i] = HostConfig{
			Node: m.top.MemoryNode(*g.Node), GPUs: []int{i},
			Memory: total / int64(len(gpus)) / tier.Page * tier.Page,
		}
	}
	return hosts
}

// fit makes spaces of a default size fit onto their nodes, and refuses those of any
// other size that do not.
func (m machine) fit(hosts []HostConfig, wanted Amount) error {
	on := map[int]int64{}
	for _, h := range hosts {
		on[h.Node]++
	}
	for i := range hosts {
		h := &hosts[i]
		has := m.memoryOn(h.Node)
		switch {
		case has == 0: // of no node in particular, or not known
		case wanted.isZero():
			h.Memory = min(h.Memory, has/2/on[h.Node]/tier.Page*tier.Page)
		case h.Memory > has/on[h.Node]:
			return fmt.Errorf("HostMemory: %d spaces of %d bytes on NUMA node %d, which has %d: want less, or spaces on other nodes", on[h.Node], h.Memory, h.Node, has)
		}
		if h.Memory < smallestHostSpace {
			return fmt.Errorf("HostMemory: it leaves %d bytes for host:%d: want at least %d for each of %d spaces", h.Memory, i, int64(smallestHostSpace), len(hosts))
		}
	}
	return nil
}

// memoryOn returns the bytes of a node; 0 if they are not known.
func (m machine) memoryOn(id int) int64 {
	n, _ := m.top.Node(id)
	return n.MemoryBytes
}

func (m machine) disks(s Sizing) ([]DiskConfig, error) {
	sizings := s.Disks
	if sizings == nil {
		sizings = []DiskSizing{{}}
	}
	disks := make([]DiskConfig, len(sizings)) // not nil: that would mean a default disk
	for i, d := range sizings {
		if d.Dir == "" {
			d.Dir = os.TempDir()
		}
		disks[i] = DiskConfig{Dir: d.Dir, Capacity: d.Capacity.Bytes, Share: d.Capacity.Share, Reserve: d.Reserve}
		dir, err := filepath.Abs(d.Dir)
		if err != nil {
			return nil, fmt.Errorf("Disks[%d].Dir: %w", i, err)
		}
		if node := m.top.NodeOfDir(dir); node != topology.Unknown {
			disks[i].Node = &node
		}
	}
	return disks, nil
}

// defaultHostShare is the part of the memory that host spaces take: 1/4 leaves room for
// the program, and for the page cache of what it reads.
const defaultHostShare = 4

// memoryOf is how much memory a process may use, in bytes.
func memoryOf(top *topology.Topology) int64 {
	for _, n := range [...]int64{top.Limits.MemoryBytes, top.Memory.TotalBytes} {
		if n > 0 {
			return n
		}
	}
	return 1 << 30 // the machine does not tell
}

// memoryNodes lists the NUMA nodes whose memory a process may use.
func memoryNodes(top *topology.Topology) []int {
	var ids []int
	allowed := top.Limits.MemoryNodes
	for _, n := range top.Nodes {
		if n.MemoryBytes > 0 && (len(allowed) == 0 || allowed.Contains(n.ID)) {
			ids = append(ids, n.ID)
		}
	}
	if len(ids) == 0 {
		ids = []int{top.Nodes[0].ID}
	}
	return ids
}
