package docstest

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// columns is how long a line of prose may be.
const columns = 100

var (
	link       = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	linkTarget = regexp.MustCompile(`^\[[^\]]+\]: (\S+)$`)
	heading    = regexp.MustCompile(`^#+ (.*)$`)
	notInSlug  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	registry   = regexp.MustCompile(`\b(docker\.io|quay\.io|ghcr\.io|registry\.k8s\.io|registry\.npmjs\.org|pypi\.org|(proxy|sum)\.golang\.org)\b`)
)

// Links returns what is wrong with a page's links to other pages and files. Links to the web are
// not followed.
func Links(root string, p Page) []string {
	var wrong []string
	for _, l := range p.Prose {
		targets := link.FindAllStringSubmatch(l.Text, -1)
		if m := linkTarget.FindStringSubmatch(l.Text); m != nil {
			targets = append(targets, m)
		}
		for _, m := range targets {
			if strings.HasPrefix(m[1], "https://") {
				continue
			}
			file, anchor, _ := strings.Cut(m[1], "#")
			name := p.Name
			if file != "" {
				name = path.Join(path.Dir(p.Name), file)
			}
			if _, err := os.Stat(filepath.Join(root, name)); err != nil && file != "" {
				wrong = append(wrong, fmt.Sprintf("%s:%d: %s: no such file", p.Name, l.Number, m[1]))
				continue
			}
			if anchor == "" {
				continue
			}
			to := p
			if name != p.Name {
				var err error
				if to, err = Read(root, name); err != nil {
					wrong = append(wrong, fmt.Sprintf("%s:%d: %v", p.Name, l.Number, err))
					continue
				}
			}
			if !slices.ContainsFunc(to.Prose, func(l Line) bool { return slug(l.Text) == anchor }) {
				wrong = append(wrong, fmt.Sprintf("%s:%d: %s: no such heading", p.Name, l.Number, m[1]))
			}
		}
	}
	return wrong
}

