package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/internal/docstest"
)

// ofCobra reports whether a command is cobra's own: its help is, too.
func ofCobra(cmd *cobra.Command) bool {
	return strings.HasPrefix(cmd.CommandPath(), "spillbench completion") || cmd.Name() == "help"
}

// TestHelpOfEveryCommand: the help of each command has an example, each of its flags once, in lines of
// a terminal's width, and the exit codes.
func TestHelpOfEveryCommand(t *testing.T) {
	t.Parallel()
	everyCommand(func(cmd *cobra.Command) {
		if cmd.Name() == "help" {
			return
		}
		text := succeed(t, append(strings.Fields(cmd.CommandPath())[1:], "--help")...).stdout
		if !strings.HasSuffix(text, "\n"+exitCodes) || !strings.Contains(text, "\nUsage:\n  spillbench") {
			t.Errorf("%s: the usage or the exit codes are missing in\n%s", cmd.CommandPath(), text)
		}
		if !ofCobra(cmd) && (cmd.Example == "" || cmd.Long == "" || !strings.Contains(text, "\nExamples:\n"+cmd.Example+"\n\n")) {
			t.Errorf("%s has no example, or no description", cmd.CommandPath())
		}
		for line := range strings.Lines(text) {
			if !ofCobra(cmd) && len([]rune(line)) > 106 {
				t.Errorf("%s: a long line: %q", cmd.CommandPath(), line)
			}
		}
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			want := 1
			if f.Hidden {
				want = 0
			}
			n := 0
			for line := range strings.Lines(text) {
				if fields := strings.Fields(line); strings.HasPrefix(line, "  ") && len(fields) > 1 && (fields[0] == "--"+f.Name || fields[1] == "--"+f.Name && strings.HasSuffix(fields[0], ",")) {
					n++
				}
			}
			if n != want {
				t.Errorf("%s: --%s is there %d times, want %d", cmd.CommandPath(), f.Name, n, want)
			}
		})
	})
}

// TestExamples: what the help and the documentation tell people to type is understood.
func TestExamples(t *testing.T) {
	t.Parallel()
	type typed struct{ where, line string }
	var all []typed
	everyCommand(func(cmd *cobra.Command) {
		for line := range strings.Lines(cmd.Example) {
			if !ofCobra(cmd) {
				all = append(all, typed{cmd.CommandPath(), line})
			}
		}
	})
	const root = "../.."
	names, err := docstest.Names(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		page, err := docstest.Read(root, name)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range page.Commands("go run ./cmd/spillbench", "spillbench") {
			line := strings.Replace(l.Text, "go run ./cmd/spillbench", "spillbench", 1)
			inConsole := slices.ContainsFunc(page.Blocks, func(b docstest.Block) bool { // some of which are wrong on purpose; TestCommands runs them
				return b.Language == "console" && slices.ContainsFunc(b.Lines, func(of docstest.Line) bool { return of.Number == l.Number })
			})
			if !inConsole && strings.HasPrefix(line, "spillbench") {
				all = append(all, typed{fmt.Sprintf("%s:%d", name, l.Number), line})
			}
		}
	}
	if len(all) < 40 {
		t.Errorf("only %d lines were found", len(all))
	}
	for _, c := range all {
		line, _, _ := strings.Cut(c.line, " #")
		line, _, _ = strings.Cut(line, " >")
		words := strings.Fields(line)
		if len(words) == 0 || words[0] != "spillbench" {
			t.Errorf("%s: %q is no call of spillbench", c.where, c.line)
			continue
		}
		root := newRoot(io.Discard, io.Discard)
		registerProfiles(root)
		cmd, args, err := root.Find(words[1:])
		if err == nil {
			err = cmd.ParseFlags(args)
		}
		if err == nil && cmd.Args != nil {
			err = cmd.Args(cmd, cmd.Flags().Args())
		}
		if err != nil {
			t.Errorf("%s: %q: %v", c.where, strings.TrimSpace(line), err)
		}
	}
}
