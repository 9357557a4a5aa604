package leases

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/fsinfo"
	"github.com/spillway-db/spillway/tier"
	"golang.org/x/sys/unix"
)

// record is the content of a process's file: one JSON object, and spaces up to recordSize bytes.
type record struct {
	Version int `json:"version"`
	Holder
	Joined int64 `json:"joined"` // the group's quota when the process joined; Holder.Quota may have changed

	file string // the name of the file
}

const (
	version    = 2
	recordSize = 4096
	filePrefix = "lease-"
	readOnly   = os.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK // follows no link and waits for no FIFO
)

// node is the directory of one GPU, as one lease or one observer has it open. One goroutine at a time
// may use it.
type node struct {
	path   string
	dir    *os.File // to lock and to list
	shared bool     // all users may join: see Share

	// Of a lease only:
	name    string // of the file
	file    *os.File
	removed bool // somebody has removed the file or the directory
}

// isAt reports whether path still names the file or directory that f has open.
func isAt(f *os.File, path string) bool {
	have, err := f.Stat()
	if err != nil {
		return false
	}
	at, err := os.Lstat(path)
	return err == nil && os.SameFile(have, at)
}

// openNode opens and locks the directory of a GPU. To lock it exclusively it creates the directory, unless
// root shares dir.
func openNode(dir, device string, how int) (*node, error) {
	dir = filepath.Clean(dir) // without a slash at the end, which would follow a link
	n := &node{path: filepath.Join(dir, deviceDir(device)), shared: isShared(dir)}
	for _, d := range []string{dir, n.path} {
		var err error
		if how == unix.LOCK_EX && !n.shared {
			err = os.MkdirAll(d, 0o700)
		}
		if err == nil {
			err = checkDir(d, n.shared)
		}
		if n.shared && errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("root shares it, but has not named %s: %w", device, err)
		}
		if err != nil {
			return nil, err
		}
	}
	var err error
	if n.dir, err = os.OpenFile(n.path, readOnly, 0); err != nil {
		return nil, err
	}
	if err := n.lock(how); err != nil {
		return nil, errors.Join(err, n.dir.Close())
	}
	return n, nil
}

// checkDir refuses a directory to which other users can write, unless it belongs to a ledger that root
// shares. There it must be root's and sticky, so that users cannot remove the files of others.
func checkDir(path string, shared bool) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	uid := int(stat(info).Uid)
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		return fmt.Errorf("%s is a link: name the directory itself", path)
	case !info.IsDir():
		return fmt.Errorf("%s is no directory", path)
	case shared && uid == 0 && info.Mode()&fs.ModeSticky != 0:
	case uid != os.Geteuid() && uid != 0:
		return fmt.Errorf(
			"%s belongs to user %d, who could change what it says: name a directory of this user's",
			path,
			uid,
		)
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s can be written to by others (mode %v): name a directory that only this user writes to",
			path, info.Mode().Perm())
	}
	if on, err := fsinfo.Of(path); err == nil && on.Remote {
		return fmt.Errorf("%s is on a network file system (%s), whose locks are not reliable: "+
			"name a local one, such as a directory in /dev/shm or /run: %w", path, on.Name, tier.ErrNotSupported)
	}
	return nil
}

// lockFor is how long a process waits for the lock of a directory. Holders keep it for well under a
// millisecond, unless they are stopped.
const lockFor = 5 * time.Second

// lock locks the directory: exclusively (unix.LOCK_EX) to charge, shared (unix.LOCK_SH) to look.
func (n *node) lock(how int) error {
	end := time.Now().Add(lockFor)
	for delay := 10 * time.Microsecond; ; delay = min(2*delay, time.Millisecond) {
		if free, err := flock(n.dir, how); free || err != nil {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s has been locked for %v: a process that uses it is stopped", n.path, lockFor)
		}
		time.Sleep(delay)
	}
}

func (n *node) unlock() { _, _ = flock(n.dir, unix.LOCK_UN) }

// flock reports whether no other process has f locked, and locks f in that case.
func flock(f *os.File, how int) (free bool, err error) {
	switch err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); err {
	case nil, unix.EWOULDBLOCK:
		return err == nil, nil
	default:
		return false, fmt.Errorf("%s cannot be locked: %w: %w", f.Name(), err, tier.ErrNotSupported)
	}
}

