package dra

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/cdispec"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
)

const (
	driverName = "gpu.spillway-db.github.io"
	nodeName   = "node-1"
	unit       = 256 << 20
)

// text is a log that goroutines write to.
type text struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (x *text) Write(p []byte) (int, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.b.Write(p)
}

func (x *text) String() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.b.String()
}

// apiServer is client-go's fake, which the tests here can make fail; package test has the real one. It
// names and counts the versions of ResourceSlices as that does. One that is old drops what shares
// devices.
func apiServer(old bool) *fake.Clientset {
	client := fake.NewClientset(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node-uid"}})
	var mu sync.Mutex
	version := 0
	store := func(action k8stesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		s := action.(interface{ GetObject() runtime.Object }).GetObject().(*resourceapi.ResourceSlice)
		version++
		s.ResourceVersion = strconv.Itoa(version)
		if s.Name == "" {
			s.Name = s.GenerateName + strconv.Itoa(version)
		}
		for i := range s.Spec.Devices {
			if d := &s.Spec.Devices[i]; old {
				d.AllowMultipleAllocations = nil
				for name, c := range d.Capacity {
					c.RequestPolicy = nil
					d.Capacity[name] = c
				}
			}
		}
		return false, nil, nil
	}
	client.PrependReactor("create", "resourceslices", store)
	client.PrependReactor("update", "resourceslices", store)
	return client
}

// node is a node with a kubelet that speaks the real protocol, and drivers on it.
type node struct {
	t      *testing.T
	cfg    Config
	client *fake.Clientset
	log    *text
	driver *Driver
	stop   func()
	dra    drapb.DRAPluginClient
	conn   *grpc.ClientConn
}

// newNode makes a node of GPUs with 1 GiB. It has no driver yet.
func newNode(t *testing.T, client *fake.Clientset, list ...gpus.GPU) *node {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: the ledger is root's")
	}
	if len(list) == 0 {
		list = gpus.Sim(2, 1<<30)
	}
	kubelet, err := os.MkdirTemp("", "spillway-") // t.TempDir's may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(kubelet) })
	if err := os.Mkdir(filepath.Join(kubelet, "plugins_registry"), 0o755); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	store, err := grants.Open(filepath.Join(dir, "node"), nil, list)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	cdi := filepath.Join(dir, "cdi")
	if err := cdispec.Write(cdi, "/nonexistent", list); err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, client: client, log: &text{}}
	n.cfg = Config{
		Driver: driverName, Node: nodeName, Kubelet: kubelet, CDIDir: cdi, Client: client, Layout: units.Layout{Unit: unit},
		Inventory: gpus.NewInventory(list), Store: store, Log: slog.New(slog.NewTextHandler(n.log, nil)),
	}
	return n
}

// until waits for something, far longer than it takes.
func (n *node) until(what string, ok func() bool) {
	n.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			n.t.Fatalf("%s: not within 30 s; the log is\n%s", what, n.log)
		}
	}
}

// start starts a driver, and registers it as the kubelet does. It waits until it is ready.
func (n *node) start() {
	n.t.Helper()
	var err error
	if n.driver, err = New(n.cfg); err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- n.driver.Run(ctx) }()
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			n.t.Error(err)
		}
		if n.conn != nil {
			n.conn.Close()
		}
	})
	n.t.Cleanup(func() { n.stop() })
	registration := filepath.Join(n.cfg.Kubelet, "plugins_registry", driverName+"-reg.sock")
	n.until("the socket for registration", func() bool { _, err := os.Lstat(registration); return err == nil })
	conn := n.dial(registration)
	defer conn.Close()
	client := registerapi.NewRegistrationClient(conn)
	info, err := client.GetInfo(n.t.Context(), &registerapi.InfoRequest{}, grpc.WaitForReady(true)) // a socket's file is there before it listens
	if err != nil || info.Type != registerapi.DRAPlugin || info.Name != driverName || !slices.Contains(info.SupportedVersions, drapb.DRAPluginService) {
		n.t.Fatal(info, err)
	}
	if err := n.driver.Ready(); err == nil || !strings.Contains(err.Error(), "the kubelet has not registered") {
		n.t.Error("ready before it is registered", err)
	}
	if _, err := client.NotifyRegistrationStatus(n.t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		n.t.Fatal(err)
	}
	n.until("ready", func() bool { return n.driver.Ready() == nil })
	n.conn = n.dial(info.Endpoint)
	n.dra = drapb.NewDRAPluginClient(n.conn)
}

