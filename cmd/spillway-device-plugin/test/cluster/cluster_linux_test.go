package cluster

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	authv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apiserver/pkg/storage/etcd3/testserver"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app/testing"
	"k8s.io/kubernetes/pkg/controller/resourceclaim"
	kubeletdra "k8s.io/kubernetes/pkg/kubelet/cm/dra"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/kubernetes/pkg/scheduler/profile"
	"sigs.k8s.io/yaml"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/cdispec"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/dra"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
)

const (
	driverName  = "gpu.spillway-db.github.io"
	clusterNode = "node-1"
)

// cluster runs Kubernetes' own code in this process: etcd, the API server, the scheduler, the controller of
// claims, and the parts of a kubelet that call drivers. Nothing runs the pods' containers.
type cluster struct {
	t       *testing.T
	config  *rest.Config
	client  kubernetes.Interface // of an administrator
	ctx     context.Context      // ends before the API server does
	dir     string
	kubelet *kubeletdra.Manager
	stopped func() // of the kubelet

	log       logText
	cfg       dra.Config
	driver    *dra.Driver
	endDriver func()
}

// logText is a log that goroutines write to.
type logText struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (x *logText) Write(p []byte) (int, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.b.Write(p)
}

func (x *logText) String() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.b.String()
}

// newCluster starts all but the kubelet and the driver.
func newCluster(t *testing.T, flags ...string) *cluster {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: the ledger is root's")
	}
	etcd := testserver.RunEtcd(t, nil)
	storage := storagebackend.NewDefaultConfig("/registry", nil)
	storage.Transport.ServerList = etcd.Endpoints()
	// The disabled plugins need controllers that do not run here.
	server, err := apiserver.StartTestServer(t, apiserver.NewDefaultTestServerOptions(),
		append(flags, "--authorization-mode=RBAC", "--allow-privileged", "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"), storage)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.TearDownFn)
	dir, err := os.MkdirTemp("", "spillway-") // t.TempDir's may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	c := &cluster{t: t, config: server.ClientConfig, ctx: ctx, dir: dir, client: kubernetes.NewForConfigOrDie(server.ClientConfig)}
	for _, of := range []string{"plugins_registry", "state"} {
		if err := os.Mkdir(filepath.Join(dir, of), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.client.CoreV1().Nodes().Create(ctx, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: clusterNode},
		Status: v1.NodeStatus{Allocatable: v1.ResourceList{v1.ResourcePods: resource.MustParse("110")}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.controllers()
	return c
}

// controllers starts the scheduler and the controller of claims.
func (c *cluster) controllers() {
	factory := scheduler.NewInformerFactory(c.client, 0, nil)
	objects := dynamicinformer.NewDynamicSharedInformerFactory(dynamic.NewForConfigOrDie(c.config), 0)
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: c.client.EventsV1()})
	s, err := scheduler.New(c.ctx, c.client, factory, objects, profile.NewRecorderFactory(broadcaster))
	if err != nil {
		c.t.Fatal(err)
	}
	claims, err := resourceclaim.NewController(klog.Background(), c.client, factory.Core().V1().Pods(), nil,
		factory.Resource().V1().ResourceClaims(), factory.Resource().V1().ResourceClaimTemplates())
	if err != nil {
		c.t.Fatal(err)
	}
	factory.Start(c.ctx.Done())
	objects.Start(c.ctx.Done())
	factory.WaitForCacheSync(c.ctx.Done())
	var running sync.WaitGroup
	running.Go(func() { s.Run(c.ctx) })
	running.Go(func() { claims.Run(c.ctx, 1) })
	c.t.Cleanup(func() {
		broadcaster.Shutdown()
		running.Wait()
		factory.Shutdown()
	})
	ctx, cancel := context.WithCancel(c.ctx)
	c.ctx = ctx
	c.t.Cleanup(cancel)
}

// apply creates the objects of a manifest in deploy/. The API server refuses unknown fields.
func (c *cluster) apply(file string) {
	c.t.Helper()
	text, err := os.ReadFile("../../../../deploy/" + file)
	if err != nil {
		c.t.Fatal(err)
	}
	groups, err := restmapper.GetAPIGroupResources(c.client.Discovery())
	if err != nil {
		c.t.Fatal(err)
	}
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	client := dynamic.NewForConfigOrDie(c.config)
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var o unstructured.Unstructured
		if err := yaml.Unmarshal([]byte(doc), &o.Object); err != nil {
			c.t.Fatal(err)
		}
		kind := o.GroupVersionKind()
		mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil {
			c.t.Fatal(err)
		}
		var to dynamic.ResourceInterface = client.Resource(mapping.Resource)
		if mapping.Scope.Name() == "namespace" {
			if o.GetNamespace() == "" {
				o.SetNamespace("default")
			}
			to = client.Resource(mapping.Resource).Namespace(o.GetNamespace())
		}
		eventually(c.t, func() error { // the server makes its own namespaces in its own time
			_, err := to.Create(c.ctx, &o, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict})
			if err != nil && !apierrors.IsNotFound(err) {
				c.t.Fatalf("%s: %v", file, err)
			}
			return err
		})
	}
}

