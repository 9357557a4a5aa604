package tiertest

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// CopyTree copies what is in the directory src into dst, which need not be there. The holes of
// a file are left out: files of spill volumes are long, and hold little.
func CopyTree(t testing.TB, dst, src string) {
	t.Helper()
	err := filepath.WalkDir(src, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(src, path)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		to := filepath.Join(dst, rel)
		if d.IsDir() {
			return os.MkdirAll(to, info.Mode().Perm()|0o700)
		}
		return copySparse(to, path, info.Mode().Perm())
	})
	if err != nil {
		t.Fatal(err)
	}
}

func copySparse(dst, src string, perm fs.FileMode) (err error) {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	out, err := os.OpenFile(dst, os.O_CREATE|os.O_EXCL|os.O_WRONLY, perm)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	size, err := in.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	for off := int64(0); off < size; {
		begin, err := in.Seek(off, unix.SEEK_DATA)
		if errors.Is(err, syscall.ENXIO) { // only a hole is left
			break
		}
		if err != nil {
			return err
		}
		if off, err = in.Seek(begin, unix.SEEK_HOLE); err != nil {
			return err
		}
		if _, err := in.Seek(begin, io.SeekStart); err != nil {
			return err
		}
		if _, err := out.Seek(begin, io.SeekStart); err != nil {
			return err
		}
		if _, err := io.CopyN(out, in, off-begin); err != nil { // by the kernel
			return err
		}
	}
	return out.Truncate(size)
}
