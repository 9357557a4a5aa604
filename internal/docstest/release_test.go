package docstest

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// modules returns the directories of the modules below a directory, "." first.
func modules(t *testing.T, root string) []string {
	t.Helper()
	var dirs []string
	err := filepath.WalkDir(root, func(name string, d os.DirEntry, err error) error {
		if err == nil && d.Name() == "go.mod" {
			dir, relErr := filepath.Rel(root, filepath.Dir(name))
			dirs = append(dirs, filepath.ToSlash(dir))
			return relErr
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(dirs)
	return dirs
}

// unfit returns why a module cannot be had by its version: CONTRIBUTING.md says what a release
// needs.
func unfit(dir, goMod string) []string {
	var wrong []string
	want := module
	if dir != "." {
		want = path.Join(module, dir)
	}
	if name, _, _ := strings.Cut(strings.TrimPrefix(goMod, "module "), "\n"); name != want {
		wrong = append(wrong, "is called "+name)
	}
	replaces := regexp.MustCompile(`(?m)^(?:replace |\t)(\S+)(?: v\S+)? => (\S+)`).FindAllStringSubmatch(goMod, -1)
	if dir == "." {
		if len(replaces) > 0 || strings.Contains(goMod, "\nexclude ") {
			wrong = append(wrong, "replaces or excludes modules: go install refuses it")
		}
		return wrong
	}
	up := strings.TrimSuffix(strings.Repeat("../", strings.Count(dir, "/")+1), "/")
	replaced := slices.ContainsFunc(replaces, func(m []string) bool { return m[1] == module && m[2] == up })
	if strings.Contains(goMod, "\t"+module+" v") && !replaced {
		wrong = append(wrong, "does not take spillway from "+up+": the checks would test an older one")
	}
	return wrong
}

// TestModules: a tag of the module as it is can be had with go get and go install.
func TestModules(t *testing.T) {
	t.Parallel()
	all := modules(t, root)
	if len(all) == 0 || all[0] != "." {
		t.Fatalf("modules: %q", all)
	}
	contributing, err := os.ReadFile(filepath.Join(root, "CONTRIBUTING.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range all {
		text, err := os.ReadFile(filepath.Join(root, dir, "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		for _, wrong := range unfit(dir, string(text)) {
			t.Errorf("%s/go.mod %s", dir, wrong)
		}
		if dir != "." && !strings.Contains(string(contributing), "`"+dir+"`") {
			t.Errorf("CONTRIBUTING.md, Release, does not say what becomes of the module %s", dir)
		}
	}
	changes, err := os.ReadFile(filepath.Join(root, "CHANGELOG.md"))
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?ms)^## Unreleased$.*^## [0-9]+\.[0-9]+\.[0-9]+ – `).Match(changes) {
		t.Error("CHANGELOG.md does not begin with what is unreleased, and then a version")
	}
}

// TestUnfitModules: what TestModules is to find is found.
func TestUnfitModules(t *testing.T) {
	t.Parallel()
	const nested = "module " + module + "/a/b\n\nrequire (\n\t" + module + " v0.0.0\n)\n"
	for _, tt := range []struct {
		dir, goMod string
		fit        bool
	}{
		{".", "module " + module + "\n", true},
		{".", "module example.com/other\n", false},
		{".", "module " + module + "\n\nreplace example.com/x => ../x\n", false},
		{"a/b", nested + "\nreplace " + module + " => ../..\n", true},
		{"a/b", nested + "\nreplace (\n\t" + module + " => ../..\n)\n", true},
		{"a/b", nested + "\nreplace " + module + " => ../../..\n", false},
		{"a/b", nested, false},
		{"a", nested, false},
	} {
		if wrong := unfit(tt.dir, tt.goMod); len(wrong) == 0 != tt.fit {
			t.Errorf("%s: %q in\n%s", tt.dir, wrong, tt.goMod)
		}
	}
}
