package docstest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const root = "../.."

const module = "github.com/spillway-db/spillway"

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
		t.Fatalf("found only %d pages", len(all))
	}
	return all
}

// rules returns the checks of a page by name.
func rules(t *testing.T) map[string]func(Page) []string {
	t.Helper()
	examples, err := Examples(root)
	if err != nil {
		t.Fatal(err)
	}
	return map[string]func(Page) []string{
		"links":     func(p Page) []string { return Links(root, p) },
		"functions": func(p Page) []string { return Functions(root, p) },
		"style":     Style,
		"fragments": func(p Page) []string { return Fragments(examples, p) },
		"languages": func(p Page) (wrong []string) {
			for _, b := range p.Blocks {
				// Without a language, a test could overlook code or a command.
				if !strings.Contains("  go sh console mermaid yaml json ", " "+b.Language+" ") {
					wrong = append(wrong, p.Name+": no test checks the language "+b.Language)
				}
			}
			return wrong
		},
	}
}

func TestPages(t *testing.T) {
	t.Parallel()
	all := pages(t)
	for name, rule := range rules(t) {
		t.Run(name, func(t *testing.T) {
			for _, p := range all {
				for _, wrong := range rule(p) {
					t.Error(wrong)
				}
			}
		})
	}
}

// TestPrograms runs the whole programs that pages show, as a reader who pastes them would.
func TestPrograms(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("links a program for each: run without -short")
	}
	ran := 0
	for _, p := range pages(t) {
		for _, b := range p.Blocks {
			if b.Language != "go" || !strings.Contains("\n"+b.Text(), "\npackage main") {
				continue
			}
			ran++
			tmp, file := t.TempDir(), filepath.Join(t.TempDir(), "main.go")
			if err := os.WriteFile(file, []byte(b.Text()), 0o600); err != nil {
				t.Fatal(err)
			}
			run := exec.Command("go", "run", file)
			run.Dir = root
			run.Env = append(os.Environ(), "TMPDIR="+tmp, "CUDA_VISIBLE_DEVICES=") // as on a machine without a GPU
			if printed, err := run.CombinedOutput(); err != nil {
				t.Errorf("%s:%d: %v\n%s", p.Name, b.Lines[0].Number, err, printed)
			}
			if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
				t.Errorf("%s:%d: left %v (%v)", p.Name, b.Lines[0].Number, left, err)
			}
		}
	}
	if ran == 0 {
		t.Error("no page has a whole program")
	}
}

// TestRulesCanFail checks that each rule finds what is wrong and nothing else.
func TestRulesCanFail(t *testing.T) {
	t.Parallel()
	all := rules(t)
	for _, tt := range []struct {
		what, rule, text string
		want             string // part of what the rule reports; empty: nothing
	}{
		{"links", "links", "[a](embedding.md#getting-batches) [b](../README.md) [c](#here)\n# Here\n", ""},
		{"a link to the web", "links", "[d](https://example.com/x)\n", ""},
		{"a missing page", "links", "[a](gone.md)\n", "gone.md: no such file"},
		{"a missing heading", "links", "[a](embedding.md#gone)\n", "no such heading"},
		{"a missing heading of its own", "links", "[a](#gone)\n", "no such heading"},
		{"a reference to a missing file", "links", "[a]: ../gone.go\n", "no such file"},
		{"file names", "links", "`internal/docstest/rules.go`, `embedding.md`, `x.go`\n", ""},
		{"a missing file name", "links", "`internal/gone.go`\n", "no such file"},
		{"a function", "functions", "| parse it | `docstest.Parse`, `Page.Text` | `internal/docstest/page.go` |\n", ""},
		{"no files", "functions", "| gone | `docstest.Gone` | nothing |\n", ""},
		{"a missing function", "functions", "| gone | `Parse`, `Gone` | `internal/docstest/page.go` |\n", "function Gone"},
		{"a fragment", "fragments", "```go\n\tb.Hint(batch.Never) // it leaves first\n```\n", ""},
		{"another comment", "fragments", "```go\nb.Hint(batch.Never)   // evicted first\n```\n", ""},
		{"a whole program", "fragments", "```go\npackage main\n```\n", ""},
		{"a changed fragment", "fragments", "```go\nb.Hint(batch.Always) // it leaves first\n```\n", "docs/x.md:2"},
		{"part of a line", "fragments", "```go\nHint(batch.Never) // it leaves first\n```\n", "docs/x.md:2"},
		{"100 columns", "style", strings.Repeat("five ", 20) + "\n| " + strings.Repeat("five ", 30) + "|\n", ""},
		{"101 columns", "style", strings.Repeat("five ", 20) + "!\n", "101 columns"},
		{"code of 101 columns", "style", "```go\n" + strings.Repeat("five ", 20) + "!\n```\n", ""},
		{"a word in code and in a message", "style", "`was made anew`, *writing it anew …*\n```\ntold\n```\n", ""},
		{"a word in prose", "style", "The file is written anew.\n", `instead of "anew"`},
		{"a registry", "style", "```sh\npodman pull docker.io/x\n```\n", "docker.io"},
		{"a language", "languages", "```go\n```\n```\n```\n", ""},
		{"an unknown language", "languages", "```golang\n```\n", "golang"},
	} {
		p, err := Parse("docs/x.md", tt.text)
		if err != nil {
			t.Fatalf("%s: %v", tt.what, err)
		}
		switch found := strings.Join(all[tt.rule](p), "\n"); {
		case tt.want == "" && found != "":
			t.Errorf("%s: %s", tt.what, found)
		case !strings.Contains(found, tt.want):
			t.Errorf("%s: found %q, want %q", tt.what, found, tt.want)
		}
	}
	if _, err := Parse("docs/x.md", "```go\n"); err == nil {
		t.Error("want an error for a fence that is not closed")
	}
}

func TestCommandsOfPages(t *testing.T) {
	t.Parallel()
	p, err := Parse("x.md", "`go test .` and `other`\n```sh\nmake a # makes a\n# nothing\n```\n"+
		"```console\n$ run\none\n$ run 2\n```\n```\ngo vet\ngone\n```\n")
	if err != nil {
		t.Fatal(err)
	}
	want := []Command{
		{Line{1, "go test ."}, "go test .", true, false, ""}, {Line{3, "make a"}, "make a # makes a", false, false, ""},
		{Line{7, "run"}, "run", false, true, "one\n"}, {Line{9, "run 2"}, "run 2", false, true, ""},
		{Line{12, "go vet"}, "go vet", false, false, ""},
	}
	got := p.Commands("go")
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) || got[i] != want[i] {
			t.Fatalf("%+v, want %+v", got, want)
		}
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
