package dra

import (
	"math/big"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
)

// A MIG instance is a device of its own, which says whose it is. Claims get it by its own UUID.
func TestInstances(t *testing.T) {
	const gpu, instance = "GPU-5d6c0b1e-9f0a-4b7f-8a1e-0e7f1c2d3b4a", "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"
	n := newNode(t, apiServer(false), gpus.GPU{UUID: instance, Name: "NVIDIA H100 80GB HBM3 MIG 1g.10gb", Index: 3, Memory: 1 << 30, Node: 1, Parent: gpu, GPUInstance: 7, Simulated: true},
		gpus.GPU{UUID: "GPU-1", Name: strings.Repeat("long", 40), Memory: 1 << 30, Node: -1, Simulated: true})
	n.start()
	name := strings.ToLower(instance)
	a := n.published()[name].Attributes
	if *a["type"].StringValue != "mig" || *a["parentUUID"].StringValue != gpu || *a["uuid"].StringValue != instance || *a["index"].IntValue != 3 ||
		*a["resource.kubernetes.io/numaNode"].IntValue != 1 {
		t.Errorf("%+v", a)
	}
	other := n.published()["gpu-1"].Attributes
	_, near := other["resource.kubernetes.io/numaNode"]
	if _, parent := other["parentUUID"]; parent || near || *other["type"].StringValue != "gpu" || len(*other["productName"].StringValue) != 64 {
		t.Errorf("%+v", other)
	}
	env, _ := n.container(n.prepared(n.claim("a", part{name, 256})))
	if env["SPILLWAY_GPU_UUID"] != instance || env["SPILLWAY_GPU_MEMORY_LIMIT"] != "256Mi" {
		t.Errorf("%v", env)
	}
}

// With a ratio more is given than the GPU has, and not more than that.
func TestRatio(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.cfg.Layout.Ratio = big.NewRat(3, 2)
	n.start()
	capacity := n.published()["sim-0"].Capacity[memory]
	if capacity.Value.Value() != 3<<29 || capacity.RequestPolicy.ValidRange.Max.Value() != 3<<29 {
		t.Errorf("%+v", capacity)
	}
	n.prepared(n.claim("a", part{"sim-0", 1024}))
	n.prepared(n.claim("b", part{"sim-0", 512}))
	if _, refusal := n.prepare(n.claim("c", part{"sim-0", 256})); !strings.Contains(refusal, "sim-0 has 1.5 GiB to give, other claims have 1.5 GiB of it") {
		t.Errorf("%q", refusal)
	}
	whole, most := n.claim("whole", part{"sim-1", 1536}), n.claim("most", part{"sim-1", 1280})
	n.prepared(whole)
	if limit := n.limit(whole); limit != "none" {
		t.Error(limit)
	}
	n.unprepare(whole)
	n.prepared(most)
	if limit := n.limit(most); limit != "1280Mi" { // above what there is: the rest spills
		t.Error(limit)
	}
}

// A GPU of one unit goes whole to one claim, and no step leads nowhere.
func TestOneUnit(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.cfg.Layout = units.Layout{Unit: 1 << 30}
	n.start()
	policy := n.published()["sim-0"].Capacity[memory].RequestPolicy
	if policy.ValidRange.Step != nil || policy.ValidRange.Min.Value() != 1<<30 || policy.ValidRange.Max.Value() != 1<<30 {
		t.Errorf("%+v", policy)
	}
	c := n.claim("a", part{"sim-0", 1024})
	n.prepared(c)
	if limit := n.limit(c); limit != "none" {
		t.Error(limit)
	}
	if _, refusal := n.prepare(n.claim("b", part{"sim-0", 1024})); !strings.Contains(refusal, "too much of a GPU") {
		t.Errorf("%q", refusal)
	}
}
