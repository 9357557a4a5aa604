package deviceplugin

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
)

// resource is one of the plugin's resources. The kubelet knows its devices by ids: those of units and
// shares are made by units.ID, and a whole GPU has its UUID.
type resource struct {
	pluginapi.UnimplementedDevicePluginServer
	p    *Plugin
	name string
	kind kind
	all  []string // ids
}

func (r *resource) options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true}
}

// GetDevicePluginOptions implements the kubelet's API.
func (r *resource) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return r.options(), nil
}

// devices returns all devices with their health. Those of a GPU that is given out as another resource
// are unhealthy, so that the scheduler counts what is free.
func (r *resource) devices() []*pluginapi.Device {
	uses := r.p.alloc.uses()
	devices := make([]*pluginapi.Device, 0, len(r.all))
	health, nodes := map[string]string{}, map[string]*pluginapi.TopologyInfo{}
	for _, g := range r.p.cfg.Inventory.GPUs() {
		health[g.UUID] = pluginapi.Healthy
		if r.p.cfg.Inventory.Sick(g.UUID) != "" || uses[g.UUID].otherThan(r.kind) {
			health[g.UUID] = pluginapi.Unhealthy
		}
		if g.Node >= 0 {
			nodes[g.UUID] = &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(g.Node)}}}
		}
	}
	for _, id := range r.all {
		uuid := r.kind.gpuOf(id)
		devices = append(devices, &pluginapi.Device{ID: id, Health: health[uuid], Topology: nodes[uuid]})
	}
	return devices
}

// ListAndWatch implements the kubelet's API. It sends all devices, and again when the health of one
// changes.
func (r *resource) ListAndWatch(
	_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse],
) error {
	sameHealth := func(a, b *pluginapi.Device) bool { return a.Health == b.Health }
	var sent []*pluginapi.Device
	for {
		sick, given := r.p.cfg.Inventory.Changed(), r.p.alloc.waiting()
		if devices := r.devices(); !slices.EqualFunc(sent, devices, sameHealth) {
			if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: devices}); err != nil {
				return err
			}
			sent = devices
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-sick:
		case <-given:
		}
	}
}

// GetPreferredAllocation implements the kubelet's API. If no GPU has room for a container, the error
// appears in the events of the container's pod.
func (r *resource) GetPreferredAllocation(
	_ context.Context, request *pluginapi.PreferredAllocationRequest,
) (*pluginapi.PreferredAllocationResponse, error) {
	response := &pluginapi.PreferredAllocationResponse{}
	uses := r.p.alloc.uses()
	for _, c := range request.GetContainerRequests() {
		var ids []string
		var err error
		if r.kind == wholeGPU {
			ids, err = r.chooseWhole(c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize()))
		} else {
			ids, err = units.Choose(c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize()),
				func(uuid string) units.Load { return uses[uuid].Load })
		}
		if err != nil {
			return nil, r.refused(codes.ResourceExhausted, err)
		}
		response.ContainerResponses = append(response.ContainerResponses,
			&pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

// chooseWhole returns n of the available GPUs, including those in must. It prefers GPUs of one NUMA
// node: that of must, or else the node that has the fewest available GPUs of those that have enough.
func (r *resource) chooseWhole(available, must []string, n int) ([]string, error) {
	if n < 1 || n < len(must) || n > len(available) {
		return nil, fmt.Errorf("%d of %d GPUs are wanted, with %d that must be among them", n, len(available),
			len(must))
	}
	byID := map[string]gpus.GPU{}
	on := map[int]int{} // available GPUs by NUMA node
	for _, id := range available {
		g, ok := r.p.cfg.Inventory.Find(id)
		if !ok {
			return nil, fmt.Errorf("%.100q is no GPU of this node", id)
		}
		byID[id] = g
		on[g.Node]++
	}
	rank := func(id string) int { // lower is better
		node := byID[id].Node
		switch {
		case slices.Contains(must, id):
			return 0
		case len(must) > 0 && node == byID[must[0]].Node:
			return 1
		case len(must) == 0 && on[node] >= n:
			return 2 + on[node]
		}
		return 1000 - on[node]
	}
	ids := slices.Clone(available)
	slices.SortFunc(ids, func(a, b string) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(byID[a].Node, byID[b].Node), cmp.Compare(byID[a].Index,
			byID[b].Index), cmp.Compare(a, b))
	})
	return ids[:n], nil
}

// Allocate implements the kubelet's API.
func (r *resource) Allocate(
	ctx context.Context, request *pluginapi.AllocateRequest,
) (*pluginapi.AllocateResponse, error) {
	response := &pluginapi.AllocateResponse{}
	for _, c := range request.GetContainerRequests() {
		given, err := r.allocate(ctx, c.GetDevicesIds())
		if err != nil {
			return nil, r.refused(codes.FailedPrecondition, err)
		}
		response.ContainerResponses = append(response.ContainerResponses, given)
	}
	return response, nil
}

