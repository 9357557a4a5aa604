package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/system"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/topology"
)

// outputFlags are the flags for the files and the format of a command's result.
type outputFlags struct {
	json, html string // a file, or - for standard output; empty: none
	format     string // empty: the flag was not given
	quiet      bool
	trace      place // of a recording that the command writes in addition; empty: none

	// figures is set if the result has figures for benchstat and a page.
	figures bool
	// prints is set if the command does nothing but print its result.
	prints bool
}

func (o *outputFlags) register(f *pflag.FlagSet) {
	formats := report.Formats()
	quiet := "print only what the other output flags ask for: no table, no notes, no progress"
	if o.prints {
		quiet = "print nothing but the result; with --json FILE not even that"
	}
	if !o.figures {
		formats = slices.DeleteFunc(formats, func(s string) bool { return s == string(report.BenchFmt) })
	}
	f.Var(choice(&o.format, "", formats...), "format",
		"print the result as `NAME`: "+either(formats)+" (default table)")
	f.Var(&valueFlag{&o.json, "FILE or -"}, "json",
		"write the result as JSON to `FILE`, or to standard output if it is -")
	if o.figures {
		f.Var(&valueFlag{&o.html, "FILE or -"}, "html", "write a page about the result to `FILE`, "+
			"or to standard output if it is -: one file that needs nothing else")
	}
	f.BoolVarP(&o.quiet, "quiet", "q", false, quiet)
}

// validate refuses flags that contradict each other.
func (o *outputFlags) validate() error {
	switch {
	case o.html == "-" && (o.json == "-" || o.format != ""):
		return fail.Usagef("--html - wants standard output for itself (name a file: --html FILE)")
	case o.json == "-" && o.format != "":
		return fail.Usagef("--json - and --format %s both want standard output (give one of them, or --json FILE)",
			o.format)
	case o.quiet && !o.prints && o.format == string(report.Table):
		return fail.Usagef("--quiet and --format table exclude each other (give one of them)")
	}
	return nil
}

// printed returns the format of the result on standard output, or "" if none goes there.
func (o *outputFlags) printed() report.Format {
	switch {
	case o.html == "-":
		return report.HTML
	case o.json == "-":
		return report.JSON
	case o.format != "":
		return report.Format(o.format)
	case o.quiet && (!o.prints || o.json != ""):
		return ""
	}
	return report.Table
}

// places returns the files of --json, --html and the trace.
func (o *outputFlags) places() []place {
	return []place{{"--json " + o.json, o.json}, {"--html " + o.html, o.html}, o.trace}
}

// output writes the result of a command.
type output struct {
	flags *outputFlags
	cmd   *cobra.Command
	call  call // of the program
}

// open checks, before the work begins, that the command can read and write its files, and that the
// results replace none of those that it reads.
func (o *outputFlags) open(cmd *cobra.Command, reads ...string) (*output, error) {
	var inputs []place
	for _, name := range reads {
		inputs = append(inputs, place{"the input " + name, name})
	}
	err := cmp.Or(stdinOnce(reads), o.validate(), apart(o.places(), inputs))
	for _, p := range o.places() {
		if err == nil {
			err = p.check()
		}
	}
	c, _ := cmd.Context().Value(callKey{}).(call)
	return &output{o, cmd, c}, err
}

// header returns the beginning of the document of a command that opens no engine.
func (o *output) header() (report.Header, error) {
	top, err := topology.Discover(o.cmd.Context(), topology.Options{})
	if err != nil {
		return report.Header{}, err
	}
	name := strings.TrimPrefix(o.cmd.CommandPath(), "spillbench ")
	return report.NewHeader(name, report.MachineEnv(top), nil), nil
}

// show writes the document to the files of --json and --html, and prints it in the chosen format. It
// prints the document of a failed run only for programs: the error is enough for people.
func (o *output) show(document report.Document, notes []string) error {
	document.Stamp(o.call.args, o.call.began)
	printed := o.flags.printed()
	if report.FailureOf(document) != "" && printed != report.JSON && printed != report.HTML {
		printed = ""
	}
	return o.write(printed, document, notes)
}

