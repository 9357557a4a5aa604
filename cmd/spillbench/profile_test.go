package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
)

// TestProfiles: each file is what go tool reads, of a command that ended well and of one that did
// not.
func TestProfiles(t *testing.T) {
	unlessShort(t)
	for name, more := range map[string]struct {
		args   []string
		status int
	}{
		"fine":    {[]string{"--quiet"}, fail.Fine},
		"refused": {[]string{"--input", "/does/not/exist"}, fail.Usage},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			args := []string{
				"run",
				"--gpu",
				"sim",
				"--gpu-memory",
				"4MiB",
				"--host-memory",
				"4MiB",
				"--disk",
				t.TempDir(),
			}
			for _, flag := range []string{"cpuprofile", "memprofile", "trace"} {
				args = append(args, "--"+flag, filepath.Join(dir, flag))
			}
			if status := Main(t.Context(), append(args, more.args...), io.Discard, io.Discard); status != more.status {
				t.Fatalf("status %d, want %d", status, more.status)
			}
			for flag, begins := range map[string]string{"cpuprofile": "\x1f\x8b", "memprofile": "\x1f\x8b", "trace": "go 1."} {
				b, err := os.ReadFile(filepath.Join(dir, flag))
				if err != nil || !strings.HasPrefix(string(b), begins) || len(b) < 100 {
					t.Errorf("%s: %d bytes that begin with %.8q, %v", flag, len(b), b, err)
				}
			}
		})
	}
}

// TestProfilesThatCannotBe: one line, with the flag.
func TestProfilesThatCannotBe(t *testing.T) {
	for _, flag := range []string{"--cpuprofile", "--memprofile", "--trace"} {
		for _, file := range []string{"", filepath.Join(t.TempDir(), "none", "file")} {
			var stderr bytes.Buffer
			status := Main(t.Context(), []string{"topo", "--quiet", flag, file}, io.Discard, &stderr)
			if status != fail.Usage || strings.Count(stderr.String(), "\n") != 1 ||
				!strings.Contains(stderr.String(), flag) {
				t.Errorf("%s %q: status %d, %q", flag, file, status, stderr.String())
			}
		}
	}
}

// TestProfilesOnFullDisk: a profile that could not be written is an error of the machine, in one line.
func TestProfilesOnFullDisk(t *testing.T) {
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("needs /dev/full, which Linux has: ", err)
	}
	for _, flag := range []string{"--cpuprofile", "--memprofile", "--trace"} {
		var stderr bytes.Buffer
		status := Main(
			t.Context(),
			[]string{"topo", "--quiet", "--format=json", flag, "/dev/full"},
			io.Discard,
			&stderr,
		)
		if status != fail.Environment || strings.Count(stderr.String(), "\n") != 1 ||
			!strings.Contains(stderr.String(), flag+": ") ||
			!strings.Contains(stderr.String(), "no space left") {
			t.Errorf("%s: status %d, %q", flag, status, stderr.String())
		}
	}
}
