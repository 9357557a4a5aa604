package dra

import (
	"fmt"
	"os"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"sigs.k8s.io/yaml"
)

// classes is the cluster's device classes: the one that deploy/ has.
type classes struct{ class resourceapi.DeviceClass }

func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	return []*resourceapi.DeviceClass{&c.class}, nil
}

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if name != c.class.Name {
		return nil, fmt.Errorf("there is no class %s", name)
	}
	return &c.class, nil
}

// document returns the manifest of a kind.
func document(t *testing.T, file, kind string, into any) {
	t.Helper()
	text, err := os.ReadFile("../../../../deploy/" + file)
	if err != nil {
		t.Fatal(err)
	}
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		if strings.Contains(doc, "\nkind: "+kind+"\n") {
			if err := yaml.UnmarshalStrict([]byte(doc), into); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("%s has no %s", file, kind)
}

// The scheduler's own allocator takes the examples' claims out of what the driver publishes, until
// nothing is left; and the driver prepares each of them.
func TestAllocator(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.start()
	list, err := n.client.ResourceV1().ResourceSlices().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var published []*resourceapi.ResourceSlice
	for i := range list.Items {
		published = append(published, &list.Items[i])
	}
	var class classes
	document(t, "dra-driver.yaml", "DeviceClass", &class.class)
	var shared resourceapi.ResourceClaimTemplate
	document(t, "example-claims.yaml", "ResourceClaimTemplate", &shared)
	var whole resourceapi.ResourceClaim
	document(t, "example-claims.yaml", "ResourceClaim", &whole)

	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	// allocate is what the scheduler does for a claim. It returns the device; empty: there is no room.
	allocate := func(name string, spec resourceapi.ResourceClaimSpec, memoryOf string) string {
		t.Helper()
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("0000-" + name)}, Spec: *spec.DeepCopy()}
		for i := range c.Spec.Devices.Requests {
			c.Spec.Devices.Requests[i].Exactly.AllocationMode = resourceapi.DeviceAllocationModeExactCount // the API server's defaults
			c.Spec.Devices.Requests[i].Exactly.Count = 1
			if memoryOf != "" {
				c.Spec.Devices.Requests[i].Exactly.Capacity.Requests[memory] = resource.MustParse(memoryOf)
			}
		}
		allocator, err := structured.NewAllocator(t.Context(), structured.Features{ConsumableCapacity: true}, state, class, published,
			cel.NewCache(10, cel.Features{EnableConsumableCapacity: true}))
		if err != nil {
			t.Fatal(err)
		}
		results, err := allocator.Allocate(t.Context(), &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, []*resourceapi.ResourceClaim{c})
		if err != nil {
			t.Fatal(err)
		}
		if len(results) == 0 {
			return ""
		}
		c.Status.Allocation = &results[0]
		for _, r := range results[0].Devices.Results {
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		}
		n.create(c)
		return n.prepared(c)[0].DeviceName
	}
	limit := func(name string) int64 {
		for _, h := range n.driver.Holders() {
			if h.Claim == name {
				return h.Limit >> 20
			}
		}
		return -1
	}
	// Each is rounded up to whole units of 256 MiB.
	if first, second := allocate("a", shared.Spec.Spec, "300Mi"), allocate("b", shared.Spec.Spec, "512Mi"); first != "sim-0" || second != "sim-0" {
		t.Errorf("%s, %s", first, second)
	}
	if limit("a") != 512 || limit("b") != 512 {
		t.Error(n.driver.Holders())
	}
	if device := allocate("c", whole.Spec, ""); device != "sim-1" || limit("c") != 0 {
		t.Errorf("%s, %d", device, limit("c"))
	}
	if device := allocate("d", shared.Spec.Spec, "1Mi"); device != "" {
		t.Errorf("more than there is: of %s", device)
	}
}
