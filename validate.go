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

func (c *Config) check() error {
	errs := []error{c.checkNilLists(), c.checkGPUs(), c.checkHosts(), c.checkDisks()}
	errs = append(errs, checkMarks("gpu marks", tier.GPU, c.GPUMarks), checkMarks("host marks", tier.Host, c.HostMarks),
		checkMarks("disk marks", tier.Disk, c.DiskMarks))
	errs = append(errs, c.Codec.Validate())
	if c.MonitorPeriod != 0 && c.MonitorPeriod < monitor.MinPeriod {
		errs = append(errs, fmt.Errorf("monitor period %v: want at least %v, or 0 for 50ms", c.MonitorPeriod, monitor.MinPeriod))
	}
	if c.MovesPerEdge < 0 || c.MovesPerEdge > monitor.MaxMovesPerEdge {
		errs = append(errs, fmt.Errorf("%d moves per edge: want 1 to %d, or 0 for 2", c.MovesPerEdge, monitor.MaxMovesPerEdge))
	}
	return errors.Join(append(errs, c.Limits.check())...)
}

func checkMarks(what string, k tier.Kind, f tier.Fractions) error {
	if err := f.In(k).Validate(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// marks are a space's own, where they are set, or those of its tier.
func marks(own, tiers tier.Fractions) tier.Fractions {
	return tier.Fractions{
		Limit: cmp.Or(own.Limit, tiers.Limit), Trigger: cmp.Or(own.Trigger, tiers.Trigger), Stop: cmp.Or(own.Stop, tiers.Stop),
	}
}

// checkNilLists refuses sizes of lists that have sizes of their own, or that could not be made.
func (c *Config) checkNilLists() error {
	var errs []error
	refuse := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for _, f := range [...]struct {
		field, list string
		set, given  bool
	}{
		{"GPUMemory", "GPUs", !c.GPUMemory.IsZero(), c.GPUs != nil},
		{"MostGPUs", "GPUs", c.MostGPUs != 0, c.GPUs != nil},
		{"HostMemory", "Hosts", !c.HostMemory.IsZero(), c.Hosts != nil},
		{"HostPerGPU", "Hosts", c.HostPerGPU, c.Hosts != nil},
	} {
		if f.set && f.given {
			refuse("%s and %s are both set: the former is for a list that is nil", f.field, f.list)
		}
	}
	if err := c.GPUMemory.Validate(); err != nil {
		refuse("GPUMemory: %w", err)
	} else if n := c.GPUMemory.Bytes; n > 0 && n < tier.Page {
		refuse("GPUMemory: %d bytes are too little: the least is %d", n, tier.Page)
	}
	if c.MostGPUs < 0 {
		refuse("MostGPUs is %d: want a number above 0, or 0 for all", c.MostGPUs)
	}
	if err := c.HostMemory.Validate(); err != nil {
		refuse("HostMemory: %w", err)
	} else if n := c.HostMemory.Bytes; n > 0 && n < smallestHostSpace {
		refuse("HostMemory: %d bytes are too little: the least is %d", n, int64(smallestHostSpace))
	}
	if c.HostPerGPU && c.GPUs != nil && len(c.GPUs) == 0 {
		refuse("HostPerGPU is set, but GPUs has no GPU space that a host space could be for")
	}
	return errors.Join(errs...)
}

func (c *Config) checkGPUs() error {
	var errs []error
	for i, g := range c.GPUs {
		refuse := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("gpu:%d: "+format, append([]any{i}, args...)...))
		}
		if err := checkMarks("Marks", tier.GPU, marks(g.Marks, c.GPUMarks)); err != nil && g.Marks != (tier.Fractions{}) {
			refuse("%w", err)
		}
		switch err := g.Memory.Validate(); {
		case g.Backend != Auto && g.Backend != Sim && g.Backend != CUDA:
			refuse("backend %q is unknown: want sim, cuda or nothing", g.Backend)
		case err != nil:
			refuse("Memory: %w", err)
		case g.Memory.Share != 0 && (g.Device != nil || g.Open != nil):
			refuse("Memory: a share is for a backend's GPU: give it in bytes")
		case g.Memory.Share != 0 && g.Backend == Sim:
			refuse("Memory: %w: give it in bytes", ErrShareOfSimulated)
		case g.Memory.Bytes > 0 && g.Memory.Bytes < tier.Page:
			refuse("Memory: %d bytes are too little: the least is %d", g.Memory.Bytes, tier.Page)
		case g.Device != nil && g.Open != nil:
			refuse("Device and Open are both set: a space has one device")
		}
		if g.Node != nil && *g.Node < topology.Unknown {
			refuse("NUMA node %d: want a node from 0, or -1 for none", *g.Node)
		}
	}
	return errors.Join(errs...)
}

// checkHosts refuses host spaces that could not be made, or for GPUs that there are not.
func (c *Config) checkHosts() error {
	var errs []error
	if c.Hosts != nil && len(c.Hosts) == 0 {
		errs = append(errs, errors.New("no host space in Hosts: want at least one host space, or nil for the machine's"))
	}
	sum := int64(0)
	for i, h := range c.Hosts {
		refuse := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("host:%d: "+format, append([]any{i}, args...)...))
		}
		if err := checkMarks("Marks", tier.Host, marks(h.Marks, c.HostMarks)); err != nil && h.Marks != (tier.Fractions{}) {
			refuse("%w", err)
		}
		switch err := h.Memory.Validate(); {
		case err != nil:
			refuse("Memory: %w", err)
		case h.Memory.Share != 0: // of what, the machine says
		case h.Memory.Bytes < smallestHostSpace:
			refuse("memory of %d bytes is too little: the least is %d", h.Memory.Bytes, int64(smallestHostSpace))
		case h.Memory.Bytes > math.MaxInt64-sum:
			refuse("memory of %d bytes is more than can be counted with the others", h.Memory.Bytes)
		default:
			sum += h.Memory.Bytes
		}
		if h.Node < topology.Unknown {
			refuse("NUMA node %d: want a node from 0, or -1 for any", h.Node)
		}
		for _, g := range h.GPUs {
			if g < 0 || c.GPUs != nil && g >= len(c.GPUs) { // how many a nil list comes to, the machine says
				refuse("there is no gpu:%d that it could be set apart for", g)
			}
		}
	}
	return errors.Join(errs...)
}

func (c *Config) checkDisks() error {
	var errs []error
	for i, d := range c.Disks {
		refuse := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("disk:%d: "+format, append([]any{i}, args...)...))
		}
		if err := checkMarks("Marks", tier.Disk, marks(d.Marks, c.DiskMarks)); err != nil && d.Marks != (tier.Fractions{}) {
			refuse("%w", err)
		}
		if err := d.Capacity.Validate(); err != nil {
			refuse("Capacity: %w", err)
		}
		if d.Reserve < 0 {
			refuse("Reserve is %d: want 0 or more", d.Reserve)
		}
		if d.Node != nil && *d.Node < topology.Unknown {
			refuse("NUMA node %d: want a node from 0, or -1 for none", *d.Node)
		}
		if err := volumes.CheckKey(d.Encrypt, d.Key, d.Persist); err != nil {
			refuse("%w", err)
		}
		if d.Persist && d.Capacity.Bytes == 0 {
			refuse("with Persist it needs a capacity in bytes: a share of what is free would not hold what persists")
		}
	}
	return errors.Join(errs...)
}
