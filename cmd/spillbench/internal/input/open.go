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
	if err != nil {
		return err
	}
	if size < 0 {
		if !once {
			return &Error{
				Path: Name(path), Err: errors.New("is a pipe, and this command reads its input more than once"),
				Fix: "save the data to a file first",
			}
		}
		return nil
	}
	f, size, err := openFile(path)
	if err != nil {
		return err
	}
	if _, err := detect(f, size); err != nil {
		return errors.Join(located(Name(path), err), f.Close())
	}
	return f.Close()
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

// openFile opens a file, or a pipe, for which size is -1. Opening a named pipe waits for a writer.
func openFile(path string) (f *os.File, size int64, err error) {
	if size, err = sizeOf(path); err != nil {
		return nil, 0, err
	}
	if path == standardInput {
		if size < 0 { // opening a named pipe again would wait for another writer
			return os.Stdin, size, nil
		}
		if f, err = os.Open("/dev/stdin"); err != nil { // a system without such files
			f = os.Stdin
		}
		return f, size, nil
	}
	if f, err = os.Open(path); err != nil {
		return nil, 0, &Error{Path: path, Err: cause(err), Fix: "check its permissions"}
	}
	return f, size, nil
}

// opened is an open file or pipe.
type opened struct {
	*os.File
	size int64         // -1: it is a pipe
	r    *bufio.Reader // from its start
}

// detect returns the format. Of a pipe that is not an Arrow stream it makes a temporary file.
func (in *opened) detect() (Format, error) {
	if in.size < 0 {
		head, err := in.r.Peek(4)
		switch {
		case len(head) == 0 && err == io.EOF:
			return "", &Error{Err: errors.New("is empty"), Fix: "write Parquet, Arrow or CSV data into it"}
		case err != nil && err != io.EOF:
			return "", err
		case bytes.Equal(head, []byte("\xff\xff\xff\xff")):
			return ArrowStream, nil
		}
		if err := in.spool(); err != nil {
			return "", &Error{
				Err: fmt.Errorf("is a pipe, and copying it to a temporary file failed: %w", err),
				Fix: "set TMPDIR to a directory with enough space, or save the data to a file first",
			}
		}
	}
	return detect(in.File, in.size)
}

// spool replaces a pipe by a temporary file of its bytes. It removes the name of the file first, so
// that an interrupted program leaves nothing behind.
func (in *opened) spool() error {
	f, err := os.CreateTemp("", "spillbench-")
	if err != nil {
		return err
	}
	if err := os.Remove(f.Name()); err != nil {
		return errors.Join(err, f.Close())
	}
	size, err := io.Copy(f, in.r)
	if err != nil {
		return errors.Join(err, f.Close())
	}
	pipe := in.File
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return errors.Join(err, f.Close())
	}
	in.File, in.size = f, size
	in.r.Reset(f)
	return pipe.Close()
}
