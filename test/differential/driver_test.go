//go:build !invariants

package differential

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

var (
	seeds  = flag.Uint64("seeds", 24, "how many seeds to run")
	first  = flag.Uint64("first", 0, "the first seed")
	update = flag.Bool("update", false, "write golden files instead of comparing with them")
	golden = flag.String("golden", "testdata", "the directory of the golden files")
)

// childEnv makes a test process one phase of a program: seed, phase, the directory of its disk, and
// the file for its lines.
const childEnv = "SPILLWAY_DIFFERENTIAL_CHILD"

// slack is how many bytes more may be moved beside a tenth: a batch or two.
const slack = 256 << 10

// TestMain runs a phase of a program if the environment says so, and else the tests.
func TestMain(m *testing.M) {
	child := os.Getenv(childEnv)
	if child == "" {
		os.Exit(m.Run())
	}
	args := strings.Split(child, "\n")
	if err := runChild(args[0], args[1], args[2], args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func runChild(seedArg, phaseArg, dir, to string) error {
	seed, err := strconv.ParseUint(seedArg, 10, 64)
	if err != nil {
		return err
	}
	phase, err := strconv.Atoi(phaseArg)
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	kill, err := run(context.Background(), seed, phase, dir, out)
	if kill {
		return syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	return errors.Join(err, out.Close())
}

// TestPrograms runs the programs and compares what they print with the golden files.
func TestPrograms(t *testing.T) {
	last := *first + *seeds
	if testing.Short() {
		last = min(last, *first+6)
	}
	for seed := *first; seed < last; seed++ {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			got := output(t, seed)
			path := filepath.Join(*golden, fmt.Sprintf("seed-%02d.golden", seed))
			if *update {
				if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range differences(string(want), got) {
				t.Errorf("seed %d: %s\nto repeat it: go test ./test/differential -run 'TestPrograms/^%d$'", seed, d, seed)
			}
		})
	}
}

// output runs all phases of a program, and returns what they print.
func output(t *testing.T, seed uint64) string {
	t.Helper()
	profile, set := settingsOf(seed)
	own := t.TempDir()
	dir, to := filepath.Join(own, "disk"), filepath.Join(own, "lines")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	var extra bytes.Buffer
	for phase := range phases(profile) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+strings.Join([]string{fmt.Sprint(seed), fmt.Sprint(phase), dir, to}, "\n"))
		said, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		killed := errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL && ctx.Err() == nil
		if want := phase < phases(profile)-1; err != nil && !(killed && want) {
			fmt.Fprintf(&extra, "phase %d ended with %v\n", phase, err)
			t.Logf("seed %d, phase %d: %v\n%s", seed, phase, err, said)
			break
		}
		if killed && set.encrypt {
			fmt.Fprintf(&extra, "the files of phase %d hold the text: %t\n", phase, holdsMarker(t, dir))
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		fmt.Fprintf(&extra, "%d files are left, %v\n", len(left), err)
	}
	lines, err := os.ReadFile(to)
	if err != nil {
		t.Fatal(err)
	}
	return string(lines) + extra.String()
}

// holdsMarker reports whether a file below dir holds the marker in plain text.
func holdsMarker(t *testing.T, dir string) (found bool) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		found = found || bytes.Contains(data, []byte(marker))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// differences compares what two versions of the engine printed for one seed. After the first line
// that differs the lines are no longer compared.
func differences(want, got string) (all []string) {
	wantLines, wantMoved := split(want)
	gotLines, gotMoved := split(got)
	for i := range max(len(wantLines), len(gotLines)) {
		w, g := "nothing", "nothing"
		if i < len(wantLines) {
			w = wantLines[i]
		}
		if i < len(gotLines) {
			g = gotLines[i]
		}
		if w != g {
			all = append(all, fmt.Sprintf("line %d is\n\t%s\nwant\n\t%s", i+1, g, w))
			break
		}
	}
	for edge, n := range gotMoved {
		if most := wantMoved[edge]*11/10 + slack; n > most {
			all = append(all, fmt.Sprintf("%s %d bytes, want at most %d", edge, n, most))
		}
	}
	return all
}

func split(text string) (lines []string, moved map[string]int64) {
	moved = make(map[string]int64)
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		edge, bytes, ok := strings.Cut(line, ": ")
		if n, err := strconv.ParseInt(bytes, 10, 64); ok && err == nil && strings.HasPrefix(edge, movedPrefix+" ") {
			moved[edge] = n
			continue
		}
		lines = append(lines, line)
	}
	return lines, moved
}
