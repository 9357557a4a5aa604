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

// kind is one of the ways in which a GPU is given to containers. A grant's name begins with it.
type kind string

const (
	memoryUnits kind = "units"  // units of its memory: their sum is the container's limit
	wholeGPU    kind = "gpus"   // all of it, without a limit
	sharedGPU   kind = "shares" // a share of it: the container sets its limit itself
)

// grantName returns the name of the grant for these ids. It does not depend on their order, so that a
// plugin which starts again finds the same name.
func grantName(k kind, ids []string) string {
	sum := sha256.Sum256([]byte(strings.Join(slices.Sorted(slices.Values(ids)), "\n")))
	return string(k) + "-" + hex.EncodeToString(sum[:8])
}

// holding is a container's part of one resource. It has no pod until the kubelet lists it.
type holding struct {
	podresources.Holding
	kind kind
	seen time.Time // when it was given, or listed the last time
}

const (
	// keepFor is how long a holding counts that the kubelet does not list. It lists a pod when it is
	// admitted, and never one that it refuses after the allocation. A kubelet that was just started
	// may answer before it knows its pods.
	keepFor = time.Minute
	// initFor is the same for one that was never listed and has ids of a container that is: then it is
	// an init container's, which is not listed.
	initFor = 24 * time.Hour
)

// allocations are who has what of the GPUs: what the kubelet lists, and what it was just given. Safe
// for concurrent use.
type allocations struct {
	mu      sync.Mutex
	held    map[string]holding // by the grant's name
	changed chan struct{}      // closed at a change
}

func newAllocations() *allocations {
	return &allocations{held: map[string]holding{}, changed: make(chan struct{})}
}

// add notes the ids that a container gets before the kubelet lists it.
func (a *allocations) add(k kind, ids []string, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held[grantName(k, ids)] = holding{podresources.Holding{IDs: slices.Clone(ids)}, k, now}
	a.tell()
}

// list takes the kubelet's list, which it was asked for at a moment.
func (a *allocations) list(list []holding, asked time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	given := map[string]bool{}
	for _, h := range list {
		h.seen = asked
		a.held[grantName(h.kind, h.IDs)] = h
		for _, id := range h.IDs {
			given[id] = true
		}
	}
	for name, h := range a.held {
		most := keepFor
		if h.Pod == "" && slices.ContainsFunc(h.IDs, func(id string) bool { return given[id] }) {
			most = initFor
		}
		if asked.Sub(h.seen) > most {
			delete(a.held, name)
		}
	}
	a.tell()
}

func (a *allocations) tell() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// waiting returns a channel that is closed at the next change.
func (a *allocations) waiting() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changed
}

// all returns every holding by the name of its grant.
func (a *allocations) all() map[string]holding {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.held)
}

// use is how much of a GPU is given away. The units of the load are shares if the GPU is shared.
type use struct {
	kinds []kind
	units.Load
}

// uses returns the use of each GPU. A unit counts once: the containers of a pod that run one after the
// other have the same.
func (a *allocations) uses() map[string]use {
	uses := map[string]use{}
	seen := map[string]bool{}
	for _, h := range a.all() {
		of := map[string]bool{}
		for _, id := range h.IDs {
			uuid := id
			if h.kind != wholeGPU {
				var err error
				if uuid, _, err = units.Parse(id); err != nil {
					continue // of an earlier version
				}
			}
			u := uses[uuid]
			if !slices.Contains(u.kinds, h.kind) {
				u.kinds = append(u.kinds, h.kind)
			}
			if counted := string(h.kind) + id; h.kind != wholeGPU && !seen[counted] {
				seen[counted] = true
				u.Units++
			}
			if !of[uuid] {
				of[uuid] = true
				u.Holders++
			}
			uses[uuid] = u
		}
	}
	return uses
}

// Holders returns who has which GPU memory.
func (p *Plugin) Holders() []grants.Holder {
	var holders []grants.Holder
	for _, h := range p.alloc.all() {
		g, err := p.grant(h.kind, h.IDs)
		if err != nil {
			continue // the GPU is not there any more
		}
		holders = append(holders, grants.Holder{Grant: g, Namespace: h.Namespace, Pod: h.Pod, Container: h.Container})
	}
	slices.SortFunc(holders, func(a, b grants.Holder) int { return strings.Compare(a.Name, b.Name) })
	return holders
}
