package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/input"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/named"
)

// defaultPage is where report writes without --html.
const defaultPage = "report.html"

func newReport() *cobra.Command {
	f := outputFlags{figures: true, prints: true}
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
		Args: files(1, 2, "the name of one or two files that --json wrote"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return makeReport(cmd, args, &f)
		},
	}
	fs := cmd.Flags()
	formats := report.Formats()
	formats = slices.DeleteFunc(formats, func(s string) bool { return s == string(report.JSON) }) // FILE is that
	fs.Var(choice(&f.format, "", formats...), "format", "print in the place of a page, by `NAME`: "+either(formats))
	fs.Var(&valueFlag{&f.html, "FILE or -"}, "html",
		"write the page to `FILE`, or to standard output if it is - (default "+defaultPage+", without --format)")
	fs.BoolVarP(&f.quiet, "quiet", "q", false, "do not print where the page is")
	return cmd
}

func makeReport(cmd *cobra.Command, files []string, f *outputFlags) error {
	printed := f.printed()
	if f.format == "" && f.html != "-" {
		printed = ""
		f.html = cmp.Or(f.html, defaultPage)
	}
	out, err := f.open(cmd, files...)
	if err != nil {
		return err
	}
	names, docs, err := readResults(files)
	if err != nil {
		return err
	}
	doc, err := report.Compared(names, docs)
	if err != nil {
		return fail.Usagef("%w", err)
	}
	page := place{"--html " + f.html, f.html}
	if page.isFile() && !replaceablePage(f.html) {
		return fail.Usagef("%s exists and is no report of spillbench (name another file with --html FILE)", f.html)
	}
	for i, d := range docs {
		switch why := report.FailureOf(d); {
		case why == "":
		case printed == report.BenchFmt:
			return fail.Usagef("%s is of a run that failed, of which there is nothing to compare: %s", names[i], why)
		case printed == report.CSV && len(docs) == 1: // it has only the tables
			cmd.PrintErrf("spillbench: note: %s\n", named.Inert(names[i]+" is of a run that failed: "+why))
		}
	}
	var notes []string
	if len(docs) == 1 {
		notes = report.NotesOf(doc)
	}
	if err := out.write(printed, doc, notes); err != nil {
		return err
	}
	if page.isFile() && !f.quiet {
		cmd.PrintErrf("spillbench: the report is in %s\n", named.Inert(f.html))
	}
	return nil
}

// readResults reads results. It returns them with the names of their files for messages.
func readResults(files []string) (names []string, docs []report.Document, err error) {
	for _, name := range files {
		f := os.Stdin
		if name != "-" {
			f, err = os.Open(name)
		}
		name = input.Name(name)
		var text []byte
		if err == nil {
			text, err = io.ReadAll(io.LimitReader(f, maxResult+1)) // a device may have no end
			_ = f.Close()
		}
		if err == nil && len(text) > maxResult {
			err = fmt.Errorf("it is larger than the %d MiB of any result", maxResult>>20)
		}
		if err != nil {
			return nil, nil, fail.Usagef("%s cannot be read: %w (name what --json wrote)", name, pathless(err))
		}
		doc, err := report.Read(text)
		if err != nil {
			return nil, nil, fail.Usagef("%s: %w (name what run, bandwidth or compare wrote with --json)", name, err)
		}
		names, docs = append(names, name), append(docs, doc)
	}
	return names, docs, nil
}

// maxResult is the maximum size of a result in bytes: hundreds of times the largest known one.
const maxResult = 64 << 20

// replaceablePage reports whether a page may be written to a file: it is a page, empty, not a regular
// file, or does not exist. A user could easily pass a file to read as the file of the page.
func replaceablePage(name string) bool {
	info, err := os.Stat(name)
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
		return true
	}
	f, err := os.Open(name)
	if err != nil {
		return true // replacing a file needs no permission to read it
	}
	defer f.Close()
	text := make([]byte, 2000)
	n, _ := io.ReadFull(f, text) // a short file is not a page
	return strings.Contains(string(text[:n]), `<meta name="generator" content="spillway">`)
}
