package input

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// standardInput is the path of standard input.
const standardInput = "-"

// Name returns path as messages name it.
func Name(path string) string {
	if path == standardInput {
		return "standard input"
	}
	return path
}

// Check returns what is wrong with the file at path, judged by its first bytes. It is a cheap look
// before the work on other files begins. It doesn't read pipes, and refuses one unless the caller
// reads its inputs once.
func Check(path string, once bool) error {
	size, err := sizeOf(path)
	switch {
	case err != nil:
		return err
	case size < 0 && once:
		return nil
	case size < 0:
		return &Error{
			Path: Name(path), Err: errors.New("is a pipe, and this command reads its input more than once"),
			Fix: "save the data to a file first",
		}
	}
	s, err := detected(path)
	if err != nil {
		return err
	}
	return s.file.Close()
}

// sizeOf returns the size of a file with bytes in it, or -1 for a pipe. Everything else is an error.
func sizeOf(path string) (int64, error) {
	wrong := func(err error, fix string) (int64, error) { return 0, &Error{Path: Name(path), Err: err, Fix: fix} }
	var info fs.FileInfo
	var err error
	if path == standardInput {
		info, err = os.Stdin.Stat()
	} else {
		info, err = os.Stat(path)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return wrong(errors.New("no such file"), "check the path")
	case err != nil:
		return wrong(cause(err), "check the path and its permissions")
	case info.IsDir():
		return wrong(errors.New("is a directory"), "name the files in it, one by one")
	case info.Mode()&fs.ModeNamedPipe != 0, path == standardInput && info.Mode()&fs.ModeSocket != 0:
		return -1, nil
	case !info.Mode().IsRegular():
		return wrong(errors.New("is not a regular file or a pipe"), "save the data to a file first")
	case info.Size() == 0:
		return wrong(errors.New("is empty"), "name a Parquet, Arrow or CSV file with data in it")
	}
	return info.Size(), nil
}

// detected opens the file at path and detects its format. Opening a named pipe waits for a writer. If
// the file is a pipe and its format is not Arrow stream, detected copies it to a temporary file.
func detected(path string) (s *Source, err error) {
	s = &Source{path: Name(path)}
	if s.size, err = sizeOf(path); err != nil {
		return nil, err
	}
	switch {
	case path != standardInput:
		if s.file, err = os.Open(path); err != nil {
			return nil, &Error{Path: path, Err: cause(err), Fix: "check its permissions"}
		}
	case s.size < 0: // opening a named pipe again would wait for another writer
		s.file = os.Stdin
	default:
		if s.file, err = os.Open("/dev/stdin"); err != nil { // a system without such files
			s.file = os.Stdin
		}
	}
	s.r = bufio.NewReaderSize(s.file, bufferSize)
	if s.size < 0 {
		err = s.detectPipe()
	}
	if err == nil && s.format == "" {
		s.format, err = detect(s.file, s.size)
	}
	if err != nil {
		return nil, s.broken(err, s.file.Close())
	}
	return s, nil
}

// detectPipe detects an Arrow stream in a pipe. It replaces another pipe by a temporary file of its
// bytes, whose name it removes before it writes them: an interrupted program leaves nothing behind.
func (s *Source) detectPipe() (err error) {
	head, err := s.r.Peek(4)
	switch {
	case len(head) == 0 && err == io.EOF:
		return &Error{Err: errors.New("is empty"), Fix: "write Parquet, Arrow or CSV data into it"}
	case err != nil && err != io.EOF:
		return err
	case bytes.Equal(head, []byte("\xff\xff\xff\xff")):
		s.format = ArrowStream
		return nil
	}
	f, err := os.CreateTemp("", "spillbench-")
	if err == nil {
		err = os.Remove(f.Name())
		if err == nil {
			s.size, err = io.Copy(f, s.r)
		}
		if err == nil {
			_, err = f.Seek(0, io.SeekStart)
		}
		s.file, f = f, s.file // the one to keep, and the one to close
		err = errors.Join(err, f.Close())
		s.r.Reset(s.file)
	}
	if err != nil {
		return &Error{
			Err: fmt.Errorf("is a pipe, and copying it to a temporary file failed: %w", err),
			Fix: "set TMPDIR to a directory with enough space, or save the data to a file first",
		}
	}
	return nil
}
