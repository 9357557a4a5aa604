package dra

import (
	"errors"
	"fmt"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// What one node may ask of the API server. client-go's own limit, of 5 in a second, would let a sweep over
// the claims of a full node hold up the kubelet's requests.
const (
	perSecond = 50
	atOnce    = 100
)

// Connect returns a client of the API server that a kubeconfig file names; empty: of the cluster that
// this process is a pod of. The server is not asked yet.
func Connect(kubeconfig string) (kubernetes.Interface, error) {
	var config *rest.Config
	var err error
	if kubeconfig == "" {
		config, err = rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, errors.New("no API server is known: this is no pod of a cluster (name a file by --kubeconfig)")
		}
		if err != nil {
			return nil, fmt.Errorf("the API server: %w (is the pod's automountServiceAccountToken off?)", err)
		}
	} else if config, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
		return nil, fmt.Errorf("the API server: %w (see --kubeconfig)", err)
	}
	config.QPS, config.Burst = perSecond, atOnce
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("the API server: %w (see --kubeconfig)", err)
	}
	return client, nil
}