// startKubelet starts a kubelet's code for drivers, with the state of the kubelet before it.
func (c *cluster) startKubelet() {
	c.t.Helper()
	ctx, cancel := context.WithCancel(c.ctx)
	m, err := kubeletdra.NewManager(klog.Background(), c.client, filepath.Join(c.dir, "state"))
	if err != nil {
		c.t.Fatal(err)
	}
	getNode := func(ctx context.Context) (*v1.Node, error) {
		return c.client.CoreV1().Nodes().Get(ctx, clusterNode, metav1.GetOptions{})
	}
	ready := &kubelet{} // it has heard of its pods
	if err := m.Start(ctx, func() []*v1.Pod { return c.pods() }, getNode, ready); err != nil {
		c.t.Fatal(err)
	}
	plugins := pluginmanager.NewPluginManager(filepath.Join(c.dir, "plugins_registry"), record.NewFakeRecorder(100))
	plugins.AddHandler(registerapi.DRAPlugin, m.GetWatcherHandler())
	var running sync.WaitGroup
	running.Go(func() { plugins.Run(ctx, ready, ctx.Done()) })
	c.kubelet = m
	c.stopped = sync.OnceFunc(func() {
		cancel()
		running.Wait()
		m.Stop()
	})
	c.t.Cleanup(func() { c.stopped() })
}

// pods returns the pods on the node.
func (c *cluster) pods() (list []*v1.Pod) {
	pods, err := c.client.CoreV1().Pods("").List(c.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + clusterNode})
	if err != nil {
		return nil
	}
	for i := range pods.Items {
		list = append(list, &pods.Items[i])
	}
	return list
}

const account = "spillway-dra-driver"

// as returns a client with a token of the driver's account, bound to a pod unless pod is nil.
func (c *cluster) as(pod *v1.Pod) kubernetes.Interface {
	return kubernetes.NewForConfigOrDie(c.configOf(pod))
}

func (c *cluster) configOf(pod *v1.Pod) *rest.Config {
	c.t.Helper()
	request := &authv1.TokenRequest{}
	if pod != nil {
		request.Spec.BoundObjectRef = &authv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
	}
	token, err := c.client.CoreV1().ServiceAccounts("kube-system").CreateToken(c.ctx, account, request, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(c.config)
	config.BearerToken = token.Status.Token
	return config
}

// kubeconfig writes a file for clients with the configuration, and returns its path.
func (c *cluster) kubeconfig(config *rest.Config) string {
	c.t.Helper()
	file := clientcmdapi.NewConfig()
	file.Clusters["c"] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData,
		CertificateAuthority: config.CAFile, TLSServerName: config.ServerName}
	file.AuthInfos["user"] = &clientcmdapi.AuthInfo{Token: config.BearerToken}
	file.Contexts["c"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "user"}
	file.CurrentContext = "c"
	path := filepath.Join(c.dir, "kubeconfig")
	if err := clientcmd.WriteToFile(*file, path); err != nil {
		c.t.Fatal(err)
	}
	return path
}

// driverPod makes the pod on the node whose token the driver has.
func (c *cluster) driverPod() *v1.Pod {
	c.t.Helper()
	pod, err := c.client.CoreV1().Pods("kube-system").Create(c.ctx, &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "driver"},
		Spec: v1.PodSpec{NodeName: clusterNode, ServiceAccountName: account, Containers: []v1.Container{{Name: "driver", Image: "driver"}}}}, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return pod
}

// newDriver configures a driver of some GPUs, by default two with 2 GiB, with the rights that deploy/ grants.
func (c *cluster) newDriver(ratio *big.Rat, list ...gpus.GPU) {
	c.t.Helper()
	if len(list) == 0 {
		list = gpus.Sim(2, 2<<30)
	}
	store, err := grants.Open(filepath.Join(c.dir, "node"), ratio, list)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { store.Close() })
	specs := filepath.Join(c.dir, "cdi")
	if err := cdispec.Write(specs, "/nonexistent", list); err != nil {
		c.t.Fatal(err)
	}
	c.cfg = dra.Config{
		Driver: driverName, Node: clusterNode, Kubelet: c.dir, CDIDir: specs, Client: c.as(c.driverPod()),
		Layout: units.Layout{Unit: 256 << 20, Ratio: ratio}, Inventory: gpus.NewInventory(list), Store: store,
		Log: slog.New(slog.NewTextHandler(&c.log, nil)),
	}
}

