package test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
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
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
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
	"github.com/spillway-db/spillway/internal/leases"
)

const (
	driverName  = "gpu.spillway-db.github.io"
	clusterNode = "node-1"
)

// cluster is Kubernetes' own code in this process: etcd, the API server, the scheduler, the controller of
// claims, and those parts of a kubelet that drivers meet. Pods have no containers: nothing runs them.
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
	// Those that are left out need controllers that do not run here.
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

// apply puts manifests of deploy/ on the API server, which refuses fields that it does not know.
func (c *cluster) apply(file string) {
	c.t.Helper()
	text, err := os.ReadFile("../../../deploy/" + file)
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

// startKubelet starts what a kubelet has for drivers, with the state of the one before it.
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

// pods returns the pods that the scheduler gave to the node.
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

// as returns a client with a token of the driver's account: that of a pod, or without one.
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

// newDriver makes a driver of GPUs, or of two with 2 GiB. It has the rights that deploy/ gives it.
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

// startDriver starts the driver, and waits until kubelet and API server have it.
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

// devices returns what the API server has of the node's GPUs.
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

// scheduled waits until a pod has the node.
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

// waits waits until the scheduler says that there is no room for a pod.
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

// run does for a pod what the kubelet does before its containers start. It returns the environment that a
// runtime gives each of them.
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

// end does for a pod what the kubelet does when its containers have ended.
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

// create makes another pod like an example, whose claim is for so much memory.
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

// checkPolicy waits until the driver may change the slices of its node and of no other, nor those of another
// driver. Its role alone lets it change all.
func (c *cluster) checkPolicy() {
	c.t.Helper()
	slice := func(name, node, driver string) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1}}}
	}
	all := slice("all", "", driverName)
	yes := true
	all.Spec.NodeName, all.Spec.AllNodes, all.Spec.Pool.Name = nil, &yes, "all"
	theirs, err := c.client.ResourceV1().ResourceSlices().Create(c.ctx, slice("theirs", "node-2", driverName), metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	theirs.Labels = map[string]string{"a": "b"}
	try := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	for _, of := range []struct {
		what string
		do   func(resourceclient.ResourceSliceInterface) error
		by   kubernetes.Interface
		says string
	}{
		{"a slice of another node", func(s resourceclient.ResourceSliceInterface) error {
			_, err := s.Create(c.ctx, slice("x", "node-2", driverName), try)
			return err
		}, c.cfg.Client, "The driver of the node node-1 may change only the ResourceSlices of that node."},
		{"a slice of all nodes", func(s resourceclient.ResourceSliceInterface) error {
			_, err := s.Create(c.ctx, all, try)
			return err
		}, c.cfg.Client, "may change only the ResourceSlices of that node."},
		{"a change of another node's", func(s resourceclient.ResourceSliceInterface) error {
			_, err := s.Update(c.ctx, theirs, metav1.UpdateOptions{DryRun: try.DryRun})
			return err
		}, c.cfg.Client, "may change only the ResourceSlices of that node."},
		{"the end of another node's", func(s resourceclient.ResourceSliceInterface) error {
			return s.Delete(c.ctx, "theirs", metav1.DeleteOptions{DryRun: try.DryRun})
		}, c.cfg.Client, "may change only the ResourceSlices of that node."},
		{"another driver's", func(s resourceclient.ResourceSliceInterface) error {
			_, err := s.Create(c.ctx, slice("x", clusterNode, "gpu.example.com"), try)
			return err
		}, c.cfg.Client, "The driver may change only its own ResourceSlices."},
		{"a token without a pod", func(s resourceclient.ResourceSliceInterface) error {
			_, err := s.Create(c.ctx, slice("x", clusterNode, driverName), try)
			return err
		}, c.as(nil), "The driver's token names no node."},
	} {
		eventually(c.t, func() error { // the API server takes a policy in its own time
			if err := of.do(of.by.ResourceV1().ResourceSlices()); !apierrors.IsInvalid(err) && !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), of.says) {
				return fmt.Errorf("%s: %v", of.what, err)
			}
			return nil
		})
	}
	if _, err := c.cfg.Client.ResourceV1().ResourceSlices().Create(c.ctx, slice("x", clusterNode, driverName), try); err != nil {
		c.t.Errorf("a slice of the node: %v", err)
	}
	if err := c.client.ResourceV1().ResourceSlices().Delete(c.ctx, "theirs", metav1.DeleteOptions{}); err != nil {
		c.t.Error(err)
	}
}

