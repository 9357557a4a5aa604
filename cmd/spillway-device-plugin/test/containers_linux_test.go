// Package test runs spillbench in containers that have what the plugin allocates, and checks that they
// stay within it.
package test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/deviceplugin"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/podresources"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
	"github.com/spillway-db/spillway/internal/leases"
)

// job is a process with mounts and a user of its own, as a container runtime starts it.
type job struct {
	Mounts map[string]string // from the container's path to the host's
	User   int
	Args   []string
}

const jobVar = "SPILLWAY_TEST_JOB"

// runJob replaces this process by the job's. It returns only after an error.
func runJob(text string) error {
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		return err
	}
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=0755"); err != nil {
		return err
	}
	for to, from := range j.Mounts {
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	for _, err := range []error{syscall.Setgroups(nil), syscall.Setgid(j.User), syscall.Setuid(j.User), os.Unsetenv(jobVar)} {
		if err != nil {
			return err
		}
	}
	return syscall.Exec(j.Args[0], j.Args, os.Environ())
}

// fakeLister lists no pods.
type fakeLister struct{}

func (fakeLister) List(context.Context, ...string) ([]podresources.Holding, error) { return nil, nil }

// The resources of units and of shares.
const (
	unitName   = "spillway-db.github.io/gpu-memory"
	sharedName = "spillway-db.github.io/shared-gpu"
)

// pods allocates parts of one simulated GPU of 96 MiB to containers, in units of 16 MiB or in four shares.
type pods struct {
	t      *testing.T
	client pluginapi.DevicePluginClient // of units
	shared pluginapi.DevicePluginClient // of shares
	store  *grants.Store
	bench  string
}

func newPods(t *testing.T) *pods {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the ledger is root's, and containers have other users")
	}
	open, err := os.MkdirTemp("", "spillway-test-") // which other users reach, unlike t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(open) })
	if err := os.Chmod(open, 0o755); err != nil {
		t.Fatal(err)
	}
	p := &pods{t: t, bench: filepath.Join(open, "spillbench")}
	build := exec.Command("go", "build", "-o", p.bench, "./cmd/spillbench")
	build.Dir = "../../.."
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath") // as in the image, without the tests' flags
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	list := gpus.Sim(1, 96<<20)
	if p.store, err = grants.Open(filepath.Join(open, "node"), nil, list); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.store.Close() })
	plugins := t.TempDir()
	plugin, err := deviceplugin.New(deviceplugin.Config{
		Dir: plugins, Resource: unitName, Layout: units.Layout{Unit: 16 << 20}, Inventory: gpus.NewInventory(list),
		Shared: sharedName, Shares: 4, Store: p.store, Pods: fakeLister{}, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- plugin.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	for name, client := range map[string]*pluginapi.DevicePluginClient{unitName: &p.client, sharedName: &p.shared} {
		socket := filepath.Join(plugins, strings.ReplaceAll(name, "/", "_")+".sock")
		conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		*client = pluginapi.NewDevicePluginClient(conn)
	}
	return p
}

// allocate returns the response for a container with units from to (exclusive).
func (p *pods) allocate(from, to int) *pluginapi.ContainerAllocateResponse {
	p.t.Helper()
	return p.allocateBy(p.client, from, to)
}

// allocateBy is allocate for units or shares.
func (p *pods) allocateBy(client pluginapi.DevicePluginClient, from, to int) *pluginapi.ContainerAllocateResponse {
	p.t.Helper()
	var ids []string
	for n := from; n < to; n++ {
		ids = append(ids, units.ID("sim-0", n))
	}
	request := &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}}
	r, err := client.Allocate(p.t.Context(), request, grpc.WaitForReady(true))
	if err != nil {
		p.t.Fatal(err)
	}
	return r.ContainerResponses[0]
}

