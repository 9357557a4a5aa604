// Package deviceplugin gives GPU memory to containers through the kubelet's device plugin API, v1beta1.
//
//	Plugin.Run ──▶ a socket for each resource ◀── the kubelet: ListAndWatch, GetPreferredAllocation,
//	   │                                            Allocate, PreStartContainer
//	   ├── registers at kubelet.sock, again when the kubelet makes that socket again
//	   └── asks PodResources which container has what; removes the grants that none has
//
// The plugin has three resources: units of memory, whole GPUs, and shares of a GPU, whose containers set
// their own limits. A GPU is given out as one of these at a time: meanwhile the plugin reports the GPU's
// devices of the other resources as unhealthy.
//
// A grant follows from the device ids that the kubelet passes. A plugin that restarts therefore needs no
// state of its predecessor.
package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/podresources"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/status"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
	"github.com/spillway-db/spillway/internal/size"
)

// Lister lists which container has which devices. It is a podresources.Client, or a fake in tests.
type Lister interface {
	List(ctx context.Context, resources ...string) ([]podresources.Holding, error)
}

// Config configures a plugin. All fields but Whole, Shared, Refresh and CDIName are required.
type Config struct {
	Dir       string // directory of the kubelet's socket and the plugin's
	Resource  string // name of the units
	Whole     string // name of whole GPUs; empty: the plugin does not offer them
	Shared    string // name of shares; empty: the plugin does not offer them
	Shares    int    // shares of each GPU, if Shared is set
	Layout    units.Layout
	Inventory *gpus.Inventory
	Store     *grants.Store
	Pods      Lister
	Log       *slog.Logger
	Refresh   time.Duration            // how often the plugin asks the kubelet which container has what; 0: every 10 s
	CDIName   func(uuid string) string // qualified CDI name of a GPU; nil: containers get no CDI devices
}

// refreshEvery is the default of Config.Refresh.
const refreshEvery = 10 * time.Second

// Plugin is a device plugin. New makes it, and Run runs it once.
type Plugin struct {
	cfg       Config
	alloc     *allocations
	resources []*resource

	putting sync.Mutex // held while the plugin makes a grant's directory, and while it removes others

	// status has one subject for each resource, by its name, which is well while the kubelet has
	// registered the resource; and list, ledger and grants, for the log.
	status *status.Status
}

// New checks the configuration and returns a plugin.
func New(cfg Config) (*Plugin, error) {
	p := &Plugin{cfg: cfg, alloc: newAllocations(), status: status.New(cfg.Log)}
	list := cfg.Inventory.GPUs()
	if err := checkMessage(list, cfg.Layout); err != nil {
		return nil, err
	}
	for _, r := range []*resource{
		{name: cfg.Resource, kind: memoryUnits},
		{name: cfg.Whole, kind: wholeGPU},
		{name: cfg.Shared, kind: sharedGPU},
	} {
		r.p = p
		if r.name == "" {
			continue
		}
		for _, g := range list {
			if r.kind == wholeGPU {
				r.all = append(r.all, g.UUID)
				continue
			}
			n, _, err := p.divide(r.kind, g)
			if err != nil {
				return nil, err
			}
			for i := range n {
				r.all = append(r.all, units.ID(g.UUID, i))
			}
		}
		p.resources = append(p.resources, r)
		p.status.Set(r.name, "the plugin does not run yet")
	}
	return p, nil
}

const (
	maxMessage = 4 << 20 // bytes that the kubelet accepts in one message: gRPC's default
	perUnit    = 31      // bytes of a unit in such a message, besides the UUID
)

// checkMessage returns an error if the units of the GPUs do not fit into one message to the kubelet,
// which would close the connection without an error. The error names a unit that is large enough.
func checkMessage(list []gpus.GPU, layout units.Layout) error {
	given, count := layout.Unit, 0
	for ; ; layout.Unit *= 2 {
		all, bytes := 0, 0
		for _, g := range list {
			n, err := layout.Count(g)
			if err != nil {
				return fmt.Errorf("dividing the GPUs into units of %s: %w", size.Format(given), err)
			}
			all += n
			bytes += n * (len(g.UUID) + perUnit)
		}
		count = max(count, all)
		switch {
		case bytes > maxMessage:
			continue
		case layout.Unit == given:
			return nil
		}
		return fmt.Errorf("%d units of %s do not fit into one message to the kubelet, of 4 MiB: use --unit %s",
			count, size.Format(given), size.Format(layout.Unit))
	}
}

// Ready returns nil if the kubelet has registered all resources, and otherwise the reason why not.
func (p *Plugin) Ready() error {
	for _, r := range p.resources {
		if problem := p.status.Problem(r.name); problem != "" {
			return fmt.Errorf("%s is not registered: %s", r.name, problem)
		}
	}
	return nil
}

// errRestart reports that the plugin must make its sockets again.
var errRestart = errors.New("the sockets must be made again")

