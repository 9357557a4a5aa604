package topology

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/nvml"
)

const nvidia = "0x10de" // PCI vendor

// gpuSource is the type of Options.GPUs. A source may block while it queries the driver, and should
// return when its context ends.
type gpuSource = func(context.Context) ([]GPU, error)

// errNotListed is in a source's error if there is a GPU that the source could not list. Then an
// entry of CUDA_VISIBLE_DEVICES that names no GPU may name that one.
var errNotListed = errors.New("cannot be asked")

// gpus returns the GPUs of the source, or those on the PCI bus, whatever CUDA_VISIBLE_DEVICES says.
// It warns of everything that the source could not find out. If a source lists some GPUs, those on
// the bus that it left out stay out: CUDA cannot use them.
func (t *tree) gpus(source gpuSource) []GPU {
	given := source != nil
	// Without a source: a recorded machine has no library that could be called, this machine may.
	if !given {
		if !t.live {
			return t.busGPUs()
		}
		source = nvmlAt(nvml.DefaultPath)
	}
	gpus, err := ask(t.ctx, source)
	if err != nil && len(gpus) == 0 {
		gpus = t.busGPUs()
		// A machine without a GPU needs no driver, so there is nothing to warn of.
		if given || len(gpus) > 0 {
			t.warnf(theDriver, "the driver's list: %v: those on the PCI bus are listed", err)
		}
		return gpus
	}
	// Joined errors are separate warnings.
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range many.Unwrap() {
			t.warnf(theDriver, "%v", one)
		}
	} else if err != nil {
		t.warnf(theDriver, "%v", err)
	}
	// The list is the source's; it is not changed.
	gpus = append([]GPU{}, gpus...)
	for i := range gpus {
		t.complete(&gpus[i])
	}
	t.fromDriver, t.partial = true, errors.Is(err, errNotListed)
	return gpus
}

// ask calls a source and makes its panic an error: the driver's library, and a program's source,
// are not part of this module, and Discover must go on without them.
func ask(ctx context.Context, source gpuSource) (gpus []GPU, err error) {
	defer func() {
		if p := recover(); p != nil {
			gpus, err = nil, fmt.Errorf("it panicked: %v", p)
		}
	}()
	return source(ctx)
}

// busGPUs returns NVIDIA's display and 3D controllers on the PCI bus, by address, which is the
// driver's default order too. Those that another driver has come last, because NVIDIA's does not
// count them. Names, memory and UUIDs are not known from the bus.
func (t *tree) busGPUs() []GPU {
	gpus := []GPU{}
	addresses, _ := t.list(pciDevices) // no bus is no warning: many VMs have none
	for _, address := range addresses {
		dir := path.Join(pciDevices, address)
		if vendor, _ := t.id(path.Join(dir, "vendor"), 4); vendor != nvidia {
			continue
		}
		class, _ := t.id(path.Join(dir, "class"), 6)
		// A GPU is a VGA controller or a 3D controller; the last two digits of the class are the
		// programming interface. Others of NVIDIA's devices are audio, USB and bridges. A virtual
		// function (SR-IOV) has a link "physfn" and is there to be given to a virtual machine.
		_, err := t.root.Stat(rel(path.Join(dir, "physfn")))
		if err != nil && (strings.HasPrefix(class, "0x0300") || strings.HasPrefix(class, "0x0302")) {
			gpus = append(gpus, GPU{PCIAddress: address, Driver: t.driverOf(dir)})
		}
	}
	slices.SortFunc(gpus, func(a, b GPU) int {
		return cmp.Or(foreign(a)-foreign(b), byNumber(a.PCIAddress, b.PCIAddress))
	})
	for i := range gpus {
		gpus[i].Index = i
		t.complete(&gpus[i])
	}
	return gpus
}

// foreign returns 1 for a GPU that a driver other than NVIDIA's has, such as vfio-pci, which gives
// it to virtual machines, and else 0. A GPU without a known driver is not foreign: a container may
// see none.
func foreign(g GPU) int {
	if g.Driver == "" || g.Driver == "nvidia" {
		return 0
	}
	return 1
}

// driverOf returns the name of the driver that is bound to the PCI device in dir; empty means none.
// The name is that of the directory to which the link "driver" leads. In a container the link may
// lead to nothing, and its name still counts.
func (t *tree) driverOf(dir string) string {
	link := path.Join(dir, "driver")
	target, err := t.resolve(link)
	name := label(path.Base(target))
	switch {
	case err != nil && !missing(err):
		t.warn(link, err)
		return ""
	case name == "driver":
		// The path ends with the link itself: it is missing, which is no driver, or it is no link.
		if err == nil { // otherwise there is no link
			t.warnf(link, "not a link to a driver")
		}
		return ""
	case err != nil:
		t.warnf(link, "a driver that is not there")
	}
	return name
}

// id returns a number in p of the given count of hexadecimal digits, such as 0x10de, as its text. A
// missing file, or one that holds no such number, is a warning.
func (t *tree) id(p string, digits int) (string, bool) {
	return parsed(t, p, t.need, func(text string) (string, error) {
		hex, ok := strings.CutPrefix(text, "0x")
		if !ok || len(hex) != digits || strings.Trim(hex, "0123456789abcdef") != "" {
			return "", fmt.Errorf("%s is not a number of %d hexadecimal digits", quote(text), digits)
		}
		return text, nil
	})
}

