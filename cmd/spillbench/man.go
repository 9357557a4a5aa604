package main

import (
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// newMan is for those who package the program: it is in no help.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use:     "man DIR",
		Short:   "Write a man page for each command into DIR",
		Long:    "Write a man page for each command into DIR, which is made if it is not there.",
		Example: "  spillbench man /usr/local/share/man/man1",
		Hidden:  true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return fail.Usagef("man wants a directory (spillbench man DIR)")
			}
			return nil
		},
		ValidArgsFunction: offer(cobra.ShellCompDirectiveFilterDirs),
		RunE:              func(cmd *cobra.Command, args []string) error { return writeManPages(cmd.Root(), args[0]) },
	}
}

// writeManPages writes one page for each command that help lists. They end with the exit codes, as
// help does.
func writeManPages(root *cobra.Command, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fail.Usagef("%s: %w (name a directory that you may write to)", dir, pathless(err))
	}
	describe(root)
	// The date is that of SOURCE_DATE_EPOCH, which packagers set, or today.
	header := doc.GenManHeader{Section: "1", Source: "spillbench " + report.Version(), Manual: "Spillway"}
	if err := doc.GenManTree(root, &header, dir); err != nil {
		return fail.Environmentf("%s: %w", dir, pathless(err))
	}
	return nil
}

// describe appends the exit codes to the description of a command and of those below it, as a block of
// Markdown.
func describe(cmd *cobra.Command) {
	text := cmd.Long
	if text == "" {
		text = cmd.Short + "."
	}
	cmd.Long = strings.TrimRight(text, "\n") + "\n\n" + indented(exitCodes)
	for _, c := range cmd.Commands() {
		describe(c)
	}
}

func indented(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString("    " + line)
	}
	return b.String()
}
