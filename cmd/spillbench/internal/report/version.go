package report

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"
)

// Version returns the version of this program's module, "(devel)" if it was built without one.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return cmp.Or(info.Main.Version, devel)
	}
	return devel
}

// devel is what Go calls a version that it does not know.
const devel = "(devel)"

// VersionLine describes this program in one line: its version, commit, and the Go and the system that
// it was built with.
func VersionLine() string {
	return fmt.Sprintf("spillbench %s, commit %s, %s, %s/%s", Version(), cmp.Or(commit(), "unknown"), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// commit returns the revision that the program was built from, which does not change while it runs.
// `go run` stamps none. Then git is queried, and without git it stays unknown.
var commit = sync.OnceValue(func() string {
	var revision, modified string
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				revision = s.Value
			case "vcs.modified":
				modified = s.Value
			}
		}
	}
	if revision == "" {
		return gitCommit()
	}
	if modified == "true" {
		revision += "+dirty"
	}
	return revision
})

// gitPatience bounds what a description of the machine may cost.
const gitPatience = 500 * time.Millisecond

func gitCommit() string {
	ctx, cancel := context.WithTimeout(context.Background(), gitPatience)
	defer cancel()
	git := func(args ...string) string {
		out, err := exec.CommandContext(ctx, "git", args...).Output()
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(out))
	}
	top, revision, ok := strings.Cut(git("rev-parse", "--show-toplevel", "HEAD"), "\n")
	if !ok {
		return ""
	}
	// Only in a checkout of this program: another repository's commit would be a lie.
	mod, err := os.ReadFile(filepath.Join(top, "go.mod"))
	if err != nil || !strings.HasPrefix(string(mod), "module github.com/spillway-db/spillway\n") {
		return ""
	}
	if git("status", "--porcelain", "--untracked-files=no") != "" {
		revision += "+dirty"
	}
	return revision
}
