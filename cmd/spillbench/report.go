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
)

// defaultPage is where report writes without --html.
const defaultPage = "report.html"

func newReport(stdout, stderr io.Writer) *cobra.Command {
	var html fileFlag
	var quiet bool
	cmd := &cobra.Command{
		Use:   "report FILE [FILE]",
		Short: "Make a page of a result, or of two that are compared",
		Long: `Make a page of a result, or of two that are compared.

Each FILE is what run, bandwidth or compare wrote with --json, and - is standard input. The
page is one file that needs nothing else, and can be sent by mail. With two results of one
command it says in words what differs, and shows both curves.`,
		Example: `  spillbench run --json a.json
  spillbench report a.json                  # writes report.html
  spillbench run --disk-throttle 100MiB --json b.json
  spillbench report a.json b.json --html slow.html`,
		Args: files(1, 2, "one or two files that --json wrote"),
		RunE: func(_ *cobra.Command, args []string) error {
			return makeReport(args, string(html), quiet, stdout, stderr)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.Var(&html, "html", "write the page to `FILE`, or to standard output if it is - (default "+defaultPage+")")
	fs.BoolVarP(&quiet, "quiet", "q", false, "do not print where the page is")
	return cmd
}

func makeReport(names []string, html string, quiet bool, stdout, stderr io.Writer) (err error) {
	if html == "" {
		html = defaultPage
	}
	if err := apart([]place{{"--html " + html, html}}, readings(names...)); err != nil {
		return err
	}
	if len(names) == 2 && names[0] == "-" && names[1] == "-" {
		return fail.Usagef("standard input can be read once (give - once, and a file)")
	}
	var docs []report.Pictured
	names = slices.Clone(names)
	for i, name := range names {
		text, err := readResult(name)
		if name == "-" {
			name, names[i] = "standard input", "standard input"
		}
		if err != nil {
			return fail.Usagef("%s cannot be read: %w (name what --json wrote)", name, pathless(err))
		}
		doc, err := report.Read(text)
		if err != nil {
			return fail.Usagef("%s: %w (name what run, bandwidth or compare wrote with --json)", name, err)
		}
		docs = append(docs, doc)
	}
	if len(docs) == 2 && report.CommandOf(docs[0]) != report.CommandOf(docs[1]) {
		return fail.Usagef("%s is of %s and %s of %s (give two results of one command)", names[0], report.CommandOf(docs[0]), names[1], report.CommandOf(docs[1]))
	}
	var b bytes.Buffer
	if err := report.WriteHTML(&b, names, docs...); err != nil {
		return err
	}
	if html == "-" {
		if _, err := stdout.Write(b.Bytes()); err != nil {
			return fail.Environmentf("writing standard output: %w", pathless(err))
		}
		return nil
	}
	if err := replaceablePage(html); err != nil {
		return err
	}
	to, err := newDestination("--html", html)
	if err != nil {
		return err
	}
	if err := to.write(b.Bytes()); err != nil {
		_ = to.close() // says nothing that matters beside it
		return err
	}
	if !quiet {
		fmt.Fprintf(stderr, "spillbench: the report is in %s\n", html)
	}
	return to.close()
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
