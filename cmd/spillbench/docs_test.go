package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/docstest"
)

// little makes runs small.
const little = " --gpu sim --gpu-memory 1MiB --host-memory 1MiB"

// typed says how TestCommands runs the commands of pages, by what they begin with; the longest
// counts. Calls of spillbench that begin with nothing here are run as they are, and console blocks
// always are.
var typed = []struct {
	begins string
	flags  string // appended
	first  string // run before
	not    string // why it is not run
}{
	{begins: "spillbench run", flags: little},
	{begins: "spillbench run --gpu cuda"}, // little would ask for a simulated one
	{begins: "spillbench run --passes 50", flags: little + " --passes 2"},
	{begins: "spillbench run --runs 5", flags: little + " --runs 2"},
	{begins: "spillbench run --fault op=write,kind=enospc", flags: little + " --stall-timeout 50ms"},
	{begins: "spillbench verify", flags: little},
	{begins: "spillbench bandwidth", flags: " --gpu sim --gpu-memory 8MiB --host-memory 8MiB --sizes 64KiB --threads 1"},
	{begins: "spillbench bandwidth --quick", flags: " --gpu sim --gpu-memory 32MiB --host-memory 32MiB --between gpu,host"}, // has sizes of its own
	{begins: "spillbench compare", flags: " --host-memory 1MiB --rounds 1"},
	{begins: "spillbench trace record", flags: little},
	{begins: "spillbench trace compare run.trace other.trace", first: "cp run.trace other.trace"},
	{begins: "spillbench report a.json b.json", first: "spillbench run --json a.json" + little + "; cp a.json b.json"},
	{begins: "spillbench report a.json b.json --html both.html"}, // the page has made them
	{begins: "spillbench quota --ledger run/ledger", first: "mkdir -m 700 -p run/ledger"},
	{begins: "spillbench quota --ledger run/ledger --share", not: "needs root; TestQuotaShares does it"},
	{begins: "spillbench quota --share UUID", not: "the same"},
	{begins: "spillbench topo --nvml go-nvml", not: "needs the tag gonvml; TestTopoGoNVML does it"},
	{begins: "mkdir -m 700 run"},

	// checkNames looks up the packages, tests and files in the arguments of these.
	{begins: "go test", not: "takes minutes, or is a test that runs anyway"},
	{begins: "go -C", not: "takes minutes"},
	{begins: ".ci/run", not: "takes minutes, and runs this test"},
	{begins: "go run ./scripts/results", not: "TestReadme there holds what it prints; with -measure it takes minutes"},
	{begins: "go tool pprof", not: "needs a profile; TestProfiles makes some"},
	{begins: "scripts/gpu-check.sh", not: "builds all tests"},
	{begins: "gpu-check/gpu-check.sh", not: "needs a GPU"},
	{begins: "scripts/duckdb", not: "needs DuckDB"},
	{begins: "benchstat", not: "is no part of this module; TestFormats holds the form of its input"},
	{begins: "kubectl", not: "needs a cluster"},
	{begins: "podman", not: "needs podman and the network"},
	{begins: "kind load", not: "needs a cluster"},
	{begins: "scp", not: "needs a node of a cluster"},
	{begins: "ssh", not: "needs a node of a cluster"},
	{begins: "sed", not: "needs a cluster; TestPage of the device plugin's cluster tests runs it"},
	{begins: "go get", not: "needs the network"},
	{begins: "go install", not: "needs the network"},
	{begins: "tidy", not: "would change this module"},
	{begins: "git clone https://github.com/spillway-db/spillway", not: "needs the network"},
	{begins: "cd spillway", not: "goes to that clone"},
	{begins: "git clone --bare", not: "is of a release, as are the next ones"},
	{begins: "git -C /tmp/spillway.git", not: "as above"},
	{begins: "export", not: "as above"},
	{begins: "mkdir /tmp/user", not: "as above"},
}

// asTyped puts what is here in the place of what readers have.
var asTyped = strings.NewReplacer("go run ./cmd/spillbench", "spillbench", "go mod tidy", "tidy", "--trace FILE", "--trace run.out", " FILE...", " testdata/flights.*",
	" FILE", " testdata/flights.parquet", " DIR", " made", "/run/spillway", "run")

// moves is the part of a table about edges that depends on how fast the machine is: which edges had
// moves, and the columns for what there was none of.
var moves = regexp.MustCompile(`(?m)^( *from +to +batches +bytes +seconds +GiB/s).*\n(?: *(?:[a-z]+:[0-9] |…).*\n)+`)

