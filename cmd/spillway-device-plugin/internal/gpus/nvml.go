package gpus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/spillway-db/spillway/internal/gpuid"
	"github.com/spillway-db/spillway/internal/size"
)

// Driver reads the node's GPUs and their health from NVIDIA's driver, through go-nvml. One goroutine
// may use it at a time.
//
// It is open from Open on. poll closes it when no GPU answers, as after the driver was unloaded, and
// opens it again when the driver is back.
type Driver struct {
	lib  nvml.Interface
	open bool
	opts Options

	parts  map[nvml.Device][]GPU  // by GPU: itself, or its MIG instances
	handle map[string]nvml.Device // by UUID
	broken map[string]string      // the fault that an event reported, by UUID
	events nvml.EventSet          // nil: no events are expected
}

// Options change how much of a GPU's memory is given away.
type Options struct {
	Reserve  int64 // bytes of each GPU that are held back
	Physical int64 // bytes that each GPU counts as having, if it does not have less; 0: all
}

// Cap returns how much of memory, in bytes, may be given away if nothing is held back.
func (o Options) Cap(memory int64) int64 {
	if o.Physical > 0 {
		return min(memory, o.Physical)
	}
	return memory
}

// Library returns NVIDIA's management library at path, or, if that is empty, where the dynamic linker
// finds it. A process has one: go-nvml calls the first that was loaded.
func Library(path string) nvml.Interface {
	if path == "" {
		return nvml.New()
	}
	return nvml.New(nvml.WithLibraryPath(path))
}

// Open initializes the library. The caller closes the driver.
func Open(lib nvml.Interface, opts Options) (*Driver, error) {
	d := &Driver{lib: lib, opts: opts, broken: map[string]string{}}
	return d, d.init()
}

func (d *Driver) init() error {
	err := failed("nvmlInit", d.lib.Init())
	switch {
	case errors.Is(err, nvml.ERROR_LIBRARY_NOT_FOUND):
		return fmt.Errorf("gpus: NVIDIA's management library cannot be loaded: %w "+
			"(install the driver, name the library by --nvml, or offer simulated GPUs by --sim 1x16Gi)", err)
	case errors.Is(err, nvml.ERROR_DRIVER_NOT_LOADED):
		return fmt.Errorf("gpus: NVIDIA's driver is not loaded: %w "+
			"(run the plugin on nodes with GPUs only, or offer simulated GPUs by --sim 1x16Gi)", err)
	case err != nil:
		return fmt.Errorf("gpus: %w", err)
	}
	d.open = true
	return nil
}

// failed returns the error of a call of the library, or nil. It matches ret.
func failed(call string, ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return fmt.Errorf("%s: %w", call, ret)
}

// has reports whether the driver has a function. Calling one that it does not have ends the process.
func (d *Driver) has(function string) bool { return d.lib.Extensions().LookupSymbol(function) == nil }

// Close shuts the library down.
func (d *Driver) Close() {
	if !d.open {
		return
	}
	d.unsubscribe()
	_ = d.lib.Shutdown()
	d.open = false
}

// List returns all GPUs. MIG instances take the place of the GPU that is divided into them.
func (d *Driver) List() ([]GPU, error) {
	d.parts, d.handle = map[nvml.Device][]GPU{}, map[string]nvml.Device{}
	n, ret := d.lib.DeviceGetCount()
	if err := failed("nvmlDeviceGetCount", ret); err != nil {
		return nil, fmt.Errorf("gpus: %w", err)
	}
	var list []GPU
	for i := range n {
		parts, err := d.list(i)
		if err != nil {
			return nil, fmt.Errorf("gpus: GPU %d: %w (nvidia-smi has details)", i, err)
		}
		list = append(list, parts...)
	}
	return list, nil
}

// list returns GPU i, or its instances.
func (d *Driver) list(i int) ([]GPU, error) {
	dev, ret := d.lib.DeviceGetHandleByIndex(i)
	if err := failed("nvmlDeviceGetHandleByIndex", ret); err != nil {
		return nil, err
	}
	gpu, err := d.describe(dev, i)
	if err != nil {
		return nil, err
	}
	gpu.Minor, ret = dev.GetMinorNumber()
	if err := failed("nvmlDeviceGetMinorNumber", ret); err != nil {
		return nil, err
	}
	divided, err := d.divided(dev)
	if err != nil {
		return nil, err
	}
	parts := []GPU{gpu}
	if divided {
		if parts, err = d.instances(dev, gpu); err != nil {
			return nil, err
		}
	}
	for k := range parts {
		if parts[k].Memory <= d.opts.Reserve {
			return nil, fmt.Errorf("%s has %s, and --reserve leaves nothing of it", parts[k].UUID, size.Approx(parts[k].Memory))
		}
		parts[k].Memory = d.opts.Cap(parts[k].Memory - d.opts.Reserve)
	}
	d.parts[dev] = parts
	return parts, nil
}

