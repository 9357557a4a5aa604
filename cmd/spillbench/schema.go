package main

import (
	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

func newSchema() *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of what --json writes",
		Long: `Print the JSON Schema (draft 2020-12) of what all commands write with --json and --format
json: each key, its type and its unit. It has no other keys than the documents of this
program, so validators refuse those of newer ones that have more.`,
		Example: `  spillbench schema > spillbench.schema.json`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return toStdout(cmd.OutOrStdout(), []byte(report.JSONSchema()))
		},
	}
}
