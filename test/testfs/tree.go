package testfs

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// Kind says what an entry of a tree is.
type Kind uint8

// What an entry can be.
const (
	File Kind = iota
	Directory
	Link
)

// Entry is one file, directory or link of a tree.
type Entry struct {
	Path string // below the root, with slashes, clean
	Kind Kind
	Text string // a file's content, or a link's target
}

// ParseTree reads the entries of a tree in the order they are written. The first
// header that cannot be right (an empty path, one that leaves the tree, a path
// written twice) is the error.
func ParseTree(text string) ([]Entry, error) {
	var entries []Entry
	var body strings.Builder // of the last entry
	ended := func() {
		if len(entries) > 0 {
			entries[len(entries)-1].Text += body.String()
		}
		body.Reset()
	}
	seen := map[string]bool{}
	number := 0
	for line := range strings.Lines(text) {
		number++
		line = strings.TrimSuffix(line, "\n")
		header, ok := cutHeader(line)
		if !ok {
			if n := len(entries); n > 0 && entries[n-1].Kind != File {
				return nil, fmt.Errorf("testfs: line %d: text below %q, which is no file", number, entries[n-1].Path)
			}
			body.WriteString(line + "\n")
			continue
		}
		ended()
		e := Entry{Path: header}
		if name, target, ok := strings.Cut(header, " -> "); ok {
			e = Entry{Path: name, Kind: Link, Text: target}
		} else if name, ok := strings.CutSuffix(header, "/"); ok {
			e = Entry{Path: name, Kind: Directory}
		}
		if !filepath.IsLocal(e.Path) || path.Clean(e.Path) != e.Path || e.Path == "." {
			return nil, fmt.Errorf("testfs: line %d: %q is not a path below the root of the tree", number, e.Path)
		}
		if seen[e.Path] {
			return nil, fmt.Errorf("testfs: line %d: %q is there twice", number, e.Path)
		}
		seen[e.Path] = true
		entries = append(entries, e)
	}
	ended()
	return entries, nil
}

func cutHeader(line string) (string, bool) {
	line, ok := strings.CutPrefix(line, "-- ")
	if !ok {
		return "", false
	}
	return strings.CutSuffix(line, " --")
}

// WriteTree makes the entries below dir, which must exist, and the directories
// that they need. Files and links that are in the way are errors.
func WriteTree(dir string, entries []Entry) error {
	root, err := os.OpenRoot(dir)
	for i := 0; err == nil && i < len(entries); i++ {
		err = write(root, entries[i])
	}
	if root != nil {
		err = errors.Join(err, root.Close())
	}
	if err != nil {
		return fmt.Errorf("testfs: %w", err)
	}
	return nil
}

func write(root *os.Root, e Entry) error {
	name := filepath.FromSlash(e.Path)
	if e.Kind == Directory {
		return root.MkdirAll(name, 0o755)
	}
	if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	if e.Kind == Link {
		return root.Symlink(filepath.FromSlash(e.Text), name)
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.WriteString(e.Text)
	return errors.Join(err, f.Close())
}

// UnpackTree makes the tree that the file holds below dir, which must exist.
func UnpackTree(file, dir string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("testfs: %w", err)
	}
	entries, err := ParseTree(string(text))
	if err != nil {
		return fmt.Errorf("%w, in %s", err, file)
	}
	return WriteTree(dir, entries)
}
