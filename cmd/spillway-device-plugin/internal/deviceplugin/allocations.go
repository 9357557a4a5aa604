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

// What a grant's name begins with says which resource it is of.
const (
	unitsPrefix = "units-"
	wholePrefix = "gpus-"
)

// grantName is the name of the grant for these ids, whatever their order. So it need not be kept.
func grantName(whole bool, ids []string) string {
	sum := sha256.Sum256([]byte(strings.Join(slices.Sorted(slices.Values(ids)), "\n")))
	if whole {
		return wholePrefix + hex.EncodeToString(sum[:8])
	}
	return unitsPrefix + hex.EncodeToString(sum[:8])
}

// holding is a container's part of one resource. Until the kubelet lists it, it has no pod.
type holding struct {
	podresources.Holding
	whole bool
	seen  time.Time // when it was given, or listed the last time
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

// add notes what is given to a container that the kubelet does not list yet.
func (a *allocations) add(whole bool, ids []string, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held[grantName(whole, ids)] = holding{podresources.Holding{IDs: slices.Clone(ids)}, whole, now}
	a.tell()
}

// list takes the kubelet's list, which it was asked for at a moment.
func (a *allocations) list(list []holding, asked time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	given := map[string]bool{}
	for _, h := range list {
		h.seen = asked
		a.held[grantName(h.whole, h.IDs)] = h
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

// use is how a GPU is given away.
type use struct {
	whole bool
	units.Load
}

// uses returns how each GPU is given away. A unit counts once: the containers of a pod that run one
// after the other have the same.
func (a *allocations) uses() map[string]use {
	uses := map[string]use{}
	seen := map[string]bool{}
	for _, h := range a.all() {
		of := map[string]bool{}
		for _, id := range h.IDs {
			uuid := id
			if !h.whole {
				var err error
				if uuid, _, err = units.Parse(id); err != nil {
					continue // of an earlier version
				}
			}
			u := uses[uuid]
			if h.whole {
				u.whole = true
			} else if !seen[id] {
				seen[id] = true
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
		g, err := p.grant(h.whole, h.IDs)
		if err != nil {
			continue // the GPU is not there any more
		}
		holders = append(holders, grants.Holder{Grant: g, Namespace: h.Namespace, Pod: h.Pod, Container: h.Container})
	}
	slices.SortFunc(holders, func(a, b grants.Holder) int { return strings.Compare(a.Name, b.Name) })
	return holders
}
