package peer

import (
	"errors"
	"io"
	"os"

	"github.com/apache/arrow-go/v18/arrow/ipc"
)

// file is a file of the peer's. Tests have one that tells what is done with it.
type file interface {
	io.Writer
	ipc.ReadAtSeeker
	io.Closer
	Sync() error
	Stat() (os.FileInfo, error)
	drop(n int64) error // see dropCache
}

// diskFile is a file as the system has it.
type diskFile struct{ *os.File }

func (f diskFile) drop(n int64) error { return dropCache(f.File, n) }

// newFile makes an anonymousFile.
func newFile(dir string) (file, error) {
	f, err := anonymousFile(dir)
	if err != nil {
		return nil, err
	}
	return diskFile{f}, nil
}

// anonymousFile makes a file in dir that has no name, or where that cannot be loses
// it at once, so that nothing stays, however the process ends.
func anonymousFile(dir string) (*os.File, error) {
	if f, err := openNameless(dir); err == nil {
		return f, nil
	}
	f, err := os.CreateTemp(dir, ".spillbench-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