// The driver, with the rights that deploy/ gives it, beside Kubernetes' own API server, scheduler and
// kubelet: the examples of deploy/ run, what has no room waits, and restarts forget nothing.
func TestCluster(t *testing.T) {
	c := newCluster(t)
	for _, file := range []string{"device-plugin.yaml", "example-pods.yaml", "dra-driver.yaml"} {
		c.apply(file)
	}
	c.startKubelet()
	c.newDriver(nil)
	c.checkPolicy() // which is at work from here on
	c.startDriver()
	devices := c.devices()
	if names := slices.Sorted(maps.Keys(devices)); !slices.Equal(names, []string{"sim-0", "sim-1"}) {
		t.Fatal(names)
	}
	if d := devices["sim-0"]; d.AllowMultipleAllocations == nil || d.Capacity["memory"].RequestPolicy == nil {
		t.Errorf("the API server dropped what shares devices: %+v", d)
	}
	if _, err := c.cfg.Client.CoreV1().Secrets("kube-system").List(c.ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("the driver may read secrets: %v", err)
	}

	c.apply("example-claims.yaml")
	shared, whole := c.run("spillway-shared"), c.run("spillway-claimed-whole")
	one, two := shared["one"], shared["two"]
	if one["SPILLWAY_GPU_MEMORY_LIMIT"] != "1024Mi" || one["SPILLWAY_GPU_QUOTA_GROUP"] == "" || !maps.Equal(one, two) {
		t.Errorf("the containers of a claim have %v and %v", one, two)
	}
	if main := whole["main"]; main["SPILLWAY_GPU_MEMORY_LIMIT"] != "" || main["SPILLWAY_GPU_QUOTA_GROUP"] == one["SPILLWAY_GPU_QUOTA_GROUP"] ||
		main["SPILLWAY_GPU_UUID"] == one["SPILLWAY_GPU_UUID"] {
		t.Errorf("who has a whole GPU has %v", main)
	}
	c.create("second", "spillway-shared", "300Mi") // rounded up to whole units
	if env := c.run("second")["one"]; env["SPILLWAY_GPU_MEMORY_LIMIT"] != "512Mi" || env["SPILLWAY_GPU_QUOTA_GROUP"] == one["SPILLWAY_GPU_QUOTA_GROUP"] {
		t.Errorf("another claim of the GPU has %v", env)
	}
	c.create("third", "spillway-shared", "1Gi")
	c.waits("third")

	// Both sides start again. A pod that ran before ends after it, and the one that waits gets its memory.
	before := c.driver.Holders()
	c.endDriver()
	c.stopped()
	c.startKubelet()
	c.startDriver()
	if after := c.driver.Holders(); len(before) != 3 || len(after) != 3 {
		t.Errorf("%d claims before, %d after", len(before), len(after))
	}
	if again := c.run("spillway-shared"); !maps.Equal(again["one"], one) {
		t.Errorf("prepared again it has %v", again)
	}
	c.end("second")
	c.run("third")
	if holders := c.driver.Holders(); len(holders) != 3 {
		t.Errorf("%+v", holders)
	}

	// A GPU that fails is not given any more.
	c.cfg.Inventory.SetSick("sim-1", "for the test")
	eventually(t, func() error {
		if n := len(c.devices()); n != 1 {
			return fmt.Errorf("%d GPUs are published", n)
		}
		return nil
	})
	for _, name := range []string{"third", "spillway-shared", "spillway-claimed-whole"} {
		c.end(name)
	}
	if holders := c.driver.Holders(); len(holders) > 0 {
		t.Errorf("%+v", holders)
	}
}

// On a cluster that does not share devices a claim gets a whole GPU, and the driver's log says why.
func TestClusterDoesNotShare(t *testing.T) {
	c := newCluster(t, "--feature-gates=DRAConsumableCapacity=false")
	c.apply("dra-driver.yaml")
	c.startKubelet()
	c.newDriver(nil)
	c.startDriver()
	for name, d := range c.devices() {
		if d.AllowMultipleAllocations != nil {
			t.Errorf("%s: %+v", name, d)
		}
	}
	if n := strings.Count(c.log.String(), "the API server does not share devices: each GPU goes whole to one claim"); n != 1 {
		t.Errorf("%d lines say so:\n%s", n, &c.log)
	}
	c.apply("example-claims.yaml")
	a, b := c.run("spillway-shared")["one"], c.run("spillway-claimed-whole")["main"]
	if a["SPILLWAY_GPU_MEMORY_LIMIT"] != "" || a["SPILLWAY_GPU_UUID"] == b["SPILLWAY_GPU_UUID"] {
		t.Errorf("%v and %v", a, b)
	}
	c.create("second", "spillway-shared", "1Gi")
	c.waits("second")
}

