// Package copytree copies directories of spill volumes, for tests.
package copytree

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
)

const page = 4096

// Copy copies what is in the directory src into dst, which need not be there. The holes of
// a file are left out: files of spill volumes are long, and hold little.
func Copy(t testing.TB, dst, src string) {
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
		begin, end, err := nextData(in, off, size)
		if err != nil {
			return err
		}
		if err := copyData(out, in, begin, end); err != nil {
			return err
		}
		off = end
	}
	return out.Truncate(size)
}

// nextData returns where the first bytes of f from off on that are no hole begin and end. On
// systems without lseek's SEEK_DATA it returns all from off on.
func nextData(f *os.File, off, size int64) (begin, end int64, err error) {
	data, hole := 3, 4 // SEEK_DATA and SEEK_HOLE
	switch runtime.GOOS {
	case "linux", "freebsd":
	case "darwin":
		data, hole = hole, data
	default:
		return off, size, nil
	}
	begin, err = f.Seek(off, data)
	if errors.Is(err, syscall.ENXIO) { // only a hole is left
		return size, size, nil
	}
	if err != nil {
		return 0, 0, err
	}
	if end, err = f.Seek(begin, hole); err != nil {
		return 0, 0, err
	}
	return begin, end, nil
}

// copyData copies the bytes from begin to end, except for pages of zeros: what is allocated and was
// never written is no hole once it has been read.
func copyData(out, in *os.File, begin, end int64) error {
	data := io.NewSectionReader(in, begin, end-begin)
	buf, zeros := make([]byte, page), make([]byte, page)
	for at := begin; at < end; at += page {
		n, err := io.ReadFull(data, buf)
		if err != nil && err != io.ErrUnexpectedEOF {
			return err
		}
		if bytes.Equal(buf[:n], zeros[:n]) {
			continue
		}
		if _, err := out.WriteAt(buf[:n], at); err != nil {
			return err
		}
	}
	return nil
}
