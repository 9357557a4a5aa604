// Package gpus lists the node's GPUs, with the MIG instances of a divided GPU in its place, and watches
// their health.
//
//	Driver, Sim ──▶ []GPU ──▶ Inventory ◀── SetSick: Driver.Watch
//	                             │
//	                             └── Changed, Sick: the code that reports to the kubelet
//
// The list is fixed for the life of a process: if the node gets other GPUs, the process must restart.
package gpus

import (
	"slices"
	"strconv"
	"sync"
)

// GPU is a GPU or a MIG instance: a device with memory of its own.
type GPU struct {
	UUID   string // as NVML writes it, with the prefix GPU- or MIG-; processes find the device by it
	Name   string // of the product
	Index  int    // NVML's number of the GPU, from 0
	Memory int64  // bytes that the plugin may give out: the hardware's, without --reserve
	Minor  int    // number of /dev/nvidia<Minor>, for a MIG instance that of its GPU; simulated GPUs have none
	Node   int    // nearest NUMA node; below 0: not known

	Simulated bool

	// For a MIG instance only. Parent is the UUID of its GPU; it is empty for a whole GPU.
	Parent          string
	GPUInstance     int
	ComputeInstance int
}

// Inventory has the GPUs of a node with their health. At first all are healthy. It is safe for
// concurrent use.
type Inventory struct {
	gpus []GPU

	mu      sync.Mutex
	sick    map[string]string // by UUID: why the GPU is unhealthy
	changed chan struct{}     // closed when sick changes
}

// NewInventory returns an inventory of the GPUs, in the order of list.
func NewInventory(list []GPU) *Inventory {
	return &Inventory{gpus: slices.Clone(list), sick: map[string]string{}, changed: make(chan struct{})}
}

// GPUs returns all GPUs, also unhealthy ones. The caller owns the slice.
func (v *Inventory) GPUs() []GPU { return slices.Clone(v.gpus) }

// Find returns the GPU with a UUID.
func (v *Inventory) Find(uuid string) (GPU, bool) {
	for _, g := range v.gpus {
		if g.UUID == uuid {
			return g, true
		}
	}
	return GPU{}, false
}

// Sick returns why a GPU is unhealthy and must not get new containers; empty: it is healthy.
func (v *Inventory) Sick(uuid string) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.sick[uuid]
}

// SetSick notes why a GPU is unhealthy, or with an empty reason that it is healthy. It reports whether
// the GPU's health changed. A second reason does not replace the first.
func (v *Inventory) SetSick(uuid, why string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if (v.sick[uuid] == "") == (why == "") {
		return false
	}
	if why == "" {
		delete(v.sick, uuid)
	} else {
		v.sick[uuid] = why
	}
	close(v.changed)
	v.changed = make(chan struct{})
	return true
}

// Changed returns a channel that is closed when the health of a GPU changes. Call it before Sick, so that
// you miss no change.
func (v *Inventory) Changed() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.changed
}

// Sim returns n simulated GPUs of memory bytes, with the names that the engine uses.
func Sim(n int, memory int64) []GPU {
	list := make([]GPU, n)
	for i := range list {
		list[i] = GPU{UUID: "sim-" + strconv.Itoa(i), Name: "simulated GPU", Index: i, Memory: memory, Node: -1,
			Simulated: true}
	}
	return list
}
