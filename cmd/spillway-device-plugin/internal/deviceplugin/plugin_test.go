package deviceplugin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/podresources"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/status"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/reservation/quota"
)

// lister is a kubelet's list that the test sets.
type lister struct {
	mu   sync.Mutex
	list []podresources.Holding
	err  error
}

func (l *lister) List(context.Context, ...string) ([]podresources.Holding, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.list), l.err
}

func (l *lister) set(err error, list ...podresources.Holding) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list, l.err = list, err
}

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

type rig struct {
	*Plugin
	t    *testing.T
	pods *lister
	log  *text
}

// newRig is a plugin with two GPUs of 4 units, that does not run.
func newRig(t *testing.T) *rig {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the ledger is root's")
	}
	r := &rig{t: t, pods: &lister{}, log: &text{}}
	list := gpus.Sim(2, 1<<30)
	store, err := grants.Open(filepath.Join(t.TempDir(), "node"), nil, list)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	r.Plugin, err = New(Config{
		Dir: t.TempDir(), Resource: "example.com/memory", Whole: "example.com/gpu", Shared: "example.com/shared", Shares: 3,
		Layout:    units.Layout{Unit: 256 << 20},
		Inventory: gpus.NewInventory(list), Store: store, Pods: r.pods, Log: slog.New(slog.NewTextHandler(r.log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// run runs the plugin until the test ends, or stop is called.
func (r *rig) run() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			r.t.Error(err)
		}
	})
	r.t.Cleanup(stop)
	return stop
}

func (r *rig) allocate(k kind, ids ...string) error {
	_, err := r.allocated(k, ids...)
	return err
}

// allocated returns what a container with these ids gets.
func (r *rig) allocated(k kind, ids ...string) (*pluginapi.ContainerAllocateResponse, error) {
	i := slices.IndexFunc(r.resources, func(r *resource) bool { return r.kind == k })
	request := &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}}
	response, err := r.resources[i].Allocate(r.t.Context(), request)
	if err != nil {
		return nil, err
	}
	return response.ContainerResponses[0], nil
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

