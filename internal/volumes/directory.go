package volumes

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// A volume has its named files in a directory of its own,
//
//	<Dir>/spillway-<pid>-<random>/lock           held by flock while the volume is open
//	                             /segment-0000   where a file system has no anonymous files
//	<Dir>/spillway-kept-<random>/lock            with Config.Persist
//	                            /<number>.part   a memory that is no batch
//	                            /<key>           a batch or a dictionary: persisted_file.go
//
// and removes all of it when it is closed. Number and key have 16 hexadecimal digits. After a kill the
// directory stays, and its lock is free: the next volume that is opened in Dir locks it and removes it.
// But no volume removes a directory with a key: the next one with Config.Persist takes it over. The
// pid is for people; nothing is decided by it, because pids mean little across containers.
//
// 100,000 files in one directory were made, opened and removed twice as fast as in 256
// subdirectories (ext4, 2026-11-27).

var (
	segmentsDirName   = regexp.MustCompile(`^spillway-[0-9]+-[0-9a-f]{16}$`)
	persistedDirName  = regexp.MustCompile(`^spillway-kept-[0-9a-f]{16}$`)
	segmentName       = regexp.MustCompile(`^segment-[0-9]{4,}$`)
	persistedFileName = regexp.MustCompile(`^[0-9a-f]{16}(\.part)?$`)
)

const (
	lockName        = "lock"
	spillName       = "segment-0000"
	persistedPrefix = "spillway-kept-"
	partSuffix      = ".part"
)

// persists reports whether a directory is one in which batches persist, by its name.
func persists(path string) bool { return persistedDirName.MatchString(filepath.Base(path)) }

func persistedName(n uint64, suffix string) string { return fmt.Sprintf("%016x%s", n, suffix) }

// ownDir is a directory of named files and the lock on it.
type ownDir struct {
	fs   disk.FS
	path string
	lock disk.Lock
}

// ownDirAttempts bounds how often the making of a directory is tried. Another volume that is being
// opened may take one for abandoned between its making and its locking; that this happens again and
// again is not chance.
const ownDirAttempts = 16

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

// claim locks a directory that its volume has left. It returns nil if that is in use, or not ours to
// judge.
func claim(fsys disk.FS, path string) (*ownDir, error) {
	lock, err := fsys.Lock(filepath.Join(path, lockName), false)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// Killed before it made its lock, or about to make it: an empty directory can go in either
		// case, because the maker tries again. Any other stays. Hidden files are of one that was
		// killed, or is just about to remove it.
		if removeHidden(fsys, path) {
			_ = fsys.Remove(path)
		}
		return nil, nil
	case errors.Is(err, disk.ErrLocked), errors.Is(err, fs.ErrPermission), errors.Is(err, errors.ErrUnsupported):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return &ownDir{fs: fsys, path: path, lock: lock}, nil
}

// content is what a directory contains.
type content struct {
	ours    []string         // names of spill files, and of files of which nothing persists
	keys    map[uint64]int64 // the lengths of the files of batches and dictionaries
	bytes   int64            // of files with a key or a number, in whole pages
	foreign []string         // names of everything else but the lock
}

// list lists a directory.
func (d *ownDir) list() (*content, error) {
	entries, err := d.fs.ReadDir(d.path)
	if err != nil {
		return nil, err
	}
	c := &content{keys: make(map[uint64]int64)}
	persists := persists(d.path)
	for _, e := range entries {
		name := e.Name()
		switch {
		case persists && e.Type().IsRegular() && persistedFileName.MatchString(name):
			info, err := d.fs.Stat(filepath.Join(d.path, name))
			if err != nil {
				return nil, err
			}
			c.bytes = min(1<<60, c.bytes+extent.RoundUp(min(1<<60, info.Size()), tier.Page))
			if key, err := strconv.ParseUint(name, 16, 64); err == nil {
				c.keys[key] = info.Size()
			} else {
				c.ours = append(c.ours, name)
			}
		case !e.IsDir() && segmentName.MatchString(name):
			c.ours = append(c.ours, name)
		case !e.IsDir() && (name == lockName || hiddenFile(name)):
		default:
			c.foreign = append(c.foreign, name)
		}
	}
	return c, nil
}

// removeFile removes a file of ours, which may be gone.
func (d *ownDir) removeFile(name string) error {
	return bare(ignoreMissing(d.fs.Remove(filepath.Join(d.path, name))))
}

// remove removes a volume's files, and the directory if it contains nothing else, and ends the lock. If
// it cannot, the lock's file stays too: the next volume that is opened in Dir needs it to see that the
// directory is abandoned.
//
// The lock's name goes while it is held, so that no other process can have it afterwards: one that
// waited for it, also the maker of a directory that looked abandoned, sees that there is no such
// file. Then it is closed, and with it the hidden file that it may be by now (see hiddenFile),
// for which the directory would stay.
func (d *ownDir) remove() (gone bool, err error) {
	c, err := d.list()
	if err != nil {
		return false, join(ignoreMissing(err), d.lock.Close())
	}
	for _, name := range c.ours {
		err = join(err, d.removeFile(name))
	}
	if err != nil || len(c.foreign) > 0 || len(c.keys) > 0 {
		return false, join(err, d.lock.Close())
	}
	err = d.removeFile(lockName)
	closed := d.lock.Close()
	if err == nil {
		err = removeDir(d.fs, d.path)
	}
	return err == nil, join(err, closed)
}

// hiddenFile reports whether a file is one that was removed while it was open: FUSE, NFS and
// SMB give it another name until it is closed. A server that died may leave it for good.
func hiddenFile(name string) bool {
	return strings.HasPrefix(name, ".fuse_hidden") || strings.HasPrefix(name, ".nfs") ||
		strings.HasPrefix(name, ".__smb")
}

// longestPause is the longest pause of removeDir, after which it gives up: all together they are a
// second.
const longestPause = 512 * time.Millisecond

// removeDir removes an empty directory of ours. There may still be hidden files in it: a FUSE
// server may see the close of a file after that of its directory's removal, and another volume may
// just have the lock's file open, to see that it is gone.
func removeDir(fsys disk.FS, path string) error {
	for pause := time.Millisecond; ; pause *= 2 {
		err := ignoreMissing(fsys.Remove(path))
		if !errors.Is(err, fs.ErrExist) || pause > longestPause ||
			!removeHidden(fsys, path) { // fs.ErrExist is ENOTEMPTY, too
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

// removeAbandoned removes what killed processes left in dir: directories with our kind of name whose
// lock is free, and of their entries those with our kinds of name. Files that may be in use stay.
// It returns the names of directories that it removed.
func removeAbandoned(fsys disk.FS, dir string) (removed []string, err error) {
	entries, err := fsys.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.IsDir() || !segmentsDirName.MatchString(e.Name()) { // a link is not a directory
			continue
		}
		own, failed := claim(fsys, filepath.Join(dir, e.Name()))
		if own != nil {
			var gone bool
			if gone, failed = own.remove(); gone {
				removed = append(removed, e.Name())
			}
		}
		err = join(err, failed)
	}
	return removed, err
}
