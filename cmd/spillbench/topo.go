package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/topology"
)

func newTopo(stdout, stderr io.Writer) *cobra.Command {
	flags := outputFlags{prints: true}
	var root string
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
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return topo(cmd.Context(), &flags, root, stdout, stderr) },
	}
	cmd.Flags().SortFlags = false
	cmd.Flags().StringVar(&root, "root", "", "read `DIR`/proc and DIR/sys, a recorded machine, instead of this machine's")
	flags.register(cmd.Flags())
	return cmd
}

func topo(ctx context.Context, flags *outputFlags, root string, stdout, stderr io.Writer) (err error) {
	if root != "" && !isDir(filepath.Join(root, "proc")) && !isDir(filepath.Join(root, "sys")) {
		return fail.Usagef("--root %s holds neither proc nor sys (name a directory that does)", root)
	}
	out, err := flags.open(ctx, stdout, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.close()) }()
	opt := topology.Options{Root: root}
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
