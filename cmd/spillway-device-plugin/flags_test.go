package main

import (
	"bytes"
	"math/big"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
)

func settingsOf(t *testing.T, args ...string) (*settings, error) {
	t.Helper()
	var f flags
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	f.add(set)
	if err := set.Parse(args); err != nil {
		t.Fatal(err)
	}
	return f.settings()
}

func TestSettings(t *testing.T) {
	s, err := settingsOf(t)
	if err != nil || s.unit != 256<<20 || s.reserve != 1<<30 || s.ratio != nil || s.simCount != 0 {
		t.Errorf("the defaults are %+v: %v", s, err)
	}
	s, err = settingsOf(t, "--unit", "1GiB", "--reserve", "0", "--ratio", "1.5", "--sim", "8x16Gi", "--whole-resource", "")
	if err != nil || s.unit != 1<<30 || s.reserve != 0 || s.ratio.Cmp(big.NewRat(3, 2)) != 0 || s.simCount != 8 || s.simMemory != 16<<30 {
		t.Errorf("%+v: %v", s, err)
	}
	t.Setenv("NODE_NAME", "node-1")
	if s, err = settingsOf(t, "--mode", "dra", "--cdi-dir", "/cdi"); err != nil || s.node != "node-1" {
		t.Errorf("%+v: %v", s, err)
	}
	if s, err = settingsOf(t, "--ratio", "1.0"); err != nil || s.ratio != nil {
		t.Errorf("a ratio of 1.0 is %v: %v", s.ratio, err)
	}
}

// TestSizesAreQuantities: Kubernetes and the plugin read a size as the same number.
func TestSizesAreQuantities(t *testing.T) {
	for _, text := range []string{
		"268435456", "256Mi", "1.5Gi", "2Ti", "1048576k", "1073741824e0", "1.073741824e9", "1.073741824E+9",
		"1073741824000e-3", "1048576E3", "1E",
	} {
		want, err := resource.ParseQuantity(text)
		if err != nil {
			t.Fatal(err)
		}
		s, err := settingsOf(t, "--unit", "1Mi", "--reserve", text, "--sim", "1x"+text)
		if err != nil || s.reserve != want.Value() || s.simMemory != want.Value() {
			t.Errorf("%s is %+v, %v; want %d bytes", text, s, err, want.Value())
		}
	}
	if s, err := settingsOf(t, "--unit", "1.073741824e9"); err != nil || s.unit != 1<<30 {
		t.Errorf("%+v: %v", s, err)
	}
}

// The plugin reads the environment as the engine does, with all names and the same order. A flag comes
// first.
func TestEnvironment(t *testing.T) {
	for name, c := range map[string]struct {
		env, args []string
		ratio     *big.Rat
		physical  int64
	}{
		"nothing":          {nil, nil, nil, 0},
		"ratio":            {[]string{"SPILLWAY_GPU_MEMORY_OVERSUB_RATIO=1.5"}, nil, big.NewRat(3, 2), 0},
		"short name":       {[]string{"SPILLWAY_GPU_OVERSUB_RATIO=15e-1"}, nil, big.NewRat(3, 2), 0},
		"nvshare's name":   {[]string{"NVSHARE_GPU_MEMORY_OVERSUB_RATIO=2"}, nil, big.NewRat(2, 1), 0},
		"ours comes first": {[]string{"NVSHARE_GPU_MEMORY_OVERSUB_RATIO=2", "SPILLWAY_GPU_OVERSUB_RATIO=3"}, nil, big.NewRat(3, 1), 0},
		"the flag wins":    {[]string{"SPILLWAY_GPU_MEMORY_OVERSUB_RATIO=1.5"}, []string{"--ratio=2"}, big.NewRat(2, 1), 0},
		"and takes it off": {[]string{"SPILLWAY_GPU_MEMORY_OVERSUB_RATIO=1.5"}, []string{"--ratio=1"}, nil, 0},
		"a ratio of 1":     {[]string{"SPILLWAY_GPU_MEMORY_OVERSUB_RATIO=1.0"}, nil, nil, 0},
		"physical":         {[]string{"SPILLWAY_GPU_PHYSICAL_MEMORY_MB=8192"}, nil, nil, 8 << 30},
		"nvshare's size":   {[]string{"NVSHARE_GPU_PHYSICAL_MEMORY_MB=512"}, nil, nil, 512 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			for _, e := range c.env {
				variable, value, _ := strings.Cut(e, "=")
				t.Setenv(variable, value)
			}
			s, err := settingsOf(t, c.args...)
			same := err == nil && (s.ratio == nil) == (c.ratio == nil) && (c.ratio == nil || s.ratio.Cmp(c.ratio) == 0)
			if !same || s.physical != c.physical {
				t.Errorf("%+v, %v; want the ratio %v of %d bytes", s, err, c.ratio, c.physical)
			}
		})
	}
	for _, e := range []string{
		"SPILLWAY_GPU_MEMORY_OVERSUB_RATIO=0", "NVSHARE_GPU_OVERSUB_RATIO=3/2", "SPILLWAY_GPU_MEMORY_OVERSUB_RATIO=",
		"SPILLWAY_GPU_PHYSICAL_MEMORY_MB=8Gi", "NVSHARE_GPU_PHYSICAL_MEMORY_MB=0",
	} {
		t.Run(e, func(t *testing.T) {
			variable, value, _ := strings.Cut(e, "=")
			t.Setenv(variable, value)
			var stdout, stderr bytes.Buffer
			status := Main(t.Context(), []string{"--sim=1x1Gi"}, &stdout, &stderr)
			want := variable + `: "` + value + `"`
			if value == "" {
				want = variable + ": it is set to nothing"
			}
			if got := stderr.String(); status != 2 || !strings.Contains(got, want) || strings.Count(got, "\n") != 1 {
				t.Errorf("status %d, %q", status, got)
			}
		})
	}
}

