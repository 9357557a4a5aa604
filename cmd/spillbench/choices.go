package main

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/inject"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/peer"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/suggest"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
)

// choices returns the values of a flag that takes one of a few; nil for others.
func choices(flag string) []string {
	switch flag {
	case "gpu":
		return []string{"auto", "cuda", "sim"}
	case "policy":
		return monitor.Names()
	case "codec":
		return codecs()
	case "place":
		return []string{"gpu", "fits"}
	case "format":
		return report.Formats()
	case "peer":
		return []string{peer.ArrowIPC}
	case "nvml":
		return []string{nvmlRunTime, nvmlGoNVML}
	case "between":
		var kinds []string
		for _, k := range tier.Kinds() {
			kinds = append(kinds, k.String())
		}
		return kinds
	}
	return nil
}

// codecs returns the names of all codecs.
func codecs() (names []string) {
	for c := convert.CodecAuto; ; c++ {
		name := c.String()
		if _, err := convert.ParseCodec(name); err != nil {
			return names
		}
		names = append(names, name)
	}
}

// choiceFlag is the value of a flag that takes one of its choices.
type choiceFlag struct {
	to   *string
	flag string
}

// choice returns the value of a flag that has a default, which may be empty.
func choice(to *string, flag, value string) *choiceFlag {
	*to = value
	return &choiceFlag{to, flag}
}

// Set takes one of the choices.
func (c *choiceFlag) Set(s string) error {
	known := choices(c.flag)
	if !slices.Contains(known, s) {
		return errors.New(suggest.Hint(s, "", known) + "want " + either(known))
	}
	*c.to = s
	return nil
}

// String returns what Set took.
func (c *choiceFlag) String() string {
	if c.to == nil { // as pflag makes one, to compare defaults
		return ""
	}
	return *c.to
}

// Type names the value in a usage text.
func (*choiceFlag) Type() string { return "string" }

// chosen refuses a value that is none of the flag's choices.
func chosen(flag, value string) error {
	known := choices(flag)
	if slices.Contains(known, value) {
		return nil
	}
	return fail.Usagef("--%s %q is unknown (%swant %s)", flag, value, suggest.Hint(value, "", known), either(known))
}

// addCompletion gives every flag and argument of a command and of those below it what shells offer
// for it. A flag's value is one of its choices, a file, a directory, or nothing that is known.
func addCompletion(cmd *cobra.Command) {
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if _, done := cmd.GetFlagCompletionFunc(f.Name); !done {
			must(cmd.RegisterFlagCompletionFunc(f.Name, completionOf(cmd, f.Name)))
		}
	})
	if cmd.ValidArgsFunction == nil && !takesFiles(cmd) {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	for _, c := range cmd.Commands() {
		addCompletion(c)
	}
}

// takesFiles reports whether a command's arguments are files.
func takesFiles(cmd *cobra.Command) bool { return strings.Contains(cmd.Use, "FILE") }

// completionOf returns what a shell offers for a flag.
func completionOf(cmd *cobra.Command, flag string) cobra.CompletionFunc {
	switch flag {
	case "input", "cpuprofile", "memprofile", "trace":
		return offer(cobra.ShellCompDirectiveDefault)
	case "json", "html":
		return offer(cobra.ShellCompDirectiveDefault, "-")
	case "disk", "root", "ledger":
		return offer(cobra.ShellCompDirectiveFilterDirs)
	case "listen":
		return offer(cobra.ShellCompDirectiveNoFileComp, "127.0.0.1:0", "localhost:8080")
	case "write-ahead":
		return offer(cobra.ShellCompDirectiveNoFileComp, "off", "64MiB")
	case "between":
		return func(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return more(typed, choices(flag)), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
		}
	case "fault":
		return func(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return inject.Complete(typed), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
		}
	}
	values := choices(flag)
	if flag == "format" { // not each command has all of them
		values = slices.DeleteFunc(values, func(s string) bool { return !strings.Contains(cmd.Flag(flag).Usage, s) })
	}
	return offer(cobra.ShellCompDirectiveNoFileComp, values...)
}

// offer is always the same.
func offer(directive cobra.ShellCompDirective, values ...string) cobra.CompletionFunc {
	return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) { return values, directive }
}

// more returns what a list with commas becomes with one more of the values, or with its last one
// complete.
func more(typed string, values []string) (all []string) {
	list, before := strings.Split(typed, ","), typed[:strings.LastIndexByte(typed, ',')+1]
	for _, v := range values {
		if !slices.Contains(list[:len(list)-1], v) {
			all = append(all, before+v)
		}
	}
	return all
}
