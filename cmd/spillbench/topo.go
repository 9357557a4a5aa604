package main

import (
	"context"
	"io"
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

func newTopo(stdout, stderr io.Writer) *cobra.Command {
	flags := outputFlags{prints: true}
	var root, binding string
	cmd := &cobra.Command{
		Use:   "topo",
		Short: "Print what this machine has",
		Long: `Print what this machine has: CPUs, NUMA nodes, memory, GPUs, network cards,
disks, what lies between them (NV#: NVLinks, PIX: one PCI switch, PXB: several,
PHB: a host bridge, NODE: two of one NUMA node, SYS: two nodes), and how much of
them this process may use.`,
		Example: `  spillbench topo
  spillbench topo --format json
  spillbench topo --root recorded/    # another machine's`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return topo(cmd.Context(), &flags, root, binding, stdout, stderr)
		},
	}
	cmd.Flags().StringVar(&root, "root", "", "read `DIR`/proc and DIR/sys, a recorded machine, instead of this machine's")
	cmd.Flags().Var(choice(&binding, nvmlRunTime, nvmlRunTime, nvmlGoNVML), "nvml",
		"call NVIDIA's management library by `HOW`: run-time, or go-nvml in a build with the tag gonvml")
	flags.register(cmd.Flags())
	return cmd
}

func topo(ctx context.Context, flags *outputFlags, root, binding string, stdout, stderr io.Writer) error {
	if root != "" && !isDir(filepath.Join(root, "proc")) && !isDir(filepath.Join(root, "sys")) {
		return fail.Usagef("--root %s holds neither proc nor sys (name a directory that does)", root)
	}
	opt := topology.Options{Root: root}
	if binding == nvmlGoNVML {
		if root != "" {
			return fail.Usagef("--nvml %s with --root: a recorded machine has no library (leave one of them out)", binding)
		}
		if goNVML == nil {
			return fail.Usagef("--nvml %s: this spillbench is built without go-nvml (with cgo: "+
				"go build -tags gonvml -ldflags '-extldflags=-Wl,-z,lazy' ./cmd/spillbench)", binding)
		}
		opt.GPUs = goNVML
	}
	out, err := flags.open(ctx, stdout, stderr)
	if err != nil {
		return err
	}
	top, err := topology.Discover(ctx, opt)
	if err != nil {
		return err
	}
	env := report.MachineEnv(top)
	if root == "" {
		env.ProbeDisk(os.TempDir()) // where run spills by default
	} else {
		env.Kernel, env.GOOS, env.GOARCH, env.Cores = "", "", "", top.Limits.CPUs // not this machine's if the recorded one's are not known
	}
	doc := &report.Topo{Header: report.NewHeader("topo", env, nil), Topology: top, Paths: top.Matrix()}
	return out.show(doc, nil)
}
