package volumes

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/tier/disk"
)

// Where a file system has no anonymous files, a volume keeps named ones in a
// directory of its own,
//
//	<Dir>/spillway-<pid>-<random>/lock           held by flock while the volume is open
//	                             /segment-0000
//	                             /…
//
// and removes all of it when it is closed. After a kill it stays, and its lock is
// free: the next volume that is opened in Dir takes the lock and removes it. The pid
// is for people; nothing is decided by it, because pids mean little across containers.

var (
	ownName     = regexp.MustCompile(`^spillway-[0-9]+-[0-9a-f]{16}$`)
	segmentName = regexp.MustCompile(`^segment-[0-9]{4,}$`)
)

const lockName = "lock"

func segmentFile(index int) string { return fmt.Sprintf("segment-%04d", index) }

// ownDir is a directory of named files and the lock on it.
type ownDir struct {
	fs    disk.FS
	path  string
	lock  disk.Lock
	dirty atomic.Bool // a file could not be removed
}

// ownDirAttempts bounds how often the making of a directory is tried. A volume
// that is being opened beside may take one for abandoned between its making and its
// locking; that this happens again and again is not chance.
const ownDirAttempts = 16

// ownPrefix is what the name of a directory begins with.
func ownPrefix() string { return fmt.Sprintf("spillway-%d-", os.Getpid()) }

// makeOwnDir makes a directory and locks it.
func makeOwnDir(fsys disk.FS, dir, prefix string) (*ownDir, error) {
	var last error
	for range ownDirAttempts {
		var random [8]byte
		rand.Read(random[:]) // never fails
		path := filepath.Join(dir, prefix+hex.EncodeToString(random[:]))
		if err := fsys.Mkdir(path); err != nil {
			return nil, err
		}
		lock, err := fsys.Lock(filepath.Join(path, lockName), true)
		if err == nil {
			return &ownDir{fs: fsys, path: path, lock: lock}, nil
		}
		// Gone already if it was taken for abandoned.
		_ = fsys.Remove(filepath.Join(path, lockName))
		_ = removeDir(fsys, path)
		last = err
		if !errors.Is(err, disk.ErrLocked) && !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return nil, fmt.Errorf("locking a directory for spill files: %w", last)
}

// removeFile removes a file of ours, which may be gone.
func (d *ownDir) removeFile(name string) error {
	err := bare(ignoreMissing(d.fs.Remove(filepath.Join(d.path, name))))
	if err != nil {
		d.dirty.Store(true)
	}
	return err
}

// removeSegments removes all segments, and reports whether there is anything else but the lock.
func (d *ownDir) removeSegments() (foreign bool, err error) {
	entries, err := d.fs.ReadDir(d.path)
	if err != nil {
		return false, ignoreMissing(err)
	}
	for _, e := range entries {
		switch name := e.Name(); {
		case name == lockName, hiddenFile(name) && !e.IsDir():
		case segmentName.MatchString(name) && !e.IsDir():
			err = join(err, d.removeFile(name))
		default:
			foreign = true
		}
	}
	return foreign, err
}

// remove removes the directory, whose segments are gone. One that could not be removed
// is tried once more. If that fails the lock's file stays too: the next volume that is
// opened beside needs it to see that the directory is abandoned.
//
// The lock's name goes while it is held, so that no other process can have it afterwards: one that
// waited for it, also the maker of a directory that looked abandoned, sees that there is no such
// file. Then it is closed, and with it the hidden file that it may be by now (see hiddenFile),
// for which the directory would stay.
func (d *ownDir) remove() error {
	if d.dirty.Load() {
		if more, err := d.removeSegments(); err != nil || more { // such as a manifest
			return join(err, d.lock.Close())
		}
	}
	err := ignoreMissing(d.fs.Remove(filepath.Join(d.path, lockName)))
	closed := d.lock.Close()
	if err == nil {
		err = removeDir(d.fs, d.path)
	}
	return join(err, closed)
}

// hiddenFile reports whether a file is one that was removed while it was open: FUSE, NFS and
// SMB give it another name until it is closed. A server that died may leave it for good.
func hiddenFile(name string) bool {
	return strings.HasPrefix(name, ".fuse_hidden") || strings.HasPrefix(name, ".nfs") || strings.HasPrefix(name, ".__smb")
}

// mostPatience is the longest pause of removeDir, after which it gives up: all together
// they are a second.
const mostPatience = 512 * time.Millisecond

// removeDir removes an empty directory of ours. There may still be hidden files in it: a FUSE
// server may see the close of a file after that of its directory's removal, and another volume may
// just have the lock's file open, to see that it is gone.
func removeDir(fsys disk.FS, path string) error {
	for pause := time.Millisecond; ; pause *= 2 {
		err := ignoreMissing(fsys.Remove(path))
		if !errors.Is(err, fs.ErrExist) || pause > mostPatience || !removeHidden(fsys, path) { // fs.ErrExist is ENOTEMPTY, too
			return err
		}
		time.Sleep(pause)
	}
}

// removeHidden removes hidden files, as far as that helps, and reports whether there is nothing
// else.
func removeHidden(fsys disk.FS, path string) bool {
	entries, err := fsys.ReadDir(path)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	for _, e := range entries {
		if !hiddenFile(e.Name()) || e.IsDir() {
			return false
		}
		_ = fsys.Remove(filepath.Join(path, e.Name())) // one that is open stays
	}
	return true
}

// removeAbandoned removes what killed processes left in dir: directories with our
// kind of name whose lock is free, and of their entries those with our kinds of
// name. What cannot be proved abandoned stays. It returns what it removed.
func removeAbandoned(fsys disk.FS, dir string) (removed []string, err error) {
	entries, err := fsys.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.IsDir() || !ownName.MatchString(e.Name()) { // a link is not a directory
			continue
		}
		gone, failed := removeIfAbandoned(fsys, filepath.Join(dir, e.Name()))
		if gone {
			removed = append(removed, e.Name())
		}
		err = join(err, failed)
	}
	return removed, err
}

func removeIfAbandoned(fsys disk.FS, path string) (gone bool, err error) {
	lock, err := fsys.Lock(filepath.Join(path, lockName), false)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// Killed before it made its lock, or about to make it: an empty directory
		// can go in either case, because the maker tries again. Any other stays. Hidden
		// files are of one that was killed, or is just about to remove it.
		return removeHidden(fsys, path) && fsys.Remove(path) == nil, nil
	case errors.Is(err, disk.ErrLocked), errors.Is(err, fs.ErrPermission), errors.Is(err, errors.ErrUnsupported):
		return false, nil // in use, or not ours to judge
	case err != nil:
		return false, err
	}
	d := &ownDir{fs: fsys, path: path, lock: lock}
	foreign, err := d.removeSegments()
	if err != nil || foreign {
		return false, join(err, lock.Close())
	}
	err = d.remove()
	return err == nil, err
}
