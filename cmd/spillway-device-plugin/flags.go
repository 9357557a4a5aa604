package main

import (
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/reservation/quota"
)

// The modes.
const (
	modePlugin = "plugin"
	modeDRA    = "dra"
)

// flags are the command's flags as given on the command line.
type flags struct {
	mode                 string
	unit, ratio, reserve string
	sim, nvml            string
	dir, kubelet         string
	metrics              string
	cdi, hostRoot        string

	// modePlugin only
	resource, whole, shared string
	shares                  int

	// modeDRA only
	driver, node, kubeconfig string

	given func(flag string) bool // reports whether the command line has a flag
}

func (f *flags) add(set *pflag.FlagSet) {
	set.SortFlags = false
	f.given = set.Changed
	set.StringVar(&f.mode, "mode", modePlugin, "plugin: a device plugin; dra: a driver for dynamic resource allocation")
	set.StringVar(&f.unit, "unit", "256Mi", "size of a unit of GPU memory, a whole number of MiB")
	set.StringVar(&f.ratio, "ratio", "",
		"give out this multiple of a GPU's memory; data that does not fit spills (default "+
			"SPILLWAY_GPU_MEMORY_OVERSUB_RATIO, or 1)")
	set.StringVar(&f.reserve, "reserve", "1Gi",
		"memory of each GPU that is held back for CUDA itself; has no effect on simulated GPUs")
	set.StringVar(&f.resource, "resource", "spillway-db.github.io/gpu-memory", "plugin: resource name of the units")
	set.StringVar(&f.whole, "whole-resource", "spillway-db.github.io/gpu",
		"plugin: resource name of whole GPUs; empty disables it")
	set.StringVar(&f.shared, "shared-resource", "spillway-db.github.io/shared-gpu",
		"plugin: resource name of shares of a GPU, for containers that set SPILLWAY_GPU_MEMORY_LIMIT; empty disables "+
			"it")
	set.IntVar(&f.shares, "shares", 10, "plugin: shares of each GPU; a container that sets no limit gets that part "+
		"of the GPU")
	set.StringVar(&f.driver, "driver", "gpu.spillway-db.github.io", "dra: name of the driver")
	set.StringVar(&f.node, "node", "", "dra: name of the node (default NODE_NAME)")
	set.StringVar(&f.kubeconfig, "kubeconfig", "",
		"dra: file that names the API server (default the pod's own cluster)")
	set.StringVar(&f.sim, "sim", "", "offer simulated GPUs instead of real ones; 8x16Gi means eight GPUs of 16 GiB")
	set.StringVar(&f.nvml, "nvml", "", "path of NVIDIA's management library (default libnvidia-ml.so.1, found by the "+
		"dynamic linker)")
	set.StringVar(&f.dir, "dir", "/run/spillway",
		"directory of the ledger and the grants, the same on the node and in the pod")
	set.StringVar(&f.kubelet, "kubelet-dir", "/var/lib/kubelet", "the kubelet's directory, with its sockets")
	set.StringVar(&f.cdi, "cdi-dir", "",
		"write CDI descriptions of the GPUs there, such as /var/run/cdi, for runtimes other than NVIDIA's; dra needs "+
			"it")
	set.StringVar(&f.hostRoot, "host-root", "/", "where the node's root directory is mounted, for --cdi-dir")
	set.StringVar(&f.metrics, "metrics", "127.0.0.1:9817", "address of /metrics and /healthz; empty disables both")
}

// settings are the values of the flags, or of the environment for flags that are not given. Sizes are in
// bytes.
type settings struct {
	flags
	unit, reserve int64
	ratio         *big.Rat // nil: 1
	physical      int64    // upper bound for each GPU's memory; 0: none
	simCount      int      // 0: real GPUs
	simMemory     int64
}

const (
	maxShares = 100 // so that the list of shares fits into one message to the kubelet
	maxDriver = 63  // Kubernetes' limit for the length of a driver's name
	maxSim    = 64  // more GPUs than a node has
)

