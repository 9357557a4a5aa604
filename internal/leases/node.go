//go:build linux || darwin

package leases

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/internal/fsinfo"
	"github.com/spillway-db/spillway/tier"
)

// node is one GPU's directory in a ledger.
//
//	DIR/<GPU>/generation   a number that rises whenever a lease comes or goes
//	DIR/<GPU>/lease-…      one for each process, locked for as long as it lives
//	DIR/<GPU>/.lease-…     one that is being made
//
// A lease gets its name only once it is complete and locked. So a named file without a lock was
// left by a dead process: the kernel releases the lock with the process, in whatever way it ends. A
// process that joins locks the directory itself.
type node struct {
	dir        *os.Root
	path       string
	generation *atomic.Int64
	genPage    []byte
	genFile    *os.File
	genID      fileID
	shared     bool // all users may join: see Share
}

// fileID distinguishes a file from others of its name.
type fileID struct{ dev, ino uint64 }

func idOf(f *os.File) (fileID, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fileID{}, &fs.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	return fileID{uint64(st.Dev), st.Ino}, nil
}

// isUnlinked reports whether an open file has no name any more. If that cannot be determined, it
// returns false: f may have been closed by a goroutine that has put another in its place.
func isUnlinked(f *os.File) bool {
	info, err := f.Stat() // which may be called beside Close
	if err != nil {
		return false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && st.Nlink == 0
}

// has reports whether that file has the name, by the directory's path: the directory may
// have been replaced, too. What cannot be found out is taken for granted.
func (n *node) has(name string, id fileID) bool {
	var st unix.Stat_t
	switch err := unix.Lstat(n.path+"/"+name, &st); err {
	case nil:
		return id == fileID{uint64(st.Dev), st.Ino}
	case unix.ENOENT, unix.ENOTDIR:
		return false
	}
	return true
}

// checkGeneration returns what is wrong with the file that counts joins and leaves. It must exist
// where processes have leases.
func (n *node) checkGeneration() error {
	page := make([]byte, pageSize+1)
	f, err := n.dir.OpenFile(genName, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err == nil {
		k, _ := f.ReadAt(page, 0)
		page = page[:k]
		err = f.Close()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s was removed while processes use the ledger: they do not see new ones: %w", genName, ErrBroken)
	case err != nil:
		return err
	case len(page) != pageSize || string(page[:len(genMagic)]) != genMagic:
		return fmt.Errorf("%s is not a ledger's, and processes use the ledger: %w", genName, ErrBroken)
	}
	return nil
}

// openNode opens the directory of a device. With create it is made if it is not there.
func openNode(dir, device string, create bool) (_ *node, err error) {
	dir = filepath.Clean(dir) // for with a slash behind it a link is taken for what it names
	n := &node{path: filepath.Join(dir, deviceDir(device)), shared: isShared(dir)}
	if n.path, err = filepath.Abs(n.path); err != nil {
		return nil, err
	}
	for _, d := range []string{dir, n.path} {
		if create && !n.shared {
			err = os.MkdirAll(d, 0o700)
		}
		if err != nil {
			return nil, err
		}
		err := checkDir(d, n.shared)
		if n.shared && errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("root shares it, but has not named %s: %w", device, err)
		}
		if err != nil {
			return nil, err
		}
	}
	if n.dir, err = os.OpenRoot(n.path); err != nil {
		return nil, err
	}
	if create {
		if err := n.openGeneration(); err != nil {
			return nil, errors.Join(err, n.close())
		}
	}
	return n, nil
}

// checkDir refuses a directory in which others could put something, unless it is part of a ledger
// that is shared. Then it must be root's, and keep users from removing what others put there.
func checkDir(path string, shared bool) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		return fmt.Errorf("%s is a link: name the directory itself", path)
	case !info.IsDir():
		return fmt.Errorf("%s is no directory", path)
	case shared && st.Uid == 0 && info.Mode()&fs.ModeSticky != 0:
	case int(st.Uid) != os.Geteuid() && st.Uid != 0:
		return fmt.Errorf("%s belongs to user %d, who could change what it says: name a directory of this user's", path, st.Uid)
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s can be written to by others (mode %v): name a directory that only this user writes to", path, info.Mode().Perm())
	}
	if on, err := fsinfo.Of(path); err == nil && on.Remote {
		return fmt.Errorf("%s lies on a network file system (%s), which shares no memory: name a local one, such as a directory in /dev/shm or /run: %w", path, on.Name, tier.ErrNotSupported)
	}
	return nil
}

