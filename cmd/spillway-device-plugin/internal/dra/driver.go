// Package dra is a driver for Kubernetes' dynamic resource allocation: it gives GPU memory to claims.
//
//	Driver.Run ──▶ ResourceSlices: the node's pool, one device for each GPU, with its memory as capacity
//	   │           the scheduler allocates parts of the capacity to ResourceClaims
//	   └── two sockets ◀── the kubelet: registration, NodePrepareResources, NodeUnprepareResources,
//	                       NodeWatchResources
//
// A prepared claim has a grant's directory, and a CDI file that mounts the directory into containers.
// The grant's note has the claim's state, see claim. A driver that restarts reads the notes, and writes
// missing CDI files again.
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
	"sync/atomic"
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
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/status"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
)

// Config configures a driver. All fields are required.
type Config struct {
	Driver    string               // the driver's name, a domain
	Node      string               // name of the node, and of its pool
	Kubelet   string               // the kubelet's directory
	CDIDir    string               // directory for the claims' CDI files; has the GPUs' file already
	Client    kubernetes.Interface // of the API server
	Layout    units.Layout
	Inventory *gpus.Inventory
	Store     *grants.Store
	Log       *slog.Logger
}

// Driver is a driver for claims. New makes it, and Run runs it once.
type Driver struct {
	cfg     Config
	api     *draclient.Client
	devices map[string]gpus.GPU // by device name

	// mu is held while the driver writes and removes files of claims, so that there is one writer.
	mu      sync.Mutex
	claims  map[types.UID]claim // the prepared ones
	unknown map[types.UID]bool  // the unknown ones, see claim

	// status has the subject kubelet, which is well once the kubelet has registered the driver; publish,
	// well while the API server has the pool as it is; and ledger, sweep and others, for the log.
	status    *status.Status
	exclusive atomic.Bool   // the API server does not share devices
	again     chan struct{} // has an element when the pool must be published again
	failed    chan error    // has the error that ends Run
	node      types.UID     // of the node that owns the ResourceSlices; empty: not known yet
}

// New checks the configuration, and reads the claims that an earlier driver prepared.
func New(cfg Config) (*Driver, error) {
	devices, err := byDevice(cfg.Inventory.GPUs())
	if err != nil {
		return nil, err
	}
	if _, err := pool(cfg.Inventory, cfg.Layout, false); err != nil {
		return nil, err
	}
	d := &Driver{
		cfg: cfg, api: draclient.New(cfg.Client), devices: devices, claims: map[types.UID]claim{},
		unknown: map[types.UID]bool{},
		status:  status.New(cfg.Log), again: make(chan struct{}, 1), failed: make(chan error, 1),
	}
	d.status.Set("kubelet", "it did not ask yet")
	d.status.Set("publish", "it was not seen yet")
	return d, d.load()
}

// Ready returns nil if pods can get claims, and otherwise the reason why they cannot.
func (d *Driver) Ready() error {
	if problem := d.status.Problem("kubelet"); problem != "" {
		return fmt.Errorf("the kubelet has not registered %s: %s", d.cfg.Driver, problem)
	}
	if problem := d.status.Problem("publish"); problem != "" {
		return fmt.Errorf("the API server does not have the node's GPUs: %s", problem)
	}
	return nil
}

// Run serves the kubelet and publishes the GPUs until ctx ends, and then returns nil. It removes its
// sockets. It leaves the ResourceSlices: a driver that restarts has the same GPUs, and without the
// slices all claims of the node would wait for it.
//
// Run returns an error when the driver has become useless, so that Kubernetes restarts it.
func (d *Driver) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(klog.NewContext(ctx, logr.FromSlogHandler(d.cfg.Log.Handler())))
	defer stop()
	options, err := d.sockets()
	if err != nil {
		return err
	}
	options = append(options, kubeletplugin.DriverName(d.cfg.Driver), kubeletplugin.NodeName(d.cfg.Node),
		kubeletplugin.KubeClient(d.cfg.Client), kubeletplugin.GRPCInterceptor(d.seen))
	asking, cancel := context.WithTimeout(ctx, 10*time.Second)
	node, err := d.cfg.Client.CoreV1().Nodes().Get(asking, d.cfg.Node, metav1.GetOptions{})
	cancel()
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("the cluster has no node %s: give the node's name by --node, or NODE_NAME", d.cfg.Node)
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return fmt.Errorf("the API server refuses the driver: %w (deploy/dra-driver.yaml has the rights that it needs)",
			err)
	case err != nil: // it may answer later, and the kubelet can unprepare claims without it
		d.status.Warn("publish", fmt.Sprintf("the API server does not answer: %v; trying again (see --kubeconfig)",
			err))
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
	defer helper.Stop()
	defer stop() // first: helper waits for calls of the API server
	running.Go(func() { d.keepPublished(ctx, helper) })
	running.Go(func() { d.watchSockets(ctx) })
	select {
	case <-ctx.Done():
		return nil
	case err := <-d.failed:
		return err
	}
}

