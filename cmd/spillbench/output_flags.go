package main

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/suggest"
)

// outputFlags say where results go and in which form; every command that has results has them.
type outputFlags struct {
	json   fileFlag
	html   fileFlag
	format formatFlag
	quiet  bool

	// figures is set if the result is a report.Measured: it has figures for benchstat and a page.
	figures bool
	// prints says that to print its result is all that the command does.
	prints bool
}

func (o *outputFlags) register(f *pflag.FlagSet) {
	formats := report.Formats()
	if !o.figures {
		formats = slices.DeleteFunc(formats, func(s string) bool { return s == string(report.BenchFmt) })
	}
	f.Var(&formatChoice{&o.format, formats}, "format", "how the result is printed, by `NAME`: "+either(formats)+" (default table)")
	f.Var(&o.json, "json", "write the result as JSON to `FILE`, or to standard output if it is -")
	if o.figures {
		f.Var(&o.html, "html", "write a page about the result to `FILE`, or to standard output if it is -: one file that needs nothing else")
	}
	quiet := "print nothing but what --json and --format ask for: no table, no notes, no progress"
	if o.figures {
		quiet = strings.Replace(quiet, "--json and", "--json, --html and", 1)
	}
	if o.prints {
		quiet = "print nothing but the result; with --json FILE not even that"
	}
	f.BoolVarP(&o.quiet, "quiet", "q", false, quiet)
}

// validate refuses flags that contradict each other.
func (o *outputFlags) validate() error {
	switch {
	case o.html == "-" && (o.json == "-" || o.format != ""):
		return fail.Usagef("--html - wants standard output for itself (name a file: --html FILE)")
	case o.format == "":
	case o.json == "-":
		return fail.Usagef("--json - and --format %s both want standard output (give one of them, or --json FILE)", o.format)
	case o.quiet && !o.prints && o.format == formatFlag(report.Table):
		return fail.Usagef("--quiet and --format table exclude each other (give one of them)")
	case o.format == formatFlag(report.BenchFmt) && !o.figures:
		return fail.Usagef("--format benchfmt is for commands that measure: run, bandwidth and compare (want table, json, csv or markdown)")
	}
	return nil
}

// printed is the format of what goes to standard output; empty: nothing does.
func (o *outputFlags) printed() report.Format {
	switch {
	case o.html == "-":
		return ""
	case o.json == "-":
		return report.JSON
	case o.format != "":
		return report.Format(o.format)
	case o.quiet && (!o.prints || o.json != ""):
		return ""
	}
	return report.Table
}

// formatFlag is the value of --format. Empty means that the flag was not given.
type formatFlag report.Format

// formatChoice is the flag that sets it.
type formatChoice struct {
	to    *formatFlag
	known []string // that the command has
}

// Set takes the name of a format, also of one that the command does not have: who validates says why.
func (f *formatChoice) Set(s string) error {
	if !slices.Contains(report.Formats(), s) {
		return errors.New(suggest.Hint(s, "", f.known) + "want " + either(f.known))
	}
	*f.to = formatFlag(s)
	return nil
}

// String returns what Set took.
func (f *formatChoice) String() string {
	if f.to == nil { // as pflag makes one, to compare defaults
		return ""
	}
	return string(*f.to)
}

// Type names the value in a usage text.
func (*formatChoice) Type() string { return "name" }

// fileFlag is the value of --json and --html. Empty means that the flag was not given, and cannot be given: an
// unset variable in a script must not lose a result.
type fileFlag string

// Set takes a path or -.
func (j *fileFlag) Set(s string) error {
	if s == "" {
		return errors.New("want FILE or -")
	}
	*j = fileFlag(s)
	return nil
}

// String returns what Set took.
func (j *fileFlag) String() string { return string(*j) }

// Type names the value in a usage text.
func (*fileFlag) Type() string { return "string" }

// valueFlag is the value of a flag that cannot be given empty: an unset variable in a script is not
// what was meant.
type valueFlag struct {
	to   *string
	want string
}

// Set takes a value.
func (v *valueFlag) Set(s string) error {
	if s == "" {
		return errors.New("want " + v.want)
	}
	*v.to = s
	return nil
}

// String returns what Set took.
func (v *valueFlag) String() string {
	if v.to == nil { // as pflag makes one, to compare defaults
		return ""
	}
	return *v.to
}

// Type names the value in a usage text.
func (*valueFlag) Type() string { return "string" }
