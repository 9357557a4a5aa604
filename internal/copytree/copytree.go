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

// Copy copies the directory src to dst, which need not exist. Holes of files stay holes, because
// files of spill volumes are long and mostly empty.
func Copy(t testing.TB, dst, src string) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(src), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		to := filepath.Join(dst, name)
		if d.IsDir() {
			return os.MkdirAll(to, info.Mode().Perm()|0o700)
		}
		return copySparse(to, filepath.Join(src, name), info.Mode().Perm())
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
	// Find all ranges first: reading next to an unwritten range makes the system report it as data.
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

// dataOf returns the ranges of f without holes. Where the system does not report holes, it returns
// the whole file.
func dataOf(f *os.File, size int64) (ranges [][2]int64, err error) {
	const seekData, seekHole = 3, 4
	if runtime.GOOS != "linux" {
		return [][2]int64{{0, size}}, nil
	}
	for end := int64(0); end < size; {
		begin, err := f.Seek(end, seekData)
		if errors.Is(err, syscall.ENXIO) { // the rest is a hole
			break
		}
		if err != nil {
			return nil, err
		}
		if end, err = f.Seek(begin, seekHole); err != nil {
			return nil, err
		}
		ranges = append(ranges, [2]int64{begin, end})
	}
	return ranges, nil
}

// copyData copies the bytes from begin to end, except for pages of zeros: a range that is allocated
// but was never written is not reported as a hole once it has been read.
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

// alike returns where the pages at from end that are all zeros, if zero is true, or that all are
// not.
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