// divided reports whether a GPU is divided into MIG instances. Some GPUs and old drivers do not
// support that.
func (d *Driver) divided(dev nvml.Device) (bool, error) {
	const function = "nvmlDeviceGetMigMode"
	if !d.has(function) {
		return false, nil
	}
	mode, _, ret := dev.GetMigMode()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return false, nil
	}
	return mode == nvml.DEVICE_MIG_ENABLE, failed(function, ret)
}

// maxNodes is the most NUMA nodes that Linux can have.
const maxNodes = 1024

// describe reads the properties that GPUs and instances have in common.
func (d *Driver) describe(dev nvml.Device, index int) (GPU, error) {
	g := GPU{Index: index, Node: -1}
	var ret nvml.Return
	g.UUID, ret = dev.GetUUID()
	if err := failed("nvmlDeviceGetUUID", ret); err != nil {
		return g, err
	}
	memory, err := memoryOf(dev)
	if err != nil {
		return g, err
	}
	g.Memory = int64(memory.Total)
	g.Name, _ = dev.GetName()
	if d.has("nvmlDeviceGetMemoryAffinity") {
		if nodes, ret := dev.GetMemoryAffinity(maxNodes, nvml.AFFINITY_SCOPE_NODE); ret == nvml.SUCCESS {
			g.Node = firstBit(nodes)
		}
	}
	d.handle[g.UUID] = dev
	return g, nil
}

func memoryOf(dev nvml.Device) (nvml.Memory, error) {
	memory, ret := dev.GetMemoryInfo()
	return memory, failed("nvmlDeviceGetMemoryInfo", ret)
}

// instances returns the MIG instances of a GPU.
func (d *Driver) instances(dev nvml.Device, gpu GPU) ([]GPU, error) {
	most, ret := dev.GetMaxMigDeviceCount()
	if err := failed("nvmlDeviceGetMaxMigDeviceCount", ret); err != nil {
		return nil, err
	}
	delete(d.handle, gpu.UUID)
	var list []GPU
	for k := range most {
		part, ret := dev.GetMigDeviceHandleByIndex(k)
		if ret == nvml.ERROR_NOT_FOUND {
			continue
		}
		err := failed("nvmlDeviceGetMigDeviceHandleByIndex", ret)
		var g GPU
		if err == nil {
			g, err = d.instance(part, gpu)
		}
		if err != nil {
			return nil, fmt.Errorf("MIG instance %d: %w", k, err)
		}
		list = append(list, g)
	}
	return list, nil
}

// instance returns a MIG instance of a GPU.
func (d *Driver) instance(part nvml.Device, gpu GPU) (GPU, error) {
	g, err := d.describe(part, gpu.Index)
	if err != nil {
		return g, err
	}
	var ret nvml.Return
	g.GPUInstance, ret = part.GetGpuInstanceId()
	if err := failed("nvmlDeviceGetGpuInstanceId", ret); err != nil {
		return g, err
	}
	g.ComputeInstance, ret = part.GetComputeInstanceId()
	if err := failed("nvmlDeviceGetComputeInstanceId", ret); err != nil {
		return g, err
	}
	g.Parent, g.Name, g.Node, g.Minor = gpu.UUID, gpu.Name, gpu.Node, gpu.Minor
	if gpuid.SameUUID(g.UUID, gpu.UUID) {
		return g, errors.New("it has no UUID of its own: it needs a newer driver")
	}
	return g, nil
}

// firstBit returns the number of the lowest bit that is set, or -1 if there is none.
func firstBit(words []uint) int {
	for i, w := range words {
		if w != 0 {
			return bits.UintSize*i + bits.TrailingZeros(w)
		}
	}
	return -1
}

const (
	pollEvery = 5 * time.Second        // how often Watch asks each GPU whether it still answers
	waitStep  = 200 * time.Millisecond // how long Watch may take to end
)

// Errors of Watch after which the process must start again.
var (
	ErrOtherGPUs   = errors.New("gpus: the node has other GPUs than before: this process lists them when it starts again")
	ErrOtherDriver = errors.New("gpus: the node's driver has another version than before: this process loads it when it starts again")
)

