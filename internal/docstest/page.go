// Package docstest reads the pages of the documentation, so that tests can hold them to what the
// module is. It is for tests alone.
//
//	README.md, docs/*.md ── Read ──▶ Page ─┬─ Blocks    fenced code: go, sh, console, …
//	                                       ├─ Commands  what readers are to type
//	                                       └─ Prose     the other lines
//
// Its own tests check all pages: Go code against the module, links, commands of the go tool, and
// the lines of prose. They run fragments of Go code. Those of cmd/spillbench run the commands, and hold what they print to
// blocks of the language console. It takes no locks.
package docstest

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Page is one file of the documentation.
type Page struct {
	Name   string // below the root of the module, with slashes
	Blocks []Block
	Prose  []Line // all lines that are in no block
}

// Line is one line of a page.
type Line struct {
	Number int // from 1
	Text   string
}

// Block is fenced code.
type Block struct {
	Language string // what stands behind the fence; empty: nothing
	Note     string // of a comment <!-- file: NAME --> on the line before: the name
	Lines    []Line
}

// Text is the block as one text.
func (b Block) Text() string {
	var text strings.Builder
	for _, l := range b.Lines {
		text.WriteString(l.Text + "\n")
	}
	return text.String()
}

// Names lists the pages of the module whose root is a directory: those of the root, and all below
// docs.
func Names(root string) ([]string, error) {
	names, err := filepath.Glob(filepath.Join(root, "*.md"))
	if err != nil {
		return nil, err
	}
	err = filepath.WalkDir(filepath.Join(root, "docs"), func(path string, d os.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".md") {
			names = append(names, path)
		}
		return err
	})
	for i, name := range names {
		below, relErr := filepath.Rel(root, name)
		if relErr != nil {
			return nil, relErr
		}
		names[i] = filepath.ToSlash(below)
	}
	slices.Sort(names)
	return names, err
}

// Read reads a page.
func Read(root, name string) (Page, error) {
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		return Page{}, err
	}
	return Parse(name, string(text))
}

var fileNote = regexp.MustCompile(`^<!-- file: (\S+) -->$`)

// Parse divides the text of a page. A fence that is not closed is an error.
func Parse(name, text string) (Page, error) {
	p := Page{Name: name}
	var open *Block
	note := ""
	number := 0
	for raw := range strings.Lines(text) {
		number++
		line := Line{number, strings.TrimRight(raw, "\n")}
		language, fence := strings.CutPrefix(line.Text, "```")
		switch {
		case fence && open == nil:
			open = &Block{Language: language, Note: note}
		case fence:
			p.Blocks = append(p.Blocks, *open)
			open = nil
		case open != nil:
			open.Lines = append(open.Lines, line)
		default:
			p.Prose = append(p.Prose, line)
		}
		note = ""
		if m := fileNote.FindStringSubmatch(line.Text); m != nil && open == nil {
			note = m[1]
		}
	}
	if open != nil {
		return p, fmt.Errorf("%s: a fence is not closed", name)
	}
	return p, nil
}

var inlineCode = regexp.MustCompile("`([^`]+)`")

// Commands returns what readers are to type: each line of blocks of the language sh, what stands
// behind "$ " in those of console, and in blocks without a language and between backquotes what
// begins with one of the prefixes. Comments at the end of a line are cut off.
func (p Page) Commands(prefixes ...string) []Line {
	begins := func(s string) bool {
		return slices.ContainsFunc(prefixes, func(prefix string) bool { return s == prefix || strings.HasPrefix(s, prefix+" ") })
	}
	var all []Line
	add := func(number int, s string) {
		s, _, _ = strings.Cut(s, " #")
		if s = strings.TrimSpace(s); s != "" && !strings.HasPrefix(s, "#") {
			all = append(all, Line{number, s})
		}
	}
	for _, b := range p.Blocks {
		for _, l := range b.Lines {
			typed, dollar := strings.CutPrefix(l.Text, "$ ")
			switch {
			case b.Language == "sh", b.Language == "console" && dollar, b.Language == "" && begins(l.Text):
				add(l.Number, typed)
			}
		}
	}
	for _, l := range p.Prose {
		for _, m := range inlineCode.FindAllStringSubmatch(l.Text, -1) {
			if begins(m[1]) {
				add(l.Number, m[1])
			}
		}
	}
	return all
}

// Step is a command of a console block, and what it prints there.
type Step struct {
	Line
	Output string
}

// Steps returns the commands of a console block with what they print.
func (b Block) Steps() []Step {
	var all []Step
	for _, l := range b.Lines {
		if typed, ok := strings.CutPrefix(l.Text, "$ "); ok {
			all = append(all, Step{Line: Line{l.Number, typed}})
		} else if len(all) > 0 {
			all[len(all)-1].Output += l.Text + "\n"
		}
	}
	return all
}

var (
	figure = regexp.MustCompile(`[0-9]+([.,:][0-9]+)*( ?(B|KiB|MiB|GiB|ns|µs|ms|s|%)\b)?`)
	blanks = regexp.MustCompile(`[ \t]+`)
	row    = regexp.MustCompile(`0( 0)+\b`) // figures of a table, of which some are empty now and then
)

// Prints reports whether what a command printed is what a page says. Figures with their units, how
// many stand side by side, and the width of columns may differ. "…" in the page stands for anything, also
// for several lines; at the beginning of a line also for none.
func Prints(page, printed string) bool {
	plain := func(s string) string {
		var kept []string
		for line := range strings.Lines(s) {
			if line = blanks.ReplaceAllString(strings.TrimSpace(figure.ReplaceAllString(line, "0")), " "); line != "" {
				kept = append(kept, row.ReplaceAllString(line, "0"))
			}
		}
		return strings.Join(kept, "\n")
	}
	var pattern strings.Builder
	for i, part := range strings.Split(strings.ReplaceAll(plain(page), "\n…", "…"), "…") {
		if i > 0 {
			pattern.WriteString(`(?s:.*)`)
		}
		pattern.WriteString(regexp.QuoteMeta(part))
	}
	return regexp.MustCompile(`^` + pattern.String() + `$`).MatchString(plain(printed))
}
