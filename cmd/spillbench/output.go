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
	"github.com/spillway-db/spillway/internal/named"
)

// output is where a command's results go. It is checked before the work begins, so that a result is
// not lost to a path that cannot be written. The check makes nothing that a killed process could
// leave.
type output struct {
	flags          *outputFlags
	stdout, stderr io.Writer
	json, html     *destination // nil: none, or standard output
	call           call         // of the program
}

// destination is a file that something is written to.
type destination struct {
	flag   string   // that named it, with the name
	path   string   // a link stays, and what it leads to is replaced
	device *os.File // instead of path where that is no regular file: written to, never replaced
}

// newDestination checks that a file can be written. The caller must close it.
func newDestination(flag, name string) (*destination, error) {
	d := &destination{flag: flag + " " + name, path: name}
	if real, err := filepath.EvalSymlinks(name); err == nil {
		d.path = real
	}
	info, err := os.Stat(d.path)
	switch {
	case err == nil && !info.Mode().IsRegular(): // a directory cannot be opened so
		d.device, err = os.OpenFile(d.path, os.O_WRONLY, 0)
	default:
		err = probeDir(filepath.Dir(d.path))
	}
	if err != nil {
		return nil, fail.Usagef("%s cannot be written: %w (name a file in a directory that you may write to)", d.flag, pathless(err))
	}
	return d, nil
}

// write writes the text, and puts it in its place.
func (d *destination) write(text []byte) (err error) {
	if d.device != nil {
		_, err = d.device.Write(text)
	} else {
		err = storeFile(d.path, text)
	}
	if err != nil {
		return fail.Environmentf("writing %s: %w", d.flag, pathless(err))
	}
	return nil
}

// close closes the device, if there is one.
func (d *destination) close() error {
	if d == nil || d.device == nil {
		return nil
	}
	f := d.device
	d.device = nil
	return f.Close()
}

// places are the files that results go to.
func (f *outputFlags) places() []place {
	return []place{{"--json " + string(f.json), string(f.json)}, {"--html " + string(f.html), string(f.html)}}
}

// open prepares the output of the call that ctx is of, which reads these files. The caller must close
// it.
func (f *outputFlags) open(ctx context.Context, stdout, stderr io.Writer, reads ...string) (*output, error) {
	if err := f.validate(); err != nil {
		return nil, err
	}
	if err := apart(f.places(), readings(reads...)); err != nil {
		return nil, err
	}
	o := &output{flags: f, stdout: stdout, stderr: stderr, call: callOf(ctx)}
	for _, to := range []struct {
		flag, name string
		where      **destination
	}{{"--json", string(f.json), &o.json}, {"--html", string(f.html), &o.html}} {
		if to.name == "" || to.name == "-" {
			continue
		}
		d, err := newDestination(to.flag, to.name)
		if err != nil {
			return nil, errors.Join(err, o.close())
		}
		*to.where = d
	}
	return o, nil
}

// show writes the document where --json and --html say, and prints it as --format says.
func (o *output) show(document report.Document, notes []string) error {
	return errors.Join(o.write(document), o.picture(document), o.print(document, notes))
}

// showFailed writes the document of a command that failed where --json and --html say, and prints it
// if JSON was asked for. For people the error is enough.
func (o *output) showFailed(document report.Document) error {
	err := errors.Join(o.write(document), o.picture(document))
	if o.flags.printed() == report.JSON {
		err = errors.Join(err, o.print(document, nil))
	}
	return err
}

// write writes the document to the file that --json names, if there is one.
func (o *output) write(document any) error {
	if o.json == nil {
		return nil
	}
	text, err := o.encode(document)
	if err != nil {
		return err
	}
	return o.json.write(text)
}

// picture writes the page that --html asks for.
func (o *output) picture(document report.Document) error {
	if o.flags.html == "" {
		return nil
	}
	doc := document.(report.Measured) // as outputFlags.figures says
	doc.Stamp(o.call.args, o.call.began)
	var b bytes.Buffer
	if err := report.WriteHTML(&b, nil, doc); err != nil {
		return err
	}
	if o.html == nil {
		return toStdout(o.stdout, b.Bytes())
	}
	return o.html.write(b.Bytes())
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
		err = report.WriteBenchmarks(&b, nil, document.(report.Measured)) // as outputFlags.figures says
		text = b.Bytes()
	default:
		err = report.Print(&b, format, document, notes)
		text = b.Bytes()
	}
	if err != nil {
		return err
	}
	return toStdout(o.stdout, text)
}

// toStdout writes to standard output. A failed write of a result is an error.
func toStdout(stdout io.Writer, text []byte) error {
	if _, err := stdout.Write(text); err != nil {
		return fail.Environmentf("writing standard output: %w", pathless(err))
	}
	return nil
}

// close closes what is open.
func (o *output) close() error { return errors.Join(o.json.close(), o.html.close()) }

// warn prints notes where what is printed has none. It is for commands that went well: an error is
// one line.
func (o *output) warn(lines []string) {
	if f := o.flags.printed(); o.flags.quiet || f == report.Table || f == report.Markdown {
		return
	}
	for _, l := range lines {
		fmt.Fprintf(o.stderr, "spillbench: note: %s\n", named.Inert(l))
	}
}
