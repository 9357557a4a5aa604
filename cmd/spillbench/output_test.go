package main

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// TestResultFile: a result replaces what was there, a link to it stays a link, a
// failed command changes nothing, and nothing is left beside it.
func TestResultFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	real, link := filepath.Join(dir, "real.json"), filepath.Join(dir, "link.json")
	if err := os.WriteFile(real, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("real.json", link); err != nil {
		t.Fatal(err)
	}
	if r := command(
		t,
		t.Context(),
		"run",
		"--input="+filepath.Join(t.TempDir(), "missing"),
		"--json",
		link,
	); r.status != 2 {
		t.Fatalf("ended with %d", r.status)
	}
	if old, _ := os.ReadFile(real); string(old) != "old" {
		t.Fatalf("a failed run left %q", old)
	}
	succeed(t, "topo", "--quiet", "--json", link)
	text, err := os.ReadFile(real)
	if err != nil {
		t.Fatal(err)
	}
	var doc report.Topo
	decode(t, string(text), &doc)
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is %v, %v", info, err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 2 {
		t.Errorf("left %v", entries)
	}
}

// TestResultToDevice: a device is written to and not replaced.
func TestResultToDevice(t *testing.T) {
	t.Parallel()
	succeed(t, "topo", "--quiet", "--json", os.DevNull)
	if info, err := os.Stat(os.DevNull); err != nil || info.Mode().IsRegular() {
		t.Errorf("%s is %v, %v", os.DevNull, info, err)
	}
}

// commandTo returns a command that prints errors and notes to stderr.
func commandTo(t *testing.T, stderr io.Writer) *cobra.Command {
	cmd := new(cobra.Command)
	cmd.SetContext(t.Context())
	cmd.SetOut(io.Discard)
	cmd.SetErr(stderr)
	return cmd
}

// TestWhereNotesGo: notes are on standard error where no table carries them, but not with --quiet.
func TestWhereNotesGo(t *testing.T) {
	for flags, want := range map[outputFlags]string{
		{}:                       "",
		{quiet: true}:            "",
		{json: "-"}:              "spillbench: note: one\nspillbench: note: two\n",
		{json: "-", quiet: true}: "",
	} {
		var stderr strings.Builder
		o, err := flags.open(commandTo(t, &stderr))
		if err != nil {
			t.Fatal(err)
		}
		if o.warn([]string{"one", "two"}); stderr.String() != want {
			t.Errorf("%+v: %q, want %q", flags, stderr.String(), want)
		}
	}
}

// TestResultHasNoOtherName: until a result is written there is nothing where it
// goes, and then there is only the result: a process killed at any moment leaves
// no other file.
func TestResultHasNoOtherName(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "r.json")
	for _, what := range []string{"new", "replaced"} {
		flags := outputFlags{json: path}
		before, _ := os.ReadDir(dir)
		if _, err := flags.open(commandTo(t, io.Discard)); err != nil {
			t.Fatal(err)
		}
		if after, err := os.ReadDir(dir); err != nil || len(after) != len(before) {
			t.Errorf("%s: before the result is written there are %v, %v", what, after, err)
		}
		if err := flags.places()[0].write([]byte(what)); err != nil {
			t.Fatal(err)
		}
		if after, err := os.ReadDir(dir); err != nil || len(after) != 1 {
			t.Errorf("%s: after it there are %v, %v", what, after, err)
		}
		if text, err := os.ReadFile(path); err != nil || string(text) != what {
			t.Errorf("%s: %q, %v", what, text, err)
		}
		if info, err := os.Stat(path); err != nil || info.Mode() != 0o644 {
			t.Errorf("%s: %v, %v", what, info, err)
		}
	}
}