// startDriver starts the driver, and waits until it is ready.
func (c *cluster) startDriver() {
	c.t.Helper()
	var err error
	if c.driver, err = dra.New(c.cfg); err != nil {
		c.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(c.ctx)
	ended := make(chan error, 1)
	go func() { ended <- c.driver.Run(ctx) }()
	c.endDriver = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			c.t.Errorf("the driver ended: %v; its log is\n%s", err, &c.log)
		}
	})
	c.t.Cleanup(func() { c.endDriver() })
	eventually(c.t, func() error {
		if err := c.driver.Ready(); err != nil {
			return fmt.Errorf("%w; the log is\n%s", err, &c.log)
		}
		return nil
	})
}

// devices returns the devices in the API server by name.
func (c *cluster) devices() map[string]resourceapi.Device {
	c.t.Helper()
	list, err := c.client.ResourceV1().ResourceSlices().List(c.ctx, metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	devices := map[string]resourceapi.Device{}
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			devices[d.Name] = d
		}
	}
	return devices
}

// scheduled waits until a pod is on the node.
func (c *cluster) scheduled(name string) *v1.Pod {
	c.t.Helper()
	var pod *v1.Pod
	eventually(c.t, func() (err error) {
		if pod, err = c.client.CoreV1().Pods("default").Get(c.ctx, name, metav1.GetOptions{}); err == nil && pod.Spec.NodeName == "" {
			err = fmt.Errorf("%s has no node: %+v", name, pod.Status.Conditions)
		}
		return err
	})
	return pod
}

// waits waits until the scheduler reports that there is no room for a pod.
func (c *cluster) waits(name string) {
	c.t.Helper()
	eventually(c.t, func() error {
		pod, err := c.client.CoreV1().Pods("default").Get(c.ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, s := range pod.Status.Conditions {
			if s.Type == v1.PodScheduled && s.Status == v1.ConditionFalse && strings.Contains(s.Message, "cannot allocate all claims") {
				return nil
			}
		}
		return fmt.Errorf("%s: %q, %+v", name, pod.Spec.NodeName, pod.Status.Conditions)
	})
}

// run prepares a pod as the kubelet does before its containers start, and returns the environment of each
// container as a runtime makes it.
func (c *cluster) run(name string) map[string]map[string]string {
	c.t.Helper()
	pod := c.scheduled(name)
	eventually(c.t, func() error { return c.kubelet.PrepareResources(c.ctx, pod) }) // the kubelet tries again, too
	cache, err := cdi.NewCache(cdi.WithSpecDirs(c.cfg.CDIDir), cdi.WithAutoRefresh(false))
	if err != nil || len(cache.GetErrors()) > 0 {
		c.t.Fatal(err, cache.GetErrors())
	}
	all := map[string]map[string]string{}
	for i := range pod.Spec.Containers {
		of := &pod.Spec.Containers[i]
		info, err := c.kubelet.GetResources(pod, of)
		if err != nil {
			c.t.Fatal(err)
		}
		spec := &oci.Spec{Process: &oci.Process{}, Linux: &oci.Linux{}}
		for _, d := range info.CDIDevices {
			if missing, err := cache.InjectDevices(spec, d.Name); err != nil {
				c.t.Fatal(missing, err)
			}
		}
		env := map[string]string{}
		for _, e := range spec.Process.Env {
			k, v, _ := strings.Cut(e, "=")
			env[k] = v
		}
		for _, m := range spec.Mounts {
			if _, err := os.Stat(m.Source); err != nil {
				c.t.Errorf("%s of %s: %v", of.Name, name, err)
			}
		}
		all[of.Name] = env
	}
	return all
}

// end unprepares a pod as the kubelet does when its containers have ended, and deletes it.
func (c *cluster) end(name string) {
	c.t.Helper()
	now := int64(0)
	if err := c.kubelet.UnprepareResources(c.ctx, c.scheduled(name)); err != nil {
		c.t.Fatal(err)
	}
	if err := c.client.CoreV1().Pods("default").Delete(c.ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		c.t.Fatal(err)
	}
}

// create creates a pod like an example, with a claim for some memory.
func (c *cluster) create(name, like, memory string) {
	c.t.Helper()
	templates := c.client.ResourceV1().ResourceClaimTemplates("default")
	template, err := templates.Get(c.ctx, "spillway-1gi", metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	of := &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: template.Spec}
	if capacity := of.Spec.Spec.Devices.Requests[0].Exactly.Capacity; capacity != nil { // a server that does not share has dropped it
		capacity.Requests["memory"] = resource.MustParse(memory)
	}
	if _, err := templates.Create(c.ctx, of, metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
	pod, err := c.client.CoreV1().Pods("default").Get(c.ctx, like, metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	another := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: pod.Spec}
	another.Spec.NodeName = ""
	another.Spec.ResourceClaims[0].ResourceClaimTemplateName = &name
	if _, err := c.client.CoreV1().Pods("default").Create(c.ctx, another, metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}
