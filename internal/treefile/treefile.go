// Package treefile keeps a whole directory tree in one text file: recorded
// machines, whose /sys is made of links and of names such as 0000:3b:00.0.
// Neither can be in a Go module (its archive leaves links out, and a colon in
// any file's name makes "go get" refuse the whole module), so a tree is stored
// as text and unpacked where a test needs it.
//
//	what machine this is (a comment, up to the first header)
//	-- sys/block/sda -> ../devices/pci0000:00/0000:00:17.0/ata1/block/sda --
//	-- mnt/data/ --
//	-- sys/devices/pci0000:00/0000:00:17.0/numa_node --
//	-1
//
// A header line begins with "-- " and ends with " --"; between them is a path below the root of the
// tree. A path that ends with a slash is a directory. One with " -> " is a symbolic link and its
// target. The target may be missing unless it is above the tree, so that dangling links can be
// recorded too. Any other path is a file whose text is the lines that follow. This is the txtar
// format of Go's own tests with links and directories added.
//
// The package has no state and takes no locks; all functions may be called at
// the same time.
package treefile

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

// Parse reads the entries of a tree in the order they are written. The first
// header that cannot be right (an empty path, one that leaves the tree, a path
// written twice) is the error.
func Parse(text string) ([]Entry, error) {
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
				return nil, fmt.Errorf("treefile: line %d: text below %q, which is no file", number, entries[n-1].Path)
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
			return nil, fmt.Errorf("treefile: line %d: %q is not a path below the root of the tree", number, e.Path)
		}
		if seen[e.Path] {
			return nil, fmt.Errorf("treefile: line %d: %q is there twice", number, e.Path)
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

// Write makes the entries below dir, which must exist, and the directories
// that they need. Files and links that are in the way are errors.
func Write(dir string, entries []Entry) error {
	root, err := os.OpenRoot(dir)
	for i := 0; err == nil && i < len(entries); i++ {
		err = write(root, entries[i])
	}
	if root != nil {
		err = errors.Join(err, root.Close())
	}
	if err != nil {
		return fmt.Errorf("treefile: %w", err)
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

// Unpack makes the tree that the file holds below dir, which must exist.
func Unpack(file, dir string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("treefile: %w", err)
	}
	entries, err := Parse(string(text))
	if err != nil {
		return fmt.Errorf("%w, in %s", err, file)
	}
	return Write(dir, entries)
}