// TestResultThatCannotBePlaced: nothing is left of a result for which there is no room in its place.
func TestResultThatCannotBePlaced(t *testing.T) {
	dir := t.TempDir()
	taken := filepath.Join(dir, "taken")
	if err := os.Mkdir(taken, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := storeFile(taken, []byte("x")); err == nil {
		t.Error("a directory was replaced")
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("left %v", entries)
	}
}

// TestHeader: every document says which program made it, from what arguments, and when.
func TestHeader(t *testing.T) {
	t.Parallel()
	began := time.Now().Truncate(time.Millisecond)
	args := []string{"topo", "-q", "--json=-", "--cpuprofile", os.DevNull}
	var doc report.Topo
	decode(t, succeed(t, args...).stdout, &doc)
	if doc.Version == "" || doc.GoVersion != runtime.Version() || !slices.Equal(doc.Args, args) ||
		doc.Time.Before(began) ||
		doc.Time.After(time.Now()) {
		t.Errorf("%+v, begun %v", doc.Header, began)
	}
	var raw struct{ Time string }
	text, err := json.Marshal(doc)
	must(errors.Join(err, json.Unmarshal(text, &raw)))
	if _, err := time.Parse(time.RFC3339, raw.Time); err != nil || !strings.HasSuffix(raw.Time, "Z") {
		t.Errorf("the time is %q: %v", raw.Time, err)
	}
}

// TestVersion: one line with the version, the commit and Go's version; nothing is run.
func TestVersion(t *testing.T) {
	t.Parallel()
	r := succeed(t, "--version", "--passes=2")
	line := regexp.MustCompile(
		`^spillbench \S+, commit \S+, ` + regexp.QuoteMeta(
			runtime.Version()+", "+runtime.GOOS+"/"+runtime.GOARCH,
		) + "\n$",
	)
	if !line.MatchString(r.stdout) {
		t.Errorf("printed %q", r.stdout)
	}
	everyCommand(func(cmd *cobra.Command) { // whatever else it wants
		if got := succeed(t, append(strings.Fields(cmd.CommandPath())[1:], "--version")...).stdout; got != r.stdout {
			t.Errorf("%s --version printed %q", cmd.CommandPath(), got)
		}
	})
	if got := succeed(t, "help", "--version").stdout; got != r.stdout {
		t.Errorf("help --version printed %q", got)
	}
	var stderr strings.Builder
	if status := Main(
		t.Context(),
		[]string{"--version"},
		full{},
		&stderr,
	); status != 3 ||
		strings.Count(stderr.String(), "\n") != 1 {
		t.Errorf("without room for it: %d, %q", status, &stderr)
	}
}

// full is a device without room.
type full struct{}

func (full) Write([]byte) (int, error) {
	return 0, &fs.PathError{Op: "write", Path: "/dev/stdout", Err: syscall.ENOSPC}
}

// TestFullOutput: a result that could not be written is an error, of the machine,
// and one line.
func TestFullOutput(t *testing.T) {
	if testing.Short() {
		t.Skip("needs seconds: run without -short")
	}
	t.Parallel()
	table := writeTable(t, "t.arrow", 1, 100)
	for _, args := range [][]string{append([]string{"run"}, small...), {"verify", table}, {"topo"}} {
		try := func(stdout io.Writer, want string, more ...string) {
			t.Helper()
			var stderr strings.Builder
			status := Main(t.Context(), append(slices.Clone(args), more...), stdout, &stderr)
			if got := stderr.String(); status != 3 || strings.Count(got, "\n") != 1 || !strings.Contains(got, want) ||
				!strings.Contains(got, syscall.ENOSPC.Error()) {
				t.Errorf("%q %q ended with %d: %q", args, more, status, got)
			}
		}
		try(full{}, "standard output")
		try(full{}, "standard output", "--json=-")
		if runtime.GOOS == "linux" {
			try(io.Discard, "--json /dev/full", "--json=/dev/full")
		}
	}
}

// TestFullHelp: help that could not be written is an error as well.
func TestFullHelp(t *testing.T) {
	t.Parallel()
	for _, line := range []string{"--help", "run --help", "help verify", "report -h", "completion bash"} {
		var stderr strings.Builder
		status := Main(t.Context(), strings.Fields(line), full{}, &stderr)
		if got := stderr.String(); status != 3 ||
			got != "spillbench: writing standard output: "+syscall.ENOSPC.Error()+"\n" {
			t.Errorf("%s ended with %d: %q", line, status, got)
		}
	}
}

// TestPlacesApart: a result does not replace what was read, nor another result, whatever names of one
// file are given, and nothing is done before that is known.
func TestPlacesApart(t *testing.T) {
	t.Chdir(t.TempDir())
	table := filepath.Base(writeTable(t, "t.arrow", 1, 100))
	for name, text := range map[string]string{table: readFile(t, writeTable(t, "t.arrow", 1, 100)), "a.json": hollow["run"], "mine.txt": "mine"} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(
		os.Link("a.json", "hard.json"),
		os.Symlink("a.json", "link.json"),
		os.Mkdir("d", 0o700),
	); err != nil {
		t.Fatal(err)
	}
	was := map[string]string{table: readFile(t, table), "a.json": readFile(t, "a.json"), "mine.txt": "mine"}
	for _, line := range []string{
		"report --html a.json a.json", "report a.json --html a.json", "report a.json --html ./a.json", "report a.json --html hard.json", "report a.json --html mine.txt",
		"run t.arrow --html t.arrow", "run --input t.arrow --json t.arrow", "run --json x --html x", "run --json x --html ./d/../x",
		"run --json link.json --html a.json",
		"verify t.arrow --json t.arrow", "compare --peer arrow-ipc --input t.arrow --json t.arrow", "bandwidth --json x --html x",
		"trace record x --json x",
	} {
		r := command(t, t.Context(), strings.Fields(line)...)
		if r.status != 2 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, "name another file") ||
			r.stdout != "" {
			t.Errorf("%s: %d, %q", line, r.status, r.stderr)
		}
	}
	for name, text := range was {
		if now := readFile(t, name); now != text {
			t.Errorf("%s is now %q", name, now)
		}
	}
	if _, err := os.Stat("x"); err == nil {
		t.Error("something was written")
	}
	succeed(
		t,
		append(
			[]string{"run", "--json=" + os.DevNull, "--html=" + os.DevNull, "-q"},
			small...)...) // a device may be shared
}

// TestNotesAreInert: a note is one line beside what is printed for programs, whatever names are in it.
func TestNotesAreInert(t *testing.T) {
	var stderr strings.Builder
	o := &output{flags: &outputFlags{format: "csv"}, cmd: commandTo(t, &stderr)}
	o.warn([]string{"no batches in a\n\x1b[31m\u202e"})
	if want := "spillbench: note: no batches in a" + `\n\x1b[31m\u202e` + "\n"; stderr.String() != want {
		t.Errorf("%q, want %q", stderr.String(), want)
	}
	t.Chdir(t.TempDir())
	r := command(t, t.Context(), "report", writeFile(t, "r.json", hollow["run"]), "--html=\x1b[31m\n.html")
	if want := "spillbench: the report is in " + `\x1b[31m\n.html` + "\n"; r.status != 0 || r.stderr != want {
		t.Errorf("%q, want %q", r.stderr, want)
	}
}