// end ends Run with an error, unless another error has ended it already.
func (d *Driver) end(err error) {
	select {
	case d.failed <- err:
	default:
	}
}

// refreshEvery is how often the driver asks whether the ResourceSlices and the claims still exist.
const refreshEvery = 10 * time.Minute

// keepPublished publishes the pool, again whenever it changes, and looks whether the API server has it.
// After the first publication it starts sweeps.
func (d *Driver) keepPublished(ctx context.Context, helper *kubeletplugin.Helper) {
	var sweeping sync.WaitGroup
	defer sweeping.Wait()
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
		const soon = 50 * time.Millisecond
		wait, retry := time.Duration(0), soon
		for changed := false; !changed; {
			select {
			case <-ctx.Done():
				return
			case <-sick:
				changed = true
			case <-d.again:
				changed = true
			case <-time.After(wait):
				if d.look(ctx, want) {
					wait, retry = refreshEvery, soon
				} else {
					wait, retry = retry, min(2*retry, 30*time.Second)
				}
			}
		}
	}
}

// sweeps removes claims and grants that nobody has any more, every ten minutes until ctx ends.
func (d *Driver) sweeps(ctx context.Context) {
	tick := time.NewTicker(refreshEvery)
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

// watchSockets ends Run when somebody removes a socket: the kubelet forgets the driver then, and a
// driver that restarts registers again.
func (d *Driver) watchSockets(ctx context.Context) {
	err := func() error {
		w, err := fsnotify.NewWatcher()
		if err != nil {
			return err
		}
		defer w.Close()
		paths := d.socketPaths()
		for _, path := range paths {
			if err := w.Add(filepath.Dir(path)); err != nil {
				return err
			}
		}
		for {
			for _, path := range paths { // the first time, too: it may have been removed before the watch
				if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) && ctx.Err() == nil {
					return fmt.Errorf("the socket %s was removed, and the kubelet does not know the driver any more: "+
						"start it again", path)
				}
			}
			select {
			case <-ctx.Done():
				return nil
			case err := <-w.Errors:
				return err
			case <-w.Events:
			}
		}
	}()
	if err != nil {
		d.end(fmt.Errorf("watching the driver's sockets: %w", err))
	}
}

// publish passes the pool to helper, which writes it to the API server, and returns the pool's devices.
func (d *Driver) publish(ctx context.Context, helper *kubeletplugin.Helper) ([]resourceapi.Device, error) {
	if d.status.Problem("publish") == "" {
		d.status.Set("publish", "it does not have the last change yet")
	}
	p, err := pool(d.cfg.Inventory, d.cfg.Layout, d.exclusive.Load())
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

// look asks the API server for the node's ResourceSlices, and reports whether they have the devices in
// want. The library that publishes reports only failures. look ends Run if the node was made anew: the
// slices have the old node as their owner, and the API server removes them with it.
func (d *Driver) look(ctx context.Context, want []resourceapi.Device) bool {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	list, err := d.api.ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   d.cfg.Driver,
		resourceapi.ResourceSliceSelectorNodeName: d.cfg.Node,
	}.String()})
	if err != nil {
		d.status.Warn("publish", fmt.Sprintf("the API server does not tell its ResourceSlices: %v; trying again", err))
		return false
	}
	if node, err := d.cfg.Client.CoreV1().Nodes().Get(ctx, d.cfg.Node, metav1.GetOptions{}); err == nil {
		d.node = cmp.Or(d.node, node.UID)
		if node.UID != d.node {
			d.end(fmt.Errorf("the node %s was made anew, and the ResourceSlices belong to the old one: start the "+
				"driver again", d.cfg.Node))
		}
	}
	slices.SortFunc(list.Items, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	var has []resourceapi.Device
	for _, s := range list.Items {
		has = append(has, s.Spec.Devices...)
	}
	if len(list.Items) == 0 || !resourceslice.DevicesDeepEqual(has, want) {
		return false
	}
	if d.status.Set("publish", "") != "" {
		d.cfg.Log.Info("published", "driver", d.cfg.Driver, "pool", d.cfg.Node, "devices", len(want))
	}
	return true
}