// command returns a spillbench process in a container with an allocation; nil: it has none.
func (p *pods) command(c *pluginapi.ContainerAllocateResponse, env map[string]string, user int, args ...string) (*exec.Cmd, *bytes.Buffer) {
	j := job{Mounts: map[string]string{}, User: user, Args: append([]string{p.bench}, args...)}
	for _, m := range c.GetMounts() {
		j.Mounts[m.ContainerPath] = m.HostPath
	}
	text, err := json.Marshal(j)
	if err != nil {
		p.t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{jobVar + "=" + string(text), "PATH=" + os.Getenv("PATH"), "TMPDIR=/tmp"}
	for name, value := range env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	return cmd, &out
}

func runArgs(more ...string) []string {
	return append([]string{"run", "--gpu", "sim", "--gpu-memory", "96MiB", "--host-memory", "16MiB", "--codec", "none", "--quiet"}, more...)
}

// live returns how much each group holds, and which quotas its processes have.
func (p *pods) live() (held map[string]int64, quotas map[string]int64, users int) {
	holders, err := leases.Holders(p.store.Ledger())
	if err != nil {
		p.t.Fatal(err)
	}
	held, quotas = map[string]int64{}, map[string]int64{}
	for _, h := range holders {
		held[h.Group] += h.Live
		quotas[h.Group] = h.Quota
	}
	return held, quotas, len(holders)
}

// within fails the test if groups hold more than their limits, or all together more than the GPU has.
func (p *pods) within(limits map[string]int64, gpu int64) {
	p.t.Helper()
	held, _, _ := p.live()
	sum := int64(0)
	for group, n := range held {
		sum += n
		if n > limits[group] {
			p.t.Errorf("%s holds %d of %d", group, n, limits[group])
		}
	}
	if sum > gpu {
		p.t.Errorf("all hold %d of %d", sum, gpu)
	}
}

func start(t *testing.T, cmd *exec.Cmd) <-chan error {
	t.Helper()
	if err := cmd.Start(); err != nil {
		if os.IsPermission(err) {
			t.Skip("needs mounts of its own: ", err)
		}
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return ended
}

// Two processes of different users in one container, and one process in another pod, never hold more than
// their allocations, and all verify their data.
func TestContainers(t *testing.T) {
	p := newPods(t)
	one, other := p.allocate(0, 4), p.allocate(4, 6)
	limits := map[string]int64{one.Envs["SPILLWAY_GPU_QUOTA_GROUP"]: 64 << 20, other.Envs["SPILLWAY_GPU_QUOTA_GROUP"]: 32 << 20}
	if len(limits) != 2 {
		t.Fatalf("both have the group %v", limits)
	}
	asked := map[string]string{}
	for name, value := range one.Envs {
		asked[name] = value
	}
	asked["SPILLWAY_GPU_MEMORY_LIMIT"] = "96Mi" // a container's own environment cannot raise its limit
	a, outA := p.command(one, asked, 1001, runArgs()...)
	b, outB := p.command(one, nil, 1002, runArgs()...) // as a session opened into it: without the environment
	c, outC := p.command(other, other.Envs, 1001, runArgs()...)
	running := map[string]<-chan error{"a": start(t, a), "b": start(t, b), "c": start(t, c)}
	outs := map[string]*bytes.Buffer{"a": outA, "b": outB, "c": outC}
	most := 0
	for len(running) > 0 {
		p.within(limits, 96<<20)
		_, quotas, users := p.live()
		most = max(most, users)
		for group, quota := range quotas {
			if quota != limits[group] {
				t.Fatalf("a process of %q has a quota of %d, not %d", group, quota, limits[group])
			}
		}
		for name, ended := range running {
			select {
			case err := <-ended:
				if err != nil {
					t.Errorf("%s: %v: %s", name, err, outs[name])
				}
				delete(running, name)
			case <-time.After(time.Millisecond):
			}
		}
	}
	if most != 3 {
		t.Errorf("at most %d processes ran side by side, of 3", most)
	}
}

// Containers share a GPU by their own limits, under either name. A container without one has a share as its
// limit, and so has a process without the container's environment, such as a login session. A container of
// units may set a limit below its allocation. As in the kubelet, a container's own variables replace the
// plugin's.
func TestOwnLimits(t *testing.T) {
	for name, c := range map[string]struct {
		client func(*pods) pluginapi.DevicePluginClient
		env    []map[string]string // of one container each
		want   []int64             // limits, MiB
		bare   bool                // the processes have no environment
	}{
		"shares": {
			func(p *pods) pluginapi.DevicePluginClient { return p.shared },
			[]map[string]string{{"SPILLWAY_GPU_MEMORY_LIMIT": "40Mi"}, {"NVSHARE_GPU_MEMORY_LIMIT": "32Mi"}, nil},
			[]int64{40, 32, 24}, false,
		},
		"sessions": {
			func(p *pods) pluginapi.DevicePluginClient { return p.shared },
			[]map[string]string{nil, nil},
			[]int64{24, 24}, true,
		},
		"units": {
			func(p *pods) pluginapi.DevicePluginClient { return p.client },
			[]map[string]string{
				{"SPILLWAY_GPU_MEMORY_LIMIT": "15Mi"}, {"NVSHARE_GPU_MEMORY_LIMIT": "14Mi"}, {"NVSHARE_GPU_MEMORY_LIMIT": "90Mi"},
			},
			[]int64{15, 14, 16}, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPods(t)
			limits, want := map[string]int64{}, map[string]int64{}
			var ended []<-chan error
			var outs []*bytes.Buffer
			for i, own := range c.env {
				got := p.allocateBy(c.client(p), i, i+1)
				env := maps.Clone(got.Envs)
				maps.Copy(env, own)
				want[env["SPILLWAY_GPU_QUOTA_GROUP"]] = c.want[i] << 20
				if c.bare {
					env = nil
				}
				cmd, out := p.command(got, env, 1001+i, runArgs("--passes", "1000")...)
				ended, outs = append(ended, start(t, cmd)), append(outs, out)
			}
			eventually(t, func() error {
				_, limits, _ = p.live()
				if len(limits) < len(want) {
					for i, e := range ended {
						select {
						case err := <-e:
							t.Fatalf("%v: %s", err, outs[i])
						default:
						}
					}
					return fmt.Errorf("%d of %d containers have joined", len(limits), len(want))
				}
				return nil
			})
			if !maps.Equal(limits, want) {
				t.Errorf("the limits are %v, want %v", limits, want)
			}
			p.within(want, 96<<20)
		})
	}
}

// When a process is killed, a process of another user can use its memory immediately.
func TestContainerIsKilled(t *testing.T) {
	p := newPods(t)
	c := p.allocate(0, 4)
	group := c.Envs["SPILLWAY_GPU_QUOTA_GROUP"]
	cmd, _ := p.command(c, c.Envs, 1001, runArgs("--passes", "1000")...)
	ended := start(t, cmd)
	eventually(t, func() error {
		if held, _, _ := p.live(); held[group] < 32<<20 {
			return fmt.Errorf("it holds %d", held[group])
		}
		return nil
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-ended
	if held, _, users := p.live(); held[group] != 0 || users != 0 {
		t.Errorf("a killed process holds %d", held[group])
	}
	next, out := p.command(c, c.Envs, 1002, runArgs()...)
	if err := <-start(t, next); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// A process without the mounts cannot join, even with the ledger's path on the node.
func TestStranger(t *testing.T) {
	p := newPods(t)
	c := p.allocate(0, 4)
	for name, dir := range map[string]string{"the container's path": "/run/spillway/ledger", "the node's": p.store.Ledger()} {
		env := map[string]string{}
		for name, value := range c.Envs {
			env[name] = value
		}
		env["SPILLWAY_GPU_QUOTA_DIR"] = dir
		cmd, out := p.command(nil, env, 1003, runArgs()...)
		if err := <-start(t, cmd); err == nil || !strings.Contains(out.String(), "permission denied") {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
	if _, _, users := p.live(); users != 0 {
		t.Errorf("%d strangers joined", users)
	}
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

func TestMain(m *testing.M) {
	if text, ok := os.LookupEnv(jobVar); ok {
		fmt.Fprintln(os.Stderr, runJob(text))
		os.Exit(125)
	}
	os.Exit(m.Run())
}
