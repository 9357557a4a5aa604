package gpus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spillway-db/spillway/internal/gpuid"
	"github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/internal/size"
)

// Driver asks NVIDIA's driver, through NVML, for the node's GPUs.
type Driver struct {
	lib     *nvml.Library
	reserve int64
	devices map[string]nvml.Device // by UUID, as List found them
}

// OpenNVML opens the library at path; empty: where the dynamic linker finds it. Of each GPU reserve
// bytes are not given away. The caller closes the driver.
func OpenNVML(path string, reserve int64) (*Driver, error) {
	lib, err := nvml.Open(path)
	switch {
	case errors.Is(err, nvml.ErrNoLibrary):
		return nil, fmt.Errorf("NVIDIA's management library: %w (install the driver, name the library by --nvml, or offer simulated GPUs by --sim 1x16Gi)", err)
	case errors.Is(err, nvml.ErrDriverNotLoaded):
		return nil, fmt.Errorf("NVIDIA's driver is not loaded: %w (run it on nodes with GPUs only, or offer simulated GPUs by --sim 1x16Gi)", err)
	case err != nil:
		return nil, err
	}
	return &Driver{lib: lib, reserve: reserve, devices: map[string]nvml.Device{}}, nil
}

// Close gives the library up.
func (d *Driver) Close() { d.lib.Close() }

// List returns all GPUs, and in the place of one that is divided its MIG instances.
func (d *Driver) List() ([]GPU, error) {
	n, err := d.lib.Count()
	if err != nil {
		return nil, err
	}
	var list []GPU
	for i := range n {
		dev, err := d.lib.Device(i)
		if err != nil {
			return nil, fmt.Errorf("GPU %d cannot be asked: %w (nvidia-smi says more)", i, err)
		}
		gpu, err := d.describe(dev, i)
		if err != nil {
			return nil, fmt.Errorf("GPU %d: %w", i, err)
		}
		divided, err := d.lib.MIG(dev)
		if err != nil && !errors.Is(err, nvml.ErrNotSupported) {
			return nil, fmt.Errorf("GPU %d: %w", i, err)
		}
		if !divided {
			list = append(list, gpu)
			continue
		}
		parts, err := d.instances(dev, gpu)
		if err != nil {
			return nil, fmt.Errorf("GPU %d: %w", i, err)
		}
		list = append(list, parts...)
	}
	for i, g := range list {
		if list[i].Memory = g.Memory - d.reserve; list[i].Memory <= 0 {
			return nil, fmt.Errorf("%s has %s, and --reserve leaves nothing of it", g.UUID, size.Approx(g.Memory))
		}
	}
	return list, nil
}

// describe asks for what is the same for a GPU and an instance.
func (d *Driver) describe(dev nvml.Device, index int) (GPU, error) {
	g := GPU{Index: index, Minor: -1, Node: -1}
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
	d.devices[g.UUID] = dev
	return g, nil
}

// instances returns the MIG instances of a GPU.
func (d *Driver) instances(dev nvml.Device, gpu GPU) ([]GPU, error) {
	most, err := d.lib.MaxInstances(dev)
	if err != nil {
		return nil, err
	}
	delete(d.devices, gpu.UUID)
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
		g.Parent, g.Name, g.Node = gpu.UUID, gpu.Name, gpu.Node
		if gpuid.SameUUID(g.UUID, gpu.UUID) {
			return nil, fmt.Errorf("MIG instance %d has no UUID of its own: it needs a driver of version 470 or later", k)
		}
		list = append(list, g)
	}
	return list, nil
}

// firstBit returns the number of the lowest bit that is set; below 0: none.
func firstBit(words []uint64) int {
	for i, w := range words {
		for b := range 64 {
			if w>>b&1 == 1 {
				return 64*i + b
			}
		}
	}
	return -1
}

// pollEvery is how often a GPU is asked whether it still answers.
const pollEvery = 5 * time.Second

// Watch asks each GPU regularly until ctx ends. One that does not answer is sick until it does.
func (d *Driver) Watch(ctx context.Context, inventory *Inventory, log *slog.Logger) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		d.poll(inventory, log)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// poll asks each GPU once.
func (d *Driver) poll(inventory *Inventory, log *slog.Logger) {
	for uuid, dev := range d.devices {
		why := ""
		if _, err := d.lib.Memory(dev); err != nil {
			why = err.Error()
		}
		if !inventory.SetSick(uuid, why) {
			continue
		}
		if why == "" {
			log.Info("a GPU answers again", "gpu", uuid)
		} else {
			log.Warn("a GPU does not answer: it gets no more containers", "gpu", uuid, "error", why)
		}
	}
}
