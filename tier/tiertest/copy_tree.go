package tiertest

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// CopyTree copies what is in the directory src into dst, which need not be there. Where a file
// has nothing but zeros its copy has holes: files of spill volumes are long, and hold little.
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
	const block = 64 << 10
	p, zeros := make([]byte, block), make([]byte, block)
	for off := int64(0); ; {
		n, err := io.ReadFull(in, p)
		if n > 0 && !bytes.Equal(p[:n], zeros[:n]) {
			if _, err := out.WriteAt(p[:n], off); err != nil {
				return err
			}
		}
		off += int64(n)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return out.Truncate(off)
		}
		if err != nil {
			return err
		}
	}
}
