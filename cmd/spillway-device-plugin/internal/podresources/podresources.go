// Package podresources asks the kubelet which container has which devices, by its PodResources API.
//
//	Client ── List ──▶ []Holding: a container's devices of one resource
package podresources

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// maxMessage is enough for the list of a full node: an id has about 50 bytes.
const maxMessage = 64 << 20

// Holding is the devices of one resource that a container has.
type Holding struct {
	Namespace string
	Pod       string
	Container string
	Resource  string
	IDs       []string // in order
}

// Client asks the kubelet through its socket. It keeps no connection between calls, so it needs no Close.
// It is safe for concurrent use.
type Client struct{ Socket string }

// List returns the holdings of all containers in the given resources.
func (c Client) List(ctx context.Context, resources ...string) ([]Holding, error) {
	conn, err := grpc.NewClient("unix://"+c.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	list, err := podresourcesapi.NewPodResourcesListerClient(conn).List(ctx, &podresourcesapi.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("asking the kubelet at %s what its pods have: %w (is its directory pod-resources "+
			"mounted?)", c.Socket, err)
	}
	var holdings []Holding
	for _, pod := range list.GetPodResources() {
		for _, container := range pod.GetContainers() {
			ids := map[string][]string{} // the kubelet has an entry for each NUMA node
			for _, d := range container.GetDevices() {
				if slices.Contains(resources, d.GetResourceName()) {
					ids[d.GetResourceName()] = append(ids[d.GetResourceName()], d.GetDeviceIds()...)
				}
			}
			for _, resource := range slices.Sorted(maps.Keys(ids)) {
				slices.Sort(ids[resource])
				holdings = append(holdings, Holding{
					Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName(),
					Resource: resource, IDs: slices.Compact(ids[resource]), // it lists a device on two nodes twice
				})
			}
		}
	}
	return holdings, nil
}
