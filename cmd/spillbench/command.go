package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/suggest"
)

// Main runs the command with args and returns its exit status. It ends soon
// after ctx does, with everything given back.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ctx = call{args: args, began: time.Now()}.in(ctx)
	before := debug.SetMemoryLimit(-1) // commands lower it; see headroom.Plan
	defer debug.SetMemoryLimit(before)
	root := newRoot(stdout, stderr)
	var profiles profileFlags
	profiles.register(root)
	root.SetArgs(args)
	printed := &helped{remembering{w: stdout}}
	root.SetOut(printed)
	return end(ctx, errors.Join(root.ExecuteContext(ctx), printed.failed(), profiles.stop()), stderr)
}

// call is one call of the program: what its documents say of it.
type call struct {
	args  []string
	began time.Time
}

type callKey struct{}

// in returns a context of the call.
func (c call) in(ctx context.Context) context.Context { return context.WithValue(ctx, callKey{}, c) }

// callOf returns the call that ctx is of; of none, one that begins now.
func callOf(ctx context.Context) call {
	if c, ok := ctx.Value(callKey{}).(call); ok {
		return c
	}
	return call{began: time.Now()}
}

// end prints how a command ended, and returns its exit status. Wrong data counts also if the
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

// newRoot builds the tree of commands. What a command is given lives in the
// closures, so that nothing is shared between two calls of Main.
func newRoot(stdout, stderr io.Writer) *cobra.Command {
	root := newRun(stdout, stderr)
	root.Use = "spillbench"
	root.Short = "Run Spillway on this machine, and measure it"
	root.Long = `Run Spillway on this machine, and measure it.

Without a subcommand it does what run does: a table several times larger than
the GPU's memory is pushed through all tiers, worked on and verified. Without a
GPU that Spillway can use, a simulated one stands in, and every figure is
labelled sim.`
	root.Example = `  spillbench                                # a generated table through all tiers
  spillbench run data.parquet --passes 2    # your own file
  spillbench --gpu-memory 1GiB --json result.json`
	root.Args = rootArgs
	root.SilenceErrors = true // Main prints them
	root.SilenceUsage = true
	root.SetFlagErrorFunc(flagError)
	root.SetUsageFunc(usage)
	root.AddCommand(newRun(stdout, stderr), newVerify(stdout, stderr), newBandwidth(stdout, stderr), newCompare(stdout, stderr), newQuota(stdout, stderr), newTopo(stdout, stderr), newTrace(stdout, stderr), newInspect(stdout, stderr), newReport(stdout, stderr), newSchema(stdout))
	help := newHelp()
	addVersion(help, stdout) // it is no command of the root yet
	root.SetHelpCommand(help)
	root.SetOut(stdout)
	root.SetErr(stderr)
	addCompletionCommand(root)
	addVersion(root, stdout)
	addCompletion(root)
	return root
}

// addCompletionCommand adds cobra's command that prints scripts for shells, but that what it does not
// know is wrong use.
func addCompletionCommand(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() != "completion" {
			continue
		}
		c.Short = "Print the script that completes commands and flags in a shell"
		c.Args = func(c *cobra.Command, args []string) error {
			var shells []string
			for _, shell := range c.Commands() {
				shells = append(shells, shell.Name())
			}
			return fail.Usagef("completion wants the name of a shell: %s (see spillbench completion --help)", either(shells))
		}
		c.RunE = func(*cobra.Command, []string) error { return nil }
		for _, shell := range c.Commands() {
			shell.Args = noArgs
			print := shell.RunE
			shell.RunE = func(cmd *cobra.Command, args []string) error {
				if err := print(cmd, args); err != nil { // only writing fails
					return fail.Environmentf("writing standard output: %w", pathless(err))
				}
				return nil
			}
		}
	}
}

