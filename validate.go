package spillway

import (
	"cmp"
	"errors"
	"fmt"
	"math"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// smallestHostSpace has room for staging and for some small batches.
const smallestHostSpace = 64 * tier.Page

// Validate returns what is wrong with c, as far as that is known without the machine. Open and
// Configure call it.
func (c Config) Validate() error {
	if err := c.check(); err != nil {
		return fmt.Errorf("spillway: %w", err)
	}
	return nil
}

// problems collects what is wrong with a configuration.
type problems struct {
	of   string // what the next ones are about, as "gpu:0: "
	errs []error
}

func (p *problems) add(format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf(p.of+format, args...))
}

// node refuses a NUMA node that no machine has; any is what -1 means.
func (p *problems) node(n int, any string) {
	if n < topology.Unknown {
		p.add("NUMA node %d: want a node from 0, or -1 for %s", n, any)
	}
}

// marks refuses marks of a space or a tier that make no sense. Those of a space are checked if it has
// own ones.
func (p *problems) marks(what string, k tier.Kind, own, tiers tier.Marks) {
	if err := marks(own, tiers).In(k).Validate(); err != nil && own != (tier.Marks{}) {
		p.add("%s: %w", what, err)
	}
}

// marks are a space's own, where they are set, or those of its tier.
func marks(own, tiers tier.Marks) tier.Marks {
	return tier.Marks{
		Limit: cmp.Or(own.Limit, tiers.Limit), Trigger: cmp.Or(own.Trigger, tiers.Trigger), Stop: cmp.Or(own.Stop,
			tiers.Stop),
	}
}

// size refuses a size that is invalid or less than least. Zero is the default, which is not checked.
func (p *problems) size(field string, a Amount, least int64) {
	if err := a.Validate(); err != nil {
		p.add("%s: %w", field, err)
	} else if a.Bytes > 0 && a.Bytes < least {
		p.add("%s: %d bytes are too little: the least is %d", field, a.Bytes, least)
	}
}

func (c *Config) check() error {
	var p problems
	// A size of a list makes no sense for a list that is given, which has sizes of its own.
	both := func(field, list string, set bool) {
		if set {
			p.add("%s and %s are both set: the former is for a list that is nil", field, list)
		}
	}
	both("GPUMemory", "GPUs", !c.GPUMemory.IsZero() && c.GPUs != nil)
	both("MaxGPUs", "GPUs", c.MaxGPUs != 0 && c.GPUs != nil)
	both("HostMemory", "Hosts", !c.HostMemory.IsZero() && c.Hosts != nil)
	both("HostPerGPU", "Hosts", c.HostPerGPU && c.Hosts != nil)
	p.size("GPUMemory", c.GPUMemory, tier.Page)
	p.size("HostMemory", c.HostMemory, smallestHostSpace)
	if c.MaxGPUs < 0 {
		p.add("MaxGPUs is %d: want a number above 0, or 0 for all", c.MaxGPUs)
	}
	if c.HostPerGPU && c.GPUs != nil && len(c.GPUs) == 0 {
		p.add("HostPerGPU is set, but GPUs has no GPU space that a host space could be for")
	}

	for i, g := range c.GPUs {
		p.of = fmt.Sprintf("gpu:%d: ", i)
		p.marks("Marks", tier.GPU, g.Marks, c.GPUMarks)
		p.size("Memory", g.Memory, tier.Page)
		switch {
		case g.Backend != Auto && g.Backend != Sim && g.Backend != CUDA:
			p.add("backend %q is unknown: want sim, cuda or nothing", g.Backend)
		case g.Memory.Share != 0 && (g.Device != nil || g.Open != nil):
			p.add("Memory: a share is for a backend's GPU: give it in bytes")
		case g.Memory.Share != 0 && g.Backend == Sim:
			p.add("Memory: %w: give it in bytes", ErrShareOfSimulated)
		case g.Device != nil && g.Open != nil:
			p.add("Device and Open are both set: a space has one device")
		}
		p.node(nodeOr(g.Node, 0), "none")
	}

	p.of = ""
	if c.Hosts != nil && len(c.Hosts) == 0 {
		p.add("no host space in Hosts: want at least one host space, or nil for the machine's")
	}
	sum := int64(0)
	for i, h := range c.Hosts {
		p.of = fmt.Sprintf("host:%d: ", i)
		p.marks("Marks", tier.Host, h.Marks, c.HostMarks)
		switch err := h.Memory.Validate(); {
		case err != nil:
			p.add("Memory: %w", err)
		case h.Memory.Share != 0: // the machine decides of what
		case h.Memory.Bytes < smallestHostSpace:
			p.add("memory of %d bytes is too little: the least is %d", h.Memory.Bytes, int64(smallestHostSpace))
		case h.Memory.Bytes > math.MaxInt64-sum:
			p.add("memory of %d bytes is more than can be counted with the others", h.Memory.Bytes)
		default:
			sum += h.Memory.Bytes
		}
		p.node(h.Node, "any")
		for _, g := range h.GPUs {
			if g < 0 || c.GPUs != nil && g >= len(c.GPUs) { // a nil list has as many as the machine
				p.add("there is no gpu:%d that it could be set apart for", g)
			}
		}
	}

	for i, d := range c.Disks {
		p.of = fmt.Sprintf("disk:%d: ", i)
		p.marks("Marks", tier.Disk, d.Marks, c.DiskMarks)
		p.size("Capacity", d.Capacity, 0)
		if d.Reserve < 0 {
			p.add("Reserve is %d: want 0 or more", d.Reserve)
		}
		p.node(nodeOr(d.Node, 0), "none")
		if err := volumes.CheckKey(d.Encrypt, d.Key, d.Persist); err != nil {
			p.add("%w", err)
		}
		if d.Persist && d.Capacity.Bytes == 0 {
			p.add("with Persist it needs a capacity in bytes: a share of what is free would not hold what persists")
		}
	}

	p.of = ""
	p.marks("gpu marks", tier.GPU, c.GPUMarks, c.GPUMarks)
	p.marks("host marks", tier.Host, c.HostMarks, c.HostMarks)
	p.marks("disk marks", tier.Disk, c.DiskMarks, c.DiskMarks)
	if c.MonitorPeriod != 0 && c.MonitorPeriod < monitor.MinPeriod {
		p.add("monitor period %v: want at least %v, or 0 for 50ms", c.MonitorPeriod, monitor.MinPeriod)
	}
	if c.MovesPerEdge < 0 || c.MovesPerEdge > monitor.MaxMovesPerEdge {
		p.add("%d moves per edge: want 1 to %d, or 0 for 2", c.MovesPerEdge, monitor.MaxMovesPerEdge)
	}
	return errors.Join(append(p.errs, c.Codec.Validate(), c.Limits.check())...)
}
