// Package deviceplugin gives GPU memory to containers by the kubelet's device plugin API, v1beta1.
//
//	Plugin.Run ──▶ a socket for each resource ◀── the kubelet: ListAndWatch, GetPreferredAllocation,
//	   │                                            Allocate, PreStartContainer
//	   ├── registers at kubelet.sock, again whenever that is made anew
//	   └── asks PodResources who has what; removes what nobody has
//
// There are three resources: units of memory, whole GPUs, and shares of a GPU whose containers set
// their own limits. A GPU is given in one of these ways at a time: while some of it is given, the
// plugin reports its ids of the other resources as unhealthy.
//
// What a grant is follows from the ids that the kubelet names. So a plugin that was started again
// needs nothing of what an earlier one knew.
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
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/podresources"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
	"github.com/spillway-db/spillway/internal/size"
)

// Lister says which container has which devices. podresources.Client is one.
type Lister interface {
	List(ctx context.Context, resources ...string) ([]podresources.Holding, error)
}

// Config is what a plugin needs. All fields but Whole, Shared, Refresh and CDIName are required.
type Config struct {
	Dir       string // with the kubelet's socket, and the plugin's
	Resource  string // name of the units
	Whole     string // name of whole GPUs; empty: none are given whole
	Shared    string // name of shared GPUs; empty: none are shared
	Shares    int    // shares of each GPU, if Shared is set
	Layout    units.Layout
	Inventory *gpus.Inventory
	Store     *grants.Store
	Pods      Lister
	Log       *slog.Logger
	Refresh   time.Duration            // how often the kubelet is asked who has what; 0: every 10 s
	CDIName   func(uuid string) string // of a GPU; nil: containers get no CDI devices
}

// refreshEvery is the default of Config.Refresh.
const refreshEvery = 10 * time.Second

// Plugin is a device plugin. New makes it, and Run runs it once.
type Plugin struct {
	cfg       Config
	alloc     *allocations
	resources []*resource

	putting sync.Mutex // held while a grant's directory is made, and while others are removed

	mu         sync.Mutex
	registered map[string]bool   // by resource
	said       map[string]string // the last thing that was logged about something
}

// maxMessage is what the kubelet takes in one message: gRPC's default.
const maxMessage = 4 << 20

// New checks the configuration. More units than fit into one message are an error: the kubelet would
// drop the connection without a word.
func New(cfg Config) (*Plugin, error) {
	p := &Plugin{cfg: cfg, alloc: newAllocations(), registered: map[string]bool{}, said: map[string]string{}}
	memory := &resource{p: p, name: cfg.Resource, kind: memoryUnits}
	list := cfg.Inventory.GPUs()
	if len(list) == 0 {
		return nil, errors.New("there is no GPU to give: try --sim 1x16Gi on a node without one")
	}
	for _, g := range list {
		n, err := cfg.Layout.Count(g)
		if err != nil {
			return nil, err
		}
		if n > maxMessage/len(g.UUID) {
			return nil, tooMany(cfg, n, list)
		}
		for i := range n {
			memory.all = append(memory.all, units.ID(g.UUID, i))
		}
	}
	if memory.bytes() > maxMessage {
		return nil, tooMany(cfg, len(memory.all), list)
	}
	p.resources = append(p.resources, memory)
	if cfg.Whole != "" {
		whole := &resource{p: p, name: cfg.Whole, kind: wholeGPU}
		for _, g := range list {
			whole.all = append(whole.all, g.UUID)
		}
		p.resources = append(p.resources, whole)
	}
	if cfg.Shared != "" {
		shared := &resource{p: p, name: cfg.Shared, kind: sharedGPU}
		for _, g := range list {
			if _, err := cfg.Layout.Share(g, cfg.Shares); err != nil {
				return nil, err
			}
			for i := range cfg.Shares {
				shared.all = append(shared.all, units.ID(g.UUID, i))
			}
		}
		p.resources = append(p.resources, shared)
	}
	return p, nil
}

// bytes is how large the largest message about the resource is.
func (r *resource) bytes() int {
	devices := r.devices()
	for _, d := range devices {
		d.Health = pluginapi.Unhealthy // the longer word
	}
	return proto.Size(&pluginapi.ListAndWatchResponse{Devices: devices})
}

