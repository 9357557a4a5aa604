package topology

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/gpuid"
)

const nvidia = "0x10de" // PCI vendor

// gpus returns the GPUs of the source, or those on the PCI bus.
func (t *tree) gpus(w placing, source GPUSource) (gpus []GPU, fromDriver bool) {
	given := source != nil
	if source == nil {
		if !t.live {
			return t.busGPUs(w), false
		}
		source = SystemGPUs()
	}
	listed, err := ask(t.ctx, source)
	if err != nil && len(listed) == 0 {
		gpus = t.busGPUs(w)
		if given || len(gpus) > 0 { // a machine without a GPU needs no driver
			t.warnf("gpus", "the driver's list: %v: those on the PCI bus are told", err)
		}
		return gpus, false
	}
	for _, one := range joined(err) {
		t.warnf("gpus", "%v", one)
	}
	gpus = append([]GPU{}, listed...)
	for i := range gpus {
		t.complete(w, &gpus[i])
	}
	return gpus, true
}

// ask lists the GPUs of a source; it may panic, as the driver's library is not ours.
func ask(ctx context.Context, source GPUSource) (gpus []GPU, err error) {
	defer func() {
		if p := recover(); p != nil {
			gpus, err = nil, fmt.Errorf("it panicked: %v", p)
		}
	}()
	return source.GPUs(ctx)
}

// joined returns the errors that errors.Join made one of.
func joined(err error) []error {
	if err == nil {
		return nil
	}
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		return many.Unwrap()
	}
	return []error{err}
}

// busGPUs returns NVIDIA's display and 3D controllers on the PCI bus, by
// address, which is the driver's order too unless it is told another.
func (t *tree) busGPUs(w placing) []GPU {
	gpus := []GPU{}
	addresses, _ := t.list(pciDevices) // no bus is no warning: many VMs have none
	for _, address := range addresses {
		dir := path.Join(pciDevices, address)
		vendor, ok := t.need(path.Join(dir, "vendor"))
		if !ok || vendor != nvidia {
			continue
		}
		class, _ := t.need(path.Join(dir, "class"))
		// VGA controllers and 3D controllers; the last two digits are the
		// programming interface. Others are audio, USB and bridges.
		if !strings.HasPrefix(class, "0x0300") && !strings.HasPrefix(class, "0x0302") {
			continue
		}
		if t.exists(path.Join(dir, "physfn")) {
			continue // a virtual function, to be given to a virtual machine
		}
		g := GPU{Index: len(gpus), PCIAddress: address}
		t.complete(w, &g)
		gpus = append(gpus, g)
	}
	return gpus
}

// complete fills in what the PCI bus knows of g and g does not.
func (t *tree) complete(w placing, g *GPU) {
	g.PCIAddress = gpuid.Address(g.PCIAddress)
	g.Name, g.UUID = label(g.Name), label(g.UUID)
	g.Node = w.nowhere()
	g.Bus, g.Links, g.MIG = []string{}, t.links(g), t.instances(g)
	dir := path.Join(pciDevices, g.PCIAddress)
	if !t.isDir(dir) || g.PCIAddress == "" {
		t.warnf(dir, "GPU %d is not on the PCI bus", g.Index)
	} else {
		t.fromBus(w, dir, g)
	}
	if g.CPUs == nil {
		g.CPUs = append(Set{}, w.cpus[g.Node]...)
	} else {
		g.CPUs = slices.Clone(g.CPUs)
	}
	if g.MemoryBytes < 0 || g.FreeBytes < 0 {
		t.warnf(dir, "GPU %d has %d bytes of memory, %d free", g.Index, g.MemoryBytes, g.FreeBytes)
		g.MemoryBytes, g.FreeBytes = max(g.MemoryBytes, 0), max(g.FreeBytes, 0)
	}
	g.FreeBytes = t.atMost(dir, "free memory", g.FreeBytes, g.MemoryBytes)
}

// links returns the NVLinks of g with addresses in the kernel's form.
func (t *tree) links(g *GPU) []Link {
	links := []Link{}
	for _, l := range g.Links {
		if l.Count <= 0 {
			t.warnf("gpus", "GPU %d has %d NVLinks to %s", g.Index, l.Count, quote(l.Remote))
			continue
		}
		l.Remote = gpuid.Address(l.Remote)
		links = append(links, l)
	}
	return links
}

// instances returns the MIG instances of g with names that can be printed.
func (t *tree) instances(g *GPU) []MIGInstance {
	instances := []MIGInstance{}
	for _, m := range g.MIG {
		m.UUID, m.Name = label(m.UUID), label(m.Name)
		if m.MemoryBytes < 0 || m.FreeBytes < 0 || m.FreeBytes > m.MemoryBytes {
			t.warnf("gpus", "MIG instance %s has %d bytes of memory, %d free", m.UUID, m.MemoryBytes, m.FreeBytes)
			m.MemoryBytes = max(m.MemoryBytes, 0)
			m.FreeBytes = min(max(m.FreeBytes, 0), m.MemoryBytes)
		}
		instances = append(instances, m)
	}
	return instances
}

func (t *tree) fromBus(w placing, dir string, g *GPU) {
	g.Node = t.nodeOf(w, dir)
	g.Bus = t.busOfAddress(g.PCIAddress)
	if g.DeviceID == "" {
		vendor, _ := t.want(path.Join(dir, "vendor"))
		device, _ := t.want(path.Join(dir, "device"))
		g.DeviceID = label(strings.TrimPrefix(vendor, "0x") + ":" + strings.TrimPrefix(device, "0x"))
	}
	if g.Driver == "" {
		if target, err := t.resolve(path.Join(dir, "driver")); err == nil {
			g.Driver = label(path.Base(target))
		} else if !missing(err) {
			t.warn(path.Join(dir, "driver"), err)
		}
	}
	if g.CPUs == nil {
		if set, ok := t.set(path.Join(dir, "local_cpulist")); ok && len(set) > 0 {
			g.CPUs = set
		}
	}
	// The current speed of an idle GPU is that of generation 1; what it can
	// do is what counts. The width does not change with the load.
	if g.PCIeGeneration == 0 {
		speed, _ := t.want(path.Join(dir, "max_link_speed"))
		g.PCIeGeneration = parseLinkSpeed(speed)
	}
	if g.PCIeWidth == 0 {
		width, _ := t.want(path.Join(dir, "current_link_width"))
		if n, err := parseMember(width); err == nil && n <= 32 { // the widest link there is
			g.PCIeWidth = n
		}
	}
}

// isBusAddress says whether s is a PCI address as the kernel writes it: domain:bus:device.function.
func isBusAddress(s string) bool { return s != "" && gpuid.Address(s) == s }