// Watch keeps the health of GPUs up to date until ctx ends, and then returns nil. List must have been
// called.
//
// A GPU that does not answer is sick until it does. A GPU for which the driver reports a hardware fault
// is sick for the rest of the process. A driver that was unloaded and is loaded again with the same
// GPUs is used again. If it has other GPUs the error is ErrOtherGPUs; if its version is another one,
// which the library in this process does not fit, the error is ErrOtherDriver.
func (d *Driver) Watch(ctx context.Context, inventory *Inventory, log *slog.Logger) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		if err := d.poll(inventory, log); err != nil {
			return err
		}
		if d.open && d.events == nil {
			d.subscribe(log)
		}
		for polled := false; !polled; {
			if d.events == nil {
				select {
				case <-ctx.Done():
					return nil
				case <-tick.C:
					polled = true
				}
				continue
			}
			event, ret := d.events.Wait(uint32(waitStep.Milliseconds()))
			switch ret {
			case nvml.SUCCESS:
				d.happened(event, inventory, log)
			case nvml.ERROR_TIMEOUT:
			default: // a GPU or the driver is lost: poll finds out which
				d.unsubscribe()
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
				polled = true
			default:
				polled = d.events == nil
			}
		}
	}
}

// faults are the kinds of events that concern a GPU's health.
const faults = nvml.EventTypeXidCriticalError | nvml.EventTypeDoubleBitEccError

// subscribe registers for the faults of all GPUs.
func (d *Driver) subscribe(log *slog.Logger) {
	events, ret := d.lib.EventSetCreate()
	if err := failed("nvmlEventSetCreate", ret); err != nil {
		log.Warn("the driver reports no faults: GPUs are only polled", "error", err)
		return
	}
	d.events = events
	for dev, parts := range d.parts {
		if err := register(dev, events); err != nil && len(parts) > 0 {
			log.Warn("a GPU reports no faults: it is only polled", "gpu", parts[0].UUID, "error", err)
		}
	}
}

// register adds the faults that a GPU supports to a set of events.
func register(dev nvml.Device, events nvml.EventSet) error {
	supported, ret := dev.GetSupportedEventTypes()
	if err := failed("nvmlDeviceGetSupportedEventTypes", ret); err != nil {
		return err
	}
	if supported&faults == 0 {
		return fmt.Errorf("its events are %#x, none of %#x", supported, faults)
	}
	return failed("nvmlDeviceRegisterEvents", dev.RegisterEvents(supported&faults, events))
}

func (d *Driver) unsubscribe() {
	if d.events != nil {
		_ = d.events.Free()
		d.events = nil
	}
}

// applications are the XIDs that a program's fault causes, or that do not concern the GPU's health:
// exceptions, page faults, a stopped engine, a preemptive cleanup. NVIDIA's own device plugin ignores
// the same ones (docs.nvidia.com/deploy/xid-errors has their meaning).
var applications = []uint64{13, 31, 43, 45, 68, 109}

// noInstance is the number of an instance in events that concern the whole GPU.
const noInstance = 1<<32 - 1

// happened marks the GPU or the instances that an event concerns as sick.
func (d *Driver) happened(e nvml.EventData, inventory *Inventory, log *slog.Logger) {
	why := "an error in its memory that cannot be corrected (ECC, two bits)"
	if e.EventType == nvml.EventTypeXidCriticalError {
		if slices.Contains(applications, e.EventData) {
			log.Info("a program failed on a GPU", "xid", e.EventData)
			return
		}
		why = fmt.Sprintf("its driver reports XID %d", e.EventData)
	}
	for _, g := range d.parts[e.Device] {
		if g.Parent != "" && e.GpuInstanceId != noInstance && int(e.GpuInstanceId) != g.GPUInstance {
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

// poll asks each GPU once whether it answers. If none does, poll closes the library; later calls open
// it again.
func (d *Driver) poll(inventory *Inventory, log *slog.Logger) error {
	if !d.open {
		if err := d.reopen(); err != nil {
			if errors.Is(err, ErrOtherGPUs) || errors.Is(err, ErrOtherDriver) {
				return err
			}
			return nil // they stay sick
		}
	}
	answered := false
	for uuid, dev := range d.handle {
		why := ""
		if _, err := memoryOf(dev); err != nil {
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

// reopen opens the library again, if the driver is the same and has the same GPUs as before.
func (d *Driver) reopen() error {
	err := d.init()
	if errors.Is(err, nvml.ERROR_LIB_RM_VERSION_MISMATCH) {
		return ErrOtherDriver
	}
	if err != nil {
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