const registryDir = "plugins_registry"

// socketPaths returns the sockets where the kubelet registers the driver, and where it calls the driver.
func (d *Driver) socketPaths() []string {
	return []string{
		filepath.Join(d.cfg.Kubelet, registryDir, d.cfg.Driver+"-reg.sock"),
		filepath.Join(d.cfg.Kubelet, "plugins", d.cfg.Driver, "dra.sock"),
	}
}

// maxSocket is the longest path, in bytes, that Linux allows for a socket.
const maxSocket = 107

// sockets makes the directory for the driver's sockets, and returns the options with their places. It
// fails if the kubelet would not find the sockets, or if another driver serves them.
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
			return nil, fmt.Errorf("%s: a socket's path has at most %d bytes: choose a shorter --driver", path,
				maxSocket)
		}
		if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
			conn.Close()
			return nil, fmt.Errorf("another driver serves %s: end it", path)
		}
	}
	return []kubeletplugin.Option{kubeletplugin.RegistrarDirectoryPath(registry),
		kubeletplugin.PluginDataDirectoryPath(own)}, nil
}

// seen intercepts the kubelet's calls to note whether it has registered the driver.
func (d *Driver) seen(
	ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	if s, ok := request.(*registerapi.RegistrationStatus); ok {
		if s.GetPluginRegistered() {
			d.status.Set("kubelet", "")
			d.cfg.Log.Info("registered", "driver", d.cfg.Driver)
		} else {
			d.status.Warn("kubelet", fmt.Sprintf("the kubelet does not take %s: %s", d.cfg.Driver, s.GetError()))
		}
	}
	return handler(ctx, request)
}

// HandleError implements kubeletplugin.DRAPlugin, for errors in the library's goroutines.
func (d *Driver) HandleError(ctx context.Context, err error, msg string) {
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case ctx.Err() != nil:
		return
	case errors.As(err, &dropped) && slices.Contains(dropped.DisabledFeatures(), "DRAConsumableCapacity"):
		if d.exclusive.CompareAndSwap(false, true) {
			d.cfg.Log.Warn("the API server does not share devices: each GPU goes whole to one claim (enable " +
				"DRAConsumableCapacity, then restart the driver)")
		}
		select { // keepPublished publishes: the caller of HandleError would wait for itself
		case d.again <- struct{}{}:
		default:
		}
	case errors.Is(err, kubeletplugin.ErrRecoverable):
		d.status.Warn("publish", fmt.Sprintf("publishing the node's GPUs: %s: %v; trying again", msg, err))
	default:
		d.end(fmt.Errorf("%s: %w", msg, err))
	}
}

// reportEvery is how often the driver reports the GPUs' health to the kubelet, which forgets a report
// after 30 seconds.
const reportEvery = 10 * time.Second

// WatchHealthStatus implements kubeletplugin.DRAPlugin. It reports all GPUs, also unhealthy ones.
func (d *Driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	for {
		changed := d.cfg.Inventory.Changed()
		var report kubeletplugin.DeviceHealthReport
		for _, g := range d.cfg.Inventory.GPUs() {
			health := kubeletplugin.DeviceHealth{
				PoolName: d.cfg.Node, DeviceName: deviceName(g.UUID), Health: kubeletplugin.HealthStatusHealthy,
				LastUpdated: time.Now(),
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
		case <-time.After(reportEvery):
		}
	}
}
