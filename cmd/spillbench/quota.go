package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/reservation/quota"
)

func newQuota() *cobra.Command {
	flags := outputFlags{prints: true}
	var ledger string
	var share []string
	cmd := &cobra.Command{
		Use:   "quota",
		Short: "Print the limits of this process, and the holders on this node",
		Long: `Print the limit of GPU memory that this process has, where it was set, and how much each
process holds according to the node's ledger. The limit comes from the environment:

  SPILLWAY_GPU_MEMORY_LIMIT          a size or a share of the GPUs: 4GiB, 25%
  SPILLWAY_GPU_MEMORY_OVERSUB_RATIO  how much of a GPU quotas may promise: 1.5
  SPILLWAY_GPU_PHYSICAL_MEMORY_MB    how many MiB a GPU counts as having
  SPILLWAY_GPU_QUOTA_DIR             the directory of the node's ledger
  SPILLWAY_GPU_QUOTA_GROUP           the group whose share of the ledger it is

The first three may also begin with NVSHARE_ instead of SPILLWAY_, and the name of the
ratio may lack MEMORY_.

The processes of one user share a ledger. Root can make one for all users with --share
and the UUID of each GPU. Every user who reaches its directory can put false numbers in
it, so make it where only trusted users can.

The command ends with status 3 if it cannot read a file of the ledger, or if somebody
removed one that a process uses.`,
		Example: `  spillbench quota
  spillbench quota --ledger /run/spillway/ledger
  spillbench quota --ledger /run/spillway/ledger --share GPU-4f7a    # as root`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printQuota(cmd, &flags, ledger, share)
		},
	}
	cmd.Flags().StringVar(&ledger, "ledger", "", "read the node's ledger in `DIR` instead of the environment's")
	cmd.Flags().StringArrayVar(&share, "share", nil,
		"let all users join the node's ledger for `GPU`, and remove what dead processes left (repeatable; needs root)")
	flags.register(cmd.Flags())
	return cmd
}

// quotaSettings returns the quota that the environment sets. A wrong value there is wrong use.
func quotaSettings() (*quota.Settings, error) {
	lookup, err := leases.LookupLimits(os.LookupEnv)
	if err != nil {
		return nil, err
	}
	s, err := quota.FromEnv(lookup)
	if err != nil {
		return nil, fail.Usagef("%w (correct or unset the variable; see spillbench quota --help)", err)
	}
	return &s, nil
}

func printQuota(cmd *cobra.Command, flags *outputFlags, ledger string, share []string) error {
	s, err := quotaSettings()
	if err != nil {
		return err
	}
	s.Ledger = cmp.Or(ledger, s.Ledger)
	if share != nil {
		switch {
		case s.Ledger == "":
			return fail.Usagef("--share needs a ledger (name its directory with --ledger DIR)")
		case slices.Contains(share, ""):
			return fail.Usagef("--share: a GPU without a name")
		}
		err := leases.Share(s.Ledger, share...)
		if errors.Is(err, fs.ErrPermission) {
			return fail.Environmentf("%w (run it as root)", err)
		}
		if err != nil {
			return err
		}
	}
	if ledger != "" && !isDir(ledger) {
		return fail.Usagef("--ledger %s is no directory", ledger)
	}
	out, err := flags.open(cmd)
	if err != nil {
		return err
	}
	header, err := out.header()
	if err != nil {
		return err
	}
	doc := &report.Quota{
		Header: header, Limit: s.Limit.String(), LimitBytes: s.Limit.Bytes, Source: s.Source, PhysicalBytes: s.Physical,
		Ledger: s.Ledger, Group: s.Group, Holders: []leases.Holder{},
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
	if broken == nil && slices.ContainsFunc(doc.Holders, func(h leases.Holder) bool { return h.Lost > 0 }) {
		broken = fmt.Errorf("files of the ledger in %s were removed while processes use it: "+
			"for a moment they did not see each other", s.Ledger)
	}
	if broken != nil {
		broken = fail.Environmentf("%w (keep whatever removes old files away from the directory)", broken)
	}
	return errors.Join(out.show(doc, nil), broken)
}
