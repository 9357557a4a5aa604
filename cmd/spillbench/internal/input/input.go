// Package input reads the files that spillbench is pointed at as Arrow record
// batches: Parquet, Arrow IPC files and streams, and CSV. What a file is, its
// first bytes say, not its name.
//
//	path ── Open ──▶ Source ── Next ──▶ record batch, owned by the caller
//
// Files come from outside, so nothing in them is trusted. A panic of a decoder is an error. No
// single allocation is larger than the machine could hold. Each error is an *Error, which names the
// file and what to do.
//
// A Source belongs to one goroutine. The package takes no locks.
package input

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
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

// Options says how to read.
type Options struct {
	// RowsPerBatch re-slices what the file holds into batches of so many rows,
	// the last one smaller; 0 leaves the file's own batches: row groups of
	// Parquet (of at most a million rows), record batches of Arrow, 65,536 rows of CSV.
	RowsPerBatch int64
	// MaxAlloc is the largest single allocation in bytes that decoding may ask for, so
	// that a broken length is an error and not the end of the process; 0 means 64 GiB.
	MaxAlloc int64
	// Room reports whether decoding may take so many bytes more; nil: it may. Its error ends
	// the reading, and is wrapped in an *Error.
	Room func(bytes int64) error
}

const defaultMaxAlloc = 64 << 30

// Error says what is wrong with a file. It prints as one line.
type Error struct {
	Path string
	Err  error
	Fix  string // what to do about it; may be empty
}

func (e *Error) Error() string {
	s := e.Path + ": " + oneLine(e.Err.Error())
	if e.Fix != "" {
		s += " (" + e.Fix + ")"
	}
	return s
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Misuse marks errors of wrong use for package fail.
func (e *Error) Misuse() {}

// decoder is one format's reader. next returns a batch that the caller owns, or
// io.EOF.
type decoder interface {
	schema() *arrow.Schema
	next(ctx context.Context) (arrow.RecordBatch, error)
	close() error
}

// Source is an open file. The caller must Close it.
type Source struct {
	path   string
	format Format
	file   *os.File
	mem    *limitedAllocator
	dec    decoder
	err    error // sticky: what Next returned last, if it was an error
}

// Open opens the file at path and reads its schema.
func Open(ctx context.Context, path string, opt Options) (*Source, error) {
	if opt.MaxAlloc <= 0 {
		opt.MaxAlloc = defaultMaxAlloc
	}
	f, size, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	format, err := detect(f, size)
	if err != nil {
		return nil, errors.Join(located(path, err), f.Close())
	}
	mem := &limitedAllocator{max: opt.MaxAlloc, room: opt.Room}
	s := &Source{path: path, format: format, file: f, mem: mem}
	err = guard(func() (err error) {
		if s.dec, err = newDecoder(ctx, format, f, size, mem, opt); err != nil {
			return err
		}
		s.dec = &checker{decoder: s.dec}
		return checkFields(s.dec.schema().Fields(), 0, 0)
	})
	if err != nil {
		if s.dec != nil {
			err = errors.Join(err, guard(s.dec.close))
		}
		return nil, s.broken(err, f.Close())
	}
	if opt.RowsPerBatch > 0 {
		s.dec = &rebatcher{src: s.dec, rows: opt.RowsPerBatch, mem: mem}
	}
	return s, nil
}

func newDecoder(ctx context.Context, format Format, f *os.File, size int64, mem *limitedAllocator, opt Options) (decoder, error) {
	switch format {
	case Parquet:
		return newParquet(ctx, f, size, mem, opt.RowsPerBatch)
	case ArrowFile:
		return newArrowFile(f, size, mem)
	case ArrowStream:
		return newArrowStream(f, size, mem)
	default:
		return newCSV(ctx, f, mem, opt.RowsPerBatch)
	}
}

// openRegular opens what must be a file with bytes in it.
func openRegular(path string) (*os.File, int64, error) {
	info, err := os.Stat(path) // before opening: opening a pipe would wait for a writer
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, 0, &Error{Path: path, Err: errors.New("no such file"), Fix: "check the path"}
	case err != nil:
		return nil, 0, &Error{Path: path, Err: cause(err), Fix: "check the path and its permissions"}
	case info.IsDir():
		return nil, 0, &Error{Path: path, Err: errors.New("is a directory"), Fix: "name the files in it, one by one"}
	case !info.Mode().IsRegular():
		return nil, 0, &Error{Path: path, Err: errors.New("is not a regular file"), Fix: "save the data to a file first"}
	case info.Size() == 0:
		return nil, 0, &Error{Path: path, Err: errors.New("is empty"), Fix: "name a Parquet, Arrow or CSV file with data in it"}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, &Error{Path: path, Err: cause(err), Fix: "check its permissions"}
	}
	return f, info.Size(), nil
}

// cause drops the operation and path of a *fs.PathError: the path is named already.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// Path returns the path that was opened.
func (s *Source) Path() string { return s.path }

// Format returns what the file is.
func (s *Source) Format() Format { return s.format }

// Schema returns the schema of all batches.
func (s *Source) Schema() *arrow.Schema { return s.dec.schema() }