func TestAllocateRefuses(t *testing.T) {
	r := newRig(t)
	r.cfg.Inventory.SetSick("sim-1", "it fell off the bus")
	for name, c := range map[string]struct {
		kind kind
		ids  []string
		want string
	}{
		"none":            {memoryUnits, nil, "none or some of them twice"},
		"twice":           {memoryUnits, []string{"sim-0::1", "sim-0::1"}, "twice"},
		"two GPUs":        {memoryUnits, []string{"sim-0::1", "sim-1::1"}, "one GPU only"},
		"an unknown GPU":  {memoryUnits, []string{"sim-7::1"}, `"sim-7" is no GPU of this node`},
		"an unknown unit": {memoryUnits, []string{"sim-0::4"}, "only 4 units"},
		"no unit":         {memoryUnits, []string{"sim-0"}, "is no unit"},
		"a sick GPU":      {memoryUnits, []string{"sim-1::0"}, "sim-1 is not healthy: it fell off the bus: delete the pod"},
		"whole, unknown":  {wholeGPU, []string{"sim-0::1"}, "is no GPU of this node"},
		"whole, sick":     {wholeGPU, []string{"sim-0", "sim-1"}, "not healthy"},
		"whole, none":     {wholeGPU, nil, "none or some"},
	} {
		if err := r.allocate(c.kind, c.ids...); err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if names, err := r.cfg.Store.Names(); len(names) > 0 || err != nil {
		t.Errorf("what was refused left %v, %v", names, err)
	}
	if len(r.alloc.all()) > 0 {
		t.Error("what was refused counts")
	}
}

// A GPU is given in units, in shares or whole; what the kubelet lists decides.
func TestOneWayAtATime(t *testing.T) {
	r := newRig(t)
	if err := r.allocate(memoryUnits, "sim-0::0"); err != nil {
		t.Fatal(err)
	}
	for k, id := range map[kind]string{wholeGPU: "sim-0", sharedGPU: "sim-0::0"} {
		if err := r.allocate(k, id); err == nil || !strings.Contains(err.Error(), "whole, in shares or in units") {
			t.Errorf("a GPU of which a unit is given is given as %s: %v", k, err)
		}
	}
	if err := r.allocate(wholeGPU, "sim-1"); err != nil {
		t.Error(err)
	}
	for _, k := range []kind{memoryUnits, sharedGPU} {
		if err := r.allocate(k, "sim-1::0"); err == nil {
			t.Errorf("%s of a GPU that is given whole are given", k)
		}
	}
	health := map[string]string{}
	for _, res := range r.resources {
		for _, d := range res.devices() {
			health[string(res.kind)+" "+d.ID] = d.Health
		}
	}
	for id, want := range map[string]string{
		"units sim-0::3": pluginapi.Healthy, "units sim-1::0": pluginapi.Unhealthy, "gpus sim-0": pluginapi.Unhealthy,
		"gpus sim-1": pluginapi.Healthy, "shares sim-0::2": pluginapi.Unhealthy, "shares sim-1::2": pluginapi.Unhealthy,
	} {
		if health[id] != want {
			t.Errorf("%s is %s", id, health[id])
		}
	}
	r.alloc.list(nil, time.Now().Add(2*keepFor)) // the pod is gone
	if err := r.allocate(wholeGPU, "sim-0"); err != nil {
		t.Errorf("after its units were given back: %v", err)
	}
}

// A container with a share of a GPU has the limit that it sets itself, by either name, and one that
// sets none has a share of the GPU. The kubelet puts a container's own variables behind the plugin's,
// and so they replace them (kubelet_pods.go, GenerateRunContainerOptions).
func TestShares(t *testing.T) {
	r := newRig(t)
	for name, c := range map[string]struct {
		ids  []string
		own  map[string]string
		want string
	}{
		"none":      {[]string{"sim-0::0"}, nil, "341MiB"},
		"none, two": {[]string{"sim-0::0", "sim-0::1"}, nil, "682MiB"},
		"ours":      {[]string{"sim-0::0"}, map[string]string{"SPILLWAY_GPU_MEMORY_LIMIT": "600Mi"}, "600MiB"},
		"nvshare's": {[]string{"sim-0::0"}, map[string]string{"NVSHARE_GPU_MEMORY_LIMIT": "64Mi"}, "64MiB"},
		"a part":    {[]string{"sim-0::0"}, map[string]string{"NVSHARE_GPU_MEMORY_LIMIT": "25%"}, "25%"},
		"all of it": {[]string{"sim-0::0"}, map[string]string{"SPILLWAY_GPU_MEMORY_LIMIT": "1Gi"}, "1GiB"},
	} {
		got, err := r.allocated(sharedGPU, c.ids...)
		if err != nil {
			t.Fatal(err)
		}
		env := maps.Clone(got.Envs)
		maps.Copy(env, c.own)
		s, err := quota.FromEnv(func(name string) (string, bool) { value, ok := env[name]; return value, ok })
		if err != nil || s.Limit.String() != c.want || s.Ledger == "" || s.Physical != 1<<30 {
			t.Errorf("%s: the engine reads %+v, %v; want the limit %s", name, s, err, c.want)
		}
		// The file has the default only, by the name that a process's own limit replaces.
		file, err := os.ReadFile(filepath.Join(got.Mounts[1].HostPath, "environment"))
		has := func(line string) bool { return strings.Contains("\n"+string(file), "\n"+line) }
		share := fmt.Sprintf("NVSHARE_GPU_MEMORY_LIMIT=%dMi\n", 341*len(c.ids))
		if err != nil || has("SPILLWAY_GPU_MEMORY_LIMIT") || !has(share) || !has("SPILLWAY_GPU_QUOTA_GROUP="+s.Group) {
			t.Errorf("%s: %s, %v", name, file, err)
		}
	}
	if err := r.allocate(sharedGPU, "sim-0::3"); err == nil || !strings.Contains(err.Error(), "has only 3 shares") {
		t.Error(err)
	}
	request := &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: []string{"sim-0::2", "sim-1::2"}, AllocationSize: 1},
	}}
	preferred, err := r.resources[2].GetPreferredAllocation(t.Context(), request)
	if err != nil || !slices.Equal(preferred.ContainerResponses[0].DeviceIDs, []string{"sim-1::2"}) {
		t.Errorf("the GPU with fewer shares given is not preferred: %v, %v", preferred, err)
	}
}

// A GPU that cannot be shared by so many is refused.
func TestTooManyShares(t *testing.T) {
	_, err := New(Config{
		Resource: "example.com/memory", Shared: "example.com/shared", Shares: 2, Layout: units.Layout{Unit: 1 << 20},
		Inventory: gpus.NewInventory(gpus.Sim(1, 1<<20)),
	})
	if err == nil || !strings.Contains(err.Error(), "choose fewer by --shares") {
		t.Error(err)
	}
}