// MIG instances, with a ratio: the scheduler gives more of them than they have, and no more than the ratio says.
func TestClusterRatio(t *testing.T) {
	c := newCluster(t)
	c.apply("dra-driver.yaml")
	c.startKubelet()
	const parent = "GPU-5d6c0b1e-9f0a-4b7f-8a1e-0e7f1c2d3b4a"
	instance := func(uuid string) gpus.GPU {
		return gpus.GPU{UUID: uuid, Name: "MIG 1g.10gb", Memory: 1 << 30, Node: 0, Parent: parent, Simulated: true}
	}
	c.newDriver(big.NewRat(3, 2), instance("MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"), instance("MIG-1c9a0b3e-5d1f-4c55-9a37-1f6e2f8f1b60"))
	c.startDriver()
	for name, d := range c.devices() {
		if d.Attributes["type"].StringValue == nil || *d.Attributes["type"].StringValue != "mig" || *d.Attributes["parentUUID"].StringValue != parent {
			t.Errorf("%s: %+v", name, d.Attributes)
		}
	}
	c.apply("example-claims.yaml")
	one, whole := c.run("spillway-shared")["one"], c.run("spillway-claimed-whole")["main"]
	if one["SPILLWAY_GPU_MEMORY_LIMIT"] != "1024Mi" || one["SPILLWAY_GPU_MEMORY_OVERSUB_RATIO"] != "1.5" || whole["SPILLWAY_GPU_MEMORY_LIMIT"] != "" {
		t.Errorf("%v and %v", one, whole)
	}
	c.create("second", "spillway-shared", "512Mi")
	if second := c.run("second")["one"]; second["SPILLWAY_GPU_UUID"] != one["SPILLWAY_GPU_UUID"] || second["SPILLWAY_GPU_MEMORY_LIMIT"] != "512Mi" {
		t.Errorf("%v", second)
	}
	c.create("third", "spillway-shared", "256Mi")
	c.waits("third")
}

// The command itself, with a file that names the API server: it becomes ready, a pod gets its claim, a second
// one on the node is refused, and it ends with status 0. One with another ratio says what is in use with the old one.
func TestClusterCommand(t *testing.T) {
	c := newCluster(t)
	c.apply("dra-driver.yaml")
	c.startKubelet()
	command := filepath.Join(c.dir, "spillway-device-plugin")
	build := exec.Command("go", "build", "-trimpath", "-o", command, ".") // as deploy/Containerfile does
	build.Dir = ".."
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	config := c.configOf(c.driverPod())
	file := clientcmdapi.NewConfig()
	file.Clusters["c"] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData, CertificateAuthority: config.CAFile, TLSServerName: config.ServerName}
	file.AuthInfos["driver"] = &clientcmdapi.AuthInfo{Token: config.BearerToken}
	file.Contexts["c"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "driver"}
	file.CurrentContext = "c"
	kubeconfig := filepath.Join(c.dir, "kubeconfig")
	if err := clientcmd.WriteToFile(*file, kubeconfig); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // for a port that is free
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	start := func(more ...string) *exec.Cmd {
		cmd := exec.Command(command, append([]string{"--mode=dra", "--sim=2x2Gi", "--node=" + clusterNode, "--kubelet-dir=" + c.dir, "--kubeconfig=" + kubeconfig,
			"--dir=" + filepath.Join(c.dir, "node"), "--cdi-dir=" + filepath.Join(c.dir, "cdi"), "--metrics=" + address}, more...)...)
		cmd.Stderr = &c.log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		return cmd
	}
	ready := func() {
		t.Helper()
		eventually(t, func() error {
			r, err := http.Get("http://" + address + "/healthz")
			if err != nil {
				return fmt.Errorf("%w; the log is\n%s", err, &c.log)
			}
			defer r.Body.Close()
			if body, err := io.ReadAll(r.Body); r.StatusCode != http.StatusOK {
				return fmt.Errorf("%d %s %v; the log is\n%s", r.StatusCode, body, err, &c.log)
			}
			return nil
		})
	}
	end := func(cmd *exec.Cmd) {
		t.Helper()
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("%v; the log is\n%s", err, &c.log)
		}
	}
	first := start()
	ready()
	if n := len(c.devices()); n != 2 {
		t.Errorf("%d GPUs are published", n)
	}
	c.apply("example-claims.yaml")
	c.cfg.CDIDir = filepath.Join(c.dir, "cdi")
	if one := c.run("spillway-shared")["one"]; one["SPILLWAY_GPU_MEMORY_LIMIT"] != "1024Mi" {
		t.Errorf("%v", one)
	}
	if err := start("--metrics=").Wait(); err == nil || !strings.Contains(c.log.String(), "another one runs with --dir") {
		t.Errorf("a second one: %v; the log is\n%s", err, &c.log)
	}
	end(first)
	lease, err := leases.Join(leases.Terms{Dir: filepath.Join(c.dir, "node", "ledger"), Device: "sim-0", Group: "x", Physical: 2 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Close()
	second := start("--ratio=1.5")
	ready()
	if !strings.Contains(c.log.String(), "in use with another --ratio or --reserve: 1, such as sim-0") {
		t.Errorf("the log is\n%s", &c.log)
	}
	end(second)
}
