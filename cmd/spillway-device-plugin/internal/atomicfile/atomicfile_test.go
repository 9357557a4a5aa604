package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// A file is replaced as a whole or not at all, and no draft is left.
func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	refused := errors.New("refused")
	for _, c := range []struct {
		text  string
		check error
		want  string
	}{{"old", nil, "old"}, {"new", refused, "old"}, {"new", nil, "new"}} {
		err := Write(path, []byte(c.text), func(draft string) error {
			if text, err := os.ReadFile(draft); err != nil || string(text) != c.text {
				t.Errorf("the draft has %q, %v; want %q", text, err, c.text)
			}
			return c.check
		})
		if !errors.Is(err, c.check) {
			t.Errorf("the error is %v, want %v", err, c.check)
		}
		if text, err := os.ReadFile(path); err != nil || string(text) != c.want {
			t.Errorf("the file has %q, %v; want %q", text, err, c.want)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
			t.Errorf("the directory has %v, %v", entries, err)
		}
	}
	if err := Write(filepath.Join(dir, "none", "f"), nil, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a directory: %v", err)
	}
}

// Only drafts are removed.
func TestRemoveDrafts(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{".spillway-db.github.io-17.tmp", "spec.17.tmp"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := RemoveDrafts(dir); err != nil {
		t.Error(err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 || entries[0].Name() != "spec.17.tmp" {
		t.Errorf("the directory has %v, %v", entries, err)
	}
}