var statusNote = regexp.MustCompile(` # .*(?:exit|status) (\d+)`)

func moduleRoot() string {
	root, err := filepath.Abs("../..")
	must(err)
	return root
}

// TestCommands: the commands of all pages run. Those of console blocks print what the pages say; the
// others end with the status that the comment behind them names, or with 0. Each page begins in a
// directory called spillway that has the module's testdata and nothing else, so that no command can
// change the module. "go run ./cmd/spillbench" is this test program, and a new module that replaces
// spillway by ../spillway gets the real one. What prose has between backquotes is run once.
func TestCommands(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux: the pages show what the command says there")
	}
	names, err := docstest.Names(moduleRoot())
	if err != nil {
		t.Fatal(err)
	}
	met := make(map[string]bool) // what typed begins with, and what prose has
	ran := 0
	for _, name := range names {
		page, err := docstest.Read(moduleRoot(), name)
		if err != nil {
			t.Fatal(err)
		}
		ran += runPage(t, page, met)
	}
	for _, k := range typed {
		if !met[k.begins] {
			t.Errorf("no page has a command that begins with %q", k.begins)
		}
	}
	if ran < 60 {
		t.Errorf("only %d commands were run", ran)
	}
}

// runPage runs the commands of a page, and returns how many.
func runPage(t *testing.T, page docstest.Page, met map[string]bool) (ran int) {
	t.Helper()
	dir := t.TempDir()
	tmp, at := filepath.Join(dir, "tmp"), filepath.Join(dir, "spillway")
	must(errors.Join(os.Mkdir(tmp, 0o700), os.MkdirAll(filepath.Join(at, "made"), 0o700)))
	must(os.CopyFS(filepath.Join(at, "testdata"), os.DirFS(filepath.Join(moduleRoot(), "testdata"))))
	self, err := os.Executable()
	must(err)
	script := fmt.Sprintf("#!/bin/sh\n%s='plain %s' TMPDIR=%s exec '%s' \"$@\"\n", commandChild, tmp, tmp, self)
	must(os.WriteFile(filepath.Join(dir, "spillbench"), []byte(script), 0o700))
	// Without a network, tidy does not find what only tests of other modules need, and may end with a
	// file that asks for more. All that a reader's module needs is what this one has. The version is what
	// the nested modules ask for, with which packages may have been compiled already.
	tidy := fmt.Sprintf(`#!/bin/sh
go mod tidy -e
{ head -1 go.mod; grep ^replace go.mod; sed 1d '%[1]s/go.mod'; } >go.mod.all && mv go.mod.all go.mod && cp '%[1]s/go.sum' . &&
	go mod edit -require=github.com/spillway-db/spillway@v0.0.0
`, moduleRoot())
	must(os.WriteFile(filepath.Join(dir, "tidy"), []byte(tidy), 0o700))
	trimmed := "" // as other modules are compiled in the same environment
	if strings.Contains(os.Getenv("GOFLAGS"), "-trimpath") {
		trimmed = "-trimpath"
	}
	for _, b := range page.Blocks {
		if b.Note != "" {
			must(os.WriteFile(filepath.Join(at, b.Note), []byte(b.Text()), 0o600))
		}
	}
	for _, c := range page.Commands("go", "spillbench", "benchstat", "gpu-check/gpu-check.sh", "scripts/gpu-check.sh", "scripts/duckdb", ".ci/run") {
		line := asTyped.Replace(c.Text)
		status := 0
		if m := statusNote.FindStringSubmatch(c.Typed); m != nil {
			status, _ = strconv.Atoi(m[1])
		}
		if !c.Console {
			if c.Prose && met[line] {
				continue
			}
			met[line] = true
			var ok bool
			if line, ok = smaller(line, met); !ok {
				t.Errorf("%s:%d: %q is in no row of the table of what is run, and what not", page.Name, c.Number, c.Text)
			}
			if line == "" {
				if err := checkNames(moduleRoot(), c.Text); err != nil {
					t.Errorf("%s:%d: %s: %v", page.Name, c.Number, c.Text, err)
				}
				continue
			}
		}
		ran++
		// The module by its own path, under which it has been compiled already.
		line = strings.ReplaceAll(line, "=../spillway", "="+moduleRoot())
		where := filepath.Join(dir, "where")
		sh := exec.Command("sh", "-c", "cd '"+at+"' || exit\n"+line+"\nstatus=$?\npwd >'"+where+"'\n(exit $status)")
		sh.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "TMPDIR="+tmp, "CUDA_VISIBLE_DEVICES=", // as where there is no GPU
			"GOPROXY=off", "GONOSUMDB=*", "GOFLAGS="+trimmed, "GOTOOLCHAIN=local")
		var printed bytes.Buffer
		sh.Stdout, sh.Stderr = &printed, &printed
		var exit *exec.ExitError
		if err := sh.Run(); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if now, err := os.ReadFile(where); err == nil {
			at = strings.TrimSpace(string(now))
		}
		ended := sh.ProcessState.ExitCode()
		if ended != 0 && strings.HasPrefix(line, "spillbench") {
			fmt.Fprintf(&printed, "exit status %d\n", ended) // as "go run" does
		}
		same := func(s string) string { return moves.ReplaceAllString(s, "$1\n") }
		if c.Console && !docstest.Prints(same(c.Output), same(printed.String())) {
			t.Errorf("%s:%d: %s prints\n%s\nand not\n%s", page.Name, c.Number, c.Text, printed.String(), c.Output)
			break // what comes after it may need it
		}
		if !c.Console && ended != status {
			t.Errorf("%s:%d: %s ends with %d, and not with %d\n%s", page.Name, c.Number, line, ended, status, printed.String())
			break
		}
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("%s: left %v (%v)", page.Name, left, err)
	}
	return ran
}

