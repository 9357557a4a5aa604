package main

import (
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/topology"
)

// The values of --nvml: how NVIDIA's management library is called.
const (
	nvmlRunTime = "run-time"
	nvmlGoNVML  = "go-nvml"
)

// topoFlags are the flags of topo.
type topoFlags struct {
	output     outputFlags
	root, nvml string
}

func newTopo() *cobra.Command {
	f := topoFlags{output: outputFlags{prints: true}}
	cmd := &cobra.Command{
		Use:   "topo",
		Short: "Print the machine's processors, memory, GPUs and disks",
		Long: `Print the machine's CPUs, NUMA nodes, memory, GPUs, network cards and disks, the
connections between them (NV#: NVLinks, PIX: one PCI switch, PXB: several, PHB: a host
bridge, NODE: two of one NUMA node, SYS: two nodes), and how much of them this process
may use.`,
		Example: `  spillbench topo
  spillbench topo --format json
  spillbench topo --root recorded/    # another machine's`,
		Args: cobra.NoArgs,
		RunE: f.run,
	}
	cmd.Flags().StringVar(&f.root, "root", "",
		"read `DIR`/proc and DIR/sys, a recorded machine (default this machine)")
	cmd.Flags().Var(choice(&f.nvml, nvmlRunTime, nvmlRunTime, nvmlGoNVML), "nvml",
		"call NVIDIA's management library by `HOW`: run-time, or go-nvml in a build with the tag gonvml")
	f.output.register(cmd.Flags())
	return cmd
}

func (f *topoFlags) run(cmd *cobra.Command, _ []string) error {
	opt := topology.Options{Root: f.root}
	if f.nvml == nvmlGoNVML {
		opt.GPUs = goNVML
	}
	switch {
	case f.root != "" && !isDir(filepath.Join(f.root, "proc")) && !isDir(filepath.Join(f.root, "sys")):
		return fail.Usagef("--root %s holds neither proc nor sys (name a directory that does)", f.root)
	case f.root != "" && f.nvml == nvmlGoNVML:
		return fail.Usagef("--nvml %s with --root: a recorded machine has no library (leave one of them out)", f.nvml)
	case f.nvml == nvmlGoNVML && goNVML == nil:
		return fail.Usagef("--nvml %s: this spillbench is built without go-nvml (with cgo: "+
			"go build -tags gonvml -ldflags '-extldflags=-Wl,-z,lazy' ./cmd/spillbench)", f.nvml)
	}
	out, err := f.output.open(cmd)
	if err != nil {
		return err
	}
	top, err := topology.Discover(cmd.Context(), opt)
	if err != nil {
		return err
	}
	env := report.MachineEnv(top)
	if f.root == "" {
		env.ProbeDisk(os.TempDir()) // where run spills by default
	} else { // the rest of a recorded machine is not known, and not that of this machine
		env.Kernel, env.GOOS, env.GOARCH, env.Cores = "", "", "", top.Limits.CPUs
	}
	doc := &report.Topo{Header: report.NewHeader("topo", env, nil), Topology: top, Paths: top.Matrix()}
	return out.show(doc, nil)
}
