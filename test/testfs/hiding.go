package testfs

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/spillway-db/spillway/tier/disk"
)

// Hiding is a file system without anonymous files. As on FUSE and NFS, a file that is removed while
// it is open stays in its directory under a hidden name until it is closed. A directory with a
// hidden file in it cannot be removed. Hiding is safe for concurrent use. Files must be opened,
// locked and removed only through it.
type Hiding struct {
	disk.FS
	late int

	mu      sync.Mutex // held during calls of the inner file system too, so that each operation is atomic
	nodes   map[string]*node
	closing []closing
	hidden  int // files that were ever hidden
}

// node is an open file.
type node struct {
	path string // its present name
	open int
	gone bool // it was removed and is hidden
}

// closing is a close that has not taken effect yet.
type closing struct {
	node *node
	left int // operations until it takes effect
}

var _ disk.FS = (*Hiding)(nil)

// NewHiding returns a Hiding over inner, whose paths must be the machine's. A close takes effect
// only after late further operations (Remove and ReadDir), because FUSE servers learn of it later,
// too.
func NewHiding(inner disk.FS, late int) *Hiding {
	return &Hiding{FS: inner, late: late, nodes: make(map[string]*node)}
}

// Hidden returns how many files were removed while they were open.
func (h *Hiding) Hidden() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.hidden
}

// OpenAnonymous implements disk.FS. It returns errors.ErrUnsupported.
func (h *Hiding) OpenAnonymous(dir string, _ bool) (disk.File, error) {
	return nil, &fs.PathError{Op: "open", Path: dir, Err: errors.ErrUnsupported}
}

// Create implements disk.FS.
func (h *Hiding) Create(path string, direct bool) (disk.File, error) {
	return h.open(path, func() (disk.File, error) { return h.FS.Create(path, direct) })
}

// Reopen implements disk.FS.
func (h *Hiding) Reopen(path string, direct bool) (disk.File, error) {
	return h.open(path, func() (disk.File, error) { return h.FS.Reopen(path, direct) })
}

func (h *Hiding) open(path string, open func() (disk.File, error)) (disk.File, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, err := open()
	if err != nil {
		return nil, err
	}
	return &file{f, h.enterLocked(path, f)}, nil
}

// Lock implements disk.FS.
func (h *Hiding) Lock(path string, create bool) (disk.Lock, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l, err := h.FS.Lock(path, create)
	if err != nil {
		return nil, err
	}
	return h.enterLocked(path, l), nil
}

// enterLocked counts an opened file or lock until its handle is closed.
func (h *Hiding) enterLocked(path string, inner io.Closer) *handle {
	n := h.nodes[path]
	if n == nil {
		n = &node{path: path}
		h.nodes[path] = n
	}
	n.open++
	return &handle{inner, h, n}
}

// ReadDir implements disk.FS.
func (h *Hiding) ReadDir(path string) ([]fs.DirEntry, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.passLocked()
	return h.FS.ReadDir(path)
}

// Rename implements disk.FS. It does not hide a file that was there with the new name.
func (h *Hiding) Rename(from, to string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := h.FS.Rename(from, to)
	if n := h.nodes[from]; err == nil && n != nil {
		delete(h.nodes, from)
		n.path = to
		h.nodes[to] = n
	}
	return err
}

// Remove implements disk.FS.
func (h *Hiding) Remove(path string) error {
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

// passLocked counts an operation for the closes that have not taken effect.
func (h *Hiding) passLocked() {
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

// endLocked ends a use of a file. The last one removes a hidden file.
func (h *Hiding) endLocked(n *node) error {
	if n.open--; n.open > 0 {
		return nil
	}
	delete(h.nodes, n.path)
	if n.gone {
		return os.Remove(n.path)
	}
	return nil
}

// handle is an open file or lock.
type handle struct {
	io.Closer
	fs   *Hiding
	node *node
}

func (c *handle) Close() error {
	err := c.Closer.Close()
	h := c.fs
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.late > 0 {
		h.closing = append(h.closing, closing{c.node, h.late})
		return err
	}
	return cmp.Or(err, h.endLocked(c.node))
}

type file struct {
	disk.File
	handle *handle
}

func (f *file) Close() error { return f.handle.Close() }
