package dra

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
)

// memory is the name of a device's capacity that claims consume.
const memory resourceapi.QualifiedName = "memory"

// deviceName returns a device's name for a GPU's UUID: Kubernetes wants a DNS label.
func deviceName(uuid string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(uuid))
}

// byDevice returns the GPUs by device name. It fails if two UUIDs give the same name.
func byDevice(list []gpus.GPU) (map[string]gpus.GPU, error) {
	names := make(map[string]gpus.GPU, len(list))
	for _, g := range list {
		name := deviceName(g.UUID)
		if wrong := validation.IsDNS1123Label(name); len(wrong) > 0 {
			return nil, fmt.Errorf("the GPU %.100q cannot be a device's name: %s", g.UUID, wrong[0])
		}
		if other, taken := names[name]; taken {
			return nil, fmt.Errorf("the GPUs %s and %s would have the same device's name", other.UUID, g.UUID)
		}
		names[name] = g
	}
	return names, nil
}

// pool returns the node's pool: a device for each healthy GPU, in slices of Kubernetes' maximum size. It
// has at least one slice, which shows that the driver runs. If exclusive is set, each device is for one
// claim.
func pool(inventory *gpus.Inventory, layout units.Layout, exclusive bool) (resourceslice.Pool, error) {
	var devices []resourceapi.Device
	for _, g := range inventory.GPUs() {
		if inventory.Sick(g.UUID) != "" {
			continue
		}
		d, err := device(g, layout, exclusive)
		if err != nil {
			return resourceslice.Pool{}, err
		}
		devices = append(devices, d)
	}
	var p resourceslice.Pool
	for part := range slices.Chunk(devices, resourceapi.ResourceSliceMaxDevices) {
		p.Slices = append(p.Slices, resourceslice.Slice{Devices: part})
	}
	if len(p.Slices) == 0 {
		p.Slices = make([]resourceslice.Slice, 1)
	}
	return p, nil
}

// device returns a GPU as a device for the scheduler.
func device(g gpus.GPU, layout units.Layout, exclusive bool) (resourceapi.Device, error) {
	n, err := layout.Count(g)
	if err != nil {
		return resourceapi.Device{}, err
	}
	d := resourceapi.Device{Name: deviceName(g.UUID),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}}
	text := func(name resourceapi.QualifiedName, value string) {
		if len(value) > resourceapi.DeviceAttributeMaxValueLength {
			value = strings.ToValidUTF8(value[:resourceapi.DeviceAttributeMaxValueLength], "")
		}
		if value != "" {
			d.Attributes[name] = resourceapi.DeviceAttribute{StringValue: &value}
		}
	}
	number := func(name resourceapi.QualifiedName, value int) {
		v := int64(value)
		d.Attributes[name] = resourceapi.DeviceAttribute{IntValue: &v}
	}
	text("uuid", g.UUID)
	text("productName", g.Name)
	text("type", "gpu")
	if g.Parent != "" {
		text("type", "mig")
		text("parentUUID", g.Parent)
	}
	number("index", g.Index)
	if g.Node >= 0 {
		number(deviceattribute.StandardDeviceAttributeNUMANode, g.Node)
	}
	all := quantity(int64(n) * layout.Unit)
	capacity := resourceapi.DeviceCapacity{Value: *all}
	if !exclusive {
		yes := true
		d.AllowMultipleAllocations = &yes
		unit := quantity(layout.Unit)
		capacity.RequestPolicy = &resourceapi.CapacityRequestPolicy{
			Default:    all, // a claim without a capacity gets the whole GPU
			ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: unit, Max: all, Step: unit},
		}
		if n == 1 { // a range of one value cannot have a step
			capacity.RequestPolicy.ValidRange.Step = nil
		}
	}
	d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{memory: capacity}
	return d, nil
}

func quantity(bytes int64) *resource.Quantity { return resource.NewQuantity(bytes, resource.BinarySI) }
