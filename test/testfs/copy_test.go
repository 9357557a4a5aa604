package testfs_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/spillway-db/spillway/test/testfs"
)

// TestCopyTree checks names, modes and bytes, also of files that end in zeros or in a hole.
func TestCopyTree(t *testing.T) {
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "new")
	files := map[string][]byte{
		"empty": nil, "a/short": []byte("x"), "a/b/zeros": make([]byte, 200_000),
		"a/b/holes": append(make([]byte, 100_000), append([]byte("middle"), make([]byte, 300_001)...)...),
		"full":      bytes.Repeat([]byte{7}, 128<<10),
	}
	for name, p := range files {
		path := filepath.Join(src, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, p, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	files["sparse"] = make([]byte, 3<<20) // holes, data, and both again
	sparse, err := os.Create(filepath.Join(src, "sparse"))
	if err != nil {
		t.Fatal(err)
	}
	defer sparse.Close()
	for _, off := range []int64{1 << 20, 2<<20 + 5} {
		if _, err := sparse.WriteAt([]byte("data"), off); err != nil {
			t.Fatal(err)
		}
		copy(files["sparse"][off:], "data")
	}
	if err := errors.Join(sparse.Truncate(3<<20), sparse.Chmod(0o600)); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(src, "nothing"), 0o700); err != nil {
		t.Fatal(err)
	}
	testfs.CopyTree(t, dst, src)
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join(dst, name))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s has %d bytes of %d: %v", name, len(got), len(want), err)
		}
		if info, err := os.Stat(filepath.Join(dst, name)); err == nil && info.Mode() != 0o600 {
			t.Errorf("%s has the mode %v", name, info.Mode())
		}
	}
	if entries, err := os.ReadDir(filepath.Join(dst, "nothing")); err != nil || len(entries) != 0 {
		t.Errorf("the empty directory: %v, %v", entries, err)
	}
}
