package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/inject"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/monitor"
)

// everyCommand calls f for each command of the program.
func everyCommand(f func(*cobra.Command)) {
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		f(c)
		for _, c := range c.Commands() {
			walk(c)
		}
	}
	walk(newRoot(io.Discard, io.Discard))
}

// TestCompletion: what a shell offers for the values of flags, and for arguments.
func TestCompletion(t *testing.T) {
	t.Parallel()
	const (
		files   = cobra.ShellCompDirectiveDefault
		nothing = cobra.ShellCompDirectiveNoFileComp
		list    = cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
		dirs    = cobra.ShellCompDirectiveFilterDirs
	)
	for _, c := range []struct {
		args      string
		directive cobra.ShellCompDirective
		want      string
	}{
		{"", nothing, "bandwidth compare completion help inspect quota report run schema topo trace verify"},
		{"trace|", nothing, "compare record replay"},
		{"help|", nothing, "bandwidth compare inspect quota report run schema topo trace verify"},
		{"help|trace|", nothing, "compare record replay"},
		{"completion|", nothing, "bash fish powershell zsh"},
		{"--policy|", nothing, strings.Join(monitor.Names(), " ")},
		{"run|--policy|", nothing, strings.Join(monitor.Names(), " ")},
		{"trace|replay|--policy|", nothing, strings.Join(monitor.Names(), " ")},
		{"run|--codec|", nothing, "auto none s2 zstd bitpack"},
		{"verify|--gpu|", nothing, "auto cuda sim"},
		{"run|--place|", nothing, "gpu fits"},
		{"run|--format|", nothing, "table json csv markdown benchfmt"},
		{"topo|--format|", nothing, "table json csv markdown"},
		{"report|--format|", nothing, "table csv markdown benchfmt"},
		{"compare|--peer|", nothing, "arrow-ipc"},
		{"bandwidth|--between|", list, "gpu host disk"},
		{"bandwidth|--between|gpu,", list, "gpu,host gpu,disk"},
		{"bandwidth|--between|gpu,h", list, "gpu,host gpu,disk"}, // the shell chooses
		{"run|--fault|", list, "op=read, op=write, op=alloc, op=copy,"},
		{"run|--fault|op=alloc,", list, "op=alloc,kind=oom op=alloc,kind=eio op=alloc,kind=slow"},
		{"run|--fault|op=read,kind=eio,p=0.1,", list, "op=read,kind=eio,p=0.1,times= op=read,kind=eio,p=0.1,path="},
		{"run|--write-ahead|", nothing, "off 64MiB"},
		{"run|--json|", files, "-"},
		{"run|--input|", files, ""},
		{"run|", files, ""},
		{"verify|", files, ""},
		{"trace|replay|", files, ""},
		{"run|--cpuprofile|", files, ""},
		{"run|--disk|", dirs, ""},
		{"topo|--root|", dirs, ""},
		{"topo|--nvml|", nothing, "run-time go-nvml"},
		{"quota|--ledger|", dirs, ""},
		{"run|--passes|", nothing, ""},
		{"topo|", nothing, ""},
		{"bandwidth|--thor", nothing, "--thorough"},
	} {
		r := command(t, t.Context(), append([]string{"__complete"}, strings.Split(c.args, "|")...)...)
		lines := strings.Split(strings.TrimSuffix(r.stdout, "\n"), "\n")
		var got []string
		for _, l := range lines[:len(lines)-1] {
			value, _, _ := strings.Cut(l, "\t")
			got = append(got, value)
		}
		if last := lines[len(lines)-1]; r.status != 0 || strings.Join(got, " ") != c.want || last != fmt.Sprintf(":%d", c.directive) {
			t.Errorf("%q: %q, %s, want %q, :%d", c.args, got, last, c.want, c.directive)
		}
	}
}

// TestChoices: each value that is offered is taken, named in the help, and there is no other.
func TestChoices(t *testing.T) {
	everyCommand(func(cmd *cobra.Command) {
		cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
			if _, ok := cmd.GetFlagCompletionFunc(f.Name); !ok && f.Name != "help" {
				t.Errorf("%s --%s: nothing says what completes it", cmd.CommandPath(), f.Name)
			}
			for _, v := range choices(f.Name) {
				left := f.Name == "format" && (v == "benchfmt" || v == "json" && cmd.Name() == "report")
				if !left && f.Name != "between" && !strings.Contains(f.Usage, v) {
					t.Errorf("%s --%s does not name %s: %s", cmd.CommandPath(), f.Name, v, f.Usage)
				}
				if err := f.Value.Set(v); err != nil {
					t.Errorf("%s --%s %s: %v", cmd.CommandPath(), f.Name, v, err)
				}
			}
		})
	})
	for _, v := range codecs() {
		if _, err := convert.ParseCodec(v); err != nil {
			t.Error(err)
		}
	}
	for flag, value := range map[string]string{"gpu": "opencl", "policy": "", "codec": "", "place": "disk", "peer": "x"} {
		if err := chosen(flag, value); err == nil || !strings.Contains(err.Error(), either(choices(flag))) {
			t.Errorf("--%s %q: %v", flag, value, err)
		}
	}
}

// TestFaultsCompleted: whatever is offered for a fault leads to one that is taken.
func TestFaultsCompleted(t *testing.T) {
	var grow func(text string)
	tried := 0
	grow = func(text string) {
		for _, next := range inject.Complete(text) {
			switch {
			case strings.HasSuffix(next, ","):
				grow(next)
				continue
			case strings.HasSuffix(next, "="):
				next += "1"
			}
			if _, err := inject.Parse(next); err != nil {
				t.Errorf("%s: %v", next, err)
			}
			if tried++; strings.Count(next, ",") < 5 {
				grow(next + ",")
			}
		}
	}
	if grow(""); tried < 50 {
		t.Errorf("%d specs were offered", tried)
	}
}

// TestCompletionScripts: each shell has a script; other shells are wrong use.
func TestCompletionScripts(t *testing.T) {
	t.Parallel()
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if r := succeed(t, "completion", shell); !strings.Contains(r.stdout, "__complete") {
			t.Errorf("%s: %q", shell, r.stdout)
		}
	}
	for _, args := range [][]string{{"completion"}, {"completion", "csh"}, {"completion", "bash", "x"}} {
		if r := command(t, t.Context(), args...); r.status != 2 || strings.Count(r.stderr, "\n") != 1 || r.stdout != "" {
			t.Errorf("%q: %d, %q", args, r.status, r.stderr)
		}
	}
	if r := succeed(t, "--help"); !slices.ContainsFunc(strings.Split(r.stdout, "\n"), func(l string) bool { return strings.HasPrefix(l, "  completion ") }) {
		t.Errorf("the help does not name the command:\n%s", r.stdout)
	}
}
