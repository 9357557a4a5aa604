package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// output is where a command's results go. It is checked before the work begins, so that a result is
// not lost to a path that cannot be written. The check makes nothing that a killed process could
// leave.
type output struct {
	flags          *outputFlags
	stdout, stderr io.Writer
	target         string   // the file that JSON goes to; empty: none
	call           call     // of the program
	device         *os.File // instead of target where that is no regular file: written to, never replaced
}

// open prepares the output of the call that ctx is of. The caller must close it.
func (f *outputFlags) open(ctx context.Context, stdout, stderr io.Writer) (*output, error) {
	if err := f.validate(); err != nil {
		return nil, err
	}
	o := &output{flags: f, stdout: stdout, stderr: stderr, call: callOf(ctx)}
	path := string(f.json)
	if path == "" || path == "-" {
		return o, nil
	}
	o.target = path
	if real, err := filepath.EvalSymlinks(path); err == nil {
		o.target = real // a link stays, and what it leads to is replaced
	}
	info, err := os.Stat(o.target)
	switch {
	case err == nil && !info.Mode().IsRegular(): // a directory cannot be opened so
		o.device, err = os.OpenFile(o.target, os.O_WRONLY, 0)
		o.target = ""
	default:
		err = probeDir(filepath.Dir(o.target))
	}
	if err != nil {
		return nil, fail.Usagef("--json %s cannot be written: %w (name a file in a directory that you may write to)", path, pathless(err))
	}
	return o, nil
}

// show writes the document where --json says, and prints it as --format says.
func (o *output) show(document report.Document, notes []string) error {
	return errors.Join(o.write(document), o.print(document, notes))
}

// write writes the document to the file that --json names, if there is one, and puts it in its place.
func (o *output) write(document any) error {
	if o.flags.json == "" || o.flags.json == "-" {
		return nil
	}
	text, err := o.encode(document)
	switch {
	case err != nil:
	case o.device != nil:
		_, err = o.device.Write(text)
	default:
		err = storeFile(o.target, text)
	}
	if err != nil {
		return fail.Environmentf("writing --json %s: %w", string(o.flags.json), pathless(err))
	}
	return nil
}

// encode returns the document as JSON, with what it says of the call.
func (o *output) encode(document any) ([]byte, error) {
	if d, ok := document.(report.Document); ok {
		d.Stamp(o.call.args, o.call.began)
	}
	var b bytes.Buffer
	err := report.Write(&b, document)
	return b.Bytes(), err
}

// print writes the document to standard output in the format that was asked for.
func (o *output) print(document report.Document, notes []string) (err error) {
	var b bytes.Buffer
	var text []byte
	switch format := o.flags.printed(); format {
	case "":
		return nil
	case report.JSON:
		text, err = o.encode(document)
	case report.BenchFmt:
		err = report.WriteBenchmarks(&b, document.(report.Measured)) // as outputFlags.figures says
		text = b.Bytes()
	default:
		err = document.Page(notes).Write(&b, format)
		text = b.Bytes()
	}
	if err != nil {
		return err
	}
	return o.toStdout(text)
}

// toStdout writes to standard output. A failed write of a result is an error.
func (o *output) toStdout(text []byte) error {
	if _, err := o.stdout.Write(text); err != nil {
		return fail.Environmentf("writing standard output: %w", pathless(err))
	}
	return nil
}

// close closes the device, if there is one.
func (o *output) close() error {
	f := o.device
	o.device = nil
	if f == nil {
		return nil
	}
	return f.Close()
}

// warn prints notes where what is printed has none. It is for commands that went well: an error is
// one line.
func (o *output) warn(lines []string) {
	if f := o.flags.printed(); o.flags.quiet || f == report.Table || f == report.Markdown {
		return
	}
	for _, l := range lines {
		fmt.Fprintf(o.stderr, "spillbench: note: %s\n", l)
	}
}