// tooMany says which unit is large enough.
func tooMany(cfg Config, n int, list []gpus.GPU) error {
	layout := cfg.Layout
	for layout.Unit < 1<<50 {
		layout.Unit *= 2
		ids, longest := 0, 0
		for _, g := range list {
			count, err := layout.Count(g)
			if err != nil { // a GPU is smaller than that
				return fmt.Errorf("%d units of %s do not fit into one message to the kubelet, and larger units not into %s", n, size.Format(cfg.Layout.Unit), g.UUID)
			}
			ids, longest = ids+count, max(longest, len(g.UUID))
		}
		if ids < maxMessage/(longest+40) { // what else there is of a unit
			break
		}
	}
	return fmt.Errorf("%d units of %s do not fit into one message to the kubelet, of 4 MiB: use --unit %s",
		n, size.Format(cfg.Layout.Unit), size.Format(layout.Unit))
}

// Ready returns why the kubelet does not know the plugin; nil: it does.
func (p *Plugin) Ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.resources {
		if !p.registered[r.name] {
			return fmt.Errorf("%s is not registered: %s", r.name, p.said[r.name])
		}
	}
	return nil
}

func (p *Plugin) setRegistered(name string, is bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.registered[name] = is
}

// say logs what is wrong, once until it is something else. An empty text: it is well again.
func (p *Plugin) say(about, text string) {
	p.mu.Lock()
	news := p.said[about] != text
	p.said[about] = text
	p.mu.Unlock()
	if news && text != "" {
		p.cfg.Log.Warn(text)
	}
}

// errAgain says that the sockets must be made anew.
var errAgain = errors.New("the sockets must be made anew")

// Run serves the kubelet until ctx ends, and then returns nil. Its sockets are gone after it.
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
		for tick := time.NewTicker(cmp.Or(p.cfg.Refresh, refreshEvery)); ; {
			select {
			case now := <-tick.C:
				p.refresh(refreshing, now)
			case <-refreshing.Done():
				tick.Stop()
				return
			}
		}
	})
	defer wg.Wait()
	defer stop()
	for {
		if err := p.serve(ctx, w); err != errAgain {
			return err
		}
	}
}

// serve makes the sockets and registers them. It returns errAgain when they must be made anew: the
// kubelet's socket is new, or it has removed ours, as it does when it starts.
func (p *Plugin) serve(ctx context.Context, w *fsnotify.Watcher) error {
	ctx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer func() {
		stop()
		wg.Wait()
		for _, r := range p.resources {
			p.setRegistered(r.name, false)
		}
	}()
	var own []string
	for _, r := range p.resources {
		path := filepath.Join(p.cfg.Dir, strings.ReplaceAll(r.name, "/", "_")+".sock")
		l, err := listen(path)
		if err != nil {
			return err
		}
		own = append(own, path)
		server := grpc.NewServer()
		pluginapi.RegisterDevicePluginServer(server, r)
		wg.Go(func() { _ = server.Serve(l) }) // ends by Stop
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
				return errAgain
			}
			if slices.Contains(own, e.Name) && e.Has(fsnotify.Remove) {
				if _, err := os.Lstat(e.Name); err != nil { // the event may be of an earlier one
					return errAgain
				}
			}
		}
	}
}

func (p *Plugin) kubelet() string { return filepath.Join(p.cfg.Dir, "kubelet.sock") }

// listen makes a socket. One that an earlier plugin left is removed; one that is served is not.
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

// register tells the kubelet of a resource, until it agrees or ctx ends.
func (p *Plugin) register(ctx context.Context, r *resource, endpoint string) {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 10*time.Second) {
		err := p.registerOnce(ctx, r, endpoint)
		if err == nil {
			p.say(r.name, "")
			p.setRegistered(r.name, true)
			p.cfg.Log.Info("registered", "resource", r.name, "devices", len(r.all))
			return
		}
		if ctx.Err() != nil {
			return
		}
		p.say(r.name, fmt.Sprintf("the kubelet does not take %s: %v; trying again", r.name, err))
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

// refresh asks the kubelet who has what, and removes the grants that nobody has. Without an answer
// nothing is removed.
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
			p.say("list", err.Error())
		}
		return
	}
	p.say("list", "")
	holdings := make([]holding, len(list))
	for i, h := range list {
		holdings[i] = holding{Holding: h, kind: kinds[h.Resource]}
	}
	p.alloc.list(holdings, now)
	p.say("ledger", p.cfg.Store.Strangers())
	if err := p.sweep(now); err != nil {
		p.say("grants", "removing grants that nobody has: "+err.Error())
		return
	}
	p.say("grants", "")
}

// sweep removes the directories of grants that nobody has had for long, those of the other mode, too.
func (p *Plugin) sweep(now time.Time) error {
	p.putting.Lock()
	defer p.putting.Unlock()
	has := p.alloc.all()
	_, err := p.cfg.Store.RemoveUnused(now, func(name string) bool { _, held := has[name]; return held })
	return err
}
