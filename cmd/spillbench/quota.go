package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/nodelimits"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/topology"
)

func newQuota(stdout, stderr io.Writer) *cobra.Command {
	flags := outputFlags{prints: true}
	var ledger string
	var share []string
	cmd := &cobra.Command{
		Use:   "quota",
		Short: "Print the limits of this process, and the holders on this node",
		Long: `Print what limit of GPU memory this process has and where it was set, and which
processes hold how much by the node's ledger. The limit comes from the environment:

  SPILLWAY_GPU_MEMORY_LIMIT          a size or a share of the GPUs: 4GiB, 25%
  SPILLWAY_GPU_MEMORY_OVERSUB_RATIO  how much of a GPU quotas may promise: 1.5
  SPILLWAY_GPU_PHYSICAL_MEMORY_MB    how many MiB a GPU counts as having
  SPILLWAY_GPU_QUOTA_DIR             the directory of the node's ledger
  SPILLWAY_GPU_QUOTA_GROUP           whose share of the ledger it is

A ledger is for one user's processes. Root can make one that all users may join, with
--share and the UUID of each GPU. Every user who reaches its directory can put false
numbers in it: make it where only those do who are to share.

A ledger that is broken is told, with exit status 3: what cannot be read, and that
somebody removed its files while processes use them.

The first three are also read with NVSHARE_ in the place of SPILLWAY_, and the ratio
without MEMORY_, too.`,
		Example: `  spillbench quota
  spillbench quota --ledger /run/spillway/ledger
  spillbench quota --ledger /run/spillway/ledger --share GPU-4f7a    # as root`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printQuota(cmd.Context(), &flags, ledger, share, stdout, stderr)
		},
	}
	cmd.Flags().SortFlags = false
	cmd.Flags().StringVar(&ledger, "ledger", "", "the node's ledger is in `DIR`, whatever the environment says")
	cmd.Flags().StringArrayVar(&share, "share", nil, "let all users join the node's ledger for `GPU`, and remove what dead processes left (repeatable; needs root)")
	flags.register(cmd.Flags())
	return cmd
}

// shareLedger is --share.
func shareLedger(dir string, gpus []string) error {
	if dir == "" {
		return &fail.Error{Status: fail.Usage, Err: errors.New("--share needs a ledger"), Fix: "name its directory with --ledger DIR"}
	}
	if slices.Contains(gpus, "") {
		return fail.Usagef("--share: a GPU without a name")
	}
	switch err := leases.Share(dir, gpus...); {
	case errors.Is(err, fs.ErrPermission):
		return &fail.Error{Status: fail.Environment, Err: err, Fix: "run it as root"}
	case err != nil:
		return &fail.Error{Status: fail.Environment, Err: err}
	}
	return nil
}

// quotaSettings are what the environment says; what is wrong there is wrong use.
func quotaSettings() (*quota.Settings, error) {
	lookup, err := nodelimits.Lookup(os.LookupEnv)
	if err != nil {
		return nil, &fail.Error{Status: fail.Environment, Err: err}
	}
	s, err := quota.FromEnv(lookup)
	if err != nil {
		return nil, &fail.Error{Status: fail.Usage, Err: err, Fix: "correct or unset the variable; see spillbench quota --help"}
	}
	return &s, nil
}

func printQuota(ctx context.Context, flags *outputFlags, ledger string, share []string, stdout, stderr io.Writer) (err error) {
	s, err := quotaSettings()
	if err != nil {
		return err
	}
	if share != nil {
		if err := shareLedger(cmp.Or(ledger, s.Ledger), share); err != nil {
			return err
		}
	}
	if ledger != "" {
		if !isDir(ledger) {
			return fail.Usagef("--ledger %s is no directory", ledger)
		}
		s.Ledger = ledger
	}
	out, err := flags.open(ctx, stdout, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.close()) }()
	top, err := topology.Discover(ctx, topology.Options{})
	if err != nil {
		return err
	}
	doc := &report.Quota{
		Header: report.NewHeader("quota", report.MachineEnv(top), nil),
		Limit:  s.Limit.String(), LimitBytes: s.Limit.Bytes, Source: s.Source, PhysicalBytes: s.Physical, Ledger: s.Ledger, Group: s.Group, Holders: []leases.Holder{},
	}
	if s.Ratio != nil {
		doc.Ratio, _ = s.Ratio.Float64()
	}
	var broken error
	if s.Ledger != "" {
		var held []leases.Holder
		held, broken = leases.Holders(s.Ledger)
		doc.Holders = append(doc.Holders, held...)
	}
	for _, h := range doc.Holders {
		if h.Lost > 0 && broken == nil {
			broken = fmt.Errorf("files of the ledger in %s were removed while processes use it: for a moment they did not see each other", s.Ledger)
		}
	}
	if broken != nil {
		broken = &fail.Error{Status: fail.Environment, Err: broken, Fix: "keep whatever removes old files away from the directory"}
	}
	return errors.Join(out.show(doc, nil), broken)
}
