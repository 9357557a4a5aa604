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
	// To read near a range that was never written makes the system count it as data.
	ranges, err := dataOf(in, size)
	if err != nil {
		return err
	}
	for _, r := range ranges {
		if err := copyData(out, in, r[0], r[1]); err != nil {
			return err
		}
	}
	return out.Truncate(size)
}

// dataOf returns where bytes of f that are no hole begin and end.
func dataOf(f *os.File, size int64) (ranges [][2]int64, err error) {
	for off := int64(0); off < size; {
		begin, end, err := nextData(f, off, size)
		if err != nil {
			return nil, err
		}
		if begin < end {
			ranges = append(ranges, [2]int64{begin, end})
		}
		off = end
	}
	return ranges, nil
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
	const most = 64 * page
	data := make([]byte, min(most, end-begin))
	for at := begin; at < end; at += most {
		data = data[:min(most, end-at)]
		if _, err := io.ReadFull(io.NewSectionReader(in, at, end-at), data); err != nil {
			return err
		}
		for from := 0; from < len(data); {
			to := alike(data, from, false)
			if _, err := out.WriteAt(data[from:to], at+int64(from)); err != nil {
				return err
			}
			from = alike(data, to, true)
		}
	}
	return nil
}

// alike returns where the pages of data from from on end that are all zeros, or that all are not.
func alike(data []byte, from int, zero bool) int {
	for from < len(data) {
		end := min(from+page, len(data))
		if bytes.Equal(data[from:end], zeros[:end-from]) != zero {
			break
		}
		from = end
	}
	return from
}

var zeros [page]byte
