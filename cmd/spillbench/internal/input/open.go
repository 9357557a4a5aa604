package input

import (
	"bufio"
	"errors"
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
	s, err := named(path)
	if err == nil && s.size == pipeSize && !once {
		err = s.broken(wrongf("save the data to a file first",
			"is a pipe, and this command reads its input more than once"))
	}
	if err != nil || s.size == pipeSize {
		return err
	}
	if err := s.open(); err != nil {
		return err
	}
	return s.file.Close()
}

// pipeSize is the size of a pipe, which is not known.
const pipeSize = math.MaxInt64

// named returns the Source of the file with bytes in it or of the pipe at path. It doesn't open it.
func named(path string) (*Source, error) {
	s := &Source{path: Name(path)}
	info, err := os.Stdin.Stat()
	if path != standardInput {
		info, err = os.Stat(path)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = wrongf("check the path", "no such file")
	case err != nil:
		err = wrongf("check the path and its permissions", "%w", cause(err))
	case info.IsDir():
		err = wrongf("name the files in it, one by one", "is a directory")
	case info.Mode()&fs.ModeNamedPipe != 0, path == standardInput && info.Mode()&fs.ModeSocket != 0:
		s.size = pipeSize
	case !info.Mode().IsRegular():
		err = wrongf("save the data to a file first", "is not a regular file or a pipe")
	case info.Size() == 0:
		err = wrongf("name a Parquet, Arrow or CSV file with data in it", "is empty")
	default:
		s.size = info.Size()
	}
	if err != nil {
		return nil, s.broken(err)
	}
	return s, nil
}

// open opens the file and detects its format. Opening a named pipe waits for a writer, and detecting
// the format of a pipe for its first bytes. open copies a pipe to a temporary file unless its format
// is Arrow stream.
func (s *Source) open() (err error) {
	switch {
	case s.path != Name(standardInput):
		if s.file, err = os.Open(s.path); err != nil {
			return s.broken(wrongf("check its permissions", "%w", cause(err)))
		}
	case s.size == pipeSize: // opening a named pipe again would wait for another writer
		s.file = os.Stdin
	default:
		if s.file, err = os.Open("/dev/stdin"); err != nil { // a system without such files
			s.file = os.Stdin
		}
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
		return errors.Join(s.broken(err), s.file.Close())
	}
	return nil
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
		return wrongf("set TMPDIR to a directory with enough space, or save the data to a file first",
			"is a pipe, and copying it to a temporary file failed: %w", err)
	}
	return nil
}
