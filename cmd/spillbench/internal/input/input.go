// Package input reads the files that spillbench is given as Arrow record batches: Parquet, Arrow
// IPC files and streams, and CSV. It detects the format by the content and not by the name.
//
//	path ── Open ──▶ Source ── Next ──▶ record batch, owned by the caller
//	                   │
//	                   format's reader ─▶ checked ─▶ rebatcher
//
// The package doesn't trust files. A panic of a decoder becomes an error. Options limits each
// allocation, and the Arrow reader allocates in proportion to the bytes of the file. Each error is an
// *Error with the name of the file and the way to mend it.
//
// A Source belongs to one goroutine. The package takes no locks.
package input

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// Format is how a file's rows are encoded.
type Format string

// The formats that are read.
const (
	Parquet     Format = "Parquet"
	ArrowFile   Format = "Arrow file"
	ArrowStream Format = "Arrow stream"
	CSV         Format = "CSV"
)

// Options configures a Source. The zero value is the default.
type Options struct {
	// RowsPerBatch is the number of rows of each batch but the last, which may have fewer. If it is
	// 0, batches are as the file has them: row groups of Parquet (of at most a million rows),
	// record batches of Arrow, 65,536 rows of CSV.
	RowsPerBatch int64

	// MaxAlloc limits a single allocation of a decoder, in bytes; 0 means 64 GiB. A broken length is
	// then an error and doesn't end the process.
	MaxAlloc int64

	// Room returns an error if a decoder may not allocate so many more bytes. Reading then ends with
	// an *Error that wraps it. If Room is nil, decoders may allocate any number of bytes.
	Room func(bytes int64) error
}

// Error is an error of a file. It prints as one line.
type Error struct {
	Path string
	Err  error
	Fix  string // how to mend it; may be empty
}

func (e *Error) Error() string {
	s := e.Path + ": " + strings.Join(strings.Fields(e.Err.Error()), " ")
	if e.Fix != "" {
		s += " (" + e.Fix + ")"
	}
	return s
}