// write writes the files, and prints in a format unless that is empty.
func (o *output) write(printed report.Format, document report.Document, notes []string) error {
	var errs []error
	write := func(format report.Format, to func(text []byte) error) {
		var b bytes.Buffer
		err := report.Print(&b, format, document, notes)
		if err == nil {
			err = to(b.Bytes())
		}
		errs = append(errs, err)
	}
	places := o.flags.places()
	for i, format := range []report.Format{report.JSON, report.HTML} {
		if places[i].isFile() {
			write(format, places[i].write)
		}
	}
	if printed != "" {
		write(printed, func(text []byte) error { return toStdout(o.cmd.OutOrStdout(), text) })
	}
	return errors.Join(errs...)
}

// toStdout writes a result to standard output.
func toStdout(stdout io.Writer, text []byte) error {
	if _, err := stdout.Write(text); err != nil {
		return fail.Environmentf("writing standard output: %w", pathless(err))
	}
	return nil
}

// warn prints notes to standard error if the printed result has none. Commands that fail do not call it,
// because an error is one line.
func (o *output) warn(lines []string) {
	switch f := o.flags.printed(); {
	case o.flags.quiet, f == report.Table, f == report.Markdown:
		return
	}
	for _, l := range lines {
		fmt.Fprintf(o.cmd.ErrOrStderr(), "spillbench: note: %s\n", named.Inert(l))
	}
}

// place is a file of a command line, with a description: "--json r.json", "the input a.csv". The name
// may be empty, or - for a standard stream.
type place struct{ what, name string }

// isFile reports whether the place names a file.
func (p place) isFile() bool { return p.name != "" && p.name != "-" }

// apart returns an error if a file is written and also read, or written twice: the second content would
// replace the first. It allows that for devices and pipes.
func apart(written, read []place) error {
	for i, w := range written {
		for _, other := range append(written[:i:i], read...) {
			if w.isFile() && other.isFile() && sameFile(w.name, other.name) {
				return fail.Usagef("%s and %s are the same file (name another file)", w.what, other.what)
			}
		}
	}
	return nil
}

func sameFile(a, b string) bool {
	infoA, errA := os.Stat(a)
	infoB, errB := os.Stat(b)
	if errA == nil && errB == nil {
		return infoA.Mode().IsRegular() && os.SameFile(infoA, infoB)
	}
	a, errA = filepath.Abs(a)
	b, errB = filepath.Abs(b)
	return errA == nil && errB == nil && a == b
}

// check returns an error if the file cannot be written. A process that is killed meanwhile leaves no
// file.
func (p place) check() error {
	if !p.isFile() {
		return nil
	}
	info, err := os.Stat(p.name)
	switch {
	case err == nil && info.IsDir():
		err = syscall.EISDIR
	case err == nil && !info.Mode().IsRegular(): // opening a pipe would block
		return nil
	default:
		err = probeDir(filepath.Dir(p.target()))
	}
	if err != nil {
		return fail.Usagef("%s cannot be written: %w (name a file in a directory that you may write to)",
			p.what, pathless(err))
	}
	return nil
}

// write replaces the content of the file, completely or not at all. It does not replace devices and
// pipes, but writes to them.
func (p place) write(text []byte) error {
	info, err := os.Stat(p.name)
	if err == nil && !info.Mode().IsRegular() {
		err = os.WriteFile(p.name, text, 0)
	} else {
		err = storeFile(p.target(), text)
	}
	if err != nil {
		return fail.Environmentf("writing %s: %w", p.what, pathless(err))
	}
	return nil
}

// target returns the file that a link refers to, so that write does not replace the link.
func (p place) target() string {
	if real, err := filepath.EvalSymlinks(p.name); err == nil {
		return real
	}
	return p.name
}

// probeDir returns an error if the process cannot create files in dir.
func probeDir(dir string) error {
	f, err := system.OpenUnlinked(dir)
	if err != nil {
		return err
	}
	return f.Close()
}

// storeFile replaces the content of the file at path, completely or not at all. A new file has no name
// until it is complete, if the file system supports that. Otherwise, and to replace a file, it has a
// temporary name until then.
func storeFile(path string, content []byte) error {
	fill := func(f *os.File) error {
		_, err := f.Write(content)
		return cmp.Or(err, f.Chmod(0o644))
	}
	if f, err := system.OpenNameless(filepath.Dir(path)); err == nil {
		if err = fill(f); err == nil {
			err = system.GiveName(f, path)
		}
		if errors.Join(err, f.Close()) == nil {
			return nil
		}
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".spillbench-*")
	if err != nil {
		return err
	}
	if err = errors.Join(fill(f), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// pathless drops the operation and path of an error: the caller names the path.
func pathless(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err
	}
	return err
}
