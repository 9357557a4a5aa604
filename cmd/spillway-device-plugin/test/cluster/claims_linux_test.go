package cluster

import (
	"fmt"
	"io"
	"maps"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/internal/leases"
)

// checkPolicy waits until the API server enforces the policy: the driver may change only its own slices of its
// own node. The driver's role alone allows more.
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

// The driver runs with the rights that deploy/ grants, against Kubernetes' own API server, scheduler and
// kubelet. The examples of deploy/ run, a claim without room waits, and restarts lose nothing.
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

	// Both sides restart. A pod from before the restart ends, and the waiting pod gets its memory.
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

	// The driver does not publish a GPU that has failed.
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

// In a cluster that does not share devices a claim gets a whole GPU, and the driver logs the reason.
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

// With a ratio the scheduler allocates more of a MIG instance than it has, up to the ratio.
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

// The command itself, with a kubeconfig file: it becomes ready, a pod gets its claim, a second command on the
// node fails, and the first ends with status 0. A command with another ratio logs what uses the old one.
func TestClusterCommand(t *testing.T) {
	c := newCluster(t)
	c.apply("dra-driver.yaml")
	c.startKubelet()
	command := filepath.Join(c.dir, "spillway-device-plugin")
	build := exec.Command("go", "build", "-trimpath", "-o", command, ".") // as deploy/Containerfile does
	build.Dir = "../.."
	build.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	kubeconfig := c.kubeconfig(c.configOf(c.driverPod()))
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
