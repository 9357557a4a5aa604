// Package dra gives GPU memory to claims: a driver for Kubernetes' dynamic resource allocation.
//
//	Driver.Run ──▶ ResourceSlices: the node's pool, a device for each GPU, with memory as capacity
//	   │           the scheduler allocates parts of it to ResourceClaims
//	   └── two sockets ◀── the kubelet: registration, NodePrepareResources, NodeUnprepareResources,
//	                       NodeWatchResources
//
// What a claim was prepared with is two things by its UID: a grant's directory, and a CDI file that
// mounts it. The grant has a note of what the claim holds, so a driver that was started again knows it. The
// CDI file is made again from that.
package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
)

// Config is what a driver needs. All fields but Refresh are required.
type Config struct {
	Driver    string               // its name, a domain
	Node      string               // the node's name, and the pool's
	Kubelet   string               // the kubelet's directory
	CDIDir    string               // of the claims' descriptions; the GPUs' are there, too
	Client    kubernetes.Interface // of the API server
	Layout    units.Layout
	Inventory *gpus.Inventory
	Store     *grants.Store
	Log       *slog.Logger
	Refresh   time.Duration // how often it is asked whether claims are gone; 0: every 10 minutes
}

// Driver is a driver. New makes it, and Run runs it once.
type Driver struct {
	cfg     Config
	api     *draclient.Client
	devices map[string]gpus.GPU // by the names of the devices

	mu      sync.Mutex // held while the files of claims are changed, too: there is one writer
	claims  map[types.UID]claim
	unknown map[types.UID]bool // claims that were prepared, and whose notes cannot be read

	again chan struct{} // has one when the pool must be published anew
	fail  chan error    // what ends Run
	node  types.UID     // of the node that owns the ResourceSlices; empty: not known yet

	stateMu    sync.Mutex
	exclusive  bool              // the API server does not know how devices are shared
	registered bool              // with the kubelet
	published  bool              // the API server has the pool as it is
	said       map[string]string // the last thing that was logged about something
}

// New checks the configuration, and reads what an earlier driver prepared.
func New(cfg Config) (*Driver, error) {
	list := cfg.Inventory.GPUs()
	if len(list) == 0 {
		return nil, errors.New("there is no GPU to give: try --sim 1x16Gi on a node without one")
	}
	devices, err := byDevice(list)
	if err != nil {
		return nil, err
	}
	if _, err := pool(cfg.Inventory, cfg.Layout, false); err != nil {
		return nil, err
	}
	d := &Driver{
		cfg: cfg, api: draclient.New(cfg.Client), devices: devices, claims: map[types.UID]claim{}, unknown: map[types.UID]bool{},
		again: make(chan struct{}, 1), fail: make(chan error, 1), said: map[string]string{},
	}
	return d, d.load()
}

// Ready returns why no claims are given yet; nil: they are.
func (d *Driver) Ready() error {
	d.stateMu.Lock()
	defer d.stateMu.Unlock()
	switch {
	case !d.registered:
		return fmt.Errorf("the kubelet has not registered %s: %s", d.cfg.Driver, cmp.Or(d.said["kubelet"], "it did not ask yet"))
	case !d.published:
		return fmt.Errorf("the API server does not have the node's GPUs: %s", cmp.Or(d.said["publish"], "it was not seen yet"))
	}
	return nil
}

// say logs what is wrong, once until it is something else. An empty text: it is well again.
func (d *Driver) say(about, text string) {
	d.stateMu.Lock()
	news := d.said[about] != text
	d.said[about] = text
	d.stateMu.Unlock()
	if news && text != "" {
		d.cfg.Log.Warn(text)
	}
}

// refreshEvery is the default of Config.Refresh.
const refreshEvery = 10 * time.Minute

// Run serves the kubelet and publishes the GPUs until ctx ends, and then returns nil. Its sockets are
// gone after it. The ResourceSlices stay: the node's GPUs are the same when it is started again.
func (d *Driver) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(klog.NewContext(ctx, logr.FromSlogHandler(d.cfg.Log.Handler())))
	defer stop()
	options, err := d.sockets()
	if err != nil {
		return err
	}
	options = append(options, kubeletplugin.DriverName(d.cfg.Driver), kubeletplugin.NodeName(d.cfg.Node),
		kubeletplugin.KubeClient(d.cfg.Client), kubeletplugin.GRPCInterceptor(d.seen))
	asking, cancel := context.WithTimeout(ctx, 10*time.Second) // the kubelet waits
	node, err := d.cfg.Client.CoreV1().Nodes().Get(asking, d.cfg.Node, metav1.GetOptions{})
	cancel()
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("the cluster has no node %s: give the node's name by --node, or NODE_NAME", d.cfg.Node)
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return fmt.Errorf("the API server refuses the driver: %w (deploy/dra-driver.yaml has the rights that it needs)", err)
	case err != nil: // it may come later, and prepared claims can be unprepared without it
		d.say("publish", fmt.Sprintf("the API server does not answer: %v; trying again (see --kubeconfig)", err))
	default:
		d.node = node.UID
		options = append(options, kubeletplugin.NodeUID(node.UID))
	}
	var running sync.WaitGroup
	defer running.Wait()
	helper, err := kubeletplugin.Start(ctx, d, options...)
	if err != nil {
		return fmt.Errorf("serving the kubelet: %w (see --kubelet-dir)", err)
	}
	defer helper.Stop() // which ends what waits for the API server, too
	defer stop()
	running.Go(func() { d.keep(ctx, helper) })
	running.Go(func() { d.watchSockets(ctx) })
	select {
	case <-ctx.Done():
		return nil
	case err := <-d.fail:
		return err
	}
}

