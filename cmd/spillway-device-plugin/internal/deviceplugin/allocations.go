package deviceplugin

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/podresources"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
)

// kind is one of the ways to give a GPU to containers. A grant's name begins with it.
type kind string

const (
	memoryUnits kind = "units"  // units of its memory: their sum is the container's limit
	wholeGPU    kind = "gpus"   // all of it, without a limit
	sharedGPU   kind = "shares" // shares of it: the container sets its own limit
)

// grantName returns the name of the grant for some device ids. It does not depend on the ids' order, so
// that a plugin that restarts finds the same name.
func grantName(k kind, ids []string) string {
	sum := sha256.Sum256([]byte(strings.Join(slices.Sorted(slices.Values(ids)), "\n")))
	return string(k) + "-" + hex.EncodeToString(sum[:8])
}

// holding is what a container has of one resource. Its pod is empty until the kubelet lists it.
type holding struct {
	podresources.Holding
	kind kind
	seen time.Time // when the kubelet allocated it, or listed it the last time
}

const (
	// keepFor is how long a holding counts that the kubelet does not list. The kubelet lists a pod once
	// it has admitted the pod, and never lists a pod that it refuses after the allocation. A kubelet that
	// restarts may answer before it has learnt of its pods.
	keepFor = time.Minute
	// initFor is the same for a holding that the kubelet never listed, while a listed container has some
	// of the same ids: it belongs to an init container, and the kubelet does not list those.
	initFor = 24 * time.Hour
)

// allocations are the holdings of all containers: those that the kubelet lists, and those that it has
// just allocated. It is safe for concurrent use.
type allocations struct {
	mu      sync.Mutex
	held    map[string]holding // by the grant's name
	changed chan struct{}      // closed at a change
}

func newAllocations() *allocations {
	return &allocations{held: map[string]holding{}, changed: make(chan struct{})}
}

// add notes the ids of a container that the kubelet does not list yet.
func (a *allocations) add(k kind, ids []string, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held[grantName(k, ids)] = holding{podresources.Holding{IDs: slices.Clone(ids)}, k, now}
	a.notify()
}

// list notes the kubelet's list, and the time when the plugin asked for it.
func (a *allocations) list(list []holding, asked time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	listed := map[string]bool{}
	for _, h := range list {
		h.seen = asked
		a.held[grantName(h.kind, h.IDs)] = h
		for _, id := range h.IDs {
			listed[id] = true
		}
	}
	maps.DeleteFunc(a.held, func(_ string, h holding) bool {
		keep := keepFor
		if h.Pod == "" && slices.ContainsFunc(h.IDs, func(id string) bool { return listed[id] }) {
			keep = initFor
		}
		return asked.Sub(h.seen) > keep
	})
	a.notify()
}

func (a *allocations) notify() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// waiting returns a channel that is closed at the next change.
func (a *allocations) waiting() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changed
}

// all returns the holdings by the names of their grants.
func (a *allocations) all() map[string]holding {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.held)
}

// use is how containers use a GPU: as which kinds, and how much. The load counts units or shares.
type use struct {
	kinds []kind
	units.Load
}

// otherThan reports whether a GPU is given out as another kind.
func (u use) otherThan(k kind) bool {
	return slices.ContainsFunc(u.kinds, func(o kind) bool { return o != k })
}

// uses returns the use of each GPU by its UUID. It counts a unit once even if several holdings have it:
// the containers of a pod that run one after the other get the same units.
func (a *allocations) uses() map[string]use {
	uses := map[string]use{}
	counted := map[string]bool{}
	for _, h := range a.all() {
		holds := map[string]bool{}
		for _, id := range h.IDs {
			uuid := h.kind.gpuOf(id)
			u := uses[uuid]
			if !slices.Contains(u.kinds, h.kind) {
				u.kinds = append(u.kinds, h.kind)
			}
			if unit := string(h.kind) + id; h.kind != wholeGPU && !counted[unit] {
				counted[unit] = true
				u.Units++
			}
			if !holds[uuid] {
				holds[uuid] = true
				u.Holders++
			}
			uses[uuid] = u
		}
	}
	return uses
}

// gpuOf returns the UUID of the GPU that a device id belongs to; empty if the id is not of the kind, as
// one of an earlier version of the plugin.
func (k kind) gpuOf(id string) string {
	if k == wholeGPU {
		return id
	}
	uuid, _, _ := units.Parse(id)
	return uuid
}

// Holders returns the containers with their GPUs, in no particular order.
func (p *Plugin) Holders() []grants.Holder {
	var holders []grants.Holder
	for _, h := range p.alloc.all() {
		g, err := p.grant(h.kind, h.IDs)
		if err != nil {
			continue // the node does not have the GPU any more
		}
		holders = append(holders, grants.Holder{Grant: g, Namespace: h.Namespace, Pod: h.Pod, Container: h.Container})
	}
	return holders
}
