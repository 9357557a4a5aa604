package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

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
	root := newRoot(io.Discard, io.Discard)
	walk(root)
}

// TestCompletion: what a shell offers for commands, for the values of flags, and for arguments.
func TestCompletion(t *testing.T) {
	t.Parallel()
	const (
		files   = cobra.ShellCompDirectiveDefault
		nothing = cobra.ShellCompDirectiveNoFileComp
		dirs    = cobra.ShellCompDirectiveFilterDirs
	)
	for _, c := range []struct {
		args      string
		directive cobra.ShellCompDirective
		want      string
	}{
		{"help|", nothing, "bandwidth compare completion help inspect quota report run schema topo trace verify"},
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
		{"run|--json|", files, ""},
		{"run|--input|", files, ""},
		{"run|", files, ""},
		{"verify|", files, ""},
		{"trace|replay|", files, ""},
		{"run|--cpuprofile|", files, ""},
		{"run|--disk|", dirs, ""},
		{"topo|--root|", dirs, ""},
		{"topo|--nvml|", nothing, "run-time go-nvml"},
		{"quota|--ledger|", dirs, ""},
		{"bandwidth|--thor", nothing, "--thorough"},
	} {
		r := command(t, t.Context(), append([]string{"__complete"}, strings.Split(c.args, "|")...)...)
		lines := strings.Split(strings.TrimSuffix(r.stdout, "\n"), "\n")
		var got []string
		for _, l := range lines[:len(lines)-1] {
			value, _, _ := strings.Cut(l, "\t")
			got = append(got, value)
		}
		if !strings.HasPrefix(r.stderr, "Completion ended with directive: ") {
			t.Errorf("%q: standard error has %q", c.args, r.stderr)
		}
		if last := lines[len(lines)-1]; r.status != 0 || strings.Join(got, " ") != c.want || last != fmt.Sprintf(":%d", c.directive) {
			t.Errorf("%q: %q, %s, want %q, :%d", c.args, got, last, c.want, c.directive)
		}
	}
}

// TestChoices: each value that is offered is taken, and the help names it; others are refused.
func TestChoices(t *testing.T) {
	choices := 0
	everyCommand(func(cmd *cobra.Command) {
		cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
			c, ok := f.Value.(*choiceFlag)
			if !ok {
				return
			}
			choices++
			for _, v := range c.known {
				if !strings.Contains(f.Usage, v) {
					t.Errorf("%s --%s does not name %s: %s", cmd.CommandPath(), f.Name, v, f.Usage)
				}
				if err := f.Value.Set(v); err != nil || f.Value.String() != v {
					t.Errorf("%s --%s %s: %v", cmd.CommandPath(), f.Name, v, err)
				}
			}
			for _, v := range []string{"", "x"} {
				if err := f.Value.Set(v); err == nil || !strings.Contains(err.Error(), either(c.known)) {
					t.Errorf("%s --%s %q: %v", cmd.CommandPath(), f.Name, v, err)
				}
			}
		})
	})
	if choices < 20 {
		t.Errorf("only %d flags have choices", choices)
	}
	codecs := newRun().Flag("codec").Value.(*choiceFlag).known
	for c := convert.CodecAuto; ; c++ {
		if _, err := convert.ParseCodec(c.String()); err != nil {
			break
		}
		if !slices.Contains(codecs, c.String()) {
			t.Errorf("--codec does not take %s", c)
		}
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
