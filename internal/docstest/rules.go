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
	"unicode/utf8"
)

var (
	link      = regexp.MustCompile(`(?:\]\(|^\[[^\]]+\]: )([^)\s]+)`)
	fileName  = regexp.MustCompile(`^[\w.-]+(/[\w.-]+)+\.(go|md|sh|json|yaml)$`)
	heading   = regexp.MustCompile(`^#+ (.*)$`)
	notInSlug = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	quoted    = regexp.MustCompile("`[^`]*`|\\*[^*]+\\*") // code, and quoted messages
	dialect   = regexp.MustCompile(`(?i)\b(anew|afresh|in vain|thereby|told|whichever|crooked|of late)\b`)
	registry  = regexp.MustCompile(`\b((docker|quay|ghcr|registry\.k8s)\.io|` +
		`(registry\.npmjs|pypi|(proxy|sum)\.golang)\.org)\b`)
)

// Links returns the links of a page whose file or heading does not exist, and the file names in
// inline code for which no file exists relative to the root or the page. It follows no web links.
func Links(root string, p Page) (wrong []string) {
	exists := func(name string) bool {
		_, err := os.Stat(filepath.Join(root, name))
		return err == nil
	}
	for _, l := range p.Prose {
		report := func(what, problem string) {
			wrong = append(wrong, fmt.Sprintf("%s:%d: %s: %s", p.Name, l.Number, what, problem))
		}
		for _, m := range inlineCode.FindAllStringSubmatch(l.Text, -1) {
			if fileName.MatchString(m[1]) && !exists(m[1]) && !exists(path.Join(path.Dir(p.Name), m[1])) {
				report(m[1], "no such file")
			}
		}
		for _, m := range link.FindAllStringSubmatch(l.Text, -1) {
			if strings.HasPrefix(m[1], "https://") {
				continue
			}
			file, anchor, _ := strings.Cut(m[1], "#")
			to := p
			if file != "" {
				to.Name = path.Join(path.Dir(p.Name), file)
				if !exists(to.Name) {
					report(m[1], "no such file")
					continue
				}
			}
			if anchor == "" {
				continue
			}
			if to.Name != p.Name {
				var err error
				if to, err = Read(root, to.Name); err != nil {
					report(m[1], err.Error())
				}
			}
			if !slices.ContainsFunc(to.Prose, func(l Line) bool { return slug(l.Text) == anchor }) {
				report(m[1], "no such heading")
			}
		}
	}
	return wrong
}

// Functions returns the functions in the second of three columns of a table that no Go file in the third
// declares.
func Functions(root string, p Page) (wrong []string) {
	for _, l := range p.Prose {
		cells := strings.Split(l.Text, "|")
		if len(cells) != 5 { // of them the first and the last are empty
			continue
		}
		var source []byte
		for _, m := range inlineCode.FindAllStringSubmatch(cells[3], -1) {
			if path.Ext(m[1]) == ".go" {
				text, _ := os.ReadFile(filepath.Join(root, m[1])) // Links reports a missing file
				source = append(source, text...)
			}
		}
		for _, m := range inlineCode.FindAllStringSubmatch(cells[2], -1) {
			name := m[1][strings.LastIndex(m[1], ".")+1:]
			declared := regexp.MustCompile(`(?m)^func (\([^)]*\) )?` + regexp.QuoteMeta(name) + `\b`)
			if source != nil && !declared.Match(source) {
				wrong = append(wrong,
					fmt.Sprintf("%s:%d: no file of the row has the function %s", p.Name, l.Number, m[1]))
			}
		}
	}
	return wrong
}

// slug returns the anchor of a heading, or "" if text is not a heading.
func slug(text string) string {
	m := heading.FindStringSubmatch(text)
	if m == nil {
		return ""
	}
	return strings.ReplaceAll(notInSlug.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")
}

// Style returns the lines of prose over 100 columns, except rows of tables and single links, the
// lines of prose with a word that plain English has a better one for, and all lines that name the
// host of a registry.
func Style(p Page) (wrong []string) {
	lines := slices.Clone(p.Prose)
	for _, b := range p.Blocks {
		lines = append(lines, b.Lines...)
	}
	for i, l := range lines {
		n := utf8.RuneCountInString(l.Text)
		if i < len(p.Prose) && n > 100 && !strings.HasPrefix(l.Text, "|") && strings.Contains(l.Text, " ") {
			wrong = append(wrong, fmt.Sprintf("%s:%d: %d columns, at most 100 are allowed", p.Name, l.Number, n))
		}
		if word := dialect.FindString(quoted.ReplaceAllString(l.Text, "")); word != "" && i < len(p.Prose) {
			wrong = append(wrong, fmt.Sprintf("%s:%d: use plain English instead of %q", p.Name, l.Number, word))
		}
		if host := registry.FindString(l.Text); host != "" {
			wrong = append(wrong, fmt.Sprintf("%s:%d: names %s", p.Name, l.Number, host))
		}
	}
	return wrong
}

// Examples returns the code of all files example*_test.go of the module at root, for Fragments.
func Examples(root string) (all []string, err error) {
	err = fs.WalkDir(os.DirFS(root), ".", func(name string, _ fs.DirEntry, err error) error {
		if ok, _ := path.Match("example*_test.go", path.Base(name)); err != nil || !ok {
			return err
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		all = append(all, bare(string(text)))
		return err
	})
	return all, err
}

// Fragments returns the blocks of Go code that are neither whole programs nor, apart from comments,
// consecutive lines of one of examples. go test compiles and runs those.
func Fragments(examples []string, p Page) (wrong []string) {
	for _, b := range p.Blocks {
		if b.Language != "go" || strings.Contains("\n"+b.Text(), "\npackage ") {
			continue
		}
		text := bare(b.Text())
		if !slices.ContainsFunc(examples, func(example string) bool { return strings.Contains(example, text) }) {
			wrong = append(wrong,
				fmt.Sprintf("%s:%d: no file example*_test.go has this code", p.Name, b.Lines[0].Number))
		}
	}
	return wrong
}

// bare returns the code of text without comments and indentation, so that a page can have its own words.
func bare(text string) string {
	lines := "\n"
	for line := range strings.Lines(text) {
		code, _, _ := strings.Cut("\t"+line, "\t//")
		code, _, _ = strings.Cut(code, " //")
		lines += strings.Join(strings.Fields(code), " ") + "\n"
	}
	return lines
}