// openGeneration maps the file that counts joins and leaves.
func (n *node) openGeneration() error {
	unlock, err := n.lock()
	if err != nil {
		return err
	}
	defer unlock()
	// Where all users may write, Linux lets nobody open another's file with O_CREATE.
	f, err := n.dir.OpenFile(genName, os.O_RDWR|unix.O_NOFOLLOW, 0)
	isNew := errors.Is(err, fs.ErrNotExist)
	if isNew {
		f, err = n.dir.OpenFile(genName, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	}
	if err != nil {
		return err
	}
	n.genFile = f // closed with the node
	if isNew && n.shared {
		if err := f.Chmod(0o666); err != nil {
			return err
		}
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() == 0 && info.Mode().IsRegular() { // new, or its creator was killed
		page := make([]byte, pageSize)
		copy(page, genMagic)
		if _, err := f.WriteAt(page, 0); err != nil {
			return err
		}
	} else if !info.Mode().IsRegular() || info.Size() != pageSize {
		return fmt.Errorf("%s is not a ledger's: remove it if no process uses the ledger", filepath.Join(n.path, genName))
	}
	if n.genPage, err = mapPage(f, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	if string(n.genPage[:len(genMagic)]) != genMagic {
		return fmt.Errorf("%s is not a ledger's: remove it if no process uses the ledger", filepath.Join(n.path, genName))
	}
	n.generation = wordOf(n.genPage, atGeneration)
	n.genID, err = idOf(f)
	return err
}

func (n *node) close() error {
	var err error
	if n.genPage != nil {
		err = unix.Munmap(n.genPage)
	}
	if n.genFile != nil {
		err = errors.Join(err, n.genFile.Close())
	}
	return errors.Join(err, n.dir.Close())
}

// lockFor is how long a process waits for another to join. Joining takes a millisecond, unless that
// process was stopped.
const lockFor = 5 * time.Second

// lock makes the caller the only process that joins.
func (n *node) lock() (unlock func(), err error) {
	d, err := n.dir.Open(".")
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(lockFor); ; time.Sleep(time.Millisecond) {
		err = unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return func() { _ = d.Close() }, nil // and by that the lock
		case err == unix.EWOULDBLOCK && time.Now().After(end):
			return nil, errors.Join(fmt.Errorf("%s has been locked for %v: a process that joins it does not go on", n.path, lockFor), d.Close())
		case err != unix.EWOULDBLOCK && err != unix.EINTR:
			return nil, errors.Join(lockError(n.path, err), d.Close())
		}
	}
}

func lockError(path string, err error) error {
	if err == unix.ENOLCK || err == unix.EOPNOTSUPP || err == unix.ENOSYS || err == unix.EINVAL {
		return fmt.Errorf("%s: the file system has no locks (%w): %w", path, err, tier.ErrNotSupported)
	}
	return &fs.PathError{Op: "flock", Path: path, Err: err}
}

// leases returns the names that leases have.
func (n *node) leases() ([]string, error) { return n.names(leasePrefix) }

func (n *node) names(prefix string) ([]string, error) {
	d, err := n.dir.Open(".")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(names, func(s string) bool { return !strings.HasPrefix(s, prefix) }), nil
}

// ownLease is a process's lease as its owner has it: locked, and mapped to be written.
type ownLease struct {
	words
	name string
	head head
	id   fileID
	file *os.File
	page []byte
}

// create makes a lease and locks it. The caller has the directory locked.
func (n *node) create(name string, h head, limit int64) (_ *ownLease, err error) {
	draft := "." + name
	f, err := n.dir.OpenFile(draft, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), n.dir.Remove(draft))
		}
	}()
	if n.shared {
		if err := f.Chmod(0o644); err != nil { // others read it
			return nil, err
		}
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, lockError(n.path, err)
	}
	if _, err := f.WriteAt(h.encode(), 0); err != nil {
		return nil, err
	}
	page, err := mapPage(f, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return nil, err
	}
	l := &ownLease{words: wordsOf(page), name: name, head: h, file: f, page: page}
	l.limit.Store(limit)
	if l.id, err = idOf(f); err != nil {
		return nil, errors.Join(err, unix.Munmap(page))
	}
	if err := n.dir.Rename(draft, name); err != nil {
		return nil, errors.Join(err, unix.Munmap(page))
	}
	return l, nil
}

