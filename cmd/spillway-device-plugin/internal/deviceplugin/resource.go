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

// resource is one of the plugin's resources, as the kubelet calls it.
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

// GetDevicePluginOptions implements the API.
func (r *resource) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return r.options(), nil
}

// devices is all ids with their health.
func (r *resource) devices() []*pluginapi.Device {
	uses := r.p.alloc.uses()
	devices := make([]*pluginapi.Device, 0, len(r.all))
	health, nodes := map[string]string{}, map[string]*pluginapi.TopologyInfo{}
	for _, g := range r.p.cfg.Inventory.GPUs() {
		health[g.UUID] = pluginapi.Healthy
		if r.p.cfg.Inventory.Sick(g.UUID) != "" || r.otherWay(uses[g.UUID]) {
			health[g.UUID] = pluginapi.Unhealthy
		}
		if g.Node >= 0 {
			nodes[g.UUID] = &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(g.Node)}}}
		}
	}
	for _, id := range r.all {
		uuid := r.gpuOf(id)
		devices = append(devices, &pluginapi.Device{ID: id, Health: health[uuid], Topology: nodes[uuid]})
	}
	return devices
}

// otherWay reports whether a GPU is given as another resource.
func (r *resource) otherWay(u use) bool {
	return slices.ContainsFunc(u.kinds, func(k kind) bool { return k != r.kind })
}

// gpuOf returns the UUID of an id that is the resource's.
func (r *resource) gpuOf(id string) string {
	if r.kind == wholeGPU {
		return id
	}
	uuid, _, _ := units.Parse(id)
	return uuid
}

// ListAndWatch implements the API: all ids, and again when the health of one changes.
func (r *resource) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	var sent []string
	for {
		sick, given := r.p.cfg.Inventory.Changed(), r.p.alloc.waiting()
		devices := r.devices()
		state := make([]string, len(devices))
		for i, d := range devices {
			state[i] = d.Health
		}
		if sent == nil || !slices.Equal(sent, state) {
			if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: devices}); err != nil {
				return err
			}
			sent = state
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-sick:
		case <-given:
		}
	}
}

// GetPreferredAllocation implements the API. If no GPU has room for a container, its error becomes that
// of the pod.
func (r *resource) GetPreferredAllocation(_ context.Context, request *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
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
			return nil, refused(codes.ResourceExhausted, r, err)
		}
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

// chooseWhole prefers GPUs that are near each other: all of one NUMA node, if one has enough.
func (r *resource) chooseWhole(available, must []string, n int) ([]string, error) {
	if n < 1 || n < len(must) || n > len(available) {
		return nil, fmt.Errorf("%d of %d GPUs are wanted, with %d that must be among them", n, len(available), len(must))
	}
	node := map[string]int{}
	index := map[string]int{}
	on := map[int]int{} // GPUs on a node
	for _, id := range available {
		g, ok := r.p.cfg.Inventory.Find(id)
		if !ok {
			return nil, fmt.Errorf("%.100q is no GPU of this node", id)
		}
		node[id], index[id] = g.Node, g.Index
		on[g.Node]++
	}
	rank := func(id string) int { // the lower, the better
		switch {
		case slices.Contains(must, id):
			return 0
		case len(must) > 0 && node[id] == node[must[0]]:
			return 1
		case len(must) == 0 && on[node[id]] >= n: // the fullest node that has enough
			return 2 + on[node[id]]
		}
		return 1000 - on[node[id]]
	}
	ids := slices.Clone(available)
	slices.SortFunc(ids, func(a, b string) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(node[a], node[b]), cmp.Compare(index[a], index[b]), cmp.Compare(a, b))
	})
	return ids[:n], nil
}

// Allocate implements the API.
func (r *resource) Allocate(ctx context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	response := &pluginapi.AllocateResponse{}
	for _, c := range request.GetContainerRequests() {
		given, err := r.allocate(ctx, c.GetDevicesIds())
		if err != nil {
			return nil, refused(codes.FailedPrecondition, r, err)
		}
		response.ContainerResponses = append(response.ContainerResponses, given)
	}
	return response, nil
}