// addVersion adds --version to a command and to those below it: it prints the version in the place of
// doing anything. Cobra's own would ask git for the commit also where nobody wants it.
func addVersion(cmd *cobra.Command, stdout io.Writer) {
	version := cmd.Flags().Bool("version", false, "print the version of spillbench, its commit and its Go")
	args, do, run := cmd.Args, cmd.RunE, cmd.Run
	if args != nil {
		cmd.Args = func(cmd *cobra.Command, given []string) error {
			if *version {
				return nil
			}
			return args(cmd, given)
		}
	}
	cmd.RunE = func(cmd *cobra.Command, given []string) error {
		switch {
		case *version:
			if _, err := fmt.Fprintln(stdout, report.VersionLine()); err != nil {
				return fail.Environmentf("writing standard output: %w", pathless(err))
			}
		case do != nil:
			return do(cmd, given)
		case run != nil:
			run(cmd, given)
		}
		return nil
	}
	for _, c := range cmd.Commands() {
		addVersion(c, stdout)
	}
}

// helped is standard output for what cobra prints, such as help, without a look at errors: the first
// one is kept, and what comes after it is dropped.
type helped struct{ remembering }

func (h *helped) Write(p []byte) (int, error) {
	if h.err == nil {
		_, _ = h.remembering.Write(p)
	}
	return len(p), nil
}

// failed returns the error that was kept, as one of the machine.
func (h *helped) failed() error {
	if h.err == nil {
		return nil
	}
	return fail.Environmentf("writing standard output: %w", pathless(h.err))
}

// rootArgs explains what is not a subcommand.
func rootArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if args[0] == "version" {
		return fail.Usagef("%q is not a command (did you mean --version?)", args[0])
	}
	if _, err := os.Stat(args[0]); err == nil {
		return fail.Usagef("%q is not a command (to run on a file: spillbench run %s)", args[0], strings.Join(args, " "))
	}
	return fail.Usagef("%q is not a command (%swant %s; see spillbench --help)", args[0], suggest.Hint(args[0], "", commandsOf(cmd)), either(commandsOf(cmd)))
}

// commandsOf returns the names of a command's own commands: not those that cobra adds, and none that
// is hidden.
func commandsOf(cmd *cobra.Command) (names []string) {
	for _, c := range cmd.Commands() {
		if !c.Hidden && c.Name() != "help" && c.Name() != "completion" {
			names = append(names, c.Name())
		}
	}
	return names
}

// either lists what there is to choose from: "a, b or c".
func either(names []string) string {
	if n := len(names) - 1; n > 0 {
		return strings.Join(names[:n], ", ") + " or " + names[n]
	}
	return strings.Join(names, "")
}

// noArgs refuses arguments that are no flags.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fail.Usagef("%s takes no arguments, and got %q (see %s --help)", strings.TrimPrefix(cmd.CommandPath(), "spillbench "), args[0], cmd.CommandPath())
}

// flagError is what a flag that is unknown, or whose value makes no sense, ends
// with.
func flagError(cmd *cobra.Command, err error) error {
	hint := ""
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		typed := unknown.GetSpecifiedName()
		if all := unknown.GetSpecifiedShortnames(); len(all) > 1 {
			typed = all // -passes, as Go's own commands take it
		}
		var known []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				known = append(known, f.Name)
			}
		})
		hint = suggest.Hint(typed, "--", known)
	}
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		if cause := invalid.Unwrap(); wanted(invalid.GetFlag(), cause) != cause {
			err = fmt.Errorf("%s%w", strings.TrimSuffix(err.Error(), cause.Error()), wanted(invalid.GetFlag(), cause))
		}
	}
	return fail.Usagef("%w (%ssee %s --help)", err, hint, cmd.CommandPath())
}

// wanted says what a flag wants that refused a value with err. What Go's parsers say is for programmers,
// and so is not shown.
func wanted(f *pflag.Flag, err error) error {
	var number *strconv.NumError
	isNumber, kind := errors.As(err, &number), f.Value.Type()
	switch {
	case isNumber && errors.Is(err, strconv.ErrRange):
		return errors.New("the number is too large or too small")
	case isNumber && kind == "bool":
		return errors.New("want true or false")
	case isNumber && kind == "float64":
		return errors.New("want a number, such as 0.9")
	case isNumber && kind == "intSlice":
		return errors.New("want whole numbers, with commas between")
	case isNumber && kind == "uint64":
		return errors.New("want a whole number, 0 or more")
	case isNumber:
		return errors.New("want a whole number")
	case kind == "duration":
		return errors.New("want a time with its unit, such as 50ms or 30s")
	}
	return err
}
