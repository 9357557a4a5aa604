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

// flags are the command's flags as they were given.
type flags struct {
	mode                 string
	unit, ratio, reserve string
	resource, whole      string
	shared               string
	shares               int
	sim, nvml            string
	dir, kubelet         string
	metrics              string
	cdi, hostRoot        string

	driver, node, kubeconfig string // of modeDRA

	given func(flag string) bool // whether the command line has it
}

func (f *flags) add(set *pflag.FlagSet) {
	set.SortFlags = false
	f.given = set.Changed
	set.StringVar(&f.mode, "mode", modePlugin, "plugin: a device plugin; dra: a driver for dynamic resource allocation")
	set.StringVar(&f.unit, "unit", "256Mi", "GPU memory is given in units of this size, whole MiB")
	set.StringVar(&f.ratio, "ratio", "",
		"units may promise that multiple of a GPU's memory; what does not fit spills; "+
			"if not given: SPILLWAY_GPU_MEMORY_OVERSUB_RATIO, or 1")
	set.StringVar(&f.reserve, "reserve", "1Gi", "memory of each GPU that is not given, for CUDA's own needs; none of a simulated GPU's")
	set.StringVar(&f.resource, "resource", "spillway-db.github.io/gpu-memory", "plugin: name of the units")
	set.StringVar(&f.whole, "whole-resource", "spillway-db.github.io/gpu", "plugin: name of whole GPUs; empty: none are given whole")
	set.StringVar(&f.shared, "shared-resource", "spillway-db.github.io/shared-gpu",
		"plugin: name of shares of a GPU, for containers that set SPILLWAY_GPU_MEMORY_LIMIT themselves; empty: none are given")
	set.IntVar(&f.shares, "shares", 10, "plugin: shares of each GPU; a container that sets no limit gets that part of it")
	set.StringVar(&f.driver, "driver", "gpu.spillway-db.github.io", "dra: name of the driver")
	set.StringVar(&f.node, "node", "", "dra: name of the node; empty: what NODE_NAME says")
	set.StringVar(&f.kubeconfig, "kubeconfig", "", "dra: file that names the API server; empty: as the cluster tells its pods")
	set.StringVar(&f.sim, "sim", "", "offer simulated GPUs in place of real ones: 8x16Gi are eight of 16 GiB")
	set.StringVar(&f.nvml, "nvml", "", "NVIDIA's management library; empty: libnvidia-ml.so.1, where the dynamic linker finds it")
	set.StringVar(&f.dir, "dir", "/run/spillway", "directory of the ledger and of the grants, the same on the node and here")
	set.StringVar(&f.kubelet, "kubelet-dir", "/var/lib/kubelet", "the kubelet's directory, with its sockets")
	set.StringVar(&f.cdi, "cdi-dir", "", "describe the GPUs there for runtimes without NVIDIA's, as in /var/run/cdi; empty: leave devices to NVIDIA's runtime; dra needs it")
	set.StringVar(&f.hostRoot, "host-root", "/", "where the node's root directory is, for --cdi-dir")
	set.StringVar(&f.metrics, "metrics", "127.0.0.1:9817", "address of /metrics and /healthz; empty: none")
}

// settings are the values of the flags, and of the environment where no flag is given.
type settings struct {
	flags
	unit, reserve int64
	ratio         *big.Rat // nil: 1
	physical      int64    // bytes that each GPU counts as having, if it does not have less; 0: all
	simCount      int      // 0: real GPUs
	simMemory     int64
}

// settings reads the flags and the environment. The error has one line for each bad value.
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
	if f.reserve != "0" { // a size is above 0
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
		if s.simCount, s.simMemory, err = parseSim(f.sim); err != nil {
			bad("sim", "%w", err)
		}
	}
	switch f.mode {
	case modePlugin:
		if err := checkResource(f.resource); err != nil {
			bad("resource", "%w", err)
		}
		if err := checkResource(f.whole); f.whole != "" && err != nil {
			bad("whole-resource", "%w", err)
		}
		if err := checkResource(f.shared); f.shared != "" && err != nil {
			bad("shared-resource", "%w", err)
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
	case modeDRA:
		if wrong := validation.IsDNS1123Subdomain(f.driver); len(wrong) > 0 || len(f.driver) > maxDriver {
			bad("driver", "%.100q is no name for a driver: want a domain of at most %d bytes, such as gpu.example.com", f.driver, maxDriver)
		}
		if s.node == "" {
			s.node = os.Getenv("NODE_NAME")
		}
		if s.node == "" {
			bad("node", "the node has no name: give it, or NODE_NAME in the environment from the pod's spec.nodeName")
		} else if wrong := validation.IsDNS1123Subdomain(s.node); len(wrong) > 0 {
			bad("node", "%.100q is no name of a node: kubectl get nodes lists them", s.node)
		}
		if f.cdi == "" {
			bad("cdi-dir", "claims are given by CDI: name the directory that the runtime reads, such as /var/run/cdi")
		}
	default:
		bad("mode", "%.60q is neither %s nor %s", f.mode, modePlugin, modeDRA)
	}
	for _, of := range []struct {
		flag string
		mode string
	}{
		{"resource", modePlugin}, {"whole-resource", modePlugin}, {"shared-resource", modePlugin}, {"shares", modePlugin},
		{"driver", modeDRA}, {"node", modeDRA}, {"kubeconfig", modeDRA},
	} {
		if known := f.mode == modePlugin || f.mode == modeDRA; known && f.given(of.flag) && f.mode != of.mode {
			bad(of.flag, "it says nothing with --mode=%s: leave it out, or choose --mode=%s", f.mode, of.mode)
		}
	}
	if f.given("host-root") && f.cdi == "" {
		bad("host-root", "only descriptions for --cdi-dir need it: give that, too, or leave it out")
	}
	if f.nvml != "" && f.sim != "" {
		bad("nvml", "simulated GPUs need no library: leave out --nvml, or --sim")
	}
	for _, p := range []struct{ flag, path string }{{"dir", f.dir}, {"kubelet-dir", f.kubelet}, {"cdi-dir", f.cdi}, {"host-root", f.hostRoot}} {
		if !filepath.IsAbs(p.path) && (p.path != "" || p.flag != "cdi-dir") {
			bad(p.flag, "%q is not an absolute path", p.path)
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

// maxShares keeps the list of shares within one message to the kubelet.
const maxShares = 100

// maxDriver is how long Kubernetes lets a driver's name be.
const maxDriver = 63

// maxSim is more GPUs than a node has.
const maxSim = 64

// parseSim reads COUNTxSIZE.
func parseSim(text string) (count int, memory int64, err error) {
	n, bytes, ok := strings.Cut(text, "x")
	count, err = strconv.Atoi(n)
	if !ok || err != nil || count < 1 || count > maxSim {
		return 0, 0, fmt.Errorf("%.60q is no number and size of GPUs: want up to %d, such as 8x16Gi", text, maxSim)
	}
	memory, err = size.Parse(bytes)
	return count, memory, err
}

// checkResource refuses what Kubernetes would not take as the name of an extended resource.
func checkResource(name string) error {
	domain, _, ok := strings.Cut(name, "/")
	wrong := validation.IsQualifiedName(name)
	if len(wrong) == 0 { // a quota for it has a longer name
		wrong = validation.IsQualifiedName("requests." + name)
	}
	reserved := domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io") || strings.HasPrefix(name, "requests.")
	if !ok || len(wrong) > 0 || reserved {
		return fmt.Errorf("%.100q is no name for an extended resource: want DOMAIN/NAME, such as example.com/gpu-memory", name)
	}
	return nil
}