// Run serves the kubelet until ctx ends, and then returns nil. It removes its sockets.
func (p *Plugin) Run(ctx context.Context) error {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watching %s: %w", p.cfg.Dir, err)
	}
	defer w.Close()
	if err := w.Add(p.cfg.Dir); err != nil {
		return fmt.Errorf("watching the kubelet's directory %s: %w (is it mounted? see --kubelet-dir)", p.cfg.Dir, err)
	}
	p.refresh(ctx, time.Now())
	refreshing, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(cmp.Or(p.cfg.Refresh, refreshEvery))
		defer tick.Stop()
		for {
			select {
			case now := <-tick.C:
				p.refresh(refreshing, now)
			case <-refreshing.Done():
				return
			}
		}
	})
	defer wg.Wait()
	defer stop()
	for {
		if err := p.serve(ctx, w); err != errRestart {
			return err
		}
	}
}

// serve makes the sockets and registers the resources. It returns errRestart when the kubelet has made
// its socket again, or has removed the plugin's, as it does when it starts.
func (p *Plugin) serve(ctx context.Context, w *fsnotify.Watcher) error {
	ctx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	var own []string
	for _, r := range p.resources {
		p.status.Set(r.name, "its socket is new")
		path := filepath.Join(p.cfg.Dir, strings.ReplaceAll(r.name, "/", "_")+".sock")
		l, err := listen(path)
		if err != nil {
			return err
		}
		own = append(own, path)
		server := grpc.NewServer()
		pluginapi.RegisterDevicePluginServer(server, r)
		wg.Go(func() { _ = server.Serve(l) }) // returns after Stop
		defer server.Stop()
		wg.Go(func() { p.register(ctx, r, filepath.Base(path)) })
	}
	kubelet := p.kubelet()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-w.Errors:
			return fmt.Errorf("watching %s: %w", p.cfg.Dir, err)
		case e := <-w.Events:
			if e.Name == kubelet && e.Has(fsnotify.Create) {
				p.cfg.Log.Info("the kubelet's socket is new: registering again")
				return errRestart
			}
			if slices.Contains(own, e.Name) && e.Has(fsnotify.Remove) {
				if _, err := os.Lstat(e.Name); err != nil { // else the event is about an earlier socket
					return errRestart
				}
			}
		}
	}
}

func (p *Plugin) kubelet() string { return filepath.Join(p.cfg.Dir, "kubelet.sock") }

// listen makes a socket. It removes a socket that an earlier plugin left, and fails if a plugin serves it.
func listen(path string) (net.Listener, error) {
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		conn.Close()
		return nil, fmt.Errorf("another plugin serves %s: end it", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("%w (a socket's path has at most 107 bytes)", err)
	}
	return l, nil
}

// register registers a resource at the kubelet. It tries until it succeeds or ctx ends.
func (p *Plugin) register(ctx context.Context, r *resource, endpoint string) {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 10*time.Second) {
		err := p.registerOnce(ctx, r, endpoint)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			p.status.Set(r.name, "")
			p.cfg.Log.Info("registered", "resource", r.name, "devices", len(r.all))
			return
		}
		p.status.Warn(r.name, fmt.Sprintf("the kubelet does not take %s: %v; trying again", r.name, err))
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func (p *Plugin) registerOnce(ctx context.Context, r *resource, endpoint string) error {
	if _, err := os.Lstat(p.kubelet()); err != nil {
		return fmt.Errorf("it does not run, or has another directory (see --kubelet-dir): %w", err)
	}
	conn, err := grpc.NewClient("unix://"+p.kubelet(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: endpoint, ResourceName: r.name, Options: r.options(),
	})
	return err
}

// refresh asks the kubelet which container has what, and removes the grants that no container has. If
// the kubelet does not answer, refresh removes nothing. now is the time of the call.
func (p *Plugin) refresh(ctx context.Context, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var names []string
	kinds := map[string]kind{}
	for _, r := range p.resources {
		names = append(names, r.name)
		kinds[r.name] = r.kind
	}
	list, err := p.cfg.Pods.List(ctx, names...)
	if err != nil {
		if ctx.Err() != context.Canceled {
			p.status.Warn("list", err.Error())
		}
		return
	}
	p.status.Warn("list", "")
	holdings := make([]holding, len(list))
	for i, h := range list {
		holdings[i] = holding{Holding: h, kind: kinds[h.Resource]}
	}
	p.alloc.list(holdings, now)
	problem := ""
	if err := p.sweep(now); err != nil {
		problem = "removing grants that nobody has: " + err.Error()
	}
	p.status.Warn("grants", problem)
}

// sweep removes the directories of grants that no container has had for long, also those of the driver
// for claims.
func (p *Plugin) sweep(now time.Time) error {
	p.putting.Lock()
	defer p.putting.Unlock()
	held := p.alloc.all()
	_, err := p.cfg.Store.RemoveUnused(now, func(name string) bool { _, ok := held[name]; return ok })
	return err
}