// settings parses the flags and the environment. The error has one line for each invalid value.
func (f *flags) settings() (*settings, error) {
	s := &settings{flags: *f}
	var errs []error
	bad := func(flag, format string, args ...any) {
		errs = append(errs, fmt.Errorf("--%s: "+format, append([]any{flag}, args...)...))
	}
	var err error
	if s.unit, err = size.Parse(f.unit); err != nil {
		bad("unit", "%w", err)
	} else if s.unit%(1<<20) != 0 {
		bad("unit", "%s is not a whole number of MiB: try 256Mi", f.unit)
	}
	if f.reserve != "0" { // size.Parse rejects 0
		if s.reserve, err = size.Parse(f.reserve); err != nil {
			bad("reserve", "%w", err)
		}
	}
	env, err := quota.FromEnv(os.LookupEnv) // as the engine reads it
	if err != nil {
		errs = append(errs, err)
	}
	s.ratio, s.physical = env.Ratio, env.Physical
	if f.given("ratio") {
		if s.ratio, err = quota.ParseRatio(f.ratio); err != nil {
			bad("ratio", "%w", err)
		}
	}
	if s.ratio != nil && s.ratio.Cmp(big.NewRat(1, 1)) == 0 {
		s.ratio = nil
	}
	if f.sim != "" {
		count, memory, ok := strings.Cut(f.sim, "x")
		s.simCount, err = strconv.Atoi(count)
		if !ok || err != nil || s.simCount < 1 || s.simCount > maxSim {
			bad("sim", "%.60q is no number and size of GPUs: want up to %d, such as 8x16Gi", f.sim, maxSim)
		} else if s.simMemory, err = size.Parse(memory); err != nil {
			bad("sim", "%w", err)
		}
	}
	switch f.mode {
	case modePlugin:
		names := [][2]string{{"resource", f.resource}, {"whole-resource", f.whole}, {"shared-resource", f.shared}}
		for _, n := range names {
			if flag, name := n[0], n[1]; (name != "" || flag == "resource") && !isResource(name) {
				bad(flag, "%.100q is no name for an extended resource: want DOMAIN/NAME, such as "+
					"example.com/gpu-memory", name)
			}
		}
		if f.whole == f.resource {
			bad("whole-resource", "%s is the name of the units, too", f.whole)
		}
		if f.shared != "" && (f.shared == f.resource || f.shared == f.whole) {
			bad("shared-resource", "%s is the name of another resource, too", f.shared)
		}
		if f.shares < 1 || f.shares > maxShares {
			bad("shares", "%d shares of a GPU: want from 1 to %d", f.shares, maxShares)
		}
		f.refuse(bad, modeDRA, "driver", "node", "kubeconfig")
	case modeDRA:
		if wrong := validation.IsDNS1123Subdomain(f.driver); len(wrong) > 0 || len(f.driver) > maxDriver {
			bad("driver", "%.100q is no name for a driver: want a domain of at most %d bytes, such as gpu.example.com",
				f.driver, maxDriver)
		}
		if s.node == "" {
			s.node = os.Getenv("NODE_NAME")
		}
		if s.node == "" {
			bad("node", "the node has no name: give it, or NODE_NAME in the environment from the pod's spec.nodeName")
		} else if wrong := validation.IsDNS1123Subdomain(s.node); len(wrong) > 0 {
			bad("node", "%.100q is no name of a node: kubectl get nodes lists them", s.node)
		}
		f.refuse(bad, modePlugin, "resource", "whole-resource", "shared-resource", "shares")
		if f.cdi == "" {
			bad("cdi-dir", "claims are given by CDI: name the directory that the runtime reads, such as /var/run/cdi")
		}
	default:
		bad("mode", "%.60q is neither %s nor %s", f.mode, modePlugin, modeDRA)
	}
	if f.given("host-root") && f.cdi == "" {
		bad("host-root", "only descriptions for --cdi-dir need it: give that, too, or leave it out")
	}
	if f.nvml != "" && f.sim != "" {
		bad("nvml", "simulated GPUs need no library: leave out --nvml, or --sim")
	}
	paths := [][2]string{{"dir", f.dir}, {"kubelet-dir", f.kubelet}, {"cdi-dir", f.cdi}, {"host-root", f.hostRoot}}
	for _, p := range paths {
		if flag, path := p[0], p[1]; !filepath.IsAbs(path) && (path != "" || flag != "cdi-dir") {
			bad(flag, "%q is not an absolute path", path)
		}
	}
	if f.metrics != "" {
		_, port, err := net.SplitHostPort(f.metrics)
		if _, number := strconv.ParseUint(port, 10, 16); err != nil || number != nil {
			bad("metrics", "%q is no address: want HOST:PORT, such as 127.0.0.1:9817", f.metrics)
		}
	}
	return s, errors.Join(errs...)
}

// refuse reports the flags of another mode as bad if the command line has them.
func (f *flags) refuse(bad func(flag, format string, args ...any), mode string, others ...string) {
	for _, flag := range others {
		if f.given(flag) {
			bad(flag, "it says nothing with --mode=%s: leave it out, or choose --mode=%s", f.mode, mode)
		}
	}
}

// isResource reports whether Kubernetes accepts name as the name of an extended resource. A quota for
// the resource has a longer name, which must be valid, too.
func isResource(name string) bool {
	domain, _, ok := strings.Cut(name, "/")
	reserved := domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io") || strings.HasPrefix(name,
		"requests.")
	return ok && !reserved && len(validation.IsQualifiedName(name)) == 0 &&
		len(validation.IsQualifiedName("requests."+name)) == 0
}