// What was just given counts although it is not listed, and so does what is missing from a list. Its
// directory stays for longer, while its processes live, and while there is no list.
func TestGrantsFollowTheList(t *testing.T) {
	r := newRig(t)
	ids := []string{"sim-0::0", "sim-0::1"}
	name := grantName(memoryUnits, ids)
	now := time.Now()
	check := func(when string, after time.Duration, holders int, directory bool) {
		t.Helper()
		now = now.Add(after)
		r.refresh(t.Context(), now)
		names, err := r.cfg.Store.Names()
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Holders(); len(got) != holders || slices.Contains(names, name) != directory {
			t.Errorf("%s: %+v, %v", when, got, names)
		}
	}
	if err := r.allocate(memoryUnits, ids...); err != nil {
		t.Fatal(err)
	}
	check("just given", 0, 1, true)
	r.pods.set(nil, podresources.Holding{Namespace: "n", Pod: "p", Container: "c", Resource: "example.com/memory", IDs: ids})
	check("listed", 2*keepFor, 1, true)
	if h := r.Holders()[0]; h.Pod != "p" || h.Limit != 512<<20 || h.Name != name {
		t.Errorf("%+v", h)
	}
	// A kubelet that was just started knows no pods yet.
	r.pods.set(nil)
	check("missing once", 10*time.Second, 1, true)
	r.pods.set(errors.New("no answer"))
	check("no answer", 2*grants.RemoveAfter, 1, true)
	check("no answer", 2*grants.RemoveAfter, 1, true)
	if n := strings.Count(r.log.String(), "no answer"); n != 1 {
		t.Errorf("it is said %d times that the kubelet does not answer", n)
	}
	r.pods.set(nil)
	check("gone", 2*keepFor, 0, true)
	// A process of it still runs: the pods are not all listed.
	lease, err := leases.Join(leases.Terms{Dir: r.cfg.Store.Ledger(), Device: "sim-0", Group: name, Physical: 1 << 30, Advertised: 1 << 30, Quota: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	check("alive", 2*grants.RemoveAfter, 0, true)
	if err := lease.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.cfg.Store.Put(grants.Grant{Name: "claim-1", GPUs: gpus.Sim(1, 1<<30)}); err != nil { // of the other mode
		t.Fatal(err)
	}
	check("ended", time.Second, 0, true)
	check("ended for long", grants.RemoveAfter+time.Second, 0, false)
	if names, err := r.cfg.Store.Names(); err != nil || len(names) > 0 {
		t.Errorf("%v, %v", names, err)
	}
	// A container that is started again after a reboot.
	if _, err := r.resources[0].PreStartContainer(t.Context(), &pluginapi.PreStartContainerRequest{DevicesIds: ids}); err != nil {
		t.Error(err)
	}
	names, err := r.cfg.Store.Names()
	if err != nil || !slices.Contains(names, name) {
		t.Errorf("the directory is not made again: %v, %v", names, err)
	}
}

// An init container is not listed; the container that has its units after it is.
func TestInitContainersAreKept(t *testing.T) {
	a := newAllocations()
	now := time.Now()
	a.add(memoryUnits, []string{"g::0"}, now)
	a.list([]holding{{kind: memoryUnits, Holding: podresources.Holding{Pod: "p", IDs: []string{"g::0", "g::1"}}}}, now.Add(time.Hour))
	if n := len(a.all()); n != 2 {
		t.Errorf("%d grants, not 2", n)
	}
	if u := a.uses()["g"]; u.Units != 2 {
		t.Errorf("%d units are given, not 2", u.Units)
	}
	a.list(nil, now.Add(time.Hour+2*keepFor))
	if n := len(a.all()); n != 0 {
		t.Errorf("%d grants of a pod that is gone", n)
	}
}

func TestTooManyUnits(t *testing.T) {
	list := gpus.Sim(8, 80<<30)
	for i := range list {
		list[i].UUID = fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i)
	}
	inventory := gpus.NewInventory(list)
	_, err := New(Config{Resource: "example.com/memory", Layout: units.Layout{Unit: 1 << 20}, Inventory: inventory})
	if err == nil || !strings.Contains(err.Error(), "use --unit ") {
		t.Fatalf("%v", err)
	}
	if _, err := New(Config{Resource: "example.com/memory", Layout: units.Layout{Unit: 1}, Inventory: inventory}); err == nil {
		t.Error("units of a byte fit")
	}
	// The unit that it names is large enough, and half of it is not.
	for unit, fits := range map[int64]bool{8 << 20: false, 16 << 20: true} {
		_, err := New(Config{Resource: "example.com/memory", Layout: units.Layout{Unit: unit}, Inventory: inventory})
		if (err == nil) != fits {
			t.Errorf("units of %d: %v", unit, err)
		}
		if err != nil && !strings.HasSuffix(err.Error(), "use --unit 16MiB") {
			t.Error(err)
		}
	}
}

func TestSockets(t *testing.T) {
	r := newRig(t)
	if err := r.Ready(); err == nil || !strings.Contains(err.Error(), "does not run yet") {
		t.Errorf("it is ready before it runs: %v", err)
	}
	path := filepath.Join(r.cfg.Dir, "example.com_memory.sock")
	// One that a killed plugin left.
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	stop := r.run()
	eventually(t, "no socket is served", func() bool {
		conn, err := net.Dial("unix", path)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	// It waits for a kubelet, and says so once.
	eventually(t, "it does not say that there is no kubelet", func() bool {
		return strings.Count(r.log.String(), "it does not run") == len(r.resources)
	})
	if err := r.Ready(); err == nil || !strings.Contains(err.Error(), "is not registered") {
		t.Errorf("it is ready: %v", err)
	}
	// A second one does not take its place.
	second, err := New(r.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "another plugin serves") {
		t.Errorf("two plugins with one socket: %v", err)
	}
	stop()
	if left, _ := os.ReadDir(r.cfg.Dir); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
	third := r.cfg
	third.Dir = filepath.Join(t.TempDir(), "none")
	p, err := New(third)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "is it mounted?") || strings.Contains(err.Error(), "\n") {
		t.Errorf("no directory: %v", err)
	}
}

// registry is a kubelet that refuses some times.
type registry struct {
	pluginapi.UnimplementedRegistrationServer
	mu      sync.Mutex
	refuse  int
	entries []string
}

func (g *registry) Register(_ context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.refuse > 0 {
		g.refuse--
		return nil, fmt.Errorf("not today")
	}
	g.entries = append(g.entries, r.ResourceName)
	return &pluginapi.Empty{}, nil
}

func (g *registry) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.entries)
}

