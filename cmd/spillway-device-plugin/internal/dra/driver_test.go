package dra

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	k8stesting "k8s.io/client-go/testing"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"sigs.k8s.io/yaml"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/internal/leases"
)

// container is what a runtime makes of what the kubelet gives it.
func (n *node) container(devices []*drapb.Device) (env map[string]string, mounts map[string]oci.Mount) {
	n.t.Helper()
	cache, err := cdi.NewCache(cdi.WithSpecDirs(n.cfg.CDIDir), cdi.WithAutoRefresh(false))
	if err != nil || len(cache.GetErrors()) > 0 {
		n.t.Fatal(err, cache.GetErrors())
	}
	spec := &oci.Spec{Process: &oci.Process{Env: []string{"SPILLWAY_GPU_MEMORY_LIMIT=7Gi"}}, Linux: &oci.Linux{}} // the pod's own
	for _, d := range devices {
		if missing, err := cache.InjectDevices(spec, d.CdiDeviceIds...); err != nil {
			n.t.Fatal(missing, err)
		}
	}
	env, mounts = map[string]string{}, map[string]oci.Mount{}
	for _, e := range spec.Process.Env {
		name, value, _ := strings.Cut(e, "=")
		env[name] = value
	}
	for _, m := range spec.Mounts {
		if _, twice := mounts[m.Destination]; twice {
			n.t.Errorf("%s is mounted twice", m.Destination)
		}
		mounts[m.Destination] = m
	}
	return env, mounts
}

