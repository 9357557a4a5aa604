package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// TestConfigFile: what a file has counts, except for what the command line has, and the JSON says what
// came of both.
func TestConfigFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	spill := filepath.Join(dir, "spill")
	if err := os.Mkdir(spill, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "c.yaml")
	text := `# small memories
gpu-memory: 512KiB
host-memory: 5.24288e5
disk: [spill=64MiB]
policy: lru
codec: s2
moves-per-edge: 4
disk-slots: 3
workers: 3
write-ahead: off
encrypt: true
rounds: 7 # of compare
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var doc report.Run
	decode(t, succeed(t, "run", "--config", file, "--codec=none", "--format=json", "-q").stdout, &doc)
	c := doc.Config
	if c.GPUMemoryBytes != 512<<10 || c.HostMemoryBytes != 512<<10 || c.Policy != "lru" || c.MovesPerEdge != 4 || c.DiskSlots != 3 || c.Workers != 3 || c.WriteAheadBytesPerS != 0 || !c.Encrypt {
		t.Errorf("the file does not count: %+v", c)
	}
	if c.Codec != "none" {
		t.Errorf("codec %s: the command line does not count more", c.Codec)
	}
	if len(c.Disks) != 1 || c.Disks[0].Dir != dir+"/spill" || c.Disks[0].CapacityBytes != 64<<20 {
		t.Errorf("disks %+v, want spill beside the file", c.Disks)
	}
	var other report.Verify // which has no --workers
	decode(t, succeed(t, "verify", writeTable(t, "t.arrow", 1, 100), "--config", file, "--disk", dir, "--format=json", "-q").stdout, &other)
	if other.Config.Policy != "lru" || len(other.Config.Disks) != 1 || other.Config.Disks[0].Dir != dir {
		t.Errorf("%+v", other.Config)
	}
}

// TestConfigRefuses: a file that is wrong is wrong use, told in one line with the line of the file.
func TestConfigRefuses(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"polciy: lru":              `line 1: "polciy" is unknown (did you mean policy? see spillbench run --help`,
		"# x\n\n--policy: lru":     `line 3: "--policy" is unknown (did you mean policy? `,
		"quantum: 1":               `line 1: "quantum" is unknown (see spillbench run --help`,
		"config: b.yaml":           `"config" is unknown`,
		"cpuprofile: a":            `"cpuprofile" is unknown`,
		"policy: [lru, lru]":       "line 1: policy takes one value, and not a list",
		"passes: many":             `line 1: passes "many": want a whole number (see`,
		"gpu-memory: -1":           `line 1: gpu-memory "-1": `,
		"policy: newest":           `policy "newest": want `,
		"moves-per-edge: 0":        "--moves-per-edge 0 is out of range (want 1 to 1024)",
		"disk-slots: 1":            "--disk-slots 1 is out of range (want 2 to ",
		"disk: nowhere":            "no such directory",
		"policy: lru\npolicy: lru": "line 2: policy was set in line 1 already",
	} {
		file := writeFile(t, "c.yaml", text)
		r := command(t, t.Context(), "run", "--config", file)
		if r.status != 2 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, want) || r.stdout != "" {
			t.Errorf("%q: %d, %q, want %q", text, r.status, r.stderr, want)
		}
	}
	for _, args := range [][]string{{"--config="}, {"--config", filepath.Join(t.TempDir(), "none.yaml")}, {"--config", t.TempDir()}} {
		if r := command(t, t.Context(), args...); r.status != 2 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, "--config") {
			t.Errorf("%q: %d, %q", args, r.status, r.stderr)
		}
	}
}

// TestConfigOnEveryEngine: each command that has the flags of an engine reads a file.
func TestConfigOnEveryEngine(t *testing.T) {
	with := 0
	everyCommand(func(cmd *cobra.Command) {
		engine, config := cmd.LocalNonPersistentFlags().Lookup("monitor-period"), cmd.LocalNonPersistentFlags().Lookup(configName)
		if (engine == nil) != (config == nil) {
			t.Errorf("%s: one of --monitor-period and --config is missing", cmd.CommandPath())
		}
		if config != nil {
			with++
		}
	})
	if keys := configKeys(newRoot(io.Discard, io.Discard)); with < 6 || len(keys) < 30 {
		t.Errorf("%d commands, keys %q", with, keys)
	}
}

// TestConfigFiles: each file that a file of --config names begins at its directory.
func TestConfigFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "c.yaml")
	if err := os.WriteFile(file, []byte("json: a.json\nhtml: b.html\nperfetto: c.json\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	succeed(t, append([]string{"run", "-q", "--config", file}, small...)...)
	for _, name := range []string{"a.json", "b.html", "c.json"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	everyCommand(func(cmd *cobra.Command) {
		cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
			if strings.Contains(f.Usage, "`FILE`") && cmd.LocalNonPersistentFlags().Lookup(configName) != nil && f.Name != configName && !slices.Contains(pathFlags, f.Name) {
				t.Errorf("%s --%s: its path begins elsewhere than those of other flags", cmd.CommandPath(), f.Name)
			}
		})
	})
}

// TestConfigPaths: relative paths of a file begin at its directory, and keep what follows them.
func TestConfigPaths(t *testing.T) {
	for _, c := range [][3]string{
		{"a/c.yaml", "spill", "a/spill"}, {"c.yaml", "spill=1GiB", "./spill=1GiB"}, {"/c.yaml", "x", "/x"},
		{"a/c.yaml", "/x", "/x"}, {"-", "x", "x"}, {"a/c.yaml", "-", "-"}, {"a/c.yaml", "d=1/", "a/d=1/"},
	} {
		if got := besideFile(c[0], c[1]); got != c[2] {
			t.Errorf("%s of %s: %s, want %s", c[1], c[0], got, c[2])
		}
	}
}