// complete adds to g what the driver does not report and the PCI bus has, and corrects what makes
// no sense. The source may be a program's, so no field is taken as it is.
func (t *tree) complete(g *GPU) {
	g.PCIAddress = named.PCIAddress(g.PCIAddress)
	g.Name, g.UUID = label(g.Name), label(g.UUID)
	// A node with CPUs is the host's: drivers report the GPU's memory as a node of its own only on
	// coherent systems. For no node they return -1.
	g.OwnNodes = slices.DeleteFunc(append(Set{}, g.OwnNodes...), func(id int) bool {
		n, ok := t.top.Node(id)
		return !ok || len(n.CPUs) > 0
	})
	// A source of a program's may return anything: links without a count make no sense.
	links := []Link{}
	for _, l := range g.Links {
		if l.Count <= 0 {
			t.warnf(theDriver, "GPU %d has %d NVLinks to %s", g.Index, l.Count, quote(l.Remote))
			continue
		}
		l.Remote = named.PCIAddress(l.Remote)
		links = append(links, l)
	}
	g.Links = links
	g.MIG = append([]MIGInstance{}, g.MIG...)
	for i := range g.MIG {
		m := &g.MIG[i]
		m.UUID, m.Name = label(m.UUID), label(m.Name)
		t.correct(theDriver, "MIG instance "+m.UUID, &m.MemoryBytes, &m.FreeBytes)
	}

	// The node comes from the driver only if the kernel reports none: the firmware of some machines
	// reports none, and the kernel then lists all CPUs as near.
	dir := path.Join(pciDevices, g.PCIAddress)
	onBus, node := g.PCIAddress != "" && t.isDir(dir), ""
	if onBus {
		node, _ = t.want(dir, "numa_node")
	} else {
		t.warnf(dir, "GPU %d is not on the PCI bus", g.Index)
	}
	// Then the node, by what is known best: the driver where the kernel reports none, the bus, or
	// nothing.
	near, isNear := t.nearTo(g)
	switch {
	case isNear && (node == "" || node == strconv.Itoa(Unknown)):
		g.Node = near.ID
		if g.CPUs == nil {
			g.CPUs = near.CPUs
		}
	case onBus:
		g.Node = t.nodeOf(dir)
	default:
		g.Node = t.nowhere()
	}
	g.Bus = []string{}
	if onBus {
		t.completeFromBus(dir, g)
	}
	if g.CPUs == nil {
		n, _ := t.top.Node(g.Node)
		g.CPUs = n.CPUs
	}
	// The set may be that of a node, which must not be shared.
	g.CPUs = append(Set{}, g.CPUs...)
	t.correct(dir, fmt.Sprintf("GPU %d", g.Index), &g.MemoryBytes, &g.FreeBytes)
}

// linkSpeeds are the speeds of the generations of PCIe, the first one first, in GT/s, as
// max_link_speed has them.
var linkSpeeds = []string{"2.5", "5", "8", "16", "32", "64", "128"}

// completeFromBus adds to g what the PCI device in dir has and g does not. Files that are missing
// are left out silently: virtual machines have few of them.
func (t *tree) completeFromBus(dir string, g *GPU) {
	// The entry in /sys/bus/pci/devices is a link to the device's place in the tree of bridges.
	if real, err := t.resolve(dir); err == nil {
		if g.Bus = busPath(real); len(g.Bus) == 0 {
			t.warnf(dir, "the device is below no host bridge: its paths to others are not known")
		}
	}
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
	if set, ok := t.set(dir, "local_cpulist"); ok && len(set) > 0 && g.CPUs == nil {
		g.CPUs = set
	}

	// An idle GPU lowers the speed of its link to that of generation 1, so the highest one counts.
	// The width does not change with the load.
	file := path.Join(dir, "max_link_speed")
	if speed, ok := t.want(file); ok && g.PCIeGeneration == 0 {
		number, _, _ := strings.Cut(speed, " ") // as "16.0 GT/s PCIe"
		// A speed that is not in the list gives 0, which means not known.
		g.PCIeGeneration = 1 + slices.Index(linkSpeeds, strings.TrimSuffix(number, ".0"))
		if g.PCIeGeneration == 0 && !strings.HasPrefix(speed, "Unknown") {
			t.warnf(file, "%s is not the speed of a link", quote(speed))
		}
	}
	file = path.Join(dir, "current_link_width")
	if width, ok := t.want(file); ok && g.PCIeWidth == 0 {
		n, err := parseMember(width)
		if err != nil || n > 32 { // the widest link there is; a device that is lost says 63
			t.warnf(file, "%s is not the width of a link", quote(width))
			return
		}
		g.PCIeWidth = n
	}
}

// correct makes a total and free memory consistent, in bytes, as a driver reports them: neither is
// negative, and free is at most total. A change is a warning.
func (t *tree) correct(p, of string, total, free *int64) {
	if *total < 0 || *free < 0 || *free > *total {
		t.warnf(p, "%s has %d bytes of memory, %d free", of, *total, *free)
		*total = max(*total, 0)
		*free = min(max(*free, 0), *total)
	}
}

// isBusAddress reports whether s is a PCI address as the kernel writes it:
// domain:bus:device.function.
func isBusAddress(s string) bool { return s != "" && named.PCIAddress(s) == s }