// A claim's containers get its limit, its group and the ledger, and nothing is left after it.
func TestPrepare(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.start()
	devices := n.published()
	if names := slices.Sorted(maps.Keys(devices)); !slices.Equal(names, []string{"sim-0", "sim-1"}) {
		t.Fatal(names)
	}
	d := devices["sim-0"]
	value := d.Capacity[memory].Value
	policy := d.Capacity[memory].RequestPolicy
	if value.Value() != 1<<30 || !*d.AllowMultipleAllocations || policy.Default.Value() != 1<<30 ||
		policy.ValidRange.Min.Value() != unit || policy.ValidRange.Step.Value() != unit || *d.Attributes["uuid"].StringValue != "sim-0" {
		t.Errorf("%+v", d)
	}
	c := n.claim("a", part{"sim-1", 512}, part{"sim-1", 256})
	for range 2 { // the kubelet asks again when it is started again
		got := n.prepared(c)
		if len(got) != 2 || got[1].DeviceName != "sim-1" || got[1].PoolName != nodeName || got[1].RequestNames[0] != "r1" || got[1].GetShareId() != "share-a1" {
			t.Fatal(got)
		}
		env, mounts := n.container(got)
		for name, want := range map[string]string{
			"SPILLWAY_GPU_MEMORY_LIMIT": "768Mi", "NVSHARE_GPU_MEMORY_LIMIT": "768Mi", "SPILLWAY_GPU_MEMORY_OVERSUB_RATIO": "1",
			"NVSHARE_GPU_PHYSICAL_MEMORY_MB": "1024", "SPILLWAY_GPU_QUOTA_GROUP": "claim-0000-a", "SPILLWAY_GPU_QUOTA_DIR": "/run/spillway/ledger",
			"SPILLWAY_GPU_UUID": "sim-1", "NVIDIA_VISIBLE_DEVICES": "void",
		} {
			if env[name] != want {
				t.Errorf("%s is %q, not %q", name, env[name], want)
			}
		}
		if m := mounts["/run/spillway/ledger"]; m.Source != n.cfg.Store.Ledger() || slices.Contains(m.Options, "ro") {
			t.Errorf("%+v", m)
		}
		limits := mounts["/run/spillway/limits"]
		file, err := os.ReadFile(filepath.Join(limits.Source, "environment"))
		if err != nil || !strings.Contains(string(file), "SPILLWAY_GPU_MEMORY_LIMIT=768Mi") || !slices.Contains(limits.Options, "ro") {
			t.Errorf("%+v: %s: %v", limits, file, err)
		}
	}
	holders := n.driver.Holders()
	if len(holders) != 1 || holders[0].Claim != "a" || holders[0].Namespace != "ns" || holders[0].Limit != 768<<20 || holders[0].GPUs[0].UUID != "sim-1" {
		t.Errorf("%+v", holders)
	}
	for range 2 {
		n.unprepare(c)
		if left := n.kept(); len(left) > 0 || len(n.driver.Holders()) > 0 {
			t.Errorf("%v is left", left)
		}
	}
	n.stop()
	if left, err := filepath.Glob(n.cfg.Kubelet + "/*/*.sock"); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

// Several whole GPUs are one grant without a limit.
func TestWhole(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.start()
	env, _ := n.container(n.prepared(n.claim("a", part{"sim-0", 1024}, part{"sim-1", 0})))
	if limit := env["NVSHARE_GPU_MEMORY_LIMIT"]; limit != "" || env["SPILLWAY_GPU_QUOTA_GROUP"] != "claim-0000-a" {
		t.Errorf("%q, %v", limit, env)
	}
	if _, refusal := n.prepare(n.claim("b", part{"sim-1", 256})); !strings.Contains(refusal, "other claims have 1.0 GiB of it") {
		t.Errorf("%q", refusal)
	}
}

// The claims of a GPU never have more than it has. One that is gone is no hindrance, unless its
// processes still hold memory.
func TestSum(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.start()
	a, b, c := n.claim("a", part{"sim-0", 512}), n.claim("b", part{"sim-0", 256}), n.claim("c", part{"sim-0", 512})
	n.prepared(a)
	n.prepared(b)
	refused := func() {
		t.Helper()
		if _, refusal := n.prepare(c); !strings.Contains(refusal, "too much of a GPU is given away: sim-0 has 1.0 GiB") {
			t.Errorf("%q", refusal)
		}
		if names := n.kept(); !slices.Equal(names, []string{"claim-0000-a", "claim-0000-b"}) {
			t.Errorf("%v", names)
		}
	}
	refused()
	d := n.claim("d", part{"sim-1", 512})
	n.prepared(d) // another GPU has room
	n.unprepare(d)
	n.delete(a)
	lease, err := leases.Join(leases.Terms{Dir: n.cfg.Store.Ledger(), Device: "sim-0", Group: "claim-0000-a", Physical: 1 << 30, Advertised: 1 << 30, Quota: 512 << 20})
	if err != nil {
		t.Fatal(err)
	}
	refused()
	if err := lease.Close(); err != nil {
		t.Error(err)
	}
	n.prepared(c)
	if names := n.kept(); !slices.Equal(names, []string{"claim-0000-b", "claim-0000-c"}) {
		t.Errorf("%v", names)
	}
}

// What cannot be given is refused, in a line that says what to ask for.
func TestRefused(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.start()
	yes := true
	for name, c := range map[string]struct {
		parts  []part
		change func(*resourceapi.AllocationResult)
		want   string
	}{
		"two-parts":    {parts: []part{{"sim-0", 256}, {"sim-1", 256}}, want: "add the constraint matchAttribute: " + driverName + "/uuid"},
		"part-whole":   {parts: []part{{"sim-0", 256}, {"sim-1", 1024}}, want: "part of a GPU is given alone"},
		"no-device":    {parts: []part{{"sim-7", 256}}, want: "is no GPU of the node node-1: delete the claim's pods"},
		"too-much":     {parts: []part{{"sim-0", 2048}}, want: "has 2.0 GiB of sim-0, which has 1.0 GiB to give: delete the claim"},
		"another-pool": {parts: []part{{"sim-0", 256}}, change: func(r *resourceapi.AllocationResult) { r.Devices.Results[0].Pool = "node-2" }, want: "is no GPU of the node"},
		"admin":        {parts: []part{{"sim-0", 256}}, change: func(r *resourceapi.AllocationResult) { r.Devices.Results[0].AdminAccess = &yes }, want: "adminAccess"},
		"nothing": {parts: []part{{"sim-0", 256}}, change: func(r *resourceapi.AllocationResult) {
			r.Devices.Results[0].ConsumedCapacity[memory] = *quantity(1<<20 - 1)
		}, want: "ask for 256MiB at least"},
		"parameters": {parts: []part{{"sim-0", 256}}, change: func(r *resourceapi.AllocationResult) {
			r.Devices.Config = []resourceapi.DeviceAllocationConfiguration{{Source: resourceapi.AllocationConfigSourceClaim,
				DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(`{}`)}}}}}
		}, want: "which has none: remove them"},
	} {
		claim := n.claim(name, c.parts...)
		if c.change != nil {
			n.delete(claim)
			c.change(claim.Status.Allocation)
			n.create(claim)
		}
		if _, refusal := n.prepare(claim); !strings.Contains(refusal, c.want) {
			t.Errorf("%s: %q does not say %q", name, refusal, c.want)
		}
	}
	if left := n.kept(); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}

