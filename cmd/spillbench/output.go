package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// output is where a command's results go. It is opened before the work begins,
// so that a result is not lost to a path that cannot be written.
type output struct {
	flags          *outputFlags
	stdout, stderr io.Writer
	target         string   // the file that JSON goes to; empty: none
	file           *os.File // what is written: target itself if it is no regular file, else a new file beside it
}

// open prepares the output. The caller must close it.
func (f *outputFlags) open(stdout, stderr io.Writer) (*output, error) {
	o := &output{flags: f, stdout: stdout, stderr: stderr}
	if f.json == "" || f.json == "-" {
		return o, nil
	}
	o.target = f.json
	if real, err := filepath.EvalSymlinks(f.json); err == nil {
		o.target = real // a link stays, and what it leads to is replaced
	}
	info, err := os.Stat(o.target)
	switch {
	case err == nil && info.IsDir():
		return nil, fail.Usagef("--json %s is a directory (name a file in it)", f.json)
	case err == nil && !info.Mode().IsRegular(): // a device or pipe is written to, never replaced
		o.file, err = os.OpenFile(o.target, os.O_WRONLY, 0)
		o.target = ""
	default:
		o.file, err = os.CreateTemp(filepath.Dir(o.target), ".spillbench-*.json")
	}
	if err != nil {
		return nil, fail.Usagef("--json %s cannot be written: %w (name a file in a directory that you may write to)", f.json, pathless(err))
	}
	return o, nil
}

// forPeople says whether tables are wanted: not with --quiet, and not where
// standard output is the document's.
func (o *output) forPeople() bool { return !o.flags.quiet && o.flags.json != "-" }

// write writes the document, if one was asked for, and puts it in its place.
func (o *output) write(document any) error {
	if o.flags.json == "-" {
		return report.Write(o.stdout, document)
	}
	if o.file == nil {
		return nil
	}
	err := report.Write(o.file, document)
	if o.target == "" {
		return errors.Join(err, o.take().Close())
	}
	f := o.take()
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), o.target)
	}
	if err != nil {
		return fail.Environmentf("writing --json %s: %w", o.flags.json, errors.Join(err, remove(f.Name())))
	}
	return nil
}

func (o *output) take() *os.File {
	f := o.file
	o.file = nil
	return f
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// close takes back what write did not use.
func (o *output) close() error {
	f := o.take()
	if f == nil {
		return nil
	}
	err := f.Close()
	if o.target != "" {
		err = errors.Join(err, remove(f.Name()))
	}
	return err
}

// warn prints notes where no table carries them.
func (o *output) warn(lines []string) {
	if o.flags.quiet || o.forPeople() {
		return
	}
	for _, l := range lines {
		fmt.Fprintf(o.stderr, "spillbench: note: %s\n", l)
	}
}
