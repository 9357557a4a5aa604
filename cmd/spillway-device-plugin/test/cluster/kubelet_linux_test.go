// Package cluster tests the device plugin and the DRA driver against Kubernetes' own code: the kubelet's
// managers of devices and claims, the API server with etcd, and the scheduler. It is a module of its own
// because only these tests need that code. scripts/cluster-check.sh runs it.
package cluster

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	kubeletpodresources "k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/deviceplugin"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/podresources"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
)

const (
	unitName  = "spillway-db.github.io/gpu-memory"
	wholeName = "spillway-db.github.io/gpu"
	// The device manager's socket has a fixed place.
	pluginsDir = "/var/lib/kubelet/device-plugins"
)

// inOwnMounts runs the test in a process with a /var/lib of its own, so that the kubelet's fixed paths are
// free and the machine's are unchanged. It reports whether this is that process.
func inOwnMounts(t *testing.T) bool {
	const mark = "SPILLWAY_TEST_OWN_MOUNTS"
	if os.Getenv(mark) != "" {
		for _, m := range []struct {
			source, dir, kind string
			flags             uintptr
		}{{"none", "/", "", unix.MS_REC | unix.MS_PRIVATE}, {"tmpfs", "/var/lib", "tmpfs", 0}} {
			if err := unix.Mount(m.source, m.dir, m.kind, m.flags, ""); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.MkdirAll(pluginsDir, 0o755); err != nil {
			t.Fatal(err)
		}
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: the ledger is root's, and so are mounts")
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=100s")
	cmd.Env = append(os.Environ(), mark+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if errnoOf(err) == syscall.EPERM {
		t.Skip("needs mounts of its own: ", err)
	}
	if err != nil {
		t.Fatalf("%v:\n%s", err, out)
	}
	return false
}

func errnoOf(err error) syscall.Errno {
	if pe, ok := err.(*os.PathError); ok {
		if e, ok := pe.Err.(syscall.Errno); ok {
			return e
		}
	}
	return 0
}

// kubelet has the parts of a kubelet that call device plugins.
type kubelet struct {
	t       *testing.T
	manager *devicemanager.ManagerImpl
	server  *grpc.Server
	socket  string
	asked   atomic.Int64 // how often List was called

	mu      sync.Mutex
	pods    []*v1.Pod
	unaware bool // it was just started, and has not heard of its pods
}

// AddSource implements the kubelet's SourcesReady.
func (k *kubelet) AddSource(string) {}

// AllReady reports whether the kubelet has learnt of its pods.
func (k *kubelet) AllReady() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return !k.unaware
}

func (k *kubelet) setUnaware(is bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.unaware = is
}

// start starts the device manager and its PodResources server, as at a (re)start of the kubelet.
func (k *kubelet) start() {
	k.t.Helper()
	logger := klog.Background()
	m, err := devicemanager.NewManagerImpl(logger, nil, topologymanager.NewFakeManager(logger))
	if err == nil {
		err = m.Start(logger, k.GetActivePods, k, containermap.NewContainerMap(), sets.New[string]())
	}
	if err != nil {
		k.t.Fatal(err)
	}
	k.manager = m
	os.Remove(k.socket)
	l, err := net.Listen("unix", k.socket)
	if err != nil {
		k.t.Fatal(err)
	}
	k.server = grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(k.server, kubeletpodresources.NewV1PodResourcesServer(k.t.Context(),
		kubeletpodresources.PodResourcesProviders{Pods: k, Devices: devices{k}, Cpus: nothing{}, Memory: nothing{}, DynamicResources: nothing{}}))
	go k.server.Serve(l)
}

func (k *kubelet) stop() {
	_ = k.manager.Stop(klog.Background())
	k.server.Stop()
}

func (k *kubelet) GetActivePods() []*v1.Pod {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.unaware {
		return nil
	}
	return append([]*v1.Pod(nil), k.pods...)
}
func (k *kubelet) GetPods() []*v1.Pod { return k.GetActivePods() }
func (k *kubelet) GetPodByName(namespace, name string) (*v1.Pod, bool) {
	for _, p := range k.GetActivePods() {
		if p.Namespace == namespace && p.Name == name {
			return p, true
		}
	}
	return nil, false
}

type devices struct{ k *kubelet }

func (d devices) UpdateAllocatedDevices(l klog.Logger) {
	d.k.asked.Add(1)
	d.k.manager.UpdateAllocatedDevices(l)
}
func (d devices) GetAllocatableDevices(klog.Logger) []*podresourcesapi.ContainerDevices {
	return nil
}
func (d devices) GetDevices(uid, container string) (list []*podresourcesapi.ContainerDevices) {
	for name, instances := range d.k.manager.GetDevices(uid, container) {
		for id := range instances {
			list = append(list, &podresourcesapi.ContainerDevices{ResourceName: name, DeviceIds: []string{id}})
		}
	}
	return list
}

type nothing struct{}

func (nothing) GetCPUs(*v1.Pod, *v1.Container) []int64 { return nil }
func (nothing) GetPodCPUs(string) []int64              { return nil }
func (nothing) GetAllocatableCPUs() []int64            { return nil }
func (nothing) GetMemory(klog.Logger, *v1.Pod, *v1.Container) []*podresourcesapi.ContainerMemory {
	return nil
}
func (nothing) GetPodMemory(klog.Logger, string) []*podresourcesapi.ContainerMemory { return nil }
func (nothing) GetAllocatableMemory(klog.Logger) []*podresourcesapi.ContainerMemory { return nil }
func (nothing) GetDynamicResources(klog.Logger, *v1.Pod, *v1.Container) []*podresourcesapi.DynamicResource {
	return nil
}

// container returns a container that requests n of a resource.
func container(name, resourceName string, n int) v1.Container {
	return v1.Container{Name: name, Resources: v1.ResourceRequirements{Limits: v1.ResourceList{
		v1.ResourceName(resourceName): *resource.NewQuantity(int64(n), resource.DecimalSI),
	}}}
}

// admit admits a pod as the kubelet does: it allocates for each container, and returns what each gets.
func (k *kubelet) admit(name string, init []v1.Container, containers ...v1.Container) (map[string]*devicemanager.DeviceRunContainerOptions, error) {
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-" + name)},
		Spec: v1.PodSpec{InitContainers: init, Containers: containers}}
	k.mu.Lock()
	k.pods = append(k.pods, pod)
	k.mu.Unlock()
	options := map[string]*devicemanager.DeviceRunContainerOptions{}
	for _, list := range [][]v1.Container{init, containers} {
		for i := range list {
			if err := k.manager.Allocate(context.Background(), pod, &list[i], lifecycle.AddOperation); err != nil {
				k.end(name)
				return nil, err
			}
		}
	}
	for _, list := range [][]v1.Container{init, containers} {
		for i := range list {
			o, err := k.manager.GetDeviceRunContainerOptions(context.Background(), pod, &list[i])
			if err != nil {
				return nil, err
			}
			options[list[i].Name] = o
		}
	}
	return options, nil
}

// end removes a pod from the node.
func (k *kubelet) end(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, p := range k.pods {
		if p.Name == name {
			k.pods = append(k.pods[:i], k.pods[i+1:]...)
			return
		}
	}
}

// allocatable waits until the kubelet counts want healthy devices of a resource.
func (k *kubelet) allocatable(name string, want int64) {
	k.t.Helper()
	var got int64
	eventually(k.t, func() error {
		_, list, _ := k.manager.GetCapacity(klog.Background())
		q := list[v1.ResourceName(name)]
		if got = q.Value(); got != want {
			return fmt.Errorf("%s: %d are allocatable, not %d", name, got, want)
		}
		return nil
	})
}

// eventually calls f until it returns nil, and fails the test if it does not within 30 seconds.
func eventually(t *testing.T, f func() error) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// node is a node with a kubelet and a plugin.
type node struct {
	t         *testing.T
	k         *kubelet
	inventory *gpus.Inventory
	store     *grants.Store
	root      string
	ratio     *big.Rat

	plugin *deviceplugin.Plugin
	stop   func()
}

// newNode returns a node with eight GPUs of 4 GiB, 16 units each.
func newNode(t *testing.T, ratio *big.Rat) *node {
	n := &node{t: t, root: filepath.Join(t.TempDir(), "spillway"), ratio: ratio}
	n.inventory = gpus.NewInventory(gpus.Sim(8, 4<<30))
	n.k = &kubelet{t: t, socket: filepath.Join(t.TempDir(), "pods.sock")}
	n.k.start()
	n.run()
	t.Cleanup(func() { n.stop(); n.k.stop() })
	return n
}

func (n *node) run() {
	n.t.Helper()
	var err error
	if n.store, err = grants.Open(n.root, n.ratio, n.inventory.GPUs()); err != nil {
		n.t.Fatal(err)
	}
	n.plugin, err = deviceplugin.New(deviceplugin.Config{
		Dir: pluginsDir, Resource: unitName, Whole: wholeName, Layout: units.Layout{Unit: 256 << 20, Ratio: n.ratio},
		Inventory: n.inventory, Store: n.store, Pods: podresources.Client{Socket: n.k.socket},
		Refresh: 20 * time.Millisecond,
		Log:     slog.New(slog.NewTextHandler(io.Discard, nil)),
		CDIName: func(uuid string) string { return "spillway-db.github.io/gpu=" + uuid },
	})
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- n.plugin.Run(ctx) }()
	n.stop = sync.OnceFunc(func() {
		defer n.store.Close()
		cancel()
		if err := <-ended; err != nil {
			n.t.Error("the plugin ended: ", err)
		}
		if left, _ := filepath.Glob(pluginsDir + "/spillway*.sock"); len(left) > 0 {
			n.t.Errorf("%v is left", left)
		}
	})
}

