package archtest

import (
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

var rules = map[string]func([]source) []string{
	"imports":  importRule,
	"layout":   layoutRule,
	"gofmt":    formatRule,
	"docs":     docRule,
	"unsafe":   unsafeRule,
	"labels":   labelRule,
	"kinds":    kindRule,
	"go-nvml":  goNVMLRule,
	"embedded": embeddedRule,
}

// The module keeps all the rules.
func TestModule(t *testing.T) {
	files, err := load(os.DirFS(moduleRoot(t)))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 10 {
		t.Fatalf("%d files: that cannot be all", len(files))
	}
	for name, rule := range rules {
		t.Run(name, func(t *testing.T) {
			for _, line := range rule(files) {
				t.Error(line)
			}
		})
	}
}

// Each rule finds what breaks it, and nothing else.
func TestRulesCanFail(t *testing.T) {
	own := func(dir string) string {
		if dir == "." {
			return `"` + module + `"`
		}
		return `"` + module + `/` + dir + `"`
	}
	file := func(pkg string, imports ...string) string {
		text := "// Package " + pkg + " is a test.\npackage " + pkg + "\n"
		for _, i := range imports {
			text += "\nimport _ " + i + "\n"
		}
		return text
	}
	for name, c := range map[string]struct {
		rule, path, text string
		broken           bool
	}{
		"a program of scripts":          {"layout", "scripts/a/a.go", file("main"), false},
		"one that imports":              {"imports", "scripts/a/a.go", file("main", own("tier")), true},
		"up":                            {"imports", "batch/a.go", file("batch", own("tier")), false},
		"down":                          {"imports", "tier/a.go", file("tier", own("batch")), true},
		"down, in a file for darwin":    {"imports", "tier/a_darwin.go", "//go:build darwin\n\n" + file("tier", own("batch")), true},
		"down, in a test":               {"imports", "tier/a_test.go", file("tier_test", own("batch")), true},
		"a rig, in a test":              {"imports", "tier/a_test.go", file("tier_test", own("tier/sim")), false},
		"a rig, not in a test":          {"imports", "tier/a.go", file("tier", own("tier/sim")), true},
		"a suite, not in a test":        {"imports", "tier/sim/a.go", file("sim", own("tier/tiertest")), true},
		"a suite, in a test":            {"imports", "tier/sim/a_test.go", file("sim", own("tier/tiertest")), false},
		"to a child":                    {"imports", "tier/a.go", file("tier", own("tier/disk")), true},
		"topology knows no tiers":       {"imports", "topology/a.go", file("topology", own("tier")), true},
		"the root":                      {"imports", "a.go", file("spillway", own("monitor"), own("tier/sim")), false},
		"to the root":                   {"imports", "monitor/a.go", file("monitor", own(".")), true},
		"internal":                      {"imports", "topology/a.go", file("topology", own("internal/size")), false},
		"internal to public":            {"imports", "internal/size/a.go", file("size", own("tier")), true},
		"internal with a place, up":     {"imports", "internal/image/a.go", file("image", own("batch")), false},
		"internal with a place, down":   {"imports", "internal/image/a.go", file("image", own("convert")), true},
		"to internal with a place":      {"imports", "convert/a.go", file("convert", own("internal/image")), false},
		"down to internal":              {"imports", "tier/a.go", file("tier", own("internal/image")), true},
		"internal to public, in a test": {"imports", "internal/size/a_test.go", file("size", own("tier")), false},
		"a package's internal":          {"imports", "internal/image/internal/span/a.go", file("span", own("tier")), false},
		"to its own package":            {"imports", "internal/image/internal/span/a.go", file("span", own("internal/image")), true},
		"a package's internal, down":    {"imports", "internal/image/internal/span/a.go", file("span", own("convert")), true},
		"a command":                     {"imports", "cmd/spillbench/a.go", file("main", own("."), own("tier")), false},
		"a command's internal":          {"imports", "cmd/spillbench/internal/job/a.go", file("job", own("."), own("tier")), false},
		"a command that wires":          {"imports", "cmd/spillbench/a.go", file("main", own("internal/host")), true},
		"a command's internal, wiring":  {"imports", "cmd/spillbench/internal/job/a.go", file("job", own("tier/sim")), true},
		"to a command":                  {"imports", "a.go", file("spillway", own("cmd/spillbench")), true},
		"an example":                    {"imports", "examples/sort/a.go", file("main", own("."), own("tier")), false},
		"an example that wires":         {"imports", "examples/sort/a.go", file("main", own("tier/sim")), true},
		"embedding":                     {"imports", "example_test.go", file("spillway_test", own(".")), false},
		"embedding with a second":       {"imports", "example_test.go", file("spillway_test", own("."), own("tier")), true},
		"another module":                {"imports", "tier/a.go", file("tier", `"`+module+`-other/batch"`, `"fmt"`), false},

		"a new package":           {"layout", "tier/tape/a.go", file("tape"), true},
		"a new internal package":  {"layout", "internal/tape/a.go", file("tape"), false},
		"in testdata":             {"layout", "tier/testdata/a.go", file("x"), false},
		"in a module of its own":  {"layout", "plugin/a.go", file("x"), false},
		"in a directory with dot": {"layout", ".x/a.go", file("x"), false},

		"formatted":     {"gofmt", "tier/a.go", file("tier"), false},
		"not formatted": {"gofmt", "tier/a.go", file("tier") + "\nvar  x int\n", true},

		"doc":              {"docs", "tier/a.go", file("tier"), false},
		"no doc":           {"docs", "tier/a.go", "package tier\n", true},
		"a licence":        {"docs", "tier/a.go", "// Copyright.\n\npackage tier\n", true},
		"another's doc":    {"docs", "tier/a.go", "// Package layer is a test.\npackage tier\n", true},
		"doc of a command": {"docs", "cmd/x/a.go", "// Command x runs.\npackage main\n", false},
		"doc in tests":     {"docs", "tier/a_test.go", file("tier"), true},

		"a goroutine with a label":    {"labels", "tier/a.go", file("tier") + "\nfunc f() { go func() { labels.Move.Set(); g() }() }\n", false},
		"a goroutine without one":     {"labels", "tier/a.go", file("tier") + "\nfunc f() { go func() { g() }() }\n", true},
		"a goroutine of a function":   {"labels", "tier/a.go", file("tier") + "\nfunc f() { go g() }\n", true},
		"one of a group with a label": {"labels", "tier/a.go", file("tier") + "\nfunc f() { wg.Go(func() { labels.Move.Set() }) }\n", false},
		"one of a group without":      {"labels", "tier/a.go", file("tier") + "\nfunc f() { wg.Go(func() {}) }\n", true},
		"one of a timer without":      {"labels", "tier/a.go", file("tier") + "\nfunc f() { time.AfterFunc(d, g) }\n", true},
		"one of a test":               {"labels", "tier/a_test.go", file("tier") + "\nfunc f() { go g() }\n", false},
		"one of a command":            {"labels", "cmd/x/a.go", file("x") + "\nfunc f() { go g() }\n", false},

		"a kind that is asked":  {"kinds", "batch/a.go", file("batch") + "\nvar x = k.IsStorage()\n", false},
		"a kind that is named":  {"kinds", "batch/a.go", file("batch") + "\nvar x = f(tier.Disk)\n", false},
		"a kind that is equal":  {"kinds", "batch/a.go", file("batch") + "\nvar x = k == tier.Disk\n", true},
		"a kind that is slower": {"kinds", "batch/a.go", file("batch") + "\nvar x = tier.Host < k\n", true},
		"a kind in a switch":    {"kinds", "batch/a.go", file("batch") + "\nfunc f() { switch k { case tier.Host: } }\n", true},
		"a kind in a command":   {"kinds", "cmd/x/a.go", file("x") + "\nvar x = k == tier.Disk\n", false},

		"go-nvml in its adapter": {"go-nvml", "topology/gonvml/a.go", file("gonvml", `"`+goNVML+`pkg/nvml"`), false},
		"go-nvml in a test":      {"go-nvml", "topology/a_test.go", file("topology", `"`+goNVML+`pkg/nvml"`), false},
		"go-nvml in topology":    {"go-nvml", "topology/a.go", file("topology", `"`+goNVML+`pkg/nvml"`), true},

		"a library in the root":           {"embedded", "a.go", file("spillway", `"github.com/google/btree"`, `"fmt"`), false},
		"one that only the command needs": {"embedded", "a.go", file("spillway", `"github.com/spf13/cobra"`), true},
		"one of the exporters":            {"embedded", "a.go", file("spillway", own("observe/page")), true},
		"one behind another package":      {"embedded", "tier/a.go", file("tier", `"golang.org/x/text/width"`), true},
		"one of a package that is not":    {"embedded", "monitor/a.go", file("monitor", `"golang.org/x/text/width"`), false},

		"unsafe where named":   {"unsafe", "tier/a_unsafe.go", file("tier", `"unsafe"`), false},
		"unsafe in a test":     {"unsafe", "tier/a_unsafe_test.go", file("tier", `"unsafe"`), false},
		"unsafe elsewhere":     {"unsafe", "tier/a.go", file("tier", `"unsafe"`), true},
		"named without reason": {"unsafe", "tier/a_unsafe.go", file("tier"), true},
	} {
		t.Run(name, func(t *testing.T) {
			files, err := load(fstest.MapFS{
				"root.go":       {Data: []byte(file("spillway", own("tier")))},
				c.path:          {Data: []byte(c.text)},
				"plugin/go.mod": {Data: []byte("module plugin\n")},
			})
			if err != nil {
				t.Fatal(err)
			}
			broken := rules[c.rule](files)
			if (len(broken) > 0) != c.broken {
				t.Errorf("found %q, want something: %v", broken, c.broken)
			}
			if c.broken && !strings.Contains(broken[0], path.Dir(c.path)) {
				t.Errorf("%q does not name the place", broken)
			}
		})
	}
}

// A file that does not parse is not passed over.
func TestDoesNotParse(t *testing.T) {
	if _, err := load(fstest.MapFS{"tier/a.go": {Data: []byte("packag tier\n")}}); err == nil {
		t.Error("want an error")
	}
}

// The lists of the layout agree with each other.
func TestLists(t *testing.T) {
	lists := map[string][]string{"testRigs": testRigs, "testOnly": testOnly, "programsMay": programsMay, "examplesMay": examplesMay}
	for name, list := range lists {
		for _, p := range list {
			if !slices.Contains(layout, p) {
				t.Errorf("%s names %s, which is not in the layout", name, p)
			}
		}
	}
}