// end ends Run with an error. The first one counts.
func (d *Driver) end(err error) {
	select {
	case d.fail <- err:
	default:
	}
}

// keep publishes the pool whenever it changes, and removes claims that are gone.
func (d *Driver) keep(ctx context.Context, helper *kubeletplugin.Helper) {
	var sweeping sync.WaitGroup
	defer sweeping.Wait()
	tick := time.NewTicker(cmp.Or(d.cfg.Refresh, refreshEvery))
	defer tick.Stop()
	for first := true; ; first = false {
		sick := d.cfg.Inventory.Changed()
		want, err := d.publish(ctx, helper) // waits until the API server answers
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			d.end(err)
			return
		}
		if first {
			sweeping.Go(func() { d.sweeps(ctx) })
		}
		look, wait := time.After(0), 50*time.Millisecond
		for changed := false; !changed; {
			select {
			case <-ctx.Done():
				return
			case <-sick:
				changed = true
			case <-d.again:
				changed = true
			case <-tick.C: // they may have been deleted
				look, wait = time.After(0), 50*time.Millisecond
			case <-look:
				look = nil
				if !d.look(ctx, want) {
					look, wait = time.After(wait), min(2*wait, 30*time.Second)
				}
			}
		}
	}
}

// sweeps removes claims that are gone, until ctx ends.
func (d *Driver) sweeps(ctx context.Context) {
	tick := time.NewTicker(cmp.Or(d.cfg.Refresh, refreshEvery))
	defer tick.Stop()
	for {
		d.sweep(ctx, "")
		d.removeOthers(time.Now())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// watchSockets ends Run when a socket is removed: the kubelet would forget the driver, which must be started
// again then.
func (d *Driver) watchSockets(ctx context.Context) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		d.end(fmt.Errorf("watching the driver's sockets: %w", err))
		return
	}
	defer w.Close()
	paths := d.socketPaths()
	for _, path := range paths {
		if err := w.Add(filepath.Dir(path)); err != nil {
			d.end(fmt.Errorf("watching the driver's sockets: %w", err))
			return
		}
	}
	for {
		for _, path := range paths { // the first time, too: it may have been before the watch
			if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) && ctx.Err() == nil {
				d.end(fmt.Errorf("the socket %s was removed, and the kubelet does not know the driver any more: start it again", path))
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case err := <-w.Errors:
			d.end(fmt.Errorf("watching the driver's sockets: %w", err))
			return
		case <-w.Events:
		}
	}
}

// publish hands the pool to what writes it to the API server, and returns its devices.
func (d *Driver) publish(ctx context.Context, helper *kubeletplugin.Helper) ([]resourceapi.Device, error) {
	d.stateMu.Lock()
	exclusive := d.exclusive
	d.published = false
	d.stateMu.Unlock()
	p, err := pool(d.cfg.Inventory, d.cfg.Layout, exclusive)
	if err != nil {
		return nil, err
	}
	var devices []resourceapi.Device
	for _, s := range p.Slices {
		devices = append(devices, s.Devices...)
	}
	pools := map[string]resourceslice.Pool{d.cfg.Node: p}
	return devices, helper.PublishResources(ctx, resourceslice.DriverResources{Pools: pools})
}

// look asks the API server whether it has the devices, and reports that.
func (d *Driver) look(ctx context.Context, want []resourceapi.Device) bool {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	list, err := d.api.ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   d.cfg.Driver,
		resourceapi.ResourceSliceSelectorNodeName: d.cfg.Node,
	}.String()})
	if err != nil {
		d.say("publish", fmt.Sprintf("the API server does not tell its ResourceSlices: %v; trying again", err))
		return false
	}
	slices.SortFunc(list.Items, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	var has []resourceapi.Device
	for _, s := range list.Items {
		has = append(has, s.Spec.Devices...)
	}
	d.checkNode(ctx)
	same := len(list.Items) > 0 && resourceslice.DevicesDeepEqual(has, want)
	d.stateMu.Lock()
	news := same && !d.published
	d.published = same
	d.stateMu.Unlock()
	if same {
		d.say("publish", "")
	}
	if news {
		d.cfg.Log.Info("published", "driver", d.cfg.Driver, "pool", d.cfg.Node, "devices", len(want))
	}
	return same
}