// The kubelet refuses for a while, and later starts again and removes all sockets.
func TestRegistersAgain(t *testing.T) {
	r := newRig(t)
	socket := filepath.Join(r.cfg.Dir, "kubelet.sock")
	serve := func(g *registry) *grpc.Server {
		l, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer()
		pluginapi.RegisterRegistrationServer(server, g)
		go func() { _ = server.Serve(l) }()
		return server
	}
	first := &registry{refuse: 2*len(r.resources) - 1}
	server := serve(first)
	r.run()
	eventually(t, "it does not register", func() bool { return first.count() == len(r.resources) && r.Ready() == nil })
	if n := strings.Count(r.log.String(), "not today"); n != len(r.resources) { // once of each
		t.Errorf("it is said %d times that the kubelet refuses", n)
	}
	server.Stop()
	own, err := filepath.Glob(r.cfg.Dir + "/example*.sock")
	if err != nil || len(own) != len(r.resources) {
		t.Fatal(own, err)
	}
	for _, path := range own {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	next := &registry{}
	server = serve(next)
	defer server.Stop()
	eventually(t, "it does not register again", func() bool { return next.count() >= 2 && r.Ready() == nil })
	for _, path := range own {
		conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		o, err := pluginapi.NewDevicePluginClient(conn).GetDevicePluginOptions(t.Context(), &pluginapi.Empty{}, grpc.WaitForReady(true))
		if err != nil || !o.PreStartRequired || !o.GetPreferredAllocationAvailable {
			t.Errorf("%s: %v, %v", path, o, err)
		}
		conn.Close()
	}
}

// Whole GPUs are of one NUMA node where one has enough.
func TestChooseWhole(t *testing.T) {
	var list []gpus.GPU
	for i, node := range []int{0, 1, 1, 0, 1} {
		list = append(list, gpus.GPU{UUID: fmt.Sprintf("GPU-%d", i), Index: i, Node: node, Memory: 1 << 30})
	}
	r := &resource{kind: wholeGPU, p: &Plugin{cfg: Config{Inventory: gpus.NewInventory(list)}}}
	all := []string{"GPU-4", "GPU-0", "GPU-1", "GPU-2", "GPU-3"}
	for _, c := range []struct {
		available, must []string
		n               int
		want            []string
	}{
		{all, nil, 2, []string{"GPU-0", "GPU-3"}},
		{all, nil, 3, []string{"GPU-1", "GPU-2", "GPU-4"}},
		{all, []string{"GPU-2"}, 2, []string{"GPU-1", "GPU-2"}},
		{all, nil, 5, []string{"GPU-0", "GPU-1", "GPU-2", "GPU-3", "GPU-4"}},
		{all[:2], nil, 3, nil},
		{[]string{"GPU-9"}, nil, 1, nil},
	} {
		got, err := r.chooseWhole(c.available, c.must, c.n)
		slices.Sort(got)
		if !slices.Equal(got, c.want) || (err == nil) != (c.want != nil) {
			t.Errorf("%d of %v with %v: %v, %v; want %v", c.n, c.available, c.must, got, err, c.want)
		}
	}
}

// asker is a log that looks at the plugin with each line: a lock that is held would never be free.
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
	r := newRig(t)
	r.status = status.New(slog.New(asker{slog.NewTextHandler(r.log, nil), func() { _ = r.Ready() }}))
	r.status.Warn("list", "wrong")
	if !strings.Contains(r.log.String(), "wrong") {
		t.Error(r.log)
	}
}
