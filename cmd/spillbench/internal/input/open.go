package input

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
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
	case size != pipeSize:
		s, err := detected(path)
		if err != nil {
			return err
		}
		return s.file.Close()
	case once:
		return nil
	}
	return &Error{
		Path: Name(path), Err: errors.New("is a pipe, and this command reads its input more than once"),
		Fix: "save the data to a file first",
	}
}

// pipeSize is the size of a pipe, which is not known.
const pipeSize = math.MaxInt64

// sizeOf returns the size of a file with bytes in it, or pipeSize. Everything else is an error.
func sizeOf(path string) (int64, error) {
	wrong := &Error{Path: Name(path), Fix: "save the data to a file first"}
	info, err := os.Stdin.Stat()
	if path != standardInput {
		info, err = os.Stat(path)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		wrong.Err, wrong.Fix = errors.New("no such file"), "check the path"
	case err != nil:
		wrong.Err, wrong.Fix = cause(err), "check the path and its permissions"
	case info.IsDir():
		wrong.Err, wrong.Fix = errors.New("is a directory"), "name the files in it, one by one"
	case info.Mode()&fs.ModeNamedPipe != 0, path == standardInput && info.Mode()&fs.ModeSocket != 0:
		return pipeSize, nil
	case !info.Mode().IsRegular():
		wrong.Err = errors.New("is not a regular file or a pipe")
	case info.Size() == 0:
		wrong.Err, wrong.Fix = errors.New("is empty"), "name a Parquet, Arrow or CSV file with data in it"
	default:
		return info.Size(), nil
	}
	return 0, wrong
}

// detected opens the file at path and detects its format. Opening a named pipe waits for a writer. If
// the file is a pipe, detected waits for its first bytes, and copies it to a temporary file unless its
// format is Arrow stream.
func detected(path string) (s *Source, err error) {
	s = &Source{path: Name(path)}
	if s.size, err = sizeOf(path); err != nil {
		return nil, err
	}
	if path != standardInput {
		s.file, err = os.Open(path)
	} else if s.size == pipeSize { // opening a named pipe again would wait for another writer
		s.file = os.Stdin
	} else if s.file, err = os.Open("/dev/stdin"); err != nil { // a system without such files
		s.file, err = os.Stdin, nil
	}
	if err != nil {
		return nil, &Error{Path: path, Err: cause(err), Fix: "check its permissions"}
	}
	s.r = bufio.NewReaderSize(s.file, bufferSize)
	head, err := s.r.Peek(sniffSize)
	if err == nil || err == io.EOF {
		s.format, err = detect(head)
	}
	if s.size == pipeSize && s.format != ArrowStream && err == nil {
		err = s.copyPipe()
	}
	if err != nil {
		return nil, errors.Join(s.broken(err), s.file.Close())
	}
	return s, nil
}

// copyPipe replaces a pipe by a temporary file of its bytes, whose name it removes before it writes
// them: an interrupted program leaves nothing behind.
func (s *Source) copyPipe() error {
	f, err := os.CreateTemp("", "spillbench-")
	if err == nil {
		err = os.Remove(f.Name())
		if err == nil {
			s.size, err = io.Copy(f, s.r)
		}
		s.file, f = f, s.file // the one to keep, and the one to close
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return &Error{
			Err: fmt.Errorf("is a pipe, and copying it to a temporary file failed: %w", err),
			Fix: "set TMPDIR to a directory with enough space, or save the data to a file first",
		}
	}
	return nil
}