// checkNode ends Run if the node was made anew: the slices have the old one as their owner, and the API
// server removes them with it.
func (d *Driver) checkNode(ctx context.Context) {
	node, err := d.cfg.Client.CoreV1().Nodes().Get(ctx, d.cfg.Node, metav1.GetOptions{})
	if err != nil {
		return // it is asked again
	}
	if d.node == "" {
		d.node = node.UID
	}
	if node.UID != d.node {
		d.end(fmt.Errorf("the node %s was made anew, and the ResourceSlices belong to the old one: start the driver again", d.cfg.Node))
	}
}

// socketPaths are where the kubelet finds the driver: to register it, and to use it.
func (d *Driver) socketPaths() []string {
	return []string{
		filepath.Join(d.cfg.Kubelet, registryDir, d.cfg.Driver+"-reg.sock"),
		filepath.Join(d.cfg.Kubelet, "plugins", d.cfg.Driver, "dra.sock"),
	}
}

const registryDir = "plugins_registry"

// sockets makes the directory for the driver's sockets, and refuses what could not work.
func (d *Driver) sockets() ([]kubeletplugin.Option, error) {
	registry := filepath.Join(d.cfg.Kubelet, registryDir)
	if info, err := os.Stat(registry); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("the kubelet's directory %s is not there: is it mounted? see --kubelet-dir", registry)
	}
	own := filepath.Join(d.cfg.Kubelet, "plugins", d.cfg.Driver)
	if err := os.MkdirAll(own, 0o750); err != nil {
		return nil, err
	}
	for _, path := range d.socketPaths() {
		if len(path) > maxSocket {
			return nil, fmt.Errorf("%s: a socket's path has at most %d bytes: choose a shorter --driver", path, maxSocket)
		}
		if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
			conn.Close()
			return nil, fmt.Errorf("another driver serves %s: end it", path)
		}
	}
	return []kubeletplugin.Option{kubeletplugin.RegistrarDirectoryPath(registry), kubeletplugin.PluginDataDirectoryPath(own)}, nil
}

// maxSocket is how long a socket's path may be.
const maxSocket = 107

// seen takes what the kubelet says of the registration.
func (d *Driver) seen(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if s, ok := request.(*registerapi.RegistrationStatus); ok {
		d.stateMu.Lock()
		d.registered = s.GetPluginRegistered()
		d.stateMu.Unlock()
		if s.GetPluginRegistered() {
			d.say("kubelet", "")
			d.cfg.Log.Info("registered", "driver", d.cfg.Driver)
		} else {
			d.say("kubelet", fmt.Sprintf("the kubelet does not take %s: %s", d.cfg.Driver, s.GetError()))
		}
	}
	return handler(ctx, request)
}

// HandleError implements kubeletplugin.DRAPlugin: what goes wrong behind it.
func (d *Driver) HandleError(ctx context.Context, err error, msg string) {
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case ctx.Err() != nil:
		return
	case errors.As(err, &dropped) && slices.Contains(dropped.DisabledFeatures(), "DRAConsumableCapacity"):
		d.stateMu.Lock()
		news := !d.exclusive
		d.exclusive = true
		d.stateMu.Unlock()
		if news {
			d.cfg.Log.Warn("the API server does not share devices: each GPU goes whole to one claim (enable DRAConsumableCapacity, then restart the driver)")
		}
		select { // not here: what calls this waits for itself then
		case d.again <- struct{}{}:
		default:
		}
	case errors.Is(err, kubeletplugin.ErrRecoverable):
		d.say("publish", fmt.Sprintf("publishing the node's GPUs: %s: %v; trying again", msg, err))
	default:
		d.end(fmt.Errorf("%s: %w", msg, err))
	}
}

// tellEvery is how often the kubelet is told of the GPUs' health. It forgets it after 30 seconds.
const tellEvery = 10 * time.Second

// WatchHealthStatus implements kubeletplugin.DRAPlugin: the health of all GPUs, sick ones too.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	for {
		changed := d.cfg.Inventory.Changed()
		var report kubeletplugin.DeviceHealthReport
		for _, g := range d.cfg.Inventory.GPUs() {
			health := kubeletplugin.DeviceHealth{
				PoolName: d.cfg.Node, DeviceName: deviceName(g.UUID), Health: kubeletplugin.HealthStatusHealthy, LastUpdated: time.Now(),
			}
			if health.Message = d.cfg.Inventory.Sick(g.UUID); health.Message != "" {
				health.Health = kubeletplugin.HealthStatusUnhealthy
			}
			report.Devices = append(report.Devices, health)
		}
		select {
		case <-ctx.Done():
			return nil
		case reports <- report:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-tick.C:
		}
	}
}