// wrongf returns an *Error without a path, which Source adds.
func wrongf(fix, format string, args ...any) error {
	return &Error{Err: fmt.Errorf(format, args...), Fix: fix}
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Misuse marks errors of wrong use for package fail.
func (e *Error) Misuse() {}

// nextFunc returns the next batch, which the caller owns, or io.EOF.
type nextFunc func(ctx context.Context) (arrow.RecordBatch, error)

// Source is an open file. The caller must Close it.
//
// Readers allocate from the Go heap. So batches that Source drops need no Release, and batches that
// Next returned stay valid after Close.
type Source struct {
	path   string        // as messages name it
	format Format        // empty until it is detected
	file   *os.File      // or a temporary copy of it
	size   int64         // pipeSize if file is a pipe
	r      *bufio.Reader // of file, from its start
	mem    limitedAllocator
	schema *arrow.Schema
	read   nextFunc // of the format
	rows   int64    // in the batches that read returned and checked accepted
	next   nextFunc // checked, or a rebatcher's
	err    error    // the error that Next returned; it is sticky
}

// Open opens the file or named pipe at path, or standard input if path is "-", and reads the schema.
//
// An Arrow stream is read from a pipe as it comes. The other formats need a file that can be read in
// any order, and so Open first copies the pipe into a temporary file without a name, in os.TempDir.
func Open(ctx context.Context, path string, opt Options) (*Source, error) {
	s, err := named(path)
	if err == nil {
		err = s.open()
	}
	if err != nil {
		return nil, err
	}
	s.mem.max, s.mem.room = cmp.Or(opt.MaxAlloc, 64<<30), opt.Room
	err = guard(func() (err error) {
		switch s.format {
		case Parquet:
			err = s.readParquet(opt.RowsPerBatch)
		case ArrowFile:
			err = s.readArrowFile()
		case ArrowStream:
			err = s.readArrow(&messages{r: s.r, end: s.size, mem: &s.mem})
		default:
			err = s.readCSV(ctx, opt.RowsPerBatch)
		}
		if err != nil {
			return err
		}
		return checkFields(s.schema.Fields(), 0, 0)
	})
	if err != nil {
		return nil, errors.Join(s.broken(err), s.file.Close())
	}
	s.next = s.checked
	if opt.RowsPerBatch > 0 {
		s.next = (&rebatcher{Source: s, perBatch: opt.RowsPerBatch}).next
	}
	return s, nil
}

// Path returns the path that was opened, as messages name it.
func (s *Source) Path() string { return s.path }

// Next returns the next batch, which the caller must Release, or io.EOF when
// there is none. After an error it returns the same error again.
func (s *Source) Next(ctx context.Context) (rec arrow.RecordBatch, err error) {
	if s.err != nil {
		return nil, s.err
	}
	if err := context.Cause(ctx); err != nil {
		return nil, err // not sticky: nothing was read
	}
	s.err = guard(func() (err error) {
		rec, err = s.next(ctx)
		return err
	})
	switch {
	case s.err == nil, s.err == io.EOF:
	case ctx.Err() != nil:
		s.err = context.Cause(ctx)
	default:
		s.err = s.broken(s.err)
	}
	return rec, s.err
}

// Close closes the file.
func (s *Source) Close() error { return s.file.Close() }

// unsupported matches the text of errors of files that may be whole, and of panics.
var unsupported = regexp.MustCompile(
	"unsupported|not (supported|implemented)|window size exceeded|panicked|runtime error")

// broken returns the error of a file that cannot be read.
func (s *Source) broken(err error) error {
	var e *Error
	if errors.As(cmp.Or(s.mem.refused, err), &e) { // some readers don't wrap what was refused
		e.Path = s.path
		return e
	}
	if s.format == "" {
		return &Error{Path: s.path, Err: cause(err)}
	}
	fix := "the file is truncated or broken: write it again"
	switch text := err.Error(); { // arrow-go has no typed errors for these
	case unsupported.MatchString(text):
		fix = "the file holds what the decoder does not support, or is broken: " +
			"write it again with plainer types, encodings and codecs"
	case strings.Contains(text, "INT96 timestamp is outside"):
		fix = "INT96 is read from the year 1677 to 2262 only: write the column as TIMESTAMP"
	case strings.Contains(text, "deserializing page header failed"):
		fix = "the file is broken, or has statistics in page headers of more than 4 MiB: write it again without them"
	case s.format == CSV:
		fix = "correct the file; its first line must name the columns"
	}
	return &Error{Path: s.path, Err: fmt.Errorf("cannot be read as %s: %w", s.format, cause(err)), Fix: fix}
}

// cause drops the operation and path of a *fs.PathError, because an Error has the path.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// guard runs f and returns a panic as an error. arrow-go panics on some files that are broken or that
// it does not support.
func guard(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the decoder panicked: %v", p)
		}
	}()
	return f()
}

// limitedAllocator allocates from the Go heap and refuses a single allocation that is larger than
// max, or for which there is no room. It refuses with a panic, because the interface has no error.
// Without it a broken length in a file would end the process: the Go runtime can't recover from a
// lack of memory.
type limitedAllocator struct {
	memory.GoAllocator
	max  int64
	room func(bytes int64) error // nil: there is always room

	refused error // an *Error without a path; nil if nothing was refused

	// elsewhere is set while a decoder may allocate on goroutines of its own, where guard can't
	// recover a panic.
	elsewhere bool
}

func (a *limitedAllocator) Allocate(size int) []byte {
	a.check(size)
	return a.GoAllocator.Allocate(size)
}

func (a *limitedAllocator) Reallocate(size int, b []byte) []byte {
	a.check(size)
	return a.GoAllocator.Reallocate(size, b)
}

func (a *limitedAllocator) check(size int) {
	if size < 0 || int64(size) > a.max {
		a.refused = wrongf("the file is broken, or needs a machine with more memory",
			"asks for %d bytes at once, and at most %d are allowed", size, a.max)
	} else if a.room != nil && !a.elsewhere {
		if err := a.room(int64(size)); err != nil {
			a.refused = wrongf("", "cannot be read: %w", err) // Room's error has the setting to change
		}
	}
	if a.refused != nil {
		panic(a.refused)
	}
}