// smaller returns a command as it is run here; empty: it is not. It is false if typed has to say how,
// and does not.
func smaller(line string, met map[string]bool) (string, bool) {
	key := line
	if line == "spillbench" || strings.HasPrefix(line, "spillbench -") {
		key = "spillbench run" + strings.TrimPrefix(line, "spillbench")
	}
	found := -1
	for i, k := range typed {
		if strings.HasPrefix(key+" ", k.begins+" ") && (found < 0 || len(k.begins) > len(typed[found].begins)) {
			found = i
		}
	}
	if found < 0 {
		if !strings.HasPrefix(line, "spillbench") {
			return "", false
		}
		return line, true
	}
	k := typed[found]
	met[k.begins] = true
	if k.not != "" {
		return "", true
	}
	line, to, redirected := strings.Cut(line, " >")
	line += k.flags
	if redirected {
		line += " >" + to
	}
	if k.first != "" {
		line = k.first + "\n" + line
	}
	return line, true
}

// checkNames returns an error if a command that no test runs names a package, script, manifest, test
// or benchmark that the module at root does not have.
func checkNames(root, command string) error {
	words, module := strings.Fields(command), root
	for i, word := range words {
		switch {
		case word == "&&":
			root = module
		case i > 0 && words[i-1] == "-C":
			root = filepath.Join(module, word)
		case i > 0 && (words[i-1] == "-run" || words[i-1] == "-bench") && word != "xxx" && word != ".":
			name := regexp.MustCompile(`(?m)^func \w*(?:` + strings.Trim(word, "'^$") + `)`)
			found := false
			err := filepath.WalkDir(root, func(file string, _ os.DirEntry, err error) error {
				if err != nil || found || !strings.HasSuffix(file, "_test.go") {
					return err
				}
				text, err := os.ReadFile(file)
				found = name.Match(text)
				return err
			})
			if err != nil {
				return err
			}
			if !found {
				return fmt.Errorf("no test matches %s", word)
			}
		case strings.HasPrefix(word, "./"), strings.HasPrefix(word, "scripts/"), strings.HasPrefix(word, "deploy/"), word == ".ci/run":
			if _, err := os.Stat(filepath.Join(root, strings.TrimSuffix(word, "..."))); err != nil {
				return err
			}
		}
	}
	return nil
}

func TestCheckNames(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	for command, want := range map[string]bool{
		"go test ./convert -run xxx -bench Move": true, "go -C cmd/spillway-device-plugin test ./...": true,
		"go test -run '^TestCheckNames$' ./cmd/spillbench": true, ".ci/run": true, "kubectl apply -f deploy/device-plugin.yaml": true,
		"go -C observe/spillwayprom test ./... && go -C observe/spillwayotel test ./...": true,
		"go test ./gone": false, "go test ./convert -run xxx -bench ThatIsGone": false, "go -C gone test ./...": false,
		"scripts/gone.sh build": false, "kubectl apply -f deploy/gone.yaml": false, "go test -run '^TestThatIsGone$' ./repository": false,
	} {
		if err := checkNames(moduleRoot(), command); (err == nil) != want {
			t.Errorf("%s: %v, want it to be right: %v", command, err, want)
		}
	}
}
