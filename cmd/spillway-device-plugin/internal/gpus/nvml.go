package gpus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"slices"
	"time"

	"github.com/spillway-db/spillway/internal/gpuid"
	"github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/internal/size"
)

// Driver asks NVIDIA's driver, through NVML, for the node's GPUs. One goroutine may use it at a time.
type Driver struct {
	path    string
	reserve int64

	lib    *nvml.Library          // nil: it was given up, because the driver did not answer
	parts  map[nvml.Device][]GPU  // what List found of each GPU
	handle map[string]nvml.Device // by UUID
	broken map[string]string      // why, by UUID: what events said
}

// OpenNVML opens the library at path; empty: where the dynamic linker finds it. Of each GPU reserve
// bytes are not given away. The caller closes the driver.
func OpenNVML(path string, reserve int64) (*Driver, error) {
	d := &Driver{path: path, reserve: reserve, broken: map[string]string{}}
	return d, d.open()
}

func (d *Driver) open() error {
	lib, err := nvml.Open(d.path)
	switch {
	case errors.Is(err, nvml.ErrNoLibrary):
		return fmt.Errorf("NVIDIA's management library: %w (install the driver, name the library by --nvml, or offer simulated GPUs by --sim 1x16Gi)", err)
	case errors.Is(err, nvml.ErrDriverNotLoaded):
		return fmt.Errorf("NVIDIA's driver is not loaded: %w (run it on nodes with GPUs only, or offer simulated GPUs by --sim 1x16Gi)", err)
	}
	d.lib = lib
	return err
}

// Close gives the library up.
func (d *Driver) Close() {
	if d.lib != nil {
		d.lib.Close()
		d.lib = nil
	}
}

// List returns all GPUs, and in the place of one that is divided its MIG instances.
func (d *Driver) List() ([]GPU, error) {
	d.parts, d.handle = map[nvml.Device][]GPU{}, map[string]nvml.Device{}
	n, err := d.lib.Count()
	if err != nil {
		return nil, err
	}
	var list []GPU
	for i := range n {
		parts, err := d.list(i)
		if err != nil {
			return nil, fmt.Errorf("GPU %d: %w (nvidia-smi says more)", i, err)
		}
		list = append(list, parts...)
	}
	return list, nil
}

// list returns GPU i, or its instances.
func (d *Driver) list(i int) ([]GPU, error) {
	dev, err := d.lib.Device(i)
	if err != nil {
		return nil, err
	}
	gpu, err := d.describe(dev, i)
	if err != nil {
		return nil, err
	}
	if gpu.Minor, err = d.lib.Minor(dev); err != nil {
		return nil, err
	}
	divided, err := d.lib.MIG(dev)
	if err != nil && !errors.Is(err, nvml.ErrNotSupported) && !errors.Is(err, nvml.ErrFunctionNotFound) { // older than MIG
		return nil, err
	}
	parts := []GPU{gpu}
	if divided {
		if parts, err = d.instances(dev, gpu); err != nil {
			return nil, err
		}
	}
	for k := range parts {
		if parts[k].Memory <= d.reserve {
			return nil, fmt.Errorf("%s has %s, and --reserve leaves nothing of it", parts[k].UUID, size.Approx(parts[k].Memory))
		}
		parts[k].Memory -= d.reserve
	}
	d.parts[dev] = parts
	return parts, nil
}

// describe asks for what is the same for a GPU and an instance.
func (d *Driver) describe(dev nvml.Device, index int) (GPU, error) {
	g := GPU{Index: index, Node: -1}
	var err error
	if g.UUID, err = d.lib.UUID(dev); err != nil {
		return g, err
	}
	memory, err := d.lib.Memory(dev)
	if err != nil {
		return g, err
	}
	g.Memory = int64(memory.Total)
	g.Name, _ = d.lib.Name(dev)
	if nodes, err := d.lib.NodeAffinity(dev); err == nil {
		g.Node = firstBit(nodes)
	}
	d.handle[g.UUID] = dev
	return g, nil
}

// instances returns the MIG instances of a GPU.
func (d *Driver) instances(dev nvml.Device, gpu GPU) ([]GPU, error) {
	most, err := d.lib.MaxInstances(dev)
	if err != nil {
		return nil, err
	}
	delete(d.handle, gpu.UUID)
	var list []GPU
	for k := range most {
		part, err := d.lib.Instance(dev, k)
		if errors.Is(err, nvml.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("MIG instance %d: %w", k, err)
		}
		g, err := d.describe(part, gpu.Index)
		if err == nil {
			g.GPUInstance, err = d.lib.GPUInstance(part)
		}
		if err == nil {
			g.ComputeInstance, err = d.lib.ComputeInstance(part)
		}
		if err != nil {
			return nil, fmt.Errorf("MIG instance %d: %w", k, err)
		}
		g.Parent, g.Name, g.Node, g.Minor = gpu.UUID, gpu.Name, gpu.Node, gpu.Minor
		if gpuid.SameUUID(g.UUID, gpu.UUID) {
			return nil, fmt.Errorf("MIG instance %d has no UUID of its own: it needs a newer driver", k)
		}
		list = append(list, g)
	}
	return list, nil
}