// slug is the anchor of a heading; empty if the line is none.
func slug(text string) string {
	m := heading.FindStringSubmatch(text)
	if m == nil {
		return ""
	}
	return strings.ReplaceAll(notInSlug.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")
}

// Style returns the lines of prose that are too long, and those that name a registry's host. Rows of
// tables may be longer, and lines that are one link.
func Style(p Page) []string {
	var wrong []string
	for _, l := range p.Prose {
		if n := utf8.RuneCountInString(l.Text); n > columns && !strings.HasPrefix(l.Text, "|") && strings.Contains(l.Text, " ") {
			wrong = append(wrong, fmt.Sprintf("%s:%d: %d columns, and %d are allowed", p.Name, l.Number, n, columns))
		}
	}
	lines := slices.Clone(p.Prose)
	for _, b := range p.Blocks {
		lines = append(lines, b.Lines...)
	}
	for _, l := range lines {
		if host := registry.FindString(l.Text); host != "" {
			wrong = append(wrong, fmt.Sprintf("%s:%d: names %s", p.Name, l.Number, host))
		}
	}
	return wrong
}

// known are the commands of lines in blocks of the languages sh and console, by how they are
// checked. A line that begins with another word is a mistake, so that nothing stays unchecked by
// accident.
var known = map[string]func(root string, words []string) error{
	"go":         goCommand,
	"spillbench": nil, // by the tests of that command
	"mkdir":      nil, "cd": nil, "git": nil, "kubectl": fileArguments, "podman": fileArguments, "kind": nil, "scp": nil, "sed": nil, "ssh": nil, "benchstat": nil, "echo": nil, "ulimit": nil, "mount": nil, "umount": nil, "mv": nil, "export": nil,
}

// Typed returns what is wrong with commands: words that no test knows, packages and scripts that are
// not there, tests and benchmarks that no package has.
func Typed(root string, p Page) []string {
	var wrong []string
	for _, l := range p.Commands("go test", "go run", "go build", "go vet", "go get", "go -C", "scripts/gpu-check.sh", "scripts/duckdb", ".ci/run") {
		for part := range strings.SplitSeq(l.Text, "&&") {
			words := strings.Fields(part)
			for len(words) > 0 && strings.Contains(words[0], "=") {
				words = words[1:] // a variable of the environment
			}
			if len(words) == 0 {
				continue
			}
			check, ok := known[words[0]]
			switch {
			case strings.Contains(words[0], "/"):
				if _, err := os.Stat(filepath.Join(root, words[0])); err != nil {
					wrong = append(wrong, fmt.Sprintf("%s:%d: %s: no such script", p.Name, l.Number, words[0]))
				}
			case !ok:
				wrong = append(wrong, fmt.Sprintf("%s:%d: no test knows the command %q", p.Name, l.Number, words[0]))
			case check != nil:
				if err := check(root, words[1:]); err != nil {
					wrong = append(wrong, fmt.Sprintf("%s:%d: %q: %v", p.Name, l.Number, l.Text, err))
				}
			}
		}
	}
	return wrong
}

// fileArguments looks whether the files are there that flags -f name.
func fileArguments(root string, words []string) error {
	for i, word := range words {
		if word == "-f" && i+1 < len(words) {
			if _, err := os.Stat(filepath.Join(root, words[i+1])); err != nil {
				return fmt.Errorf("%s: no such file", words[i+1])
			}
		}
	}
	return nil
}

// goCommand checks a command of the go tool: its packages, and the tests and benchmarks that it
// names.
func goCommand(root string, words []string) error {
	if len(words) > 2 && words[0] == "-C" {
		root, words = filepath.Join(root, words[1]), words[2:]
	}
	if len(words) == 0 || !slices.Contains([]string{"test", "run", "build", "vet", "get", "mod", "version", "install"}, words[0]) {
		return fmt.Errorf("no test knows that")
	}
	var packages []string
	patterns := make(map[string]string)
	for i := 1; i < len(words); i++ {
		name := strings.TrimLeft(words[i], "-")
		switch {
		case slices.Contains([]string{"-run", "-bench"}, words[i]) && i+1 < len(words):
			patterns[name] = strings.Trim(words[i+1], "'^$")
			i++
		case slices.Contains([]string{"-tags", "-cpu", "-timeout", "-replace"}, words[i]):
			i++
		case strings.HasPrefix(words[i], "./") || words[i] == ".":
			packages = append(packages, strings.TrimSuffix(words[i], "/..."))
			if words[0] == "run" {
				i = len(words) // the rest is the program's
			}
		}
	}
	for _, dir := range packages {
		if info, err := os.Stat(filepath.Join(root, dir)); err != nil || !info.IsDir() {
			return fmt.Errorf("%s: no such package", dir)
		}
	}
	for flag, pattern := range patterns {
		if pattern == "xxx" || pattern == "." { // no test, or each
			continue
		}
		kind := map[string]string{"run": "Test|Example|Fuzz", "bench": "Benchmark"}[flag]
		of, err := regexp.Compile(`(?m)^func ((` + kind + `)\w*)\(`)
		if err != nil {
			return err
		}
		want, err := regexp.Compile(strings.Split(pattern, "/")[0])
		if err != nil {
			return err
		}
		if !declared(root, packages, strings.Contains(strings.Join(words, " "), "..."), of, want) {
			return fmt.Errorf("nothing there is called %s", pattern)
		}
	}
	return nil
}

// declared reports whether the tests of packages, and of those below them, declare a function.
func declared(root string, packages []string, below bool, of, want *regexp.Regexp) bool {
	for _, dir := range packages {
		top := filepath.Join(root, dir)
		found := false
		_ = filepath.WalkDir(top, func(name string, d os.DirEntry, err error) error {
			if err != nil || found || d.IsDir() && name != top && !below {
				return filepath.SkipDir
			}
			if strings.HasSuffix(name, "_test.go") {
				text, err := os.ReadFile(name)
				if err != nil {
					return err
				}
				for _, m := range of.FindAllSubmatch(text, -1) {
					found = found || want.Match(m[1])
				}
			}
			return nil
		})
		if found {
			return true
		}
	}
	return false
}

var (
	testName = regexp.MustCompile(`^(Test|Benchmark|Example|Fuzz)\w+$`)
	fileName = regexp.MustCompile(`^[\w.-]+(/[\w.-]+)+\.(go|md|sh|json|yaml)$`)
	function = regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Example|Fuzz)\w+)\(`)
)

// Tests returns the names of all tests, benchmarks and examples of the module whose root is a
// directory, those of nested modules too.
func Tests(root string) (map[string]bool, error) {
	names := make(map[string]bool)
	err := filepath.WalkDir(root, func(name string, d os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(name, "_test.go") {
			return err
		}
		text, err := os.ReadFile(name)
		for _, m := range function.FindAllSubmatch(text, -1) {
			names[string(m[1])] = true
		}
		return err
	})
	return names, err
}

// Named returns the tests and files that a page names between backquotes, and that are not there.
func Named(root string, tests map[string]bool, p Page) []string {
	var wrong []string
	for _, l := range p.Prose {
		for _, m := range inlineCode.FindAllStringSubmatch(l.Text, -1) {
			switch {
			case testName.MatchString(m[1]) && !tests[m[1]]:
				wrong = append(wrong, fmt.Sprintf("%s:%d: %s: no such test", p.Name, l.Number, m[1]))
			case fileName.MatchString(m[1]):
				_, err := os.Stat(filepath.Join(root, m[1]))
				_, beside := os.Stat(filepath.Join(root, path.Dir(p.Name), m[1]))
				if err != nil && beside != nil {
					wrong = append(wrong, fmt.Sprintf("%s:%d: %s: no such file", p.Name, l.Number, m[1]))
				}
			}
		}
	}
	return wrong
}