// close gives the lock up, also where a child process that is being started has the file open, too.
func (l *ownLease) close() {
	_ = unix.Munmap(l.page)
	_ = unix.Flock(int(l.file.Fd()), unix.LOCK_UN)
	_ = l.file.Close()
}

func (n *node) remove(name string) error {
	err := n.dir.Remove(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // another goroutine found that we are closing
	}
	return err
}

// peer is another process's lease, mapped to be read.
type peer struct {
	name  string
	group string
	head  head
	words words
	file  *os.File
	page  []byte
}

// open opens the lease of a process that is alive; nil if it is not.
func (n *node) open(name string) (*peer, error) {
	info, err := n.dir.Lstat(name) // for a root follows links, and a socket cannot be opened
	if errors.Is(err, fs.ErrNotExist) || err == nil && !info.Mode().IsRegular() {
		return nil, nil // no process of ours has made it
	}
	if err != nil {
		return nil, err
	}
	f, err := n.dir.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	p, err := openPeer(f, name)
	if p == nil {
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return nil, fmt.Errorf("%s, whose owner is alive, cannot be read: %w", filepath.Join(n.path, name), err)
	}
	return p, nil
}

func openPeer(f *os.File, name string) (*peer, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, nil // no process of ours has made it
	}
	if free, err := isFree(f); free || err != nil {
		return nil, err
	}
	if info.Size() != pageSize {
		return nil, fmt.Errorf("it has %d bytes, not %d", info.Size(), pageSize)
	}
	page, err := mapPage(f, unix.PROT_READ)
	if err != nil {
		return nil, err
	}
	h, err := decode(page)
	if err != nil {
		return nil, errors.Join(err, unix.Munmap(page))
	}
	p := &peer{name: name, group: h.group, head: h, words: wordsOf(page), file: f, page: page}
	if p.group == "" {
		p.group = "\x00" + name
	}
	return p, nil
}

func (p *peer) close() {
	_ = unix.Munmap(p.page)
	_ = p.file.Close()
}

// alive reports whether the owner of a lease has it locked still.
func (n *node) alive(p *peer) bool {
	free, err := isFree(p.file)
	return err != nil || !free
}

// isFree reports whether no process has f locked.
func isFree(f *os.File) (bool, error) {
	for {
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err {
		case nil:
			return true, unix.Flock(int(f.Fd()), unix.LOCK_UN)
		case unix.EWOULDBLOCK:
			return false, nil
		case unix.EINTR:
		default:
			return false, err
		}
	}
}

// reap removes the lease of a dead process: an unlocked file with the name and the content of a
// lease. Other files stay.
func (n *node) reap(name string) {
	f, err := n.dir.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return
	}
	defer f.Close()
	page := make([]byte, pageSize+1)
	k, _ := f.ReadAt(page, 0)
	if _, err := decode(page[:k]); err != nil {
		return
	}
	if free, err := isFree(f); free && err == nil {
		_ = n.dir.Remove(name)
	}
}

// sweep removes files of processes that were killed while they joined. The caller has the directory
// locked, so no other process is joining.
func (n *node) sweep() {
	names, err := n.names(draftPrefix)
	if err != nil {
		return
	}
	for _, name := range names {
		f, err := n.dir.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		page := make([]byte, pageSize+1)
		k, _ := f.ReadAt(page, 0)
		_, bad := decode(page[:k])
		if free, err := isFree(f); free && err == nil && (k == 0 || bad == nil) {
			_ = n.dir.Remove(name)
		}
		_ = f.Close()
	}
}

func mapPage(f *os.File, prot int) ([]byte, error) {
	page, err := unix.Mmap(int(f.Fd()), 0, pageSize, prot, unix.MAP_SHARED)
	if err != nil {
		return nil, &fs.PathError{Op: "mmap", Path: f.Name(), Err: err}
	}
	return page, nil
}