// firstBit returns the number of the lowest bit that is set; below 0: none.
func firstBit(words []uint64) int {
	for i, w := range words {
		if w != 0 {
			return 64*i + bits.TrailingZeros64(w)
		}
	}
	return -1
}

const (
	pollEvery = 5 * time.Second        // how often each GPU is asked whether it still answers
	waitStep  = 200 * time.Millisecond // how long the end of Watch may take
)

// ErrOtherGPUs is Watch's error after which the process must start again.
var ErrOtherGPUs = errors.New("the node has other GPUs than before: they are listed again when this process starts again")

// Watch keeps the health of GPUs until ctx ends, and then returns nil. List must have been called.
//
// A GPU that does not answer is sick until it does. One whose driver tells a fault of the hardware is sick
// for the rest of the process. A driver that went away, and comes back with the same GPUs, is taken
// again; with other ones the error is ErrOtherGPUs.
func (d *Driver) Watch(ctx context.Context, inventory *Inventory, log *slog.Logger) error {
	var events *nvml.Events
	drop := func() {
		if events != nil && d.lib != nil {
			events.Close()
		}
		events = nil
	}
	defer func() { drop() }()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		lib := d.lib
		if err := d.poll(inventory, log); err != nil {
			return err
		}
		if d.lib != lib { // and so the set of events is gone
			events = nil
		}
		if events == nil && d.lib != nil {
			events = d.subscribe(log)
		}
		for polled := false; !polled; {
			if events == nil {
				select {
				case <-ctx.Done():
					return nil
				case <-tick.C:
					polled = true
				}
				continue
			}
			event, err := events.Wait(waitStep)
			switch {
			case err == nil:
				d.happened(event, inventory, log)
			case !errors.Is(err, nvml.ErrTimeout): // a GPU or the driver is lost: asking each tells which
				drop()
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
				polled = true
			default:
				polled = events == nil
			}
		}
	}
}

// subscribe has the driver tell of faults; nil if it does not.
func (d *Driver) subscribe(log *slog.Logger) *nvml.Events {
	events, err := d.lib.Events()
	if err != nil {
		log.Warn("the driver tells of no faults: GPUs are only asked", "error", err)
		return nil
	}
	for dev, parts := range d.parts {
		if err := events.Add(dev, nvml.EventXID|nvml.EventDoubleBitECC); err != nil && len(parts) > 0 {
			log.Warn("a GPU tells of no faults: it is only asked", "gpu", parts[0].UUID, "error", err)
		}
	}
	return events
}

// applications are the XIDs that a program's fault causes, or that say nothing of the GPU:
// exceptions, page faults, a stopped engine, a preemptive cleanup. They are what NVIDIA's own device
// plugin leaves out (docs.nvidia.com/deploy/xid-errors has their meaning).
var applications = []uint64{13, 31, 43, 45, 68, 109}

// happened takes an event in.
func (d *Driver) happened(e nvml.Event, inventory *Inventory, log *slog.Logger) {
	why := "an error in its memory that cannot be corrected (ECC, two bits)"
	if e.Kind == nvml.EventXID {
		if slices.Contains(applications, e.Data) {
			log.Info("a program failed on a GPU", "xid", e.Data)
			return
		}
		why = fmt.Sprintf("its driver reports XID %d", e.Data)
	}
	for _, g := range d.parts[e.Device] {
		if g.Parent != "" && e.GPUInstance != nvml.NoInstance && int(e.GPUInstance) != g.GPUInstance {
			continue
		}
		d.broken[g.UUID] = why
		d.set(g.UUID, why, inventory, log)
	}
}

func (d *Driver) set(uuid, why string, inventory *Inventory, log *slog.Logger) {
	if !inventory.SetSick(uuid, why) {
		return
	}
	if why == "" {
		log.Info("a GPU answers again", "gpu", uuid)
	} else {
		log.Warn("a GPU gets no more containers", "gpu", uuid, "why", why)
	}
}

// poll asks each GPU once. If none answers the library is given up, and opened again by later calls.
func (d *Driver) poll(inventory *Inventory, log *slog.Logger) error {
	if d.lib == nil {
		if err := d.reopen(); err != nil {
			if errors.Is(err, ErrOtherGPUs) {
				return err
			}
			return nil // they stay sick
		}
	}
	answered := false
	for uuid, dev := range d.handle {
		why := ""
		if _, err := d.lib.Memory(dev); err != nil {
			why = err.Error()
		} else {
			answered = true
		}
		if broken := d.broken[uuid]; broken != "" {
			why = broken
		}
		d.set(uuid, why, inventory, log)
	}
	if !answered {
		d.Close()
	}
	return nil
}

// reopen opens the library again, if the driver has the same GPUs as before.
func (d *Driver) reopen() error {
	if err := d.open(); err != nil {
		return err
	}
	before := d.handle
	parts := d.parts
	if _, err := d.List(); err != nil {
		d.Close()
		d.handle, d.parts = before, parts
		return err
	}
	same := len(before) == len(d.handle)
	for uuid := range before {
		_, ok := d.handle[uuid]
		same = same && ok
	}
	if !same {
		return ErrOtherGPUs
	}
	return nil
}
