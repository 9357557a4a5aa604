package leases

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// write writes a file of limits to dir.
func writeLimits(dir string, env map[string]string) error {
	text, err := FormatLimits(env)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, LimitsFile)
	if err := os.WriteFile(path, text, 0o644); err != nil {
		return err
	}
	return os.Chmod(path, 0o644) // independent of the umask
}

func TestLookup(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the file is root's")
	}
	node := map[string]string{
		"SPILLWAY_GPU_MEMORY_LIMIT": "1024Mi", "NVSHARE_GPU_MEMORY_LIMIT": "1024Mi",
		"SPILLWAY_GPU_PHYSICAL_MEMORY_MB": "4096", "SPILLWAY_GPU_QUOTA_DIR": LedgerDir, "SPILLWAY_GPU_QUOTA_GROUP": "g",
	}
	whole := map[string]string{"SPILLWAY_GPU_QUOTA_DIR": LedgerDir}
	shared := map[string]string{otherLimitVar: "1024Mi"}
	for name, c := range map[string]struct {
		node, env  map[string]string
		what, want string
	}{
		"no environment":        {node, nil, limitVar, "1024Mi"},
		"a higher limit":        {node, map[string]string{limitVar: "2Gi"}, limitVar, "1024Mi"},
		"a lower one":           {node, map[string]string{limitVar: "512Mi"}, limitVar, "512Mi"},
		"a lower one, nvshare":  {node, map[string]string{otherLimitVar: "512Mi"}, limitVar, "512Mi"},
		"a lower power of ten":  {node, map[string]string{limitVar: "1e9"}, limitVar, "1e9"},
		"a higher power of ten": {node, map[string]string{limitVar: "1.1E9"}, limitVar, "1024Mi"},
		"nvshare's, the node's": {node, map[string]string{limitVar: "1024Mi", otherLimitVar: "512Mi"}, limitVar, "512Mi"},
		"ours before nvshare's": {node, map[string]string{limitVar: "2Gi", otherLimitVar: "1Mi"}, limitVar, "1024Mi"},
		"a lower share":         {node, map[string]string{limitVar: "20%"}, limitVar, "20%"},
		"a higher share":        {node, map[string]string{limitVar: "26%"}, limitVar, "1024Mi"},
		"nonsense":              {node, map[string]string{limitVar: "much"}, limitVar, "much"},
		"nothing":               {node, map[string]string{limitVar: ""}, limitVar, ""},
		"another ledger": {node, map[string]string{"SPILLWAY_GPU_QUOTA_DIR": "/tmp"}, "SPILLWAY_GPU_QUOTA_DIR",
			LedgerDir},
		"another group":        {node, map[string]string{"SPILLWAY_GPU_QUOTA_GROUP": "h"}, "SPILLWAY_GPU_QUOTA_GROUP", "g"},
		"a limit of its own":   {whole, map[string]string{limitVar: "2Gi"}, limitVar, "2Gi"},
		"a default":            {shared, nil, otherLimitVar, "1024Mi"},
		"instead of a default": {shared, map[string]string{otherLimitVar: "2Gi"}, otherLimitVar, "2Gi"},
		"before a default":     {shared, map[string]string{limitVar: "2Gi"}, limitVar, "2Gi"},
		"not the node's":       {node, map[string]string{"HOME": "/root"}, "HOME", "/root"},
	} {
		dir := t.TempDir()
		if err := writeLimits(dir, c.node); err != nil {
			t.Fatal(err)
		}
		found, err := lookupLimits(dir, func(name string) (string, bool) { v, ok := c.env[name]; return v, ok })
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got, ok := found(c.what); !ok || got != c.want {
			t.Errorf("%s: %s is %q, %v; want %q", name, c.what, got, ok, c.want)
		}
	}
}

// A file that cannot be trusted is an error, and never "no limit".
func TestLookupRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the file is root's")
	}
	env := func(string) (string, bool) { return "", false }
	if _, err := lookupLimits(filepath.Join(t.TempDir(), "none"), env); err != nil {
		t.Errorf("no directory: %v", err)
	}
	for name, spoil := range map[string]func(path string) error{
		"others can write": func(path string) error { return os.Chmod(path, 0o666) },
		"another's":        func(path string) error { return os.Chown(path, 1001, 0) },
		"no line":          func(path string) error { return os.WriteFile(path, []byte("A=b\nnonsense\n"), 0o644) },
		"too long": func(path string) error {
			return os.WriteFile(path, []byte("A="+strings.Repeat("b", maxLimits)),
				0o644)
		},
		"a directory": func(path string) error { return os.Mkdir(path+"x", 0o755) },
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, LimitsFile)
		if err := writeLimits(dir, map[string]string{"A": "b"}); err != nil {
			t.Fatal(err)
		}
		if err := spoil(path); err != nil {
			t.Fatal(err)
		}
		if name == "a directory" {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(path+"x", path); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := lookupLimits(dir, env); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := FormatLimits(map[string]string{"A": "b\nSPILLWAY_X=1"}); err == nil {
		t.Error("a value of two lines is written")
	}
}
