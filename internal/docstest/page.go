// Package docstest reads the Markdown pages of this module and checks them against the module. Only
// tests use it.
//
//	*.md, docs/**/*.md ── Read ──▶ Page ─┬─ Blocks    fenced code: go, sh, console, …
//	                                     ├─ Commands  what readers are to type
//	                                     └─ Prose     all other lines
//
// The tests of this package check links, the length of lines, and Go code. The tests of
// cmd/spillbench run the commands and compare their output with the blocks of the language console.
package docstest

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Page is one Markdown file.
type Page struct {
	Name   string // slash-separated, relative to the root of the module
	Blocks []Block
	Prose  []Line // the lines outside of blocks
}

// Line is one line of a page.
type Line struct {
	Number int // counted from 1
	Text   string
}

// Block is fenced code.
type Block struct {
	Language string // the word after the fence; may be empty
	Note     string // NAME, if the comment <!-- file: NAME --> precedes the block
	Lines    []Line
}

// Text returns the lines of the block as one string.
func (b Block) Text() string {
	var text strings.Builder
	for _, l := range b.Lines {
		text.WriteString(l.Text + "\n")
	}
	return text.String()
}

// Names lists the pages of the module at root: those of its top directory and all below docs.
func Names(root string) ([]string, error) {
	module := os.DirFS(root)
	names, err := fs.Glob(module, "*.md")
	if err != nil {
		return nil, err
	}
	err = fs.WalkDir(module, "docs", func(name string, _ fs.DirEntry, err error) error {
		if path.Ext(name) == ".md" {
			names = append(names, name)
		}
		return err
	})
	return names, err
}

// Read reads the page called name of the module at root.
func Read(root, name string) (Page, error) {
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		return Page{}, err
	}
	return Parse(name, string(text))
}

var fileNote = regexp.MustCompile(`^<!-- file: (\S+) -->$`)

// Parse divides text into blocks and prose. It returns an error if a fence is not closed.
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
		if m := fileNote.FindStringSubmatch(line.Text); m != nil {
			note = m[1]
		}
	}
	if open != nil {
		return p, fmt.Errorf("%s: a fence is not closed", name)
	}
	return p, nil
}

// Command is a command line that a page asks its readers to type.
type Command struct {
	Line
	Typed   string // the line as the page has it, with its comment
	Prose   bool   // it is inline code
	Console bool   // it is in a console block, and Output is what the page shows below it
	Output  string
}

var inlineCode = regexp.MustCompile("`([^`]+)`")

// Commands returns the command lines of a page in their order, without trailing comments: every
// line of sh blocks, the lines after "$ " of console blocks, and in blocks without a language and in
// inline code those that begin with one of prefixes.
func (p Page) Commands(prefixes ...string) []Command {
	begins := func(s string) bool {
		return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(s+" ", prefix+" ") })
	}
	var all []Command
	add := func(number int, typed string, c Command) {
		text, _, _ := strings.Cut(typed, " #")
		c.Line, c.Typed = Line{number, strings.TrimSpace(text)}, typed
		if c.Text != "" && !strings.HasPrefix(c.Text, "#") {
			all = append(all, c)
		}
	}
	for _, b := range p.Blocks {
		for _, l := range b.Lines {
			typed, dollar := strings.CutPrefix(l.Text, "$ ")
			switch {
			case b.Language == "sh", b.Language == "" && begins(l.Text):
				add(l.Number, l.Text, Command{})
			case b.Language == "console" && dollar:
				add(l.Number, typed, Command{Console: true})
			case b.Language == "console" && len(all) > 0:
				all[len(all)-1].Output += l.Text + "\n"
			}
		}
	}
	for _, l := range p.Prose {
		for _, m := range inlineCode.FindAllStringSubmatch(l.Text, -1) {
			if begins(m[1]) {
				add(l.Number, m[1], Command{Prose: true})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b Command) int { return a.Number - b.Number })
	return all
}

var (
	figure = regexp.MustCompile(`[0-9]+([.,:][0-9]+)*( ?(B|KiB|MiB|GiB|ns|µs|ms|s|%)\b)?`)
	row    = regexp.MustCompile(`0( 0)+\b`) // adjacent figures of a table, some of which may be empty
)

// Prints reports whether printed is what a page shows. Figures with their units, the number of
// adjacent figures, and the width of columns may differ. "…" in the page matches any text, including
// line breaks; at the beginning of a line it also matches nothing.
func Prints(page, printed string) bool {
	plain := func(s string) string {
		var kept []string
		for line := range strings.Lines(s) {
			if line = strings.Join(strings.Fields(figure.ReplaceAllString(line, "0")), " "); line != "" {
				kept = append(kept, row.ReplaceAllString(line, "0"))
			}
		}
		return strings.Join(kept, "\n")
	}
	pattern := regexp.QuoteMeta(strings.ReplaceAll(plain(page), "\n…", "…"))
	return regexp.MustCompile(`^(?s:` + strings.ReplaceAll(pattern, "…", `.*`) + `)$`).MatchString(plain(printed))
}
