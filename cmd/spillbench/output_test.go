package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// TestResultFile: a result replaces what was there, a link to it stays a link, a
// failed command changes nothing, and nothing is left beside it.
func TestResultFile(t *testing.T) {
	dir := t.TempDir()
	real, link := filepath.Join(dir, "real.json"), filepath.Join(dir, "link.json")
	if err := os.WriteFile(real, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("real.json", link); err != nil {
		t.Fatal(err)
	}
	if r := command(t, t.Context(), "run", "--input=/nonexistent", "--json", link); r.status != 2 {
		t.Fatalf("ended with %d", r.status)
	}
	if old, _ := os.ReadFile(real); string(old) != "old" {
		t.Fatalf("a failed run left %q", old)
	}
	succeed(t, "topo", "--quiet", "--json", link)
	text, err := os.ReadFile(real)
	if err != nil {
		t.Fatal(err)
	}
	var doc report.Topo
	decode(t, string(text), &doc)
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is %v, %v", info, err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 2 {
		t.Errorf("left %v", entries)
	}
}

// TestResultToDevice: a device is written to and not replaced.
func TestResultToDevice(t *testing.T) {
	succeed(t, "topo", "--quiet", "--json", os.DevNull)
	if info, err := os.Stat(os.DevNull); err != nil || info.Mode().IsRegular() {
		t.Errorf("%s is %v, %v", os.DevNull, info, err)
	}
}
