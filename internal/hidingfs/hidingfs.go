// Package hidingfs is a file system for tests. As on FUSE and NFS, a file that is removed while it
// is open stays in its directory under another name until it is closed.
package hidingfs

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/spillway-db/spillway/tier/disk"
)

// FS is a disk.FS. A directory with a hidden file in it cannot be removed. There are no anonymous
// files. It is safe for concurrent use; files must be opened, locked and removed by it alone.
type FS struct {
	disk.FS
	late int

	mu      sync.Mutex // held while the inner file system is called, so that no other call comes between
	nodes   map[string]*node
	closing []closing
	hidden  int // files that were ever hidden
}

// node is a file that is open.
type node struct {
	path string // where it lies now
	open int
	gone bool // it was removed, and is hidden
}

// closing is a close of which the file system knows nothing yet.
type closing struct {
	node *node
	left int // operations until it does
}

var _ disk.FS = (*FS)(nil)

// New returns such a file system over inner, whose paths must be the machine's. Of
// a close it knows only late operations (Remove and ReadDir) afterwards: FUSE
// servers learn of it later, too.
func New(inner disk.FS, late int) *FS {
	return &FS{FS: inner, late: late, nodes: make(map[string]*node)}
}

// Hidden returns how many files were removed while they were open.
func (h *FS) Hidden() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.hidden
}

// OpenAnonymous implements disk.FS: it is errors.ErrUnsupported.
func (h *FS) OpenAnonymous(dir string, _ bool) (disk.File, error) {
	return nil, &fs.PathError{Op: "open", Path: dir, Err: errors.ErrUnsupported}
}

// Create implements disk.FS.
func (h *FS) Create(path string, direct bool) (disk.File, error) {
	return h.open(path, func() (disk.File, error) { return h.FS.Create(path, direct) })
}

// Reopen implements disk.FS.
func (h *FS) Reopen(path string, direct bool) (disk.File, error) {
	return h.open(path, func() (disk.File, error) { return h.FS.Reopen(path, direct) })
}

func (h *FS) open(path string, open func() (disk.File, error)) (disk.File, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, err := open()
	if err != nil {
		return nil, err
	}
	return &hidingFile{f, h, h.enterLocked(path)}, nil
}

// Lock implements disk.FS.
func (h *FS) Lock(path string, create bool) (disk.Lock, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l, err := h.FS.Lock(path, create)
	if err != nil {
		return nil, err
	}
	return &hidingLock{l, h, h.enterLocked(path)}, nil
}

func (h *FS) enterLocked(path string) *node {
	n := h.nodes[path]
	if n == nil {
		n = &node{path: path}
		h.nodes[path] = n
	}
	n.open++
	return n
}

// ReadDir implements disk.FS.
func (h *FS) ReadDir(path string) ([]fs.DirEntry, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.passLocked()
	return h.FS.ReadDir(path)
}

// Remove implements disk.FS.
func (h *FS) Remove(path string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.passLocked()
	n := h.nodes[path]
	if n == nil {
		return h.FS.Remove(path)
	}
	h.hidden++
	name := filepath.Join(filepath.Dir(path), fmt.Sprintf(".fuse_hidden%08x", h.hidden))
	if err := os.Rename(path, name); err != nil {
		return err
	}
	delete(h.nodes, path)
	n.path, n.gone = name, true
	h.nodes[name] = n
	return nil
}

// passLocked notes that an operation has passed.
func (h *FS) passLocked() {
	waiting := h.closing
	h.closing = nil
	for _, c := range waiting {
		if c.left--; c.left > 0 {
			h.closing = append(h.closing, c)
		} else {
			_ = h.endLocked(c.node)
		}
	}
}

func (h *FS) closed(n *node) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.late > 0 {
		h.closing = append(h.closing, closing{n, h.late})
		return nil
	}
	return h.endLocked(n)
}

// endLocked ends a use of a file; the last ends a hidden one.
func (h *FS) endLocked(n *node) error {
	if n.open--; n.open > 0 {
		return nil
	}
	delete(h.nodes, n.path)
	if n.gone {
		return os.Remove(n.path)
	}
	return nil
}

type hidingFile struct {
	disk.File
	fs   *FS
	node *node
}

func (f *hidingFile) Close() error {
	err := f.File.Close()
	return cmp.Or(err, f.fs.closed(f.node))
}

type hidingLock struct {
	disk.Lock
	fs   *FS
	node *node
}

func (l *hidingLock) Close() error {
	err := l.Lock.Close()
	return cmp.Or(err, l.fs.closed(l.node))
}