// A driver that is started again knows its claims. Those that are gone, and what was prepared half, are
// removed.
func TestRestart(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.start()
	a, b := n.claim("a", part{"sim-0", 768}), n.claim("b", part{"sim-1", 512})
	n.prepared(a)
	n.prepared(b)
	before := n.driver.Holders()
	n.stop()
	n.delete(b)
	if _, err := n.cfg.Store.Put(grants.Grant{Name: "claim-half", GPUs: gpus.Sim(1, 1<<30), Limit: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	next, err := New(n.cfg)
	if err != nil {
		t.Fatal(err)
	}
	limits := func(holders []grants.Holder) map[string]int64 {
		limits := map[string]int64{}
		for _, h := range holders {
			limits[h.Claim] = h.Limit
		}
		return limits
	}
	if after := limits(next.Holders()); len(after) != 2 || !maps.Equal(after, limits(before)) {
		t.Errorf("%v, and before %v", after, limits(before))
	}
	n.start()
	n.until("the claim that is gone is removed", func() bool { return len(n.driver.Holders()) == 1 })
	if names := n.kept(); !slices.Equal(names, []string{"claim-0000-a"}) {
		t.Errorf("%v", names)
	}
	if _, refusal := n.prepare(n.claim("c", part{"sim-0", 512})); !strings.Contains(refusal, "too much of a GPU") {
		t.Errorf("%q", refusal)
	}
	n.prepared(a)
	n.unprepare(a)
	if left := n.kept(); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}

// A sick GPU is not published, and no new claim gets it. What runs there goes on.
func TestSick(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.start()
	a := n.claim("a", part{"sim-0", 512})
	n.prepared(a)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	health, err := drahealth.NewDRAResourceHealthClient(n.conn).NodeWatchResources(ctx, &drahealth.NodeWatchResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	told := func(want drahealth.HealthStatus) {
		t.Helper()
		r, err := health.Recv()
		if err != nil || len(r.Devices) != 2 || r.Devices[0].Health != want || r.Devices[1].Health != drahealth.HealthStatus_HEALTHY {
			t.Fatal(r, err)
		}
	}
	told(drahealth.HealthStatus_HEALTHY)
	n.cfg.Inventory.SetSick("sim-0", "XID 79")
	told(drahealth.HealthStatus_UNHEALTHY)
	n.until("the sick GPU is left out", func() bool { return len(n.published()) == 1 })
	if _, there := n.published()["sim-1"]; !there {
		t.Error(n.published())
	}
	if _, refusal := n.prepare(n.claim("b", part{"sim-0", 256})); refusal != "sim-0 is not healthy: XID 79: delete the claim and its pods, so that another GPU is found" {
		t.Errorf("%q", refusal)
	}
	n.prepared(a)
	n.cfg.Inventory.SetSick("sim-0", "")
	n.until("it is back", func() bool { return len(n.published()) == 2 && n.driver.Ready() == nil })
	n.cfg.Inventory.SetSick("sim-0", "gone")
	n.cfg.Inventory.SetSick("sim-1", "gone")
	n.until("the pool is there without devices", func() bool { return len(n.published()) == 0 && n.driver.Ready() == nil })
}

// An API server that does not share devices gets such that are not shared, and the log says so once.
func TestExclusive(t *testing.T) {
	n := newNode(t, apiServer(true))
	n.start() // it becomes ready only when what is published is what is wanted
	for name, d := range n.published() {
		value := d.Capacity[memory].Value
		if d.AllowMultipleAllocations != nil || d.Capacity[memory].RequestPolicy != nil || value.Value() != 1<<30 {
			t.Errorf("%s: %+v", name, d)
		}
	}
	if got := strings.Count(n.log.String(), "does not share devices: each GPU goes whole to one claim"); got != 1 {
		t.Errorf("%d lines say so:\n%s", got, n.log)
	}
	n.prepared(n.claim("a", part{"sim-0", 0}))
	if _, refusal := n.prepare(n.claim("b", part{"sim-0", 0})); !strings.Contains(refusal, "too much of a GPU") {
		t.Errorf("%q", refusal)
	}
}

// The driver's role has the rights that it uses, and no other. A node of more GPUs than a slice takes has
// several slices; one is deleted when there are fewer.
func TestRights(t *testing.T) {
	n := newNode(t, apiServer(false), gpus.Sim(resourceapi.ResourceSliceMaxDevices+1, 1<<30)...)
	n.start()
	if got := len(n.published()); got != resourceapi.ResourceSliceMaxDevices+1 || n.slices() != 2 {
		t.Fatalf("%d devices in %d slices", got, n.slices())
	}
	n.prepared(n.claim("a", part{"sim-0", 256}))
	n.client.ClearActions() // from here on nothing is the test's own, and before it what is allowed below
	used := map[string]bool{"resourceslices list": true, "resourceslices watch": true, "resourceslices create": true, "resourceclaims get": true, "nodes get": true}
	n.cfg.Inventory.SetSick("sim-0", "gone")
	n.until("published anew", func() bool { return n.driver.Ready() == nil && strings.Count(n.log.String(), "msg=published") > 1 })
	n.driver.sweep(t.Context(), "")
	for _, a := range n.client.Actions() {
		used[a.GetResource().Resource+" "+a.GetVerb()] = true
	}
	if got := len(n.published()); got != resourceapi.ResourceSliceMaxDevices || n.slices() != 1 {
		t.Errorf("%d devices in %d slices", got, n.slices())
	}
	text, err := os.ReadFile("../../../../deploy/dra-driver.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var allowed []string
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var role rbacv1.ClusterRole
		if err := yaml.Unmarshal([]byte(doc), &role); err != nil {
			t.Fatal(err)
		}
		for _, rule := range role.Rules {
			for _, verb := range rule.Verbs {
				allowed = append(allowed, rule.Resources[0]+" "+verb)
			}
		}
	}
	slices.Sort(allowed)
	if want := slices.Sorted(maps.Keys(used)); !slices.Equal(allowed, want) {
		t.Errorf("the role allows %q, and the driver uses %q", allowed, want)
	}
}

// What is not there is one line that says what to do.
func TestRunFails(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*node)
		want   string
	}{
		"no kubelet": {func(n *node) { n.cfg.Kubelet = "/none" }, "is it mounted? see --kubelet-dir"},
		"no node":    {func(n *node) { n.cfg.Node = "node-7" }, "no node node-7: give the node's name by --node"},
		"no rights": {func(n *node) {
			n.client.PrependReactor("get", "nodes", func(k8stesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, nodeName, errors.New("no"))
			})
		}, "deploy/dra-driver.yaml has the rights"},
		"a long name": {func(n *node) { n.cfg.Driver = strings.Repeat("x", 60); n.cfg.Kubelet += strings.Repeat("/.", 40) }, "choose a shorter --driver"},
		"another one": {func(n *node) { n.start() }, "-reg.sock: end it"},
	} {
		n := newNode(t, apiServer(false))
		c.change(n)
		d, err := New(n.cfg)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Run(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Without an answer of the API server a driver waits, and still ends without an error.
func TestNoAnswer(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.client.PrependReactor("*", "*", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("no answer")
	})
	d, err := New(n.cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	registration := filepath.Join(n.cfg.Kubelet, "plugins_registry", driverName+"-reg.sock")
	n.until("the socket for registration", func() bool { _, err := os.Lstat(registration); return err == nil })
	n.until("the driver asked for the slices", func() bool {
		return slices.ContainsFunc(n.client.Actions(), func(a k8stesting.Action) bool { return a.Matches("list", "resourceslices") })
	})
	if err := d.Ready(); err == nil {
		t.Error("it is ready")
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if !strings.Contains(n.log.String(), "the API server does not answer: no answer; trying again") {
		t.Error(n.log)
	}
}

// runs runs a driver, and returns what its end sends to. It waits until both sockets are there.
func (n *node) runs(ctx context.Context) <-chan error {
	n.t.Helper()
	d := n.again()
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	n.until("the sockets", func() bool {
		return !slices.ContainsFunc(d.socketPaths(), func(path string) bool { _, err := os.Lstat(path); return err != nil })
	})
	return ended
}

// What would leave a driver useless ends it, whatever it waits for: it is started again then.
func TestEnds(t *testing.T) {
	for name, c := range map[string]struct {
		before, then func(*node)
		want         string
	}{
		"a server failed while the API server was down": {
			func(n *node) {
				n.client.PrependReactor("*", "*", func(k8stesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("no answer") })
			},
			func(n *node) { n.driver.HandleError(t.Context(), errors.New("accept: bad file"), "serving") }, "serving: accept: bad file",
		},
		"the registration socket is removed": {nil, func(n *node) { os.Remove(n.driver.socketPaths()[0]) }, "-reg.sock was removed"},
		"the other socket is removed":        {nil, func(n *node) { os.Remove(n.driver.socketPaths()[1]) }, "dra.sock was removed"},
		"the node was made anew": {nil, func(n *node) {
			n.until("the first look", func() bool { return strings.Contains(n.log.String(), "msg=published") })
			node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "another"}}
			if _, err := n.client.CoreV1().Nodes().Update(t.Context(), node, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			n.cfg.Inventory.SetSick("sim-0", "for the test")
		}, "the node node-1 was made anew"},
	} {
		n := newNode(t, apiServer(false))
		if c.before != nil {
			c.before(n)
		}
		ended := n.runs(t.Context())
		c.then(n)
		if err := <-ended; err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		if left, err := filepath.Glob(n.cfg.Kubelet + "/*/*.sock"); err != nil || len(left) > 0 {
			t.Errorf("%s: %v is left, %v", name, left, err)
		}
	}
}

// Each outage of the API server is logged, not only the first.
func TestOutages(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.start()
	down := false
	n.client.PrependReactor("list", "resourceslices", func(k8stesting.Action) (bool, runtime.Object, error) {
		if down {
			return true, nil, errors.New("no leader")
		}
		return false, nil, nil
	})
	p, err := pool(n.cfg.Inventory, n.cfg.Layout, false)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		down = true
		for range 2 {
			if n.driver.look(t.Context(), p.Slices[0].Devices) {
				t.Error("it has seen the slices without an answer")
			}
		}
		if got := strings.Count(n.log.String(), "no leader"); got != i+1 {
			t.Errorf("outage %d: %d lines", i+1, got)
		}
		down = false
		if !n.driver.look(t.Context(), p.Slices[0].Devices) {
			t.Error("it has not seen the slices")
		}
	}
}

// The GPUs are published before the API server is asked about old claims.
func TestPublishesFirst(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.again()
	n.gives(n.claim("a", part{"sim-0", 256}))
	n.client.ClearActions()
	// A lease that makes no sense, of a process that lives: what the other mode left is looked for, and stays.
	lease, err := os.Create(filepath.Join(n.cfg.Store.Ledger(), "sim-0", "lease-1-x"))
	if err == nil {
		err = syscall.Flock(int(lease.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Close()
	ctx, cancel := context.WithCancel(t.Context())
	ended := n.runs(ctx)
	at := func(verb, resource string) int {
		return slices.IndexFunc(n.client.Actions(), func(a k8stesting.Action) bool { return a.Matches(verb, resource) })
	}
	n.until("asked about the claim", func() bool { return at("get", "resourceclaims") >= 0 })
	if list := at("list", "resourceslices"); list < 0 || list > at("get", "resourceclaims") {
		t.Errorf("%v", n.client.Actions())
	}
	n.until("the other mode's grants are looked for", func() bool { return strings.Contains(n.log.String(), "what the device plugin gave is not removed") })
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// asker is a log that looks at the driver with each line: a lock that is held would never be free.
type asker struct {
	slog.Handler
	ask func()
}

func (a asker) Handle(ctx context.Context, r slog.Record) error {
	a.ask()
	return a.Handler.Handle(ctx, r)
}

// Nothing is logged while a lock is held.
func TestLogsWithoutLocks(t *testing.T) {
	n := newNode(t, apiServer(false))
	n.cfg.Log = slog.New(asker{slog.NewTextHandler(n.log, nil), func() {
		if n.driver != nil {
			n.driver.Ready()
			n.driver.Holders()
		}
	}})
	n.again()
	c := n.claim("a", part{"sim-0", 256})
	n.gives(c)
	n.delete(c)
	n.driver.sweep(t.Context(), "")
	n.driver.status.Warn("publish", "wrong")
	for _, line := range []string{"a claim is gone", "wrong"} {
		if !strings.Contains(n.log.String(), line) {
			t.Errorf("%q is not logged: %s", line, n.log)
		}
	}
}

// A node's claims are asked about without waiting for client-go's own limit.
func TestRate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(path, []byte(`{"apiVersion":"v1","kind":"Config","clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:1"}}],
		"contexts":[{"name":"c","context":{"cluster":"c"}}],"current-context":"c"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	client, err := Connect(path)
	if err != nil {
		t.Fatal(err)
	}
	if qps := client.ResourceV1().RESTClient().GetRateLimiter().QPS(); qps != perSecond {
		t.Errorf("%v in a second", qps)
	}
}

func TestConnect(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := Connect(""); err == nil || !strings.Contains(err.Error(), "name a file by --kubeconfig") {
		t.Error(err)
	}
	if _, err := Connect("/none"); err == nil || !strings.Contains(err.Error(), "see --kubeconfig") {
		t.Error(err)
	}
}
