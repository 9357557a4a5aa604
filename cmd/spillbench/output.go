package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

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

// something refuses --quiet of a command that only prints, if nothing else is asked for: its name is
// that of the command.
func (f *outputFlags) something(command string) error {
	if f.quiet && f.json == "" {
		return fail.Usagef("%s --quiet has no result (give --json FILE as well, or leave --quiet out)", command)
	}
	return nil
}

// forPeople reports whether tables are wanted: not with --quiet, and not where
// standard output is the document's.
func (o *output) forPeople() bool { return !o.flags.quiet && o.flags.json != "-" }

// write writes the document, if one was asked for, and puts it in its place.
func (o *output) write(document any) error {
	if o.flags.json == "" {
		return nil
	}
	if d, ok := document.(interface{ Stamp([]string, time.Time) }); ok {
		d.Stamp(o.call.args, o.call.began)
	}
	var b bytes.Buffer
	err := report.Write(&b, document)
	switch {
	case err != nil:
	case o.flags.json == "-":
		return o.toStdout(b.Bytes())
	case o.device != nil:
		_, err = o.device.Write(b.Bytes())
	default:
		err = storeFile(o.target, b.Bytes())
	}
	if err != nil {
		return fail.Environmentf("writing --json %s: %w", string(o.flags.json), pathless(err))
	}
	return nil
}

// print writes to standard output what draw draws, if tables are wanted.
func (o *output) print(draw func(io.Writer)) error {
	if !o.forPeople() {
		return nil
	}
	var b bytes.Buffer
	draw(&b)
	return o.toStdout(b.Bytes())
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

// warn prints notes where no table carries them. It is for commands that went
// well: an error is one line.
func (o *output) warn(lines []string) {
	if o.flags.quiet || o.forPeople() {
		return
	}
	for _, l := range lines {
		fmt.Fprintf(o.stderr, "spillbench: note: %s\n", l)
	}
}
