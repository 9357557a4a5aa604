// Package gpus is what a node offers: its GPUs, or the MIG instances of those that are divided, and
// which of them are healthy.
//
//	NVML, Sim ──▶ []GPU ──▶ Inventory ◀── SetSick: by what watches the GPUs
//	                           │
//	                           └── Changed, Sick: for what tells the kubelet
//
// The list is fixed for the life of a process: with other GPUs, the process is started again.
// An Inventory is safe for concurrent use.
package gpus

import (
	"slices"
	"strconv"
	"sync"
)

// GPU is a GPU, or a MIG instance of one: what has a memory of its own.
type GPU struct {
	UUID   string // as NVML writes it, with the GPU- or MIG- before it; what processes find it by
	Name   string // the product's
	Index  int    // NVML's number of the GPU, from 0
	Memory int64  // bytes that may be given away: those of the hardware, less what is held back
	Minor  int    // of /dev/nvidia<Minor>; of a MIG instance its GPU's. A simulated GPU has no file
	Node   int    // NUMA node that it is nearest to; below 0: not known

	Simulated bool

	// Of a MIG instance only: Parent is the GPU's UUID, empty for a whole GPU.
	Parent          string
	GPUInstance     int
	ComputeInstance int
}

// Inventory is the GPUs of a node with their health. It starts with all of them healthy.
type Inventory struct {
	gpus []GPU

	mu      sync.Mutex
	sick    map[string]string // why, by UUID
	changed chan struct{}     // closed when sick changes
}

// NewInventory makes an inventory of the GPUs, which it keeps in their order.
func NewInventory(list []GPU) *Inventory {
	return &Inventory{gpus: slices.Clone(list), sick: map[string]string{}, changed: make(chan struct{})}
}

// GPUs returns all GPUs, sick ones too. The slice is the caller's.
func (v *Inventory) GPUs() []GPU { return slices.Clone(v.gpus) }

// Find returns the GPU of a UUID.
func (v *Inventory) Find(uuid string) (GPU, bool) {
	i := slices.IndexFunc(v.gpus, func(g GPU) bool { return g.UUID == uuid })
	if i < 0 {
		return GPU{}, false
	}
	return v.gpus[i], true
}

// Sick returns why a GPU should get no new work; empty: it is healthy.
func (v *Inventory) Sick(uuid string) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.sick[uuid]
}

// SetSick says why a GPU should get no new work; an empty reason: it is healthy again. It reports
// whether that is news. A second reason does not replace the first.
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

// Changed returns a channel that is closed when the health of a GPU changes. It is taken before
// Sick is called, so no change is missed.
func (v *Inventory) Changed() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.changed
}

// Sim returns n simulated GPUs as the engine names them, for nodes without a GPU.
func Sim(n int, memory int64) []GPU {
	list := make([]GPU, n)
	for i := range list {
		list[i] = GPU{UUID: "sim-" + strconv.Itoa(i), Name: "simulated GPU", Index: i, Memory: memory, Node: -1, Simulated: true}
	}
	return list
}