// What says nothing sensible is refused in one line that names the flag and what to do.
func TestBadFlags(t *testing.T) {
	t.Setenv("NODE_NAME", "")
	dra := func(args ...string) []string { // what is last counts
		return append([]string{"--mode", "dra", "--node", "node-1", "--cdi-dir", "/var/run/cdi"}, args...)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--unit", "0"}, "--unit: "},
		{[]string{"--unit", "-1Gi"}, "--unit: "},
		{[]string{"--unit", "256m"}, "--unit: "},
		{[]string{"--unit", "1e9"}, "not a whole number of MiB: try 256Mi"},
		{[]string{"--reserve", "1e19"}, "--reserve: "},
		{[]string{"--reserve", "-1e9"}, "--reserve: "},
		{[]string{"--unit", "1000"}, "not a whole number of MiB: try 256Mi"},
		{[]string{"--unit", "99999999Ti"}, "--unit: "},
		{[]string{"--reserve", "much"}, "--reserve: "},
		{[]string{"--ratio", "0"}, `--ratio: "0" is not a ratio: want a number above 0, such as 1.5`},
		{[]string{"--ratio", "-1.5"}, "--ratio: "},
		{[]string{"--ratio", "NaN"}, "--ratio: "},
		{[]string{"--ratio", "Inf"}, "--ratio: "},
		{[]string{"--ratio", "3/2"}, "--ratio: "},
		{[]string{"--ratio", "1e400"}, "--ratio: "},
		{[]string{"--ratio", ""}, "--ratio: "},
		{[]string{"--sim", "8"}, "--sim: "},
		{[]string{"--sim", "0x16Gi"}, "--sim: "},
		{[]string{"--sim", "65x16Gi"}, "--sim: "},
		{[]string{"--sim", "8x"}, "--sim: "},
		{[]string{"--resource", "gpu-memory"}, "want DOMAIN/NAME, such as example.com/gpu-memory"},
		{[]string{"--resource", "a.kubernetes.io/gpu"}, "--resource: "},
		{[]string{"--resource", "example.com/gpu memory"}, "--resource: "},
		{[]string{"--resource", "example.com/" + strings.Repeat("x", 64)}, "--resource: "},
		{[]string{"--whole-resource", "spillway-db.github.io/gpu-memory"}, "is the name of the units, too"},
		{[]string{"--shared-resource", "spillway-db.github.io/gpu"}, "is the name of another resource, too"},
		{[]string{"--shared-resource", "gpu"}, "--shared-resource: "},
		{[]string{"--shares", "0"}, "--shares: 0 shares of a GPU: want from 1 to 100"},
		{[]string{"--shares", "101"}, "--shares: "},
		{[]string{"--dir", "run"}, `--dir: "run" is not an absolute path`},
		{[]string{"--kubelet-dir", ""}, "--kubelet-dir: "},
		{[]string{"--cdi-dir", "cdi"}, "--cdi-dir: "},
		{[]string{"--host-root", ""}, "--host-root: "},
		{[]string{"--metrics", "9817"}, "want HOST:PORT, such as 127.0.0.1:9817"},
		{[]string{"--metrics", "127.0.0.1:99817"}, "--metrics: "},
		{[]string{"--mode", "both"}, `--mode: "both" is neither plugin nor dra`},
		{dra("--driver", "GPU_1"), "want a domain of at most 63 bytes, such as gpu.example.com"},
		{dra("--driver", strings.Repeat("x", 64)), "--driver: "},
		{dra("--node", ""), "--node: the node has no name: give it, or NODE_NAME"},
		{dra("--node", "a b"), "kubectl get nodes lists them"},
		{dra("--cdi-dir", ""), "--cdi-dir: claims are given by CDI: name the directory that the runtime reads"},
		{dra("--resource", "example.com/memory"), "--resource: it says nothing with --mode=dra: leave it out, or choose --mode=plugin"},
		{dra("--shares", "2"), "--shares: it says nothing with --mode=dra"},
		{dra("--whole-resource", ""), "--whole-resource: it says nothing with --mode=dra"},
		{[]string{"--driver", "gpu.example.com"}, "--driver: it says nothing with --mode=plugin: leave it out, or choose --mode=dra"},
		{[]string{"--node", "node-1"}, "--node: it says nothing with --mode=plugin"},
		{[]string{"--kubeconfig", "/config"}, "--kubeconfig: it says nothing with --mode=plugin"},
		{[]string{"--host-root", "/host"}, "--host-root: only descriptions for --cdi-dir need it"},
		{[]string{"--sim", "1x1Gi", "--nvml", "/lib.so"}, "--nvml: simulated GPUs need no library: leave out --nvml, or --sim"},
		{[]string{"--nonsense"}, "unknown flag: --nonsense"},
		{[]string{"start"}, `"start" is no flag`},
	} {
		var stdout, stderr bytes.Buffer
		status := Main(t.Context(), c.args, &stdout, &stderr)
		if got := stderr.String(); status != 2 || !strings.Contains(got, c.want) || strings.Count(got, "\n") != 1 {
			t.Errorf("%q ends with status %d and says %q, not one line with %q", c.args, status, got, c.want)
		}
	}
}
