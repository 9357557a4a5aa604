package gpus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/bits"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
)

// Driver reads the node's GPUs and their health from NVIDIA's driver, through go-nvml. Only one goroutine
// at a time may use it.
//
// The library is open after Open. When no GPU answers, as after NVIDIA's driver was unloaded, poll closes
// the library; later calls of poll try to open it again.
type Driver struct {
	lib  nvml.Interface
	open bool
	opts Options

	parts  map[nvml.Device][]GPU  // by GPU: itself, or its MIG instances
	handle map[string]nvml.Device // by UUID
	broken map[string]string      // by UUID: the fault that an event reported
	events nvml.EventSet          // nil: the driver expects no events
}

// Options reduce how much of a GPU's memory the plugin gives out. Sizes are in bytes.
type Options struct {
	Reserve  int64 // held back of each GPU
	Physical int64 // upper bound for each GPU, applied after Reserve; 0: none
}

// Cap returns memory, or Physical if that is smaller.
func (o Options) Cap(memory int64) int64 {
	if o.Physical > 0 {
		return min(memory, o.Physical)
	}
	return memory
}

// Library returns NVIDIA's management library at path, or, if path is empty, where the dynamic linker
// finds it. A process has only one: go-nvml uses the first library that it loads.
func Library(path string) nvml.Interface {
	return nvml.New(nvml.WithLibraryPath(cmp.Or(path, "libnvidia-ml.so.1")))
}

// Open initializes the library. The caller closes the Driver.
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

// failed returns the error of a library call, which matches ret, or nil.
func failed(call string, ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return fmt.Errorf("%s: %w", call, ret)
}

// has reports whether the library has a function. Calling a missing function ends the process.
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

// List returns all GPUs. It returns the MIG instances of a divided GPU in place of the GPU.
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

// list returns GPU i, or its MIG instances.
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
			return nil, fmt.Errorf("%s has %s, and --reserve leaves nothing of it", parts[k].UUID,
				size.Approx(parts[k].Memory))
		}
		parts[k].Memory = d.opts.Cap(parts[k].Memory - d.opts.Reserve)
	}
	d.parts[dev] = parts
	return parts, nil
}

// divided reports whether a GPU is divided into MIG instances. Some GPUs and old drivers do not
// support MIG.
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

// maxNodes is the maximum number of NUMA nodes of a Linux kernel.
const maxNodes = 1024

// describe reads the properties that GPUs and MIG instances have in common.
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
	if named.SameUUID(g.UUID, gpu.UUID) {
		return g, errors.New("it has no UUID of its own: it needs a newer driver")
	}
	return g, nil
}

// firstBit returns the number of the lowest bit that is set, or -1.
func firstBit(words []uint) int {
	for i, w := range words {
		if w != 0 {
			return bits.UintSize*i + bits.TrailingZeros(w)
		}
	}
	return -1
}

const (
	pollEvery = 5 * time.Second        // how often Watch polls each GPU
	waitStep  = 200 * time.Millisecond // how long Watch may take to return
)

// Errors of Watch after which the process must restart.
var (
	ErrOtherGPUs = errors.New("gpus: the node has other GPUs than before: this process lists them when it starts " +
		"again")
	ErrOtherDriver = errors.New("gpus: the node's driver has another version than before: this process loads it when " +
		"it starts again")
)

// Watch keeps the health of the GPUs up to date until ctx ends, and then returns nil. The caller must
// have called List.
//
// A GPU that does not answer is unhealthy until it answers again. A GPU with a hardware fault, which
// NVIDIA's driver reports as an event, is unhealthy for the rest of the process. If NVIDIA's driver is
// unloaded and loaded again, Watch uses it again, with two exceptions: it returns ErrOtherGPUs if the
// node has other GPUs, and ErrOtherDriver if the driver's version does not match the loaded library.
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
		if d.events == nil {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
			continue
		}
		for polling := false; !polling; {
			event, ret := d.events.Wait(uint32(waitStep.Milliseconds()))
			switch ret {
			case nvml.SUCCESS:
				d.mark(event, inventory, log)
			case nvml.ERROR_TIMEOUT:
			default: // a GPU or the driver is lost: poll finds out which
				d.unsubscribe()
				polling = true
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
				polling = true
			default:
			}
		}
	}
}

// faults are the types of events about a GPU's health.
const faults = nvml.EventTypeXidCriticalError | nvml.EventTypeDoubleBitEccError

// subscribe asks for the faults of all GPUs as events.
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

// register adds those of the faults that a GPU supports to a set of events.
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

// applications are the XIDs that faulty programs cause, or that do not affect the GPU's health:
// exceptions, page faults, a stopped engine, a preemptive cleanup. NVIDIA's own device plugin ignores
// the same ones. docs.nvidia.com/deploy/xid-errors explains them.
var applications = []uint64{13, 31, 43, 45, 68, 109}

// noInstance is the GPU instance in an event about the whole GPU.
const noInstance = 1<<32 - 1

// mark marks the GPU or the MIG instances of an event as unhealthy.
func (d *Driver) mark(e nvml.EventData, inventory *Inventory, log *slog.Logger) {
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

// poll queries each GPU once, and notes which of them answer. If none answers, poll closes the library;
// later calls try to open it again.
func (d *Driver) poll(inventory *Inventory, log *slog.Logger) error {
	if !d.open {
		err := d.reopen()
		if errors.Is(err, ErrOtherGPUs) || errors.Is(err, ErrOtherDriver) {
			return err
		}
		if err != nil {
			return nil // the GPUs stay unhealthy
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

// reopen opens the library again. It fails if the driver has another version or other GPUs than before.
func (d *Driver) reopen() error {
	err := d.init()
	if errors.Is(err, nvml.ERROR_LIB_RM_VERSION_MISMATCH) {
		return ErrOtherDriver
	}
	if err != nil {
		return err
	}
	before, parts := d.handle, d.parts
	if _, err := d.List(); err != nil {
		d.Close()
		d.handle, d.parts = before, parts
		return err
	}
	if !maps.EqualFunc(before, d.handle, func(nvml.Device, nvml.Device) bool { return true }) { // other UUIDs
		return ErrOtherGPUs
	}
	return nil
}
