// Package metrics serves metrics about the GPUs' memory over HTTP, for Prometheus.
//
//	Serve ──▶ /metrics   the inventory, the holders of grants, and the ledger
//	      └─▶ /healthz   200, or 503 with the reason why the kubelet does not know the plugin
//
// A grant's name joins what a container was granted with what its processes hold, because that name is
// the processes' group in the ledger. The package keeps nothing between scrapes, and scrapes may overlap.
// Containers can write to the ledger, so no name becomes a label that only the ledger has.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/named"
)

// Source has what the metrics show. All fields are required. It is a prometheus.Collector.
type Source struct {
	Inventory *gpus.Inventory
	Layout    units.Layout
	Holders   func() []grants.Holder
	Ledger    string
	Ready     func() error // nil: the kubelet knows the plugin
}

// otherGPU is the label for GPUs that are in the ledger and not on the node.
const otherGPU = "other"

var (
	byGPU   = []string{"gpu"}
	byOwner = []string{"gpu", "namespace", "pod", "container", "claim"}

	healthy  = prometheus.NewDesc("spillway_gpu_healthy", "1 if the GPU gets new containers, else 0.", byGPU, nil)
	capacity = prometheus.NewDesc("spillway_gpu_memory_capacity_bytes",
		"Memory of the GPU, without what is held back.", byGPU, nil)
	advertised = prometheus.NewDesc("spillway_gpu_memory_advertised_bytes",
		"Memory of the GPU that may be given out, by the ratio.", byGPU, nil)
	allocated = prometheus.NewDesc("spillway_gpu_memory_allocated_bytes",
		"Memory of the GPU allocated to a container or a claim. Without a name: the kubelet does not list the "+
			"container yet.", byOwner, nil)
	used = prometheus.NewDesc("spillway_gpu_memory_used_bytes",
		"Memory of the GPU that the processes of a container or a claim hold through Spillway. Without a name: it is "+
			"not known.", byOwner, nil)
	over = prometheus.NewDesc("spillway_gpu_memory_over_limit_bytes",
		"Memory that the processes of a container or a claim hold beyond its limit.", byOwner, nil)
	processes = prometheus.NewDesc("spillway_gpu_processes",
		"Processes of a container or a claim that have joined the ledger for the GPU.", byOwner, nil)
	readable = prometheus.NewDesc("spillway_ledger_readable",
		"1 if the whole ledger of the node could be read, else 0.", nil, nil)
)

// Describe implements prometheus.Collector.
func (s Source) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{healthy, capacity, advertised, allocated, used, over, processes, readable} {
		to <- d
	}
}

// owner is the labels of a container or of a claim.
type owner struct{ gpu, namespace, pod, container, claim string }

// part is what an owner has of a GPU. Sizes are in bytes.
type part struct {
	given, used, over, processes int64
	limit                        int64 // 0: none, or not known
	granted                      bool
}

// Collect implements prometheus.Collector.
func (s Source) Collect(to chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value int64, labels ...string) {
		if m, err := prometheus.NewConstMetric(d, prometheus.GaugeValue, float64(value), labels...); err == nil {
			to <- m // else a label is not valid UTF-8
		}
	}
	flag := func(d *prometheus.Desc, is bool, labels ...string) {
		value := int64(0)
		if is {
			value = 1
		}
		gauge(d, value, labels...)
	}
	for _, g := range s.Inventory.GPUs() {
		flag(healthy, s.Inventory.Sick(g.UUID) == "", g.UUID)
		gauge(capacity, g.Memory, g.UUID)
		if n, err := s.Layout.Count(g); err == nil {
			gauge(advertised, int64(n)*s.Layout.Unit, g.UUID)
		}
	}
	parts, err := s.parts()
	for o, p := range parts {
		labels := []string{o.gpu, o.namespace, o.pod, o.container, o.claim}
		gauge(allocated, p.given, labels...)
		gauge(used, p.used, labels...)
		gauge(processes, p.processes, labels...)
		if p.granted {
			gauge(over, p.over, labels...)
		}
	}
	flag(readable, err == nil)
}

// add returns a + max(0, b), or the largest number if the sum is larger.
func add(a, b int64) int64 {
	if b = max(0, b); a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// parts joins the grants and the ledger by grant and GPU, and then adds up the grants with the same
// labels: containers without a name. If it returns an error, the parts lack what could not be read.
func (s Source) parts() (map[owner]part, error) {
	type key struct{ group, gpu string }
	byGrant := map[key]part{}
	owners := map[string]owner{} // by the grant's name
	for _, h := range s.Holders() {
		owners[h.Name] = owner{namespace: h.Namespace, pod: h.Pod, container: h.Container, claim: h.Claim}
		for _, g := range h.GPUs {
			p := part{given: h.Limit, limit: h.Limit, granted: true}
			if h.Own { // the containers have limits of their own
				p.limit = 0
			}
			if n, err := s.Layout.Count(g); h.Limit == 0 && err == nil {
				p.given = int64(n) * s.Layout.Unit
			}
			byGrant[key{h.Name, g.UUID}] = p
		}
	}
	held, err := leases.Holders(s.Ledger)
	for _, h := range held {
		k := key{h.Group, otherGPU}
		for _, g := range s.Inventory.GPUs() {
			if named.SameUUID(g.UUID, h.Device) { // the ledger has CUDA's name of a MIG instance
				k.gpu = g.UUID
			}
		}
		p := byGrant[k]
		p.used = add(p.used, h.Live)
		p.processes++
		byGrant[k] = p
	}
	parts := map[owner]part{}
	for k, p := range byGrant {
		o := owners[k.group]
		o.gpu = k.gpu
		sum := parts[o]
		sum.given = add(sum.given, p.given)
		sum.used = add(sum.used, p.used)
		sum.processes += p.processes
		sum.granted = sum.granted || p.granted
		if p.limit > 0 {
			sum.over = add(sum.over, p.used-p.limit)
		}
		parts[o] = sum
	}
	return parts, err
}

// Handler returns a handler for /metrics and /healthz.
func (s Source) Handler() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(s, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if err := s.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}

// Serve serves Handler at l until ctx ends.
func (s Source) Serve(ctx context.Context, l net.Listener, log *slog.Logger) {
	server := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 5 * time.Second}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		log.Error("metrics end", "error", err)
	}
}

// Listen listens at an address such as 127.0.0.1:9817.
func Listen(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w (choose another address by --metrics, or none by --metrics '')", err)
	}
	return l, nil
}
