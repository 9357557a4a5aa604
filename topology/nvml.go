package topology

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/nvml"
)

// NVML returns a source for [Options].GPUs that opens a library of NVIDIA's at each query, lists
// its GPUs and closes it. Several goroutines may use the source at a time, if they may call open.
// An Interface is internal to this module: programs that have a library of their own use package
// gonvml, or write a source.
//
// The source returns an error alone if the library cannot be used. A GPU that cannot be queried is
// left out, and a property that cannot be read stays zero: these errors are joined, and returned
// with the rest.
func NVML(open func() (nvml.Interface, error)) func(context.Context) ([]GPU, error) {
	return func(ctx context.Context) ([]GPU, error) {
		lib, err := open()
		switch {
		case errors.Is(err, nvml.ErrNoLibrary):
			return nil, fmt.Errorf("NVIDIA's library libnvidia-ml.so.1 is not there (it comes with the driver): "+
				"names, memory, MIG instances and NVLinks of the GPUs are not known: %w", err)
		case errors.Is(err, nvml.ErrDriverNotLoaded):
			return nil, errors.New("NVIDIA's library is there, but its kernel driver is not loaded " +
				"(modprobe nvidia; in a container, run it with the GPUs)")
		case err != nil:
			return nil, fmt.Errorf("NVIDIA's library cannot be initialized: %w", err)
		}
		defer lib.Close()

		count, err := lib.Count()
		if err == nil && (count < 0 || count > maxGPUs) {
			err = fmt.Errorf("%d", count)
		}
		if err != nil {
			return nil, fmt.Errorf("NVIDIA's library does not say how many GPUs there are: %w", err)
		}
		r := nvmlReader{lib: lib}
		gpus := make([]GPU, 0, count)
		for i := range count {
			// A query may take long for each GPU that must be woken, so the context is looked at
			// between them.
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			dev, err := lib.Device(i)
			if err == nil && dev == 0 {
				err = nvml.ErrNotFound
			}
			if err != nil {
				r.problems = append(r.problems, fmt.Errorf("GPU %d %w: %w", i, errNotListed, err))
				continue
			}
			gpus = append(gpus, r.gpu(i, dev))
		}
		return gpus, errors.Join(r.problems...)
	}
}

// nvmlAt returns the source of GPUs that binds NVIDIA's library at path when it is queried. It fails
// if the driver is not installed.
func nvmlAt(path string) gpuSource {
	return NVML(func() (nvml.Interface, error) { return nvml.Open(path) })
}

// maxGPUs bounds the number of queries, whatever count a broken library returns. The driver's own
// limit is 64.
const maxGPUs = 256

// nvmlReader reads GPUs of one open library, and collects the errors of queries that failed. It
// goes on after each: most properties are worth having without the others.
type nvmlReader struct {
	lib      nvml.Interface
	index    int // of the GPU
	problems []error
}

// read calls a function of the library, stores its result in to, and reports whether it could. On a
// failure to is unchanged. If the GPU does not have the property, or the driver is too old for the
// query, the failure is no problem to report: NVML has a code for each of these cases.
func read[T any](r *nvmlReader, to *T, call func(nvml.Device) (T, error), dev nvml.Device) bool {
	value, err := call(dev)
	if err == nil {
		*to = value
		return true
	}
	none := []error{nvml.ErrNotSupported, nvml.ErrNotFound, nvml.ErrInvalidArgument, nvml.ErrFunctionNotFound}
	if !slices.ContainsFunc(none, func(n error) bool { return errors.Is(err, n) }) {
		r.problems = append(r.problems, fmt.Errorf("GPU %d: %w", r.index, err))
	}
	return false
}

// readAt is read for functions with an index: one of several links or instances of a device.
func readAt[T any](r *nvmlReader, to *T, call func(nvml.Device, int) (T, error), dev nvml.Device, k int) bool {
	return read(r, to, func(dev nvml.Device) (T, error) { return call(dev, k) }, dev)
}