// PreStartContainer implements the API. A container that is started again is not allocated again. But
// what it mounts may be gone, as it is after a reboot.
func (r *resource) PreStartContainer(_ context.Context, request *pluginapi.PreStartContainerRequest) (*pluginapi.PreStartContainerResponse, error) {
	g, err := r.p.grant(r.kind, request.GetDevicesIds())
	if err == nil {
		if _, ok := r.p.alloc.all()[g.Name]; !ok {
			r.p.alloc.add(r.kind, request.GetDevicesIds(), time.Now())
		}
		_, err = r.put(g)
	}
	if err != nil {
		return nil, refused(codes.FailedPrecondition, r, err)
	}
	return &pluginapi.PreStartContainerResponse{}, nil
}

func refused(code codes.Code, r *resource, err error) error {
	r.p.cfg.Log.Warn("refused", "resource", r.name, "error", err)
	return status.Error(code, err.Error())
}

// allocate gives ids to one container.
func (r *resource) allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	g, err := r.p.grant(r.kind, ids)
	if err != nil {
		return nil, err
	}
	for _, gpu := range g.GPUs {
		if why := r.p.cfg.Inventory.Sick(gpu.UUID); why != "" {
			return nil, fmt.Errorf("%s is not healthy: %s: delete the pod, so that it gets another GPU", gpu.UUID, why)
		}
	}
	if other := r.taken(g); other != "" {
		r.p.refresh(ctx, time.Now()) // it may have been given back
		if other = r.taken(g); other != "" {
			return nil, fmt.Errorf("%s is given away already in another way: a GPU is given whole, in shares or in units", other)
		}
	}
	r.p.alloc.add(r.kind, ids, time.Now()) // first: so nothing removes its directory
	access, err := r.put(g)
	if err != nil {
		return nil, err
	}
	response := &pluginapi.ContainerAllocateResponse{Envs: access.Env}
	for _, m := range access.Mounts {
		response.Mounts = append(response.Mounts, &pluginapi.Mount{ContainerPath: m.Container, HostPath: m.Host, ReadOnly: m.ReadOnly})
	}
	if r.p.cfg.CDIName != nil {
		for _, gpu := range g.GPUs {
			response.CdiDevices = append(response.CdiDevices, &pluginapi.CDIDevice{Name: r.p.cfg.CDIName(gpu.UUID)})
		}
	}
	return response, nil
}

// taken returns a GPU of the grant that is given in another way, or "".
func (r *resource) taken(g grants.Grant) string {
	uses := r.p.alloc.uses()
	for _, gpu := range g.GPUs {
		if r.otherWay(uses[gpu.UUID]) {
			return gpu.UUID
		}
	}
	return ""
}

// put makes a grant's directory.
func (r *resource) put(g grants.Grant) (grants.Access, error) {
	r.p.putting.Lock()
	defer r.p.putting.Unlock()
	return r.p.cfg.Store.Put(g)
}

// grant returns the grant that ids stand for.
func (p *Plugin) grant(k kind, ids []string) (grants.Grant, error) {
	sorted := slices.Sorted(slices.Values(ids))
	if len(slices.Compact(slices.Clone(sorted))) != len(ids) || len(ids) == 0 {
		return grants.Grant{}, fmt.Errorf("%d devices are named, none or some of them twice", len(ids))
	}
	g := grants.Grant{Name: grantName(k, ids)}
	if k != wholeGPU {
		uuid, err := units.GPUOf(ids)
		if err != nil {
			return g, err
		}
		gpu, ok := p.cfg.Inventory.Find(uuid)
		if !ok {
			return g, fmt.Errorf("%.100q is no GPU of this node", uuid)
		}
		count, unit, err := p.divide(k, gpu)
		if err != nil {
			return g, err
		}
		for _, id := range ids {
			if _, n, _ := units.Parse(id); n >= count {
				return g, fmt.Errorf("%s: the GPU has only %d %s", id, count, k)
			}
		}
		g.GPUs, g.Limit, g.Own = append(g.GPUs, gpu), int64(len(ids))*unit, k == sharedGPU
		return g, nil
	}
	for _, uuid := range sorted {
		gpu, ok := p.cfg.Inventory.Find(uuid)
		if !ok {
			return g, fmt.Errorf("%.100q is no GPU of this node", uuid)
		}
		g.GPUs = append(g.GPUs, gpu)
	}
	return g, nil
}

// divide returns how many units or shares a GPU has, and how many bytes each is.
func (p *Plugin) divide(k kind, g gpus.GPU) (count int, unit int64, err error) {
	if k == sharedGPU {
		unit, err = p.cfg.Layout.Share(g, p.cfg.Shares)
		return p.cfg.Shares, unit, err
	}
	count, err = p.cfg.Layout.Count(g)
	return count, p.cfg.Layout.Unit, err
}
