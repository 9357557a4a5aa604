package dra

import (
	"errors"
	"fmt"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Limits for the requests of one node to the API server. With client-go's default, 5 per second, a sweep
// over the claims of a full node would delay the kubelet's requests.
const (
	perSecond = 50
	atOnce    = 100
)

// Connect returns a client of the API server that a kubeconfig file names, or, if kubeconfig is empty, of
// the cluster in which this process is a pod. It does not call the server.
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