// gpu reads the GPU with index i, and the MIG instances on it.
func (r *nvmlReader) gpu(i int, dev nvml.Device) GPU {
	r.index = i
	g := GPU{Index: i}
	read(r, &g.Name, r.lib.Name, dev)
	read(r, &g.UUID, r.lib.UUID, dev)
	var info nvml.PCI
	if read(r, &info, r.lib.PCI, dev) {
		g.PCIAddress = addressOf(info)
		// The lower half is the vendor, the upper half the device (nvmlPciInfo_t, pciDeviceId).
		if id := info.DeviceID; id != 0 {
			g.DeviceID = fmt.Sprintf("%04x:%04x", id&0xffff, id>>16)
		}
	}
	r.memory(&g.MemoryBytes, &g.FreeBytes, dev)
	read(r, &g.PCIeGeneration, r.lib.PCIeGeneration, dev)
	read(r, &g.PCIeWidth, r.lib.PCIeWidth, dev)
	// On a coherent system (Grace Hopper) the GPU's memory is a NUMA node.
	var own int
	if read(r, &own, r.lib.Node, dev) {
		g.OwnNodes = Set{own}
	}
	var near []uint
	if read(r, &near, r.lib.NodeAffinity, dev) {
		g.NodeAffinity = setOf(near)
	}
	if read(r, &near, r.lib.CPUAffinity, dev) {
		g.CPUAffinity = setOf(near)
	}
	for link := range nvml.MaxLinks { // a failed query of one link does not hide the links after it
		var up bool
		if readAt(r, &up, r.lib.LinkUp, dev, link) && up {
			r.link(dev, link, &g)
		}
	}

	// With MIG disabled there are no instances. With MIG enabled a GPU has places for some, of
	// which only a part may be taken.
	var maxInstances int
	if !read(r, &g.MIGEnabled, r.lib.MIG, dev) || !g.MIGEnabled || !read(r, &maxInstances, r.lib.MaxInstances, dev) {
		return g
	}
	for k := range min(maxInstances, maxGPUs) {
		var part nvml.Device
		if !readAt(r, &part, r.lib.Instance, dev, k) || part == 0 {
			continue // no instance has this place
		}
		m := MIGInstance{}
		read(r, &m.UUID, r.lib.UUID, part)
		read(r, &m.Name, r.lib.Name, part)
		read(r, &m.GPUInstance, r.lib.GPUInstance, part)
		read(r, &m.ComputeInstance, r.lib.ComputeInstance, part)
		r.memory(&m.MemoryBytes, &m.FreeBytes, part)
		g.MIG = append(g.MIG, m)
	}
	return g
}

// memory reads the memory of a GPU or a MIG instance in bytes. NVML's numbers are unsigned; those
// beyond an int64 are lowered.
func (r *nvmlReader) memory(total, free *int64, dev nvml.Device) {
	var m nvml.Memory
	if read(r, &m, r.lib.Memory, dev) {
		*total, *free = int64(min(m.Total, math.MaxInt64)), int64(min(m.Free, math.MaxInt64))
	}
}

// link counts an NVLink that is up in g.Links, with the device at its other end. Links to the CPU
// (Grace Hopper) are not listed: they are no path to another GPU.
func (r *nvmlReader) link(dev nvml.Device, link int, g *GPU) {
	l := Link{}
	var remote nvml.PCI
	if readAt(r, &remote, r.lib.LinkRemote, dev, link) {
		l.Remote = addressOf(remote)
	}
	kind := nvml.LinkUnknown
	readAt(r, &kind, r.lib.LinkKind, dev, link)
	if kind == nvml.LinkToProcessor {
		return
	}
	// A virtual machine does not see the switches. NCCL has the same rule: an unknown device that
	// is linked, and not on the bus, is a switch.
	l.Switch = kind == nvml.LinkToSwitch || kind == nvml.LinkUnknown && l.Remote == ""
	// Links that end at the same device are one entry. All switches that are not known are one too.
	i := slices.IndexFunc(g.Links, func(o Link) bool { return o.Remote == l.Remote && o.Switch == l.Switch })
	if i < 0 {
		i, g.Links = len(g.Links), append(g.Links, l)
	}
	g.Links[i].Count++
}

// setOf returns the numbers of the bits that are set: bit k of word i is 64i+k.
func setOf(words []uint) Set {
	set := Set{}
	for i, w := range words {
		for ; w != 0; w &= w - 1 {
			set = append(set, i*64+bits.TrailingZeros(w))
		}
	}
	return set
}

// addressOf returns the PCI address of a device, or "" if the library does not know it or the
// device is not visible, for which the library returns zeros or a domain of all ones. The address
// in numbers counts only if the text is missing.
func addressOf(info nvml.PCI) string {
	if info.Domain == math.MaxUint32 {
		return ""
	}
	if s := named.PCIAddress(info.Address); s != "" || info.Domain == 0 && info.Bus == 0 && info.Device == 0 {
		return s
	}
	return named.PCIAddress(fmt.Sprintf("%08x:%02x:%02x.0", info.Domain, info.Bus, info.Device))
}
