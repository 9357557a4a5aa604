package docstest

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

const root = "../.."

func pages(t *testing.T) []Page {
	t.Helper()
	names, err := Names(root)
	if err != nil {
		t.Fatal(err)
	}
	var all []Page
	for _, name := range names {
		p, err := Read(root, name)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	if len(all) < 10 {
		t.Fatalf("only %d pages were found", len(all))
	}
	return all
}

// TestGo: the Go code of all pages compiles with the module as it is.
func TestGo(t *testing.T) {
	t.Parallel()
	c, err := NewChecker(root)
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, p := range pages(t) {
		for _, b := range p.Blocks {
			if b.Language == "go" {
				checked++
				for _, wrong := range c.Check(p.Name, b) {
					t.Error(wrong)
				}
			}
		}
	}
	if checked < 3 {
		t.Errorf("only %d blocks were found", checked)
	}
}

// TestFragmentsRun: the fragments of Go code of all pages do what they say without an error. A whole
// file is in a console block, too, which TestCommands of cmd/spillbench runs.
func TestFragmentsRun(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("needs seconds: run without -short")
	}
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux: what persists does")
	}
	all := pages(t)
	dir, spill := t.TempDir(), t.TempDir()
	here := strings.NewReplacer(`"/var/spill"`, `"`+spill+`"`, `"/fast/spill"`, `"`+spill+`"`, "1 << 40", "1 << 24")
	for _, p := range all {
		for _, b := range p.Blocks {
			for i, l := range b.Lines {
				b.Lines[i].Text = here.Replace(l.Text)
			}
		}
	}
	programs, err := Programs(all)
	if err != nil {
		t.Fatal(err)
	}
	ran := 0
	for _, p := range programs {
		if _, err := os.Stat(filepath.Join(root, p.Dir, "go.mod")); err != nil {
			continue // as TestGo does
		}
		ran += p.Calls
		file, tmp := filepath.Join(dir, "main.go"), t.TempDir()
		if err := os.WriteFile(file, []byte(p.Source), 0o600); err != nil {
			t.Fatal(err)
		}
		run := exec.Command("go", "run", file)
		run.Dir = filepath.Join(root, p.Dir)
		run.Env = append(os.Environ(), "TMPDIR="+tmp, "CUDA_VISIBLE_DEVICES=") // as where there is no GPU
		if printed, err := run.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, printed)
		}
		if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
			t.Errorf("left %v (%v)", left, err)
		}
	}
	if ran < 10 {
		t.Errorf("only %d fragments were run", ran)
	}
}

// TestChecked: fragments get the checks that pages leave out, and no others.
func TestChecked(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ text, want string }{
		{"x := 1", "x := 1; _ = x"},
		{"x, err := f() // why", "x, err := f(); _ = x; _ = err; if err != nil { return err } // why"},
		{"err = f()\nif err == io.EOF {\n}", "err = f(); _ = err\nif err == io.EOF {\n}"},
		{"err = f()\nif x {\n}", "err = f(); _ = err; if err != nil { return err }\nif x {\n}"},
		{"for x, err := range f {\n\tuse(x)\n}", "for x, err := range f { _ = x; _ = err; if err != nil { return err };\n\tuse(x)\n}"},
	} {
		if got, err := checked(tt.text); err != nil || got != tt.want {
			t.Errorf("%q becomes\n%s\nand not\n%s\n(%v)", tt.text, got, tt.want, err)
		}
	}
	if _, err := checked("func f() {}"); err == nil {
		t.Error("a declaration is taken for a fragment")
	}
}

// TestLinks: all pages and files that pages link to are there, and so are the headings.
func TestLinks(t *testing.T) {
	t.Parallel()
	for _, p := range pages(t) {
		for _, wrong := range Links(root, p) {
			t.Error(wrong)
		}
	}
}

// TestTyped: what pages tell people to type names what is there.
func TestTyped(t *testing.T) {
	t.Parallel()
	for _, p := range pages(t) {
		for _, wrong := range Typed(root, p) {
			t.Error(wrong)
		}
	}
}

