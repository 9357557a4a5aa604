package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// Main runs the command with args and returns its exit status. It returns soon after ctx is done,
// and releases everything first.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ctx = context.WithValue(ctx, callKey{}, call{args: args, began: time.Now()})
	before := debug.SetMemoryLimit(-1) // commands lower it; see headroom.Plan
	defer debug.SetMemoryLimit(before)
	var printed bytes.Buffer // by cobra, which drops the errors of its writer
	root := newRoot(stderr, &printed)
	profiles := registerProfiles(root)
	started := false // errors before that are wrong use
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) (err error) {
		started = true
		cmd.SetOut(stdout)
		for _, p := range profiles {
			err = errors.Join(err, p.start())
		}
		return err
	}
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil && !started {
		err = fail.Usagef("%w", err)
	}
	if printed.Len() > 0 {
		err = errors.Join(err, toStdout(stdout, printed.Bytes()))
	}
	for _, p := range profiles {
		err = errors.Join(err, p.stop())
	}
	return end(ctx, err, stderr)
}

// call describes one call of the program in the documents that it writes.
type call struct {
	args  []string
	began time.Time
}

// callKey is the key of a context's call.
type callKey struct{}

// end prints how a command ended, and returns its exit status. Wrong data decides it even if the
// command was interrupted.
func end(ctx context.Context, err error, stderr io.Writer) int {
	if err == nil {
		return fail.Fine
	}
	if ctx.Err() != nil && fail.Status(err) != fail.Wrong {
		fmt.Fprintln(stderr, "spillbench: interrupted; everything was given back")
		return fail.Interrupted
	}
	fmt.Fprintf(stderr, "spillbench: %s\n", fail.Line(err))
	return fail.Status(err)
}

// exitCodes ends the help of each command.
const exitCodes = `
Exit codes:
    0  all is well
    1  data was wrong, corruption was found, or a fault of --fault was not survived
    2  wrong use: the line on standard error explains what to do
    3  the machine cannot do it: no device, no space, no memory
  130  interrupted
`

// newRoot builds the tree of commands. cobra prints help texts to help. Closures hold the values of
// flags, so two calls of Main share nothing.
func newRoot(stderr, help io.Writer) *cobra.Command {
	root := newRun()
	root.SetOut(help)
	root.SetErr(stderr)
	root.Use = "spillbench"
	root.Short = "Run Spillway on this machine, and measure it"
	root.Long = `Run Spillway on this machine, and measure it.

Without a subcommand, spillbench does what run does: it pushes a table several times
larger than the GPUs' memory through all tiers, works on it and verifies it. Without a
GPU that Spillway can use, it simulates one and labels every figure sim.`
	root.Example = `  spillbench                                # a generated table through all tiers
  spillbench run data.parquet --passes 2    # your own file
  spillbench --gpu-memory 1GiB --json result.json`
	root.Args = refuseUnknown
	root.SilenceErrors, root.SilenceUsage = true, true // Main prints errors
	root.AddCommand(newRun(), newVerify(), newBandwidth(), newCompare(), newTopo(), newTrace(),
		newQuota(), newInspect(), newReport(), newSchema())
	root.PersistentFlags().Bool("version", false, "print the version of spillbench, its commit and its Go")
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fail.Usagef("%w (see %s --help)", err, cmd.CommandPath())
	})
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages", ".FlagUsagesWrapped 100") + exitCodes)
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	finish(root)
	return root
}

// refuseUnknown returns an error if there are args, of which the first is not a subcommand of cmd.
func refuseUnknown(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2 // letters that may be wrong
	hint := ""
	if names := cmd.SuggestionsFor(args[0]); len(names) > 0 {
		hint = "did you mean " + either(names) + "? "
	} else if _, err := os.Stat(args[0]); err == nil {
		hint = "to run on a file: spillbench run " + strings.Join(args, " ") + "; "
	}
	path := cmd.CommandPath()
	return fail.Usagef("unknown command %q for %q (%ssee %s --help)", args[0], path, hint, path)
}

// finish completes cmd and its subcommands. It registers the values of flags for completion in shells,
// and makes a missing subcommand or an unknown topic of help an error: cobra would print help.
func finish(cmd *cobra.Command) {
	cmd.Version = report.VersionLine()
	cmd.Flags().SortFlags = false
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if c, ok := f.Value.(*choiceFlag); ok {
			values := cobra.FixedCompletions(c.known, cobra.ShellCompDirectiveNoFileComp)
			must(cmd.RegisterFlagCompletionFunc(f.Name, values))
		}
		if slices.Contains([]string{"disk", "root", "ledger"}, f.Name) {
			must(cmd.MarkFlagDirname(f.Name))
		}
	})
	switch {
	case cmd.Name() == "help":
		cmd.Args = func(_ *cobra.Command, topic []string) error {
			cmd, rest, err := cmd.Root().Find(topic)
			return errors.Join(err, refuseUnknown(cmd, rest))
		}
	case !cmd.Runnable():
		cmd.Args = refuseUnknown
		cmd.RunE = func(cmd *cobra.Command, _ []string) error {
			return fail.Usagef("%s needs a subcommand (see %s --help)", cmd.CommandPath(), cmd.CommandPath())
		}
	}
	for _, c := range cmd.Commands() {
		finish(c)
	}
}

// files returns a check for min to max arguments, none of them empty. what describes them in the error.
func files(min, max int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < min || len(args) > max || slices.Contains(args, "") {
			return fail.Usagef("%s needs %s (see %s --help)",
				strings.TrimPrefix(cmd.CommandPath(), "spillbench "), what, cmd.CommandPath())
		}
		return nil
	}
}

// either joins alternatives: "a, b or c".
func either(names []string) string {
	if n := len(names) - 1; n > 0 {
		return strings.Join(names[:n], ", ") + " or " + names[n]
	}
	return strings.Join(names, "")
}

// must panics on an error that only a wrong constant can cause.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// valueFlag is a flag with a value that is not empty: an unset variable of a script must not lose a
// result.
type valueFlag struct {
	to   *string
	want string // describes the value in errors
}

// Set takes a value.
func (v *valueFlag) Set(s string) error {
	if s == "" {
		return errors.New("want " + v.want)
	}
	*v.to = s
	return nil
}

// String returns the value.
func (v *valueFlag) String() string { return *v.to }

// Type names the value in a usage text.
func (*valueFlag) Type() string { return "string" }

// choiceFlag is a flag that takes one of a few values.
type choiceFlag struct {
	valueFlag
	known []string
}

// choice sets to to its default, which may be empty, and returns the flag for it.
func choice(to *string, value string, known ...string) *choiceFlag {
	*to = value
	return &choiceFlag{valueFlag{to, either(known)}, known}
}

// Set takes a known value.
func (c *choiceFlag) Set(s string) error {
	if !slices.Contains(c.known, s) {
		s = ""
	}
	return c.valueFlag.Set(s)
}