// read returns the records of the other live processes. With reap it removes the files of dead ones, as
// far as this user may. The error names each file that cannot be read and whose process is alive. The
// caller has the directory locked.
func (n *node) read(reap bool) (live []record, err error) {
	if _, err := n.dir.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	entries, err := n.dir.ReadDir(-1)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, e := range entries {
		path := filepath.Join(n.path, e.Name())
		if e.Name() == n.name || !strings.HasPrefix(e.Name(), filePrefix) || !e.Type().IsRegular() {
			continue
		}
		r, alive, err := readRecord(path)
		switch {
		case errors.Is(err, fs.ErrNotExist): // Close has removed it
		case err != nil:
			errs = append(errs, fmt.Errorf("%s, whose process is alive, cannot be read: %w", path, err))
		case alive:
			live = append(live, r)
		case reap:
			if ours, _ := filepath.Match("lease-[0-9]*-*", e.Name()); ours { // other files stay
				_ = os.Remove(path) // where that is not allowed, the file counts for nothing
			}
		}
	}
	return live, errors.Join(errs...)
}

// readRecord reads the file of a process, unless the process is dead: nobody has its file locked.
func readRecord(path string) (r record, alive bool, err error) {
	f, err := os.OpenFile(path, readOnly, 0)
	if err != nil {
		return r, false, err
	}
	defer f.Close()
	free, err := flock(f, unix.LOCK_SH)
	if free || err != nil {
		return r, false, err
	}
	text := make([]byte, recordSize)
	size, err := f.ReadAt(text, 0)
	if err == nil || err == io.EOF {
		err = json.Unmarshal(bytes.TrimRight(text[:size], " \n"), &r)
	}
	switch {
	case err != nil:
	case r.Version != version:
		err = fmt.Errorf("it has version %d of the format, not %d", r.Version, version)
	case min(r.Quota, r.Joined, r.Physical, r.Advertised) <= 0 || min(r.Granted, r.Live, r.Peak) < 0:
		err = fmt.Errorf("its numbers make no sense: %+v", r)
	}
	r.file = path
	return r, true, err
}

// create makes the file of this process, locks it for as long as the process lives, and writes r. The
// caller has the directory locked.
func (n *node) create(r record) (err error) {
	n.name = fmt.Sprintf("%s%d-%s", filePrefix, os.Getpid(), strconv.FormatUint(rand.Uint64(), 36))
	n.file, err = os.OpenFile(filepath.Join(n.path, n.name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if n.shared {
		err = n.file.Chmod(0o644) // other users read it
	}
	free, lockErr := flock(n.file, unix.LOCK_EX)
	if !free && lockErr == nil {
		lockErr = fmt.Errorf("another process has locked the new file %s", n.name)
	}
	return errors.Join(err, lockErr, n.write(r))
}

// write replaces the content of this process's file. The caller has the directory locked, so nobody reads
// half of it.
func (n *node) write(r record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	page := bytes.Repeat([]byte(" "), recordSize)
	copy(page, append(text, '\n'))
	_, err = n.file.WriteAt(page, 0)
	return err
}

// close unlocks and closes what the node has open, and removes the file of this process. It unlocks
// explicitly, because a child process that is just being started has the files open, too.
func (n *node) close() (err error) {
	n.unlock()
	if n.file != nil {
		if err = os.Remove(filepath.Join(n.path, n.name)); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		_, _ = flock(n.file, unix.LOCK_UN)
		err = errors.Join(err, n.file.Close())
	}
	return errors.Join(err, n.dir.Close())
}

// deviceDir returns the name of a GPU's directory: the GPU's own name, escaped as in URLs.
func deviceDir(device string) string {
	if digits, ok := strings.CutPrefix(device, "MIG-"); ok {
		device = "GPU-" + digits // CUDA's name of the instance that NVML calls MIG-…
	}
	name := url.PathEscape(device)
	if strings.HasPrefix(name, ".") {
		name = "%2E" + name[1:]
	}
	return name
}