func envOf(o *devicemanager.DeviceRunContainerOptions) map[string]string {
	env := map[string]string{}
	for _, e := range o.Envs {
		env[e.Name] = e.Value
	}
	return env
}

func TestKubelet(t *testing.T) {
	if !inOwnMounts(t) {
		return
	}
	n := newNode(t, nil)
	n.k.allocatable(unitName, 8*16)
	n.k.allocatable(wholeName, 8)
	eventually(t, n.plugin.Ready)

	// A container of 4 units gets its limits, mounts and GPU.
	options, err := n.k.admit("a", nil, container("main", unitName, 4))
	if err != nil {
		t.Fatal(err)
	}
	o := options["main"]
	env := envOf(o)
	for name, want := range map[string]string{
		"SPILLWAY_GPU_MEMORY_LIMIT": "1024Mi", "NVSHARE_GPU_MEMORY_LIMIT": "1024Mi",
		"SPILLWAY_GPU_MEMORY_OVERSUB_RATIO": "1", "SPILLWAY_GPU_PHYSICAL_MEMORY_MB": "4096",
		"SPILLWAY_GPU_QUOTA_DIR": "/run/spillway/ledger", "NVIDIA_VISIBLE_DEVICES": "void",
	} {
		if env[name] != want {
			t.Errorf("%s is %q, not %q", name, env[name], want)
		}
	}
	if len(o.Mounts) != 2 || len(o.CDIDevices) != 1 || o.CDIDevices[0].Name != "spillway-db.github.io/gpu=sim-0" {
		t.Errorf("mounts %v, CDI devices %v", o.Mounts, o.CDIDevices)
	}
	for _, m := range o.Mounts {
		if info, err := os.Stat(m.HostPath); err != nil || !info.IsDir() {
			t.Errorf("%s: %v", m.HostPath, err)
		}
		if m.ReadOnly != (m.ContainerPath == "/run/spillway/limits") {
			t.Errorf("%+v", m)
		}
	}
	n.k.allocatable(wholeName, 7) // one is given in units

	// The next containers go to the least loaded GPUs.
	seen := map[string]bool{"sim-0": true}
	for i := 1; i < 8; i++ {
		options, err := n.k.admit(fmt.Sprint("spread-", i), nil, container("main", unitName, 2))
		if err != nil {
			t.Fatal(err)
		}
		seen[strings.TrimPrefix(options["main"].CDIDevices[0].Name, "spillway-db.github.io/gpu=")] = true
	}
	if len(seen) != 8 {
		t.Errorf("eight containers are on %d GPUs", len(seen))
	}
	n.k.allocatable(wholeName, 0)

	// The plugin refuses more units than a GPU has.
	if _, err := n.k.admit("large", nil, container("main", unitName, 17)); err == nil || !strings.Contains(err.Error(), "one GPU only") {
		t.Errorf("17 units of GPUs that have 16: %v", err)
	}
	// The containers of a pod use its init container's units again.
	options, err = n.k.admit("init", []v1.Container{container("first", unitName, 6)}, container("main", unitName, 8))
	if err != nil {
		t.Fatal(err)
	}
	if a, b := options["first"].CDIDevices[0].Name, options["main"].CDIDevices[0].Name; a != b || envOf(options["main"])["SPILLWAY_GPU_MEMORY_LIMIT"] != "2048Mi" {
		t.Errorf("the init container is on %s, the container on %s with %v", a, b, options["main"].Envs)
	}

	// A GPU fails while it runs.
	n.inventory.SetSick("sim-3", "for the test")
	n.k.allocatable(unitName, 7*16)
	n.inventory.SetSick("sim-3", "")
	n.k.allocatable(unitName, 8*16)

	// Both sides restart, in either order, and lose nothing.
	before := len(n.plugin.Holders()) - 1 // the kubelet does not list init containers
	n.k.stop()
	n.k.start()
	n.k.allocatable(unitName, 8*16)
	n.stop()
	n.run()
	n.k.allocatable(unitName, 8*16)
	n.k.allocatable(wholeName, 0)
	if got := len(n.plugin.Holders()); got != before {
		t.Errorf("after a restart %d containers have something, not %d", got, before)
	}

	// Pods that end release their units.
	for _, name := range []string{"a", "init", "spread-1", "spread-2", "spread-3", "spread-4", "spread-5", "spread-6", "spread-7"} {
		n.k.end(name)
	}
	n.stop()
	n.run() // it asks the kubelet when it starts
	n.k.allocatable(wholeName, 8)
	options, err = n.k.admit("whole", nil, container("main", wholeName, 2))
	if err != nil {
		t.Fatal(err)
	}
	env = envOf(options["main"])
	if _, ok := env["SPILLWAY_GPU_MEMORY_LIMIT"]; ok || len(options["main"].CDIDevices) != 2 {
		t.Errorf("two whole GPUs come as %v, %v", env, options["main"].CDIDevices)
	}
	n.k.allocatable(unitName, 6*16)
}

