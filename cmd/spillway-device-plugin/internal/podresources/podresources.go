// Package podresources asks the kubelet which container has which devices.
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

// maxMessage is above what the list of a full node needs: an id has some 50 bytes.
const maxMessage = 64 << 20

// Holding is the devices of one resource that a container has.
type Holding struct {
	Namespace string
	Pod       string
	Container string
	Resource  string
	IDs       []string // in order
}

// Client asks the kubelet over its socket. It holds no connection between calls, so it needs no
// Close. It may be used by several goroutines.
type Client struct{ Socket string }

// List returns what all containers have of the resources.
func (c Client) List(ctx context.Context, resources ...string) ([]Holding, error) {
	conn, err := grpc.NewClient("unix://"+c.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	list, err := podresourcesapi.NewPodResourcesListerClient(conn).List(ctx, &podresourcesapi.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("asking the kubelet at %s what its pods have: %w (is its directory pod-resources mounted?)", c.Socket, err)
	}
	var holdings []Holding
	for _, pod := range list.GetPodResources() {
		for _, container := range pod.GetContainers() {
			ids := map[string][]string{} // there is an entry for each NUMA node
			for _, d := range container.GetDevices() {
				if slices.Contains(resources, d.GetResourceName()) {
					ids[d.GetResourceName()] = append(ids[d.GetResourceName()], d.GetDeviceIds()...)
				}
			}
			for _, resource := range slices.Sorted(maps.Keys(ids)) {
				slices.Sort(ids[resource])
				holdings = append(holdings, Holding{
					Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName(),
					Resource: resource, IDs: slices.Compact(ids[resource]), // one on two nodes is listed twice
				})
			}
		}
	}
	return holdings, nil
}
