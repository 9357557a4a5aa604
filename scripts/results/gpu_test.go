package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestGPUTable checks that the table of a real GPU has the measured figures, and that a check that
// failed, lacks figures or is a trial results in an error.
func TestGPUTable(t *testing.T) {
	t.Parallel()
	names, err := filepath.Glob(filepath.Join(root, "docs", "results", "*.json"))
	if err != nil || len(names) == 0 {
		t.Fatalf("%v, %v", names, err)
	}
	text, err := os.ReadFile(names[0])
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	results := filepath.Join(dir, "docs", "results")
	if err := os.MkdirAll(results, 0o700); err != nil {
		t.Fatal(err)
	}
	made := func(change func(doc map[string]any, steps map[string]map[string]any)) (string, error) {
		var doc map[string]any
		if err := json.Unmarshal(text, &doc); err != nil {
			t.Fatal(err)
		}
		steps := make(map[string]map[string]any)
		for _, s := range doc["steps"].([]any) {
			steps[s.(map[string]any)["name"].(string)] = s.(map[string]any)
		}
		change(doc, steps)
		changed, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(results, filepath.Base(names[0])), changed, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := newestCheck(dir)
		if err != nil {
			return "", err
		}
		return gpuTable(c)
	}
	table, err := made(func(doc map[string]any, steps map[string]map[string]any) {
		row := steps["bandwidth"]["result"].(map[string]any)["rows"].([]any)[0].(map[string]any)
		row["gib_per_s"], row["limit_gib_per_s"] = 12.34, 56.78
		steps["cdevice"]["passed"] = 100_000
	})
	if err != nil {
		t.Error(err)
	}
	for _, want := range []string{
		"| GPU → pinned host memory | 12.3 / 56.8 |", "tests passed and none failed", " 100",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("the table lacks %q:\n%s", want, table)
		}
	}
	type object = map[string]any
	for name, change := range map[string]func(doc object, steps map[string]object){
		"a trial":        func(doc object, _ map[string]object) { doc["small"] = true },
		"an emulator":    func(doc object, _ map[string]object) { doc["emulator"] = true },
		"another day":    func(doc object, _ map[string]object) { doc["date"] = "2001-01-31T00:00:00Z" },
		"another schema": func(doc object, _ map[string]object) { doc["schema"] = "other" },
		"a failed step":  func(_ object, steps map[string]object) { steps["convert"]["status"] = 1 },
		"failed tests":   func(_ object, steps map[string]object) { steps["convert"]["failed"] = 2 },
		"a failed run":   func(_ object, steps map[string]object) { steps["run"]["status"] = 1 },
		"wrong bytes": func(_ object, steps map[string]object) {
			steps["run"]["result"].(object)["verify"].(object)["mismatches"] = 1
		},
		"no disk": func(_ object, steps map[string]object) {
			steps["bandwidth-disk"]["result"].(object)["rows"] = []any{}
		},
	} {
		if table, err := made(change); err == nil {
			t.Errorf("%s gives a table:\n%s", name, table)
		}
	}
}

// TestNoMarksForGPU checks that a page without the marks is an error if there is a check, and that
// the page does not change.
func TestNoMarksForGPU(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	results := filepath.Join("docs", "results")
	if err := os.CopyFS(filepath.Join(dir, results), os.DirFS(filepath.Join(root, results))); err != nil {
		t.Fatal(err)
	}
	page = bytes.Replace(page, []byte(beginGPU), nil, 1)
	if err := os.WriteFile(filepath.Join(dir, "README.md"), page, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run(dir, false, "", 0, ""); err == nil || !strings.Contains(err.Error(), "of a real GPU") {
		t.Errorf("got %v", err)
	}
	if now, err := os.ReadFile(filepath.Join(dir, "README.md")); err != nil || !bytes.Equal(now, page) {
		t.Errorf("the page was changed (%v)", err)
	}
}
