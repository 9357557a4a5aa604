package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/docstest"
)

// TestConsole: the console blocks of all pages print what the pages say. Each page begins in a
// directory called spillway that has the module's testdata and nothing else, so that no command can
// change the module. "go run ./cmd/spillbench" is this test program, and a new module that replaces
// spillway by ../spillway gets the real one.
func TestConsole(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux: the pages show what the command says there")
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	names, err := docstest.Names(root)
	if err != nil {
		t.Fatal(err)
	}
	steps := 0
	for _, name := range names {
		page, err := docstest.Read(root, name)
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		tmp := filepath.Join(dir, "tmp")
		checkout := filepath.Join(dir, "spillway")
		must(errors.Join(os.Mkdir(tmp, 0o700), os.Mkdir(checkout, 0o700), os.Symlink(filepath.Join(root, "testdata"), filepath.Join(checkout, "testdata"))))
		script := fmt.Sprintf("#!/bin/sh\n%s='plain %s' TMPDIR=%s exec '%s' \"$@\"\n", commandChild, tmp, tmp, self)
		must(os.WriteFile(filepath.Join(dir, "spillbench"), []byte(script), 0o700))
		at := checkout
	blocks:
		for _, b := range page.Blocks {
			if b.Note != "" {
				must(os.WriteFile(filepath.Join(at, b.Note), []byte(b.Text()), 0o600))
			}
			if b.Language != "console" {
				continue
			}
			for _, step := range b.Steps() {
				steps++
				typed, _, _ := strings.Cut(step.Text, " #")
				typed = strings.ReplaceAll(typed, "go run ./cmd/spillbench", "spillbench")
				// The module by its own path, under which it has been compiled already.
				typed = strings.ReplaceAll(typed, "=../spillway", "="+root)
				where := filepath.Join(dir, "where")
				sh := exec.Command("sh", "-c", "cd '"+at+"' || exit\n"+typed+"\nstatus=$?\npwd >'"+where+"'\n(exit $status)")
				sh.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "TMPDIR="+tmp, "GOPROXY=off", "GONOSUMDB=*", "GOFLAGS=", "GOTOOLCHAIN=local")
				var printed bytes.Buffer
				sh.Stdout, sh.Stderr = &printed, &printed
				var exit *exec.ExitError
				if err := sh.Run(); err != nil && !errors.As(err, &exit) {
					t.Fatal(err)
				}
				if now, err := os.ReadFile(where); err == nil {
					at = strings.TrimSpace(string(now))
				}
				if status := sh.ProcessState.ExitCode(); status != 0 && strings.HasPrefix(step.Text, "go run ./cmd/spillbench") {
					fmt.Fprintf(&printed, "exit status %d\n", status) // as "go run" does
				}
				if !docstest.Prints(step.Output, printed.String()) {
					t.Errorf("%s:%d: %s prints\n%s\nand not\n%s", name, step.Number, step.Text, printed.String(), step.Output)
					break blocks // what comes after it may need it
				}
			}
		}
		if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
			t.Errorf("%s: left %v (%v)", name, left, err)
		}
	}
	if steps < 5 {
		t.Errorf("only %d commands were found", steps)
	}
}