// A kubelet that restarts answers before it has learnt of its pods. Meanwhile a running container keeps its
// limits, and the plugin does not offer its GPU whole.
func TestKubeletKnowsNoPodsYet(t *testing.T) {
	if !inOwnMounts(t) {
		return
	}
	n := newNode(t, nil)
	n.k.allocatable(unitName, 8*16)
	options, err := n.k.admit("a", nil, container("main", unitName, 4))
	if err != nil {
		t.Fatal(err)
	}
	n.k.stop()
	n.k.setUnaware(true)
	n.k.start()
	n.k.allocatable(unitName, 8*16)
	before := n.k.asked.Load()
	eventually(t, func() error { // it has taken the first answers when it asks again
		if n.k.asked.Load() < before+3 {
			return fmt.Errorf("the plugin does not ask who has what")
		}
		return nil
	})
	n.k.allocatable(wholeName, 7)
	for _, m := range options["main"].Mounts {
		if _, err := os.Stat(m.HostPath); err != nil {
			t.Errorf("a container that runs has lost a directory: %v", err)
		}
	}
	n.k.setUnaware(false)
	n.stop()
	n.run()
	n.k.allocatable(wholeName, 7) // which the kubelet may have from the plugin before
	eventually(t, func() error {
		if h := n.plugin.Holders(); len(h) != 1 || h[0].Pod != "a" {
			return fmt.Errorf("%+v", h)
		}
		return nil
	})
}

func TestKubeletRatio(t *testing.T) {
	if !inOwnMounts(t) {
		return
	}
	n := newNode(t, big.NewRat(3, 2))
	n.k.allocatable(unitName, 8*24)
	options, err := n.k.admit("a", nil, container("main", unitName, 24))
	if err != nil {
		t.Fatal(err)
	}
	env := envOf(options["main"])
	if env["SPILLWAY_GPU_MEMORY_LIMIT"] != "6144Mi" || env["SPILLWAY_GPU_MEMORY_OVERSUB_RATIO"] != "1.5" || env["SPILLWAY_GPU_PHYSICAL_MEMORY_MB"] != "4096" {
		t.Errorf("%v", env)
	}
}

func TestMain(m *testing.M) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	os.Exit(m.Run())
}