// TestNamed: the tests and files that pages name are there.
func TestNamed(t *testing.T) {
	t.Parallel()
	tests, err := Tests(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pages(t) {
		for _, wrong := range Named(root, tests, p) {
			t.Error(wrong)
		}
	}
}

// TestIdentifiers: the types, fields and methods of this module that pages name exist. Decisions and
// the changelog may name former ones.
func TestIdentifiers(t *testing.T) {
	t.Parallel()
	c, err := NewChecker(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pages(t) {
		if strings.HasPrefix(p.Name, "docs/decisions/") || p.Name == "CHANGELOG.md" {
			continue
		}
		for _, wrong := range c.Identifiers(p) {
			t.Error(wrong)
		}
	}
}

// TestStyle: lines of prose are short enough to be read in a terminal.
func TestStyle(t *testing.T) {
	t.Parallel()
	for _, p := range pages(t) {
		for _, wrong := range Style(p) {
			t.Error(wrong)
		}
	}
}

// TestLanguages: each block says what it is, so that none stays unchecked by accident.
func TestLanguages(t *testing.T) {
	t.Parallel()
	allowed := " go sh console mermaid yaml json "
	for _, p := range pages(t) {
		for _, b := range p.Blocks {
			if b.Language != "" && !strings.Contains(allowed, " "+b.Language+" ") {
				t.Errorf("%s: no test knows the language %q", p.Name, b.Language)
			}
		}
	}
}

// TestRotIsFound: each check fails on a page that has become wrong, and not on one that is right.
func TestRotIsFound(t *testing.T) {
	t.Parallel()
	c, err := NewChecker(root)
	if err != nil {
		t.Fatal(err)
	}
	code := func(p Page) (all []string) {
		for _, b := range p.Blocks {
			all = append(all, c.Check(p.Name, b)...)
		}
		return all
	}
	links := func(p Page) []string { return Links(root, p) }
	typed := func(p Page) []string { return Typed(root, p) }
	tests, err := Tests(root)
	if err != nil {
		t.Fatal(err)
	}
	named := func(p Page) []string { return Named(root, tests, p) }
	identifiers := func(p Page) []string { return c.Identifiers(p) }
	const head = "package main\nimport \"github.com/spillway-db/spillway\"\n"
	for _, tt := range []struct {
		what, text string
		check      func(Page) []string
		want       string // part of what is found; empty: nothing is
	}{
		{"a fragment", "```go\neng, err := spillway.Open(ctx, spillway.Config{})\n```\n", code, ""},
		{"a fragment of declarations", "```go\nfunc f(e spillway.Event) { fmt.Println(e.Kind) }\n```\n", code, ""},
		{"a file", "```go\n" + head + "func main() { _ = spillway.Bytes(1) }\n```\n", code, ""},
		{"a method that is gone", "```go\n\neng.Spill(ctx)\n```\n", code, "docs/x.md:3"},
		{"a field that is gone", "```go\ncfg := spillway.Config{Dir: \"x\"}\n```\n", code, "unknown field Dir"},
		{"an argument too few", "```go\nplan, err := eng.Plan()\n```\n", code, "not enough arguments"},
		{"a name that nothing declares", "```go\neng.Explain(victim)\n```\n", code, "undefined: victim"},
		{"no Go", "```go\neng.Plan(\n```\n", code, "docs/x.md:"},
		{"a file that imports in vain", "```go\n" + head + "func main() {}\n```\n", code, "imported and not used"},
		{"a file with a mistake", "```go\n" + head + "func main() { spillway.Gone() }\n```\n", code, "undefined: spillway.Gone"},
		{"links", "[a](embedding.md#getting-batches) [b](../README.md) [c](#here) [d](https://example.com/x)\n# Here\n", links, ""},
		{"a page that is gone", "[a](gone.md)\n", links, "gone.md: no such file"},
		{"a heading that is gone", "[a](embedding.md#gone)\n", links, "no such heading"},
		{"a heading of its own that is gone", "[a](#gone)\n", links, "no such heading"},
		{"a reference to a file that is gone", "[a]: ../gone.go\n", links, "no such file"},
		{"commands", "```\ngo test ./convert -run xxx -bench Move\n```\n`go -C cmd/spillway-device-plugin test ./...`\n", typed, ""},
		{"a package that is gone", "`go test ./gone`\n", typed, "no such package"},
		{"a benchmark that is gone", "| `go test ./convert -run xxx -bench Gone` |\n", typed, "nothing there is called Gone"},
		{"a test that is gone", "```sh\ngo test -run '^TestWhichIsNotThere$' ./repository\n```\n", typed, "nothing there is called TestWhichIsNotThere"},
		{"a script that is gone", "```sh\nscripts/gone.sh build\n```\n", typed, "no such script"},
		{"a file for a cluster that is gone", "```sh\nkubectl apply -f deploy/gone.yaml\n```\n", typed, "no such file"},
		{"a command that no test knows", "```console\n$ spilbench run\n```\n", typed, "no test knows"},
		{"names", "`TestRotIsFound`, `internal/docstest/rules.go`, `Test`, `x.go`\n", named, ""},
		{"the name of a test that is gone", "`TestWhichIsNotThere`\n", named, "TestWhichIsNotThere: no such test"},
		{"the name of a file that is gone", "`internal/gone.go`\n", named, "no such file"},
		{"identifiers", "`Engine.Reserve`, `Config.Limits`, `tier.Space.SetMarks`, `batch.Never`, `errors.Is(err, x)`\n", identifiers, ""},
		{"a method that is gone in prose", "`Engine.Gone(x)`\n", identifiers, "docs/x.md:1: Engine.Gone: no such name"},
		{"a type of a package that is gone", "`tier.Gone`\n", identifiers, "tier.Gone: no such name"},
		{"a field of a package that is gone", "`tier.Space.Gone`\n", identifiers, "tier.Space.Gone: no such name"},
		{"a line of 100 columns", strings.Repeat("five ", 20) + "\n| " + strings.Repeat("five ", 30) + "|\n", Style, ""},
		{"a line of 101 columns", strings.Repeat("five ", 20) + "!\n", Style, "101 columns"},
		{"a registry", "```sh\npodman pull docker.io/x\n```\n", Style, "docker.io"},
	} {
		p, err := Parse("docs/x.md", tt.text)
		if err != nil {
			t.Fatalf("%s: %v", tt.what, err)
		}
		switch found := strings.Join(tt.check(p), "\n"); {
		case tt.want == "" && found != "":
			t.Errorf("%s: %s", tt.what, found)
		case !strings.Contains(found, tt.want):
			t.Errorf("%s: found %q, not %q", tt.what, found, tt.want)
		}
	}
	if _, err := Parse("docs/x.md", "```go\n"); err == nil {
		t.Error("a fence that is not closed")
	}
}

// TestPrints: figures and blanks may differ from the page, words and lines may not.
func TestPrints(t *testing.T) {
	t.Parallel()
	const page = "gpu:0  sim  64.0 MiB   12.5 s\n…\nverified: all 97 digests\n"
	if !Prints("sum …, of 10\n", "sum f7, of 20\n") { // a comma behind a figure is no part of it
		t.Error("a sum that ends with a figure")
	}
	for printed, want := range map[string]bool{
		page: true,
		"gpu:0 sim 1.5 GiB 3 ms\n\nmore\nand more\nverified: all 9 digests\n": true,
		"gpu:0 sim 1.5 GiB 3 ms\nverified: all 9 digests\n":                   true,
		"gpu:0 sim\nverified: all 9 digests\n":                                false,
		"gpu:0 sim 1.5 GiB 3 ms\nmore\nfailed: all 9 digests\n":               false,
		"gpu:0 cuda 1.5 GiB 3 ms\nmore\nverified: all 9 digests\n":            false,
		"": false,
		"gpu:0 sim 64.0 MiB 12.5 s\nsum f0, of\nverified: all 97 digests\n": true,
	} {
		if Prints(page, printed) != want {
			t.Errorf("%q: not %v", printed, want)
		}
	}
}
