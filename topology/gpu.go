package topology

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/gpuid"
	"github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/internal/procfs"
)

const nvidia = "0x10de" // PCI vendor

// listing is what is known of the GPUs before CUDA_VISIBLE_DEVICES.
type listing struct {
	gpus       []GPU
	fromDriver bool // UUIDs and MIG instances are known
	partial    bool // there are GPUs that are not listed
}

// ownNodes returns the nodes whose memory is that of one of the GPUs.
func (l listing) ownNodes() Set {
	all := Set{}
	for _, g := range l.gpus {
		all = append(all, g.OwnNodes...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// gpuSource is what Options.GPUs is.
type gpuSource = func(context.Context) ([]GPU, error)

// errNotListed is in a source's error if there is a GPU that it does not list.
var errNotListed = errors.New("cannot be asked")

// gpus returns the GPUs of the source, or those on the PCI bus.
func (t *tree) gpus(w placing, source gpuSource) listing {
	given := source != nil
	if source == nil {
		if !t.live {
			return listing{gpus: t.busGPUs(w)}
		}
		source = nvmlAt(nvml.DefaultPath)
	}
	gpus, err := ask(t.ctx, source)
	if err != nil && len(gpus) == 0 {
		gpus = t.busGPUs(w)
		if given || len(gpus) > 0 { // a machine without a GPU needs no driver
			t.warnf(theDriver, "the driver's list: %v: those on the PCI bus are listed", err)
		}
		return listing{gpus: gpus}
	}
	for _, one := range joined(err) {
		t.warnf(theDriver, "%v", one)
	}
	gpus = append([]GPU{}, gpus...)
	for i := range gpus {
		t.complete(w, &gpus[i])
	}
	return listing{gpus: gpus, fromDriver: true, partial: errors.Is(err, errNotListed)}
}

// ask lists the GPUs of a source; it may panic, as the driver's library is not ours.
func ask(ctx context.Context, source gpuSource) (gpus []GPU, err error) {
	defer func() {
		if p := recover(); p != nil {
			gpus, err = nil, fmt.Errorf("it panicked: %v", p)
		}
	}()
	return source(ctx)
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

// busGPUs returns NVIDIA's display and 3D controllers on the PCI bus, by address, which is the
// driver's default order too. Those that another driver has come last: NVIDIA's does not count
// them.
func (t *tree) busGPUs(w placing) []GPU {
	gpus := []GPU{}
	addresses, _ := t.list(pciDevices)                 // no bus is no warning: many VMs have none
	slices.SortFunc(addresses, func(a, b string) int { // 10000:00:00.0 is behind 2000:00:00.0
		return cmp.Or(len(a)-len(b), strings.Compare(a, b))
	})
	for _, address := range addresses {
		dir := path.Join(pciDevices, address)
		if vendor, _ := t.id(path.Join(dir, "vendor"), 4); vendor != nvidia {
			continue
		}
		class, _ := t.id(path.Join(dir, "class"), 6)
		// VGA controllers and 3D controllers; the last two digits are the
		// programming interface. Others are audio, USB and bridges.
		if !strings.HasPrefix(class, "0x0300") && !strings.HasPrefix(class, "0x0302") {
			continue
		}
		if t.exists(path.Join(dir, "physfn")) {
			continue // a virtual function, to be given to a virtual machine
		}
		gpus = append(gpus, GPU{PCIAddress: address, Driver: t.driverOf(dir)})
	}
	slices.SortStableFunc(gpus, func(a, b GPU) int { return cmp.Compare(foreign(a), foreign(b)) })
	for i := range gpus {
		gpus[i].Index = i
		t.complete(w, &gpus[i])
	}
	return gpus
}

// foreign is 1 for a GPU that another driver than NVIDIA's has, such as that which gives it to
// virtual machines. No driver is none that is known: a container may be shown none.
func foreign(g GPU) int {
	if g.Driver == "" || g.Driver == "nvidia" {
		return 0
	}
	return 1
}

// driverOf returns the name of the driver that has the device in dir; empty: none.
func (t *tree) driverOf(dir string) string {
	link := path.Join(dir, "driver")
	target, err := t.resolve(link)
	name := procfs.Label(path.Base(target))
	switch {
	case err != nil && !missing(err):
		t.warn(link, err)
		return ""
	case name == "driver" && err == nil:
		t.warnf(link, "not a link to a driver")
		return ""
	case name == "driver":
		return "" // there is no link
	case err != nil:
		t.warnf(link, "a driver that is not there")
	}
	return name
}

// complete fills in what the PCI bus knows of g and g does not.
func (t *tree) complete(w placing, g *GPU) {
	g.PCIAddress = gpuid.Address(g.PCIAddress)
	g.Name, g.UUID = procfs.Label(g.Name), procfs.Label(g.UUID)
	g.Node = w.nowhere()
	// A node with CPUs is the host's, and of one that is none drivers say -1.
	g.OwnNodes = slices.DeleteFunc(append(Set{}, g.OwnNodes...), func(n int) bool { return !w.nodes.Contains(n) || len(w.cpus[n]) > 0 })
	g.Bus, g.Links, g.MIG = []string{}, t.links(g), t.instances(g)
	dir := path.Join(pciDevices, g.PCIAddress)
	if !t.isDir(dir) || g.PCIAddress == "" {
		t.warnf(dir, "GPU %d is not on the PCI bus", g.Index)
		if node, ok := w.near(g); ok {
			g.Node = node
		}
	} else {
		t.fromBus(w, dir, g)
	}
	if g.CPUs == nil {
		g.CPUs = w.cpus[g.Node]
	}
	g.CPUs = append(Set{}, g.CPUs...)
	t.correct(dir, fmt.Sprintf("GPU %d", g.Index), &g.MemoryBytes, &g.FreeBytes)
}

// correct makes sense of what a driver says of a memory, in bytes.
func (t *tree) correct(p, of string, total, free *int64) {
	if *total < 0 || *free < 0 || *free > *total {
		t.warnf(p, "%s has %d bytes of memory, %d free", of, *total, *free)
		*total = max(*total, 0)
		*free = min(max(*free, 0), *total)
	}
}

// links returns the NVLinks of g with addresses in the kernel's form.
func (t *tree) links(g *GPU) []Link {
	links := []Link{}
	for _, l := range g.Links {
		if l.Count <= 0 {
			t.warnf(theDriver, "GPU %d has %d NVLinks to %s", g.Index, l.Count, procfs.Quote(l.Remote))
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
		m.UUID, m.Name = procfs.Label(m.UUID), procfs.Label(m.Name)
		t.correct(theDriver, "MIG instance "+m.UUID, &m.MemoryBytes, &m.FreeBytes)
		instances = append(instances, m)
	}
	return instances
}

func (t *tree) fromBus(w placing, dir string, g *GPU) {
	g.Node = t.nodeOfGPU(w, dir, g)
	g.Bus = t.busOfAddress(g.PCIAddress)
	if g.DeviceID == "" {
		vendor, ok1 := t.id(path.Join(dir, "vendor"), 4)
		device, ok2 := t.id(path.Join(dir, "device"), 4)
		if ok1 && ok2 {
			g.DeviceID = vendor[2:] + ":" + device[2:]
		}
	}
	if g.Driver == "" {
		g.Driver = t.driverOf(dir)
	}
	if g.CPUs == nil {
		if set, ok := t.set(path.Join(dir, "local_cpulist")); ok && len(set) > 0 {
			g.CPUs = set
		}
	}
	t.linkOf(dir, g)
}

// linkOf fills in the PCIe link of the GPU in dir.
func (t *tree) linkOf(dir string, g *GPU) {
	// The current speed of an idle GPU is that of generation 1; what it can
	// do is what counts. The width does not change with the load.
	file := path.Join(dir, "max_link_speed")
	if speed, ok := t.want(file); ok && g.PCIeGeneration == 0 {
		g.PCIeGeneration = procfs.LinkSpeed(speed)
		if g.PCIeGeneration == 0 && !strings.HasPrefix(speed, "Unknown") {
			t.warnf(file, "%s is not the speed of a link", procfs.Quote(speed))
		}
	}
	file = path.Join(dir, "current_link_width")
	if width, ok := t.want(file); ok && g.PCIeWidth == 0 {
		n, err := procfs.Member(width)
		if err != nil || n > 32 { // the widest link there is; a device that is lost says 63
			t.warnf(file, "%s is not the width of a link", procfs.Quote(width))
			return
		}
		g.PCIeWidth = n
	}
}

// isBusAddress reports whether s is a PCI address as the kernel writes it:
// domain:bus:device.function.
func isBusAddress(s string) bool { return s != "" && gpuid.Address(s) == s }