// PreStartContainer implements the kubelet's API. The kubelet does not call Allocate again for a
// container that it restarts, but the grant's directory may be gone, as after a reboot.
func (r *resource) PreStartContainer(
	_ context.Context, request *pluginapi.PreStartContainerRequest,
) (*pluginapi.PreStartContainerResponse, error) {
	g, err := r.p.grant(r.kind, request.GetDevicesIds())
	if err == nil {
		if _, ok := r.p.alloc.all()[g.Name]; !ok {
			r.p.alloc.add(r.kind, request.GetDevicesIds(), time.Now())
		}
		_, err = r.put(g)
	}
	if err != nil {
		return nil, r.refused(codes.FailedPrecondition, err)
	}
	return &pluginapi.PreStartContainerResponse{}, nil
}

func (r *resource) refused(code codes.Code, err error) error {
	r.p.cfg.Log.Warn("refused", "resource", r.name, "error", err)
	return status.Error(code, err.Error())
}

// allocate gives the devices with some ids to one container.
func (r *resource) allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	g, err := r.p.grant(r.kind, ids)
	if err != nil {
		return nil, err
	}
	taken := func() string { // a GPU of the grant that is given out as another resource
		uses := r.p.alloc.uses()
		for _, gpu := range g.GPUs {
			if uses[gpu.UUID].otherThan(r.kind) {
				return gpu.UUID
			}
		}
		return ""
	}
	for _, gpu := range g.GPUs {
		if why := r.p.cfg.Inventory.Sick(gpu.UUID); why != "" {
			return nil, fmt.Errorf("%s is not healthy: %s: delete the pod, so that it gets another GPU", gpu.UUID, why)
		}
	}
	if taken() != "" {
		r.p.refresh(ctx, time.Now()) // the pod that had it may be gone
	}
	if other := taken(); other != "" {
		return nil, fmt.Errorf("%s is given away already in another way: a GPU is given whole, in shares or in units",
			other)
	}
	r.p.alloc.add(r.kind, ids, time.Now()) // before put, so that no sweep removes the directory
	access, err := r.put(g)
	if err != nil {
		return nil, err
	}
	response := &pluginapi.ContainerAllocateResponse{Envs: access.Env}
	for _, m := range access.Mounts {
		response.Mounts = append(response.Mounts, &pluginapi.Mount{ContainerPath: m.Container, HostPath: m.Host,
			ReadOnly: m.ReadOnly})
	}
	if r.p.cfg.CDIName != nil {
		for _, gpu := range g.GPUs {
			response.CdiDevices = append(response.CdiDevices, &pluginapi.CDIDevice{Name: r.p.cfg.CDIName(gpu.UUID)})
		}
	}
	return response, nil
}

// put makes a grant's directory.
func (r *resource) put(g grants.Grant) (grants.Access, error) {
	r.p.putting.Lock()
	defer r.p.putting.Unlock()
	return r.p.cfg.Store.Put(g)
}

// grant returns the grant for some device ids.
func (p *Plugin) grant(k kind, ids []string) (grants.Grant, error) {
	uuids := slices.Sorted(slices.Values(ids))
	if len(slices.Compact(slices.Clone(uuids))) != len(ids) || len(ids) == 0 {
		return grants.Grant{}, fmt.Errorf("%d devices are named, none or some of them twice", len(ids))
	}
	g := grants.Grant{Name: grantName(k, ids), Own: k == sharedGPU}
	if k != wholeGPU {
		uuid, err := units.GPUOf(ids)
		if err != nil {
			return g, err
		}
		uuids = []string{uuid}
	}
	for _, uuid := range uuids {
		gpu, ok := p.cfg.Inventory.Find(uuid)
		if !ok {
			return g, fmt.Errorf("%.100q is no GPU of this node", uuid)
		}
		g.GPUs = append(g.GPUs, gpu)
	}
	if k == wholeGPU {
		return g, nil
	}
	count, unit, err := p.divide(k, g.GPUs[0])
	if err != nil {
		return g, err
	}
	for _, id := range ids {
		if _, n, _ := units.Parse(id); n >= count {
			return g, fmt.Errorf("%s: the GPU has only %d %s", id, count, k)
		}
	}
	g.Limit = int64(len(ids)) * unit
	return g, nil
}

// divide returns how many units or shares a GPU has, and the bytes of each.
func (p *Plugin) divide(k kind, g gpus.GPU) (count int, unit int64, err error) {
	if k == sharedGPU {
		unit, err = p.cfg.Layout.Share(g, p.cfg.Shares)
		return p.cfg.Shares, unit, err
	}
	count, err = p.cfg.Layout.Count(g)
	return count, p.cfg.Layout.Unit, err
}
