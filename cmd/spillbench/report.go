package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/named"
)

// defaultPage is where report writes without --html.
const defaultPage = "report.html"

// reportFlags are the flags of report.
type reportFlags struct {
	html   string
	format string
	quiet  bool
}

func newReport(stdout, stderr io.Writer) *cobra.Command {
	var f reportFlags
	cmd := &cobra.Command{
		Use:   "report FILE [FILE]",
		Short: "Make a page of a result, or of two that are compared",
		Long: `Make a page of a result, or of two that are compared.

Each FILE is what run, bandwidth or compare wrote with --json, and - is standard input. The
page is one file that needs nothing else, and can be sent by mail. With two results of one
command it says in words what differs, and shows both curves.

With --format it prints instead: a result as its command would have, or what differs
between two. For benchfmt it prints the figures of each FILE, with its name as "result".`,
		Example: `  spillbench run --json a.json
  spillbench report a.json                  # writes report.html
  spillbench run --disk-throttle 100MiB --json b.json
  spillbench report a.json b.json --html slow.html
  spillbench report a.json b.json --format markdown
  spillbench report a.json b.json --format benchfmt    # for benchstat -col result`,
		Args: files(1, 2, "one or two files that --json wrote"),
		RunE: func(_ *cobra.Command, args []string) error { return makeReport(args, f, stdout, stderr) },
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	formats := slices.DeleteFunc(report.Formats(), func(s string) bool { return s == string(report.JSON) }) // FILE is that
	fs.Var(choice(&f.format, "", formats...), "format", "print in the place of a page, by `NAME`: "+either(formats))
	fs.Var(&valueFlag{&f.html, "FILE or -"}, "html", "write the page to `FILE`, or to standard output if it is - (default "+defaultPage+", without --format)")
	fs.BoolVarP(&f.quiet, "quiet", "q", false, "do not print where the page is")
	return cmd
}

// validate refuses flags that contradict each other.
func (f reportFlags) validate() error {
	if f.format != "" && f.html == "-" {
		return fail.Usagef("--html - wants standard output for itself (name a file: --html FILE)")
	}
	return nil
}

func makeReport(names []string, f reportFlags, stdout, stderr io.Writer) error {
	if err := f.validate(); err != nil {
		return err
	}
	html := f.html
	if html == "" && f.format == "" {
		html = defaultPage
	}
	if err := apart([]place{{"--html " + html, html}}, readings(names...)); err != nil {
		return err
	}
	names = slices.Clone(names)
	docs, err := readResults(names)
	if err != nil {
		return err
	}
	if html != "" {
		if err := writePage(html, names, docs, f.quiet, stdout, stderr); err != nil {
			return err
		}
	}
	if f.format == "" {
		return nil
	}
	for i, d := range docs {
		switch why := report.FailureOf(d); {
		case why != "" && f.format == string(report.BenchFmt):
			return fail.Usagef("%s is of a run that failed, of which there is nothing to compare: %s", names[i], why)
		case why != "" && len(docs) == 1 && f.format == string(report.CSV): // which has tables alone
			fmt.Fprintf(stderr, "spillbench: note: %s\n", named.Inert(names[i]+" is of a run that failed: "+why))
		}
	}
	var b bytes.Buffer
	switch {
	case f.format == string(report.BenchFmt):
		err = report.WriteBenchmarks(&b, names, docs...)
	case len(docs) == 1:
		err = docs[0].Page(report.NotesOf(docs[0])).Write(&b, report.Format(f.format))
	default:
		err = report.PageOfTwo(names, docs[0], docs[1]).Write(&b, report.Format(f.format))
	}
	if err != nil {
		return err
	}
	return toStdout(stdout, b.Bytes())
}

// readResults reads one result, or two of one command. In names, - becomes what a reader knows.
func readResults(names []string) (docs []report.Measured, err error) {
	if len(names) == 2 && names[0] == "-" && names[1] == "-" {
		return nil, fail.Usagef("standard input can be read once (give - once, and a file)")
	}
	for i, name := range names {
		text, err := readResult(name)
		if name == "-" {
			name, names[i] = "standard input", "standard input"
		}
		if err != nil {
			return nil, fail.Usagef("%s cannot be read: %w (name what --json wrote)", name, pathless(err))
		}
		doc, err := report.Read(text)
		if err != nil {
			return nil, fail.Usagef("%s: %w (name what run, bandwidth or compare wrote with --json)", name, err)
		}
		docs = append(docs, doc)
	}
	if len(docs) == 2 && report.CommandOf(docs[0]) != report.CommandOf(docs[1]) {
		return nil, fail.Usagef("%s is of %s and %s of %s (give two results of one command)", names[0], report.CommandOf(docs[0]), names[1], report.CommandOf(docs[1]))
	}
	return docs, nil
}

// writePage writes the page to the file html, or to standard output.
func writePage(html string, names []string, docs []report.Measured, quiet bool, stdout, stderr io.Writer) error {
	var b bytes.Buffer
	if err := report.WriteHTML(&b, names, docs...); err != nil {
		return err
	}
	to := place{"--html " + html, html}
	if to.isFile() {
		if err := replaceablePage(html); err != nil {
			return err
		}
		if err := to.check(); err != nil {
			return err
		}
	}
	if err := to.write(stdout, b.Bytes()); err != nil {
		return err
	}
	if to.isFile() && !quiet {
		fmt.Fprintf(stderr, "spillbench: the report is in %s\n", named.Inert(html))
	}
	return nil
}

// maxResult is how large a result may be: hundreds of times the largest that we know.
const maxResult = 64 << 20

// readResult reads a result's file, or standard input; one without an end, such as a device, not to its end.
func readResult(name string) (text []byte, err error) {
	f := os.Stdin
	if name != "-" {
		if f, err = os.Open(name); err != nil {
			return nil, err
		}
		defer f.Close()
	}
	text, err = io.ReadAll(io.LimitReader(f, maxResult+1))
	if err == nil && len(text) > maxResult {
		err = fmt.Errorf("it is larger than the %d MiB of any result", maxResult>>20)
	}
	return text, err
}

// replaceablePage refuses a file that is no page of ours: report takes names of files, and so one that
// was meant to be read is easily named as the page. What is no regular file is not replaced.
func replaceablePage(name string) error {
	if info, err := os.Stat(name); err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
		return nil
	}
	f, err := os.Open(name)
	if err != nil {
		return nil // to replace it takes no right to read it
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, 2000))
	if err == nil && strings.Contains(string(text), `<meta name="generator" content="spillway">`) {
		return nil
	}
	return fail.Usagef("%s exists and is no report of spillbench (name another file with --html FILE)", name)
}
