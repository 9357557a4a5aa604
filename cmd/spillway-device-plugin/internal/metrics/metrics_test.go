package metrics

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/units"
	"github.com/spillway-db/spillway/internal/leases"
)

func newSource(t *testing.T) Source {
	list := gpus.Sim(2, 1<<30)
	return Source{
		Inventory: gpus.NewInventory(list), Layout: units.Layout{Unit: 256 << 20, Ratio: big.NewRat(3, 2)},
		Ledger: filepath.Join(t.TempDir(), "ledger"), Ready: func() error { return nil },
		Holders: func() []grants.Holder {
			return []grants.Holder{
				{
					Grant:     grants.Grant{Name: "a", GPUs: list[:1], Limit: 256 << 20},
					Namespace: "n",
					Pod:       "p",
					Container: "c",
				},
				{Grant: grants.Grant{Name: "whole", GPUs: list[1:]}, Namespace: "n", Pod: "q", Container: "c"},
				// Two that the kubelet does not list yet have the same labels.
				{Grant: grants.Grant{Name: "new-1", GPUs: list[:1], Limit: 1 << 20}},
				{Grant: grants.Grant{Name: "new-2", GPUs: list[:1], Limit: 2 << 20}},
			}
		},
	}
}

func TestMetrics(t *testing.T) {
	s := newSource(t)
	join := func(group, device string, quota, hold int64) *leases.Lease {
		l, err := leases.Join(
			leases.Terms{
				Dir:        s.Ledger,
				Device:     device,
				Group:      group,
				Physical:   1 << 30,
				Advertised: 3 << 29,
				Quota:      quota,
			},
		)
		if err == nil {
			err = l.Charge(hold)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	join("a", "sim-0", 256<<20, 100<<20)
	a := join("a", "sim-0", 256<<20, 150<<20)
	join("unknown", "sim-0", 1<<20, 1<<19)
	if err := a.SetLimit(200 << 20); err != nil { // which revokes nothing, and here the grant is the larger one
		t.Fatal(err)
	}
	s.Inventory.SetSick("sim-1", "for the test")
	const want = `
# HELP spillway_gpu_healthy 1 if the GPU gets new containers, else 0.
# TYPE spillway_gpu_healthy gauge
spillway_gpu_healthy{gpu="sim-0"} 1
spillway_gpu_healthy{gpu="sim-1"} 0
# HELP spillway_gpu_memory_advertised_bytes Memory of the GPU that may be given out, by the ratio.
# TYPE spillway_gpu_memory_advertised_bytes gauge
spillway_gpu_memory_advertised_bytes{gpu="sim-0"} 1.610612736e+09
spillway_gpu_memory_advertised_bytes{gpu="sim-1"} 1.610612736e+09
# HELP spillway_gpu_memory_allocated_bytes Memory of the GPU allocated to a container or a claim. Without a name: the kubelet does not list the container yet.
# TYPE spillway_gpu_memory_allocated_bytes gauge
spillway_gpu_memory_allocated_bytes{claim="",container="",gpu="sim-0",namespace="",pod=""} 3.145728e+06
spillway_gpu_memory_allocated_bytes{claim="",container="c",gpu="sim-0",namespace="n",pod="p"} 2.68435456e+08
spillway_gpu_memory_allocated_bytes{claim="",container="c",gpu="sim-1",namespace="n",pod="q"} 1.610612736e+09
# HELP spillway_gpu_memory_used_bytes Memory of the GPU that the processes of a container or a claim hold through Spillway. Without a name: it is not known.
# TYPE spillway_gpu_memory_used_bytes gauge
spillway_gpu_memory_used_bytes{claim="",container="",gpu="sim-0",namespace="",pod=""} 524288
spillway_gpu_memory_used_bytes{claim="",container="c",gpu="sim-0",namespace="n",pod="p"} 2.62144e+08
spillway_gpu_memory_used_bytes{claim="",container="c",gpu="sim-1",namespace="n",pod="q"} 0
# HELP spillway_gpu_processes Processes of a container or a claim that have joined the ledger for the GPU.
# TYPE spillway_gpu_processes gauge
spillway_gpu_processes{claim="",container="",gpu="sim-0",namespace="",pod=""} 1
spillway_gpu_processes{claim="",container="c",gpu="sim-0",namespace="n",pod="p"} 2
spillway_gpu_processes{claim="",container="c",gpu="sim-1",namespace="n",pod="q"} 0
# HELP spillway_ledger_readable 1 if the whole ledger of the node could be read, else 0.
# TYPE spillway_ledger_readable gauge
spillway_ledger_readable 1
`
	if err := testutil.CollectAndCompare(
		s,
		strings.NewReader(want),
		"spillway_gpu_healthy",
		"spillway_gpu_memory_advertised_bytes",
		"spillway_gpu_memory_allocated_bytes",
		"spillway_gpu_memory_used_bytes",
		"spillway_gpu_processes",
		"spillway_ledger_readable",
	); err != nil {
		t.Error(err)
	}
	problems, err := testutil.CollectAndLint(s)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}

// More than a container was given is shown; a ledger that cannot be read spoils nothing else.
func TestOverLimitAndBrokenLedger(t *testing.T) {
	s := newSource(t)
	l, err := leases.Join(
		leases.Terms{
			Dir:        s.Ledger,
			Device:     "sim-0",
			Group:      "a",
			Physical:   1 << 30,
			Advertised: 2 << 30,
			Quota:      1 << 30,
		},
	)
	if err == nil {
		err = l.Charge(300 << 20)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	// One whose limit is not known is not over it.
	unknown, err := leases.Join(
		leases.Terms{
			Dir:        s.Ledger,
			Device:     "sim-0",
			Group:      "unknown",
			Physical:   1 << 30,
			Advertised: 2 << 30,
			Quota:      1 << 30,
		},
	)
	if err == nil {
		err = unknown.Charge(500 << 20)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unknown.Close()
	if err := testutil.CollectAndCompare(s, strings.NewReader(`
# HELP spillway_gpu_memory_over_limit_bytes Memory that the processes of a container or a claim hold beyond its limit.
# TYPE spillway_gpu_memory_over_limit_bytes gauge
spillway_gpu_memory_over_limit_bytes{claim="",container="",gpu="sim-0",namespace="",pod=""} 0
spillway_gpu_memory_over_limit_bytes{claim="",container="c",gpu="sim-0",namespace="n",pod="p"} 4.6137344e+07
spillway_gpu_memory_over_limit_bytes{claim="",container="c",gpu="sim-1",namespace="n",pod="q"} 0
`), "spillway_gpu_memory_over_limit_bytes"); err != nil {
		t.Error(err)
	}
	s.Ledger = filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(s.Ledger, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := testutil.CollectAndCompare(s, strings.NewReader(`
# HELP spillway_ledger_readable 1 if the whole ledger of the node could be read, else 0.
# TYPE spillway_ledger_readable gauge
spillway_ledger_readable 0
`), "spillway_ledger_readable"); err != nil {
		t.Error(err)
	}
}

// A container that sets its limit itself is not over the share that others of its kind get.
func TestOwnLimit(t *testing.T) {
	s := newSource(t)
	shared := grants.Grant{Name: "s", GPUs: gpus.Sim(1, 1<<30), Limit: 100 << 20, Own: true}
	s.Holders = func() []grants.Holder {
		return []grants.Holder{{Grant: shared, Namespace: "n", Pod: "p", Container: "c"}}
	}
	l, err := leases.Join(leases.Terms{Dir: s.Ledger, Device: "sim-0", Group: "s", Physical: 1 << 30, Quota: 1 << 30})
	if err == nil {
		err = l.Charge(300 << 20)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := testutil.CollectAndCompare(s, strings.NewReader(`
# HELP spillway_gpu_memory_over_limit_bytes Memory that the processes of a container or a claim hold beyond its limit.
# TYPE spillway_gpu_memory_over_limit_bytes gauge
spillway_gpu_memory_over_limit_bytes{claim="",container="c",gpu="sim-0",namespace="n",pod="p"} 0
# HELP spillway_gpu_memory_used_bytes Memory of the GPU that the processes of a container or a claim hold through Spillway. Without a name: it is not known.
# TYPE spillway_gpu_memory_used_bytes gauge
spillway_gpu_memory_used_bytes{claim="",container="c",gpu="sim-0",namespace="n",pod="p"} 3.145728e+08
`), "spillway_gpu_memory_over_limit_bytes", "spillway_gpu_memory_used_bytes"); err != nil {
		t.Error(err)
	}
}

func TestServe(t *testing.T) {
	s := newSource(t)
	var ready error = errors.New("it is not registered")
	s.Ready = func() error { return ready }
	l, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(l.Addr().String()); err == nil || !strings.Contains(err.Error(), "--metrics") {
		t.Errorf("an address that is taken: %v", err)
	}
	ask := func(path string) (int, string) {
		r, err := http.Get("http://" + l.Addr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, string(body)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); s.Serve(ctx, l, slog.New(slog.DiscardHandler)) }()
	if status, body := ask("/healthz"); status != 503 || body != "it is not registered\n" {
		t.Errorf("%d %s", status, body)
	}
	ready = nil
	if status, body := ask("/healthz"); status != 200 || body != "ok\n" {
		t.Errorf("%d %s", status, body)
	}
	if status, body := ask(
		"/metrics",
	); status != 200 ||
		!strings.Contains(body, `spillway_gpu_healthy{gpu="sim-0"} 1`) {
		t.Errorf("%d %s", status, body)
	}
	cancel()
	<-ended
}

// The ledger has CUDA's name of a MIG instance, the inventory NVML's.
func TestInstance(t *testing.T) {
	const digits = "8932f937-d72c-4106-c12f-20bd9faed9f6"
	s := newSource(t)
	list := []gpus.GPU{{UUID: "MIG-" + digits, Memory: 1 << 30}}
	s.Inventory = gpus.NewInventory(list)
	s.Holders = func() []grants.Holder {
		return []grants.Holder{{Grant: grants.Grant{Name: "a", GPUs: list, Limit: 256 << 20}, Pod: "p"}}
	}
	l, err := leases.Join(
		leases.Terms{Dir: s.Ledger, Device: "GPU-" + digits, Group: "a", Physical: 1 << 30, Advertised: 1 << 30},
	)
	if err == nil {
		err = l.Charge(1 << 20)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := testutil.CollectAndCompare(s, strings.NewReader(`
# HELP spillway_gpu_memory_used_bytes Memory of the GPU that the processes of a container or a claim hold through Spillway. Without a name: it is not known.
# TYPE spillway_gpu_memory_used_bytes gauge
spillway_gpu_memory_used_bytes{claim="",container="",gpu="MIG-8932f937-d72c-4106-c12f-20bd9faed9f6",namespace="",pod="p"} 1.048576e+06
`), "spillway_gpu_memory_used_bytes"); err != nil {
		t.Error(err)
	}
}

// What containers can write to the ledger becomes no label: a name that is no text, or any other GPU.
func TestStrangeNames(t *testing.T) {
	s := newSource(t)
	for _, device := range []string{"\xff", "made-up-1", "made-up-2", "made-up-3"} {
		l, err := leases.Join(
			leases.Terms{Dir: s.Ledger, Device: device, Group: "x", Physical: 1 << 50},
		)
		if err == nil {
			err = l.Charge(1 << 50)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	if err := testutil.CollectAndCompare(s, strings.NewReader(`
# HELP spillway_gpu_memory_used_bytes Memory of the GPU that the processes of a container or a claim hold through Spillway. Without a name: it is not known.
# TYPE spillway_gpu_memory_used_bytes gauge
spillway_gpu_memory_used_bytes{claim="",container="",gpu="other",namespace="",pod=""} 4.503599627370496e+15
spillway_gpu_memory_used_bytes{claim="",container="",gpu="sim-0",namespace="",pod=""} 0
spillway_gpu_memory_used_bytes{claim="",container="c",gpu="sim-0",namespace="n",pod="p"} 0
spillway_gpu_memory_used_bytes{claim="",container="c",gpu="sim-1",namespace="n",pod="q"} 0
`), "spillway_gpu_memory_used_bytes"); err != nil {
		t.Error(err)
	}
	s.Holders = func() []grants.Holder {
		return []grants.Holder{{Grant: grants.Grant{Name: "a", GPUs: gpus.Sim(1, 1<<30)}, Pod: "\xff"}}
	}
	if n, err := testutil.GatherAndCount(registry(s), "spillway_gpu_healthy"); err != nil || n != 2 {
		t.Errorf("%d, %v", n, err)
	}
}

// A claim has a label of its own. Several pods may share it.
func TestClaim(t *testing.T) {
	s := newSource(t)
	s.Holders = func() []grants.Holder {
		return []grants.Holder{
			{
				Grant:     grants.Grant{Name: "claim-1", GPUs: gpus.Sim(1, 1<<30), Limit: 1 << 20},
				Namespace: "n",
				Claim:     "shared",
			},
		}
	}
	if err := testutil.CollectAndCompare(s, strings.NewReader(`
# HELP spillway_gpu_memory_allocated_bytes Memory of the GPU allocated to a container or a claim. Without a name: the kubelet does not list the container yet.
# TYPE spillway_gpu_memory_allocated_bytes gauge
spillway_gpu_memory_allocated_bytes{claim="shared",container="",gpu="sim-0",namespace="n",pod=""} 1.048576e+06
`), "spillway_gpu_memory_allocated_bytes"); err != nil {
		t.Error(err)
	}
}

func registry(s Source) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(s)
	return r
}
