package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/suggest"
)

// exitCodes is what each command's help ends with.
const exitCodes = `Exit codes:
    0  all is well
    1  data was wrong, corruption was found, or a fault of --fault was not survived
    2  wrong use: the line on standard error says what to do
    3  the machine cannot do it: no device, no space, no memory
  130  interrupted
`

// groups are the headings under which help lists flags, in its order, with the flags that each has.
// Those of none come first: they are what the command is about.
var groups = []struct {
	title string
	flags []string
}{
	{"Flags", nil},
	{"Input", []string{"input", "repeat", "rows-per-batch", "seed"}},
	{"Memories", []string{"gpu", "gpu-memory", "host-memory", "disk-memory", "disk", "limit", "trigger", "stop"}},
	{"Moves and waits", []string{"policy", "codec", "encrypt", "monitor-period", "stuck-after", "write-ahead", "moves-per-edge", "disk-slots"}},
	{"Faults and slow disks", []string{"fault", "disk-throttle"}},
	{"Output", []string{"format", "json", "html", "listen", "quiet"}},
	{"Profiles", []string{"cpuprofile", "memprofile", "trace"}},
	{"Other", []string{"help", "version"}},
}

// helpWidth is how many columns help takes.
const helpWidth = 100

// usage prints what follows a command's description in its help.
func usage(cmd *cobra.Command) error {
	var b strings.Builder
	b.WriteString("Usage:\n")
	if cmd.Runnable() {
		fmt.Fprintf(&b, "  %s\n", cmd.UseLine())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&b, "  %s [command]\n", cmd.CommandPath())
	}
	if cmd.HasExample() {
		fmt.Fprintf(&b, "\nExamples:\n%s\n", cmd.Example)
	}
	if cmd.HasAvailableSubCommands() {
		b.WriteString("\nCommands:\n")
		for _, c := range cmd.Commands() {
			if c.IsAvailableCommand() {
				fmt.Fprintf(&b, "  %-*s  %s\n", c.NamePadding(), c.Name(), c.Short)
			}
		}
	}
	for i, flags := range grouped(cmd) {
		if flags.HasAvailableFlags() {
			fmt.Fprintf(&b, "\n%s:\n%s", groups[i].title, flags.FlagUsagesWrapped(helpWidth))
		}
	}
	b.WriteString("\n" + exitCodes)
	_, err := io.WriteString(cmd.OutOrStderr(), b.String())
	return err
}

// grouped returns the flags of each of the groups, in the order in which they were defined.
func grouped(cmd *cobra.Command) []*pflag.FlagSet {
	sets := make([]*pflag.FlagSet, len(groups))
	for i := range sets {
		sets[i] = pflag.NewFlagSet("", pflag.ContinueOnError)
		sets[i].SortFlags = false
	}
	add := func(f *pflag.Flag) {
		of := 0
		for i, g := range groups {
			if slices.Contains(g.flags, f.Name) {
				of = i
			}
		}
		sets[of].AddFlag(f)
	}
	cmd.LocalFlags().VisitAll(add)
	cmd.InheritedFlags().VisitAll(add)
	return sets
}

// newHelp is cobra's help command, but that asking for help on what does not
// exist is wrong use.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Print help on a command",
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			about, _, err := cmd.Root().Find(args)
			if err != nil {
				about = cmd.Root()
			}
			return commandsOf(about), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			about := cmd.Root()
			for _, name := range args {
				i := slices.IndexFunc(about.Commands(), func(c *cobra.Command) bool { return c.Name() == name })
				if i < 0 {
					return fail.Usagef("there is no help on %q (%swant %s)", strings.Join(args, " "), suggest.Hint(name, "", commandsOf(about)), either(commandsOf(cmd.Root())))
				}
				about = about.Commands()[i]
			}
			about.InitDefaultHelpFlag()
			return about.Help()
		},
	}
}