// Next returns the next batch, which the caller must Release, or io.EOF when
// there is none. After an error it returns the same error again.
func (s *Source) Next(ctx context.Context) (rec arrow.RecordBatch, err error) {
	if s.err != nil {
		return nil, s.err
	}
	if err := context.Cause(ctx); err != nil {
		return nil, err // not sticky: nothing was read
	}
	err = guard(func() (err error) {
		rec, err = s.dec.next(ctx)
		return err
	})
	switch {
	case err == nil:
		return rec, nil
	case err == io.EOF:
		s.err = io.EOF
	case ctx.Err() != nil:
		s.err = context.Cause(ctx)
	default:
		s.err = s.broken(err, nil)
	}
	return nil, s.err
}

// Close closes the file. Batches that Next returned stay valid.
func (s *Source) Close() error {
	return errors.Join(guard(s.dec.close), s.file.Close())
}

// broken is the error of a file that is of a known format and cannot be read.
func (s *Source) broken(err, closing error) error {
	var e *Error
	if errors.As(err, &e) {
		e.Path = s.path
		return errors.Join(e, closing)
	}
	fix := "the file is truncated or broken: write it again"
	var panicked *panicError
	switch {
	case s.mem.noRoom != nil:
		err, fix = s.mem.noRoom, "" // what gave the limit knows what to do
	case s.mem.tooLarge:
		fix = "the file is broken, or needs a machine with more memory"
	case errors.Is(err, arrow.ErrNotImplemented), errors.As(err, &panicked), mentions(err, "not supported", "unsupported", "not implemented"):
		fix = "the file holds what the decoder does not support, or is broken: write it again with plainer types, encodings and codecs"
	case mentions(err, "INT96 timestamp is outside"):
		fix = "INT96 is read from the year 1677 to 2262 only: write the column as TIMESTAMP"
	case mentions(err, "deserializing page header failed"):
		fix = "the file is broken, or has statistics in page headers of more than 4 MiB: write it again without them"
	case s.format == CSV:
		fix = "correct the file; its first line must name the columns"
	}
	e = &Error{Path: s.path, Err: fmt.Errorf("cannot be read as %s: %w", s.format, cause(err)), Fix: fix}
	return errors.Join(e, closing)
}

// located gives an error of detection its path.
func located(path string, err error) error {
	var e *Error
	if errors.As(err, &e) {
		e.Path = path
		return e
	}
	return &Error{Path: path, Err: cause(err)}
}

// mentions reports whether the text of err contains one of these: arrow-go has no typed errors for
// them.
func mentions(err error, any ...string) bool {
	text := err.Error()
	return slices.ContainsFunc(any, func(s string) bool { return strings.Contains(text, s) })
}

// panicError is a panic of a decoder.
type panicError struct{ error }

// Unwrap returns what it panicked with, if that was an error.
func (e *panicError) Unwrap() error { return errors.Unwrap(e.error) }

// guard runs f and makes a panic an error: arrow-go panics on some broken files, and on some
// that it does not support.
func guard(f func() error) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case refusal:
			err = p.error
		case error:
			err = &panicError{fmt.Errorf("the decoder panicked: %w", p)}
		default:
			err = &panicError{fmt.Errorf("the decoder panicked: %v", p)}
		}
	}()
	return f()
}

// oneLine keeps the first line of a message that carries a stack, and joins
// what else there is.
func oneLine(s string) string {
	if i := strings.Index(s, "\ngoroutine "); i >= 0 {
		s = s[:i]
	}
	return strings.Join(strings.Fields(s), " ")
}

// Check returns what is wrong with the file at path, judged by its first bytes. It is a cheap look
// before the work on other files begins.
func Check(path string) error {
	f, size, err := openRegular(path)
	if err != nil {
		return err
	}
	if _, err := detect(f, size); err != nil {
		return errors.Join(located(path, err), f.Close())
	}
	return f.Close()
}

// limitedAllocator allocates from the Go heap and refuses a single allocation
// that is larger than max, or for which there is no room. It refuses with a panic, as the
// interface has no error; guard makes that an error again. Without it a broken length in a
// file ends the process: the runtime cannot recover from memory that is not there.
type limitedAllocator struct {
	heap memory.GoAllocator
	max  int64
	room func(bytes int64) error // nil: there is always room

	tooLarge bool // an allocation was larger than max

	noRoom error // what room refused with: some readers make a text of it

	// elsewhere is set while a decoder may allocate on goroutines of its own: nothing could
	// catch a panic there.
	elsewhere bool
}

// refusal is what an allocator panics with.
type refusal struct{ error }

// Unwrap returns the reason.
func (r refusal) Unwrap() error { return r.error }

func (a *limitedAllocator) Allocate(size int) []byte {
	a.check(size)
	return a.heap.Allocate(size)
}

func (a *limitedAllocator) Reallocate(size int, b []byte) []byte {
	a.check(size)
	return a.heap.Reallocate(size, b)
}

func (a *limitedAllocator) Free(b []byte) { a.heap.Free(b) }

func (a *limitedAllocator) check(size int) {
	if size < 0 || int64(size) > a.max {
		a.tooLarge = true
		panic(refusal{fmt.Errorf("it asks for %d bytes at once, and at most %d are allowed", size, a.max)})
	}
	if a.room == nil || a.elsewhere {
		return
	}
	if err := a.room(int64(size)); err != nil {
		a.noRoom = err
		panic(refusal{err})
	}
}