func (n *node) dial(path string) *grpc.ClientConn {
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		n.t.Fatal(err)
	}
	return conn
}

// published returns the devices that the API server has, by their names.
func (n *node) published() map[string]resourceapi.Device {
	list, err := n.client.ResourceV1().ResourceSlices().List(n.t.Context(), metav1.ListOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	devices := map[string]resourceapi.Device{}
	for _, s := range list.Items {
		if *s.Spec.NodeName != nodeName || s.Spec.Pool.Name != nodeName || s.Spec.Driver != driverName {
			n.t.Errorf("%+v", s.Spec)
		}
		for _, d := range s.Spec.Devices {
			devices[d.Name] = d
		}
	}
	return devices
}

// slices returns how many ResourceSlices the API server has.
func (n *node) slices() int {
	list, err := n.client.ResourceV1().ResourceSlices().List(n.t.Context(), metav1.ListOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	return len(list.Items)
}

// part is a result of the scheduler: so many MiB of a device; 0: all, of one that is not shared.
type part struct {
	device string
	mib    int64
}

// claim puts an allocated claim on the API server.
func (n *node) claim(name string, parts ...part) *resourceapi.ResourceClaim {
	n.t.Helper()
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("0000-" + name)}}
	c.Status.Allocation = &resourceapi.AllocationResult{}
	for i, p := range parts {
		r := resourceapi.DeviceRequestAllocationResult{Request: "r" + strconv.Itoa(i), Driver: driverName, Pool: nodeName, Device: p.device}
		if p.mib > 0 {
			share := types.UID("share-" + name + strconv.Itoa(i))
			r.ShareID = &share
			r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{memory: *quantity(p.mib << 20)}
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, r)
	}
	n.create(c)
	return c
}

func (n *node) create(c *resourceapi.ResourceClaim) {
	n.t.Helper()
	if _, err := n.client.ResourceV1().ResourceClaims(c.Namespace).Create(n.t.Context(), c, metav1.CreateOptions{}); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) delete(c *resourceapi.ResourceClaim) {
	n.t.Helper()
	if err := n.client.ResourceV1().ResourceClaims(c.Namespace).Delete(n.t.Context(), c.Name, metav1.DeleteOptions{}); err != nil {
		n.t.Fatal(err)
	}
}

// prepare has a claim prepared, and returns its devices, or what the driver says against it.
func (n *node) prepare(c *resourceapi.ResourceClaim) ([]*drapb.Device, string) {
	n.t.Helper()
	r, err := n.dra.NodePrepareResources(n.t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{
		{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)},
	}})
	if err != nil {
		n.t.Fatal(err)
	}
	if len(r.Claims) != 1 {
		n.t.Fatal(r)
	}
	of := r.Claims[string(c.UID)]
	if strings.ContainsAny(of.GetError(), "\r\n") {
		n.t.Errorf("not one line: %q", of.GetError())
	}
	return of.GetDevices(), of.GetError()
}

// prepared is prepare, which must succeed.
func (n *node) prepared(c *resourceapi.ResourceClaim) []*drapb.Device {
	n.t.Helper()
	devices, refusal := n.prepare(c)
	if refusal != "" {
		n.t.Fatal(refusal)
	}
	return devices
}

func (n *node) unprepare(c *resourceapi.ResourceClaim) {
	n.t.Helper()
	r, err := n.dra.NodeUnprepareResources(n.t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{
		{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)},
	}})
	if err != nil || len(r.Claims) != 1 || r.Claims[string(c.UID)].GetError() != "" {
		n.t.Fatal(r, err)
	}
}

// kept returns the names of the grants, which the store and the CDI files agree on.
func (n *node) kept() []string {
	n.t.Helper()
	names, err := n.cfg.Store.Names()
	if err != nil {
		n.t.Fatal(err)
	}
	for _, name := range names {
		if err := cdispec.CheckGrant(n.cfg.CDIDir, name); err != nil {
			n.t.Error(err)
		}
	}
	files, err := filepath.Glob(filepath.Join(n.cfg.CDIDir, "*grant_*"))
	if err != nil || len(files) != len(names) {
		n.t.Errorf("%v, but %v: %v", files, names, err)
	}
	return names
}
