// Package leases counts the GPU memory of all processes of a node, so that they share quotas
// without a daemon. Package reservation/quota documents the rules.
//
//	Join(Terms) ──▶ Lease, a tier.Quota for one GPU
//	Holders ── what all live processes hold
//	Share ── a ledger for several users, which only root creates
//
// # Grains
//
// A process counts memory in grains: a 64th of its group's limit, at most 64 MiB. It takes a grain
// when a charge does not fit into those that it has, and returns grains once more than one is
// unused. So most charges take no system call, and at most one grain of each process is counted
// without being used. A grain that does not fit into the quota any more is taken in part: as many
// bytes as the charge needs. Thus a process can have a quota to its last byte.
//
// # Files
//
//	DIR/<GPU>/               locked for a moment by a process that reads or writes files in it
//	DIR/<GPU>/lease-PID-…    one for each process (or engine, if it has several), locked while it lives
//
// A lease file is a JSON object: the process, its group, the limit that it asks for, the bytes that
// it has granted itself in grains, and those that it held when it wrote the file. Only its process
// writes it. Each GPU has a directory, so that charges on several GPUs do not wait for each other,
// and root can open each GPU to users by itself.
//
// All locks are flock(2). A process that joins, charges, returns grains or changes its limit has
// the directory locked exclusively: it reads all files, decides, and writes its own. Observers have
// it locked shared. Thus nobody reads half a record, and two processes cannot take the same bytes.
// While a process is stopped with the lock, other processes cannot take grains: after 5 seconds a
// charge fails with an error. Charges within their grains succeed.
//
// A file counts while its process has it locked. The kernel releases a process's locks when the
// process ends in any way, so kill -9 is harmless at any point:
//
//   - before it has created its file: nothing is there;
//   - with an empty or half-written file: the file is unlocked, so nobody reads it;
//   - while it charges, before or after the write: its file does not count any more, whatever it says;
//   - with the directory locked: the lock is gone, and the next process gets it.
//
// The next process that looks removes unlocked files. Process IDs in names and records are for
// people; that they are reused does not matter. Files are open with O_CLOEXEC, so programs that the
// process starts do not keep the locks. A child that is forked without exec keeps them until it
// ends, and counts as the process until then. Nothing is synced to disk: after a power failure no
// process is left to count. A network file system is refused, because its locks may not reach all
// processes. If a file cannot be written, as on a full disk, the charge fails with the system's
// error, and nothing is charged.
//
// Links, directories, sockets and FIFOs are ignored, and files with other names stay. A file named
// like a lease that somebody has locked and that makes no sense is an error in every charge that
// takes a grain, never nothing.
//
// # Locks
//
// Lease.files is acquired before Lease.mu, which has the rank Backend. With mu locked, subscribers
// and events are not called, and files are not used.
package leases

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/fsinfo"
	"github.com/spillway-db/spillway/tier"
	"golang.org/x/sys/unix"
)

// Holder is a process that has a lease. Sizes are in bytes.
type Holder struct {
	Device  string    `json:"device"`
	Group   string    `json:"group,omitempty"` // empty: the process has a quota of its own
	PID     int       `json:"pid"`             // as the process itself sees it
	Started time.Time `json:"started"`         // when it joined
	Quota   int64     `json:"quota"`           // of the group, as this process has it
	Live    int64     `json:"live"`            // promised or allocated when the process last wrote its file
	Peak    int64     `json:"peak"`            // largest Live so far
	Lost    int64     `json:"lost,omitempty"`  // how often its files were removed while it used them

	Granted    int64 `json:"granted"`    // counted against the limits: Live in whole grains
	Physical   int64 `json:"physical"`   // size of the GPU
	Advertised int64 `json:"advertised"` // how much quotas may promise of the GPU
}

// record is the content of a process's file: one JSON object, spaces up to recordSize bytes, and a
// newline.
type record struct {
	Version int `json:"version"`
	Holder
	Joined int64 `json:"joined"` // the group's quota when the process joined; Holder.Quota may have changed

	file string // the path of the file
}

func (r *record) charge(n int64) {
	r.Live += n
	r.Peak = max(r.Peak, r.Live)
}

const (
	version    = 2
	recordSize = 4096
	readOnly   = os.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK // follows no link and waits for no FIFO

	// lockFor is how long a process waits for the lock of a directory. Processes keep it for well
	// under a millisecond, unless they are stopped.
	lockFor = 5 * time.Second
)

// Holders returns the holders on all GPUs of a ledger, by GPU, group and process. It changes
// nothing. The error names files that cannot be read, which are left out. A directory that does not
// exist is an empty ledger. In a ledger that root shares, directories that root has not created are
// ignored; see Strangers.
func Holders(dir string) ([]Holder, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	errs := []error{err}
	var out []Holder
	for _, e := range entries {
		device, err := url.PathUnescape(e.Name())
		if err != nil || !e.IsDir() {
			continue
		}
		var records []record
		g, err := openGPU(dir, e.Name(), unix.LOCK_SH)
		if err == nil {
			records, err = g.read(false)
		}
		g.close()
		errs = append(errs, err)
		for _, r := range records {
			r.Device, r.Started = device, r.Started.Local()
			out = append(out, r.Holder)
		}
	}
	slices.SortFunc(out, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Group, b.Group), a.Started.Compare(b.Started))
	})
	if err := errors.Join(errs...); err != nil {
		return out, fmt.Errorf("quota: the ledger in %s: %w", dir, err)
	}
	return out, nil
}

// Advertised returns ⌊physical × ratio⌋, in bytes: how much quotas may promise of a GPU. A nil
// ratio is 1.
func Advertised(physical int64, ratio *big.Rat) (int64, error) {
	ratio = cmp.Or(ratio, big.NewRat(1, 1))
	n := new(big.Int).Mul(big.NewInt(physical), ratio.Num())
	if n.Quo(n, ratio.Denom()); !n.IsInt64() || n.Sign() <= 0 {
		return 0, fmt.Errorf("quota: a GPU of %d bytes, oversubscribed %s times, is less than a byte "+
			"or above the largest size", physical, ratio.RatString())
	}
	return n.Int64(), nil
}

// gpuDir is the directory of one GPU, as one lease or one observer has it open. One goroutine at a
// time may use it.
type gpuDir struct {
	dir    *os.File // to lock and to list
	shared bool     // root lets all users join: see Share
	file   *os.File // of a lease: its file, locked; nil before the first write
}

// isAt reports whether the path of f still names the file or directory that f has open.
func isAt(f *os.File) bool {
	have, err := f.Stat()
	if err != nil {
		return false
	}
	at, err := os.Lstat(f.Name())
	return err == nil && os.SameFile(have, at)
}

// openGPU opens and locks the directory of a GPU. To lock it exclusively it creates the directory.
func openGPU(dir, name string, how int) (*gpuDir, error) {
	dir = filepath.Clean(dir) // without a slash at the end, which would follow a link
	path := filepath.Join(dir, name)
	g := &gpuDir{}
	var err error
	for _, d := range []string{dir, path} {
		if how == unix.LOCK_EX {
			if err := os.MkdirAll(d, 0o700); err != nil {
				return nil, fmt.Errorf("the ledger in %s: root has not shared %s, "+
					"and this process cannot create it: %w",
					dir, name, err)
			}
		}
		if g.shared, err = checkDir(d, d == path); err != nil {
			return nil, err
		}
	}
	if on, err := fsinfo.Of(path); err == nil && on.Remote {
		return nil, fmt.Errorf("%s is on a network file system (%s), whose locks are not reliable: "+
			"name a local one, such as a directory in /dev/shm or /run: %w", path, on.Name, tier.ErrNotSupported)
	}
	if g.dir, err = os.OpenFile(path, readOnly, 0); err != nil {
		return nil, err
	}
	return g, g.lock(how, time.Now().Add(lockFor))
}

// checkDir refuses a directory to which other users can write. Only the directory of a GPU may be
// shared: it must be root's, and sticky, so that users cannot remove the files of others.
func checkDir(path string, mayBeShared bool) (shared bool, err error) {
	info, err := os.Lstat(path)
	if err != nil {
		return false, err
	}
	uid := int(stat(info).Uid)
	shared = mayBeShared && uid == 0 && info.Mode()&fs.ModeSticky != 0
	switch {
	case !info.IsDir():
		return false, fmt.Errorf("%s is not a directory, or is a link: name the directory itself", path)
	case uid != os.Geteuid() && uid != 0:
		return false, fmt.Errorf("%s belongs to user %d, who could change its files: name a directory of this user's",
			path, uid)
	case !shared && info.Mode().Perm()&0o022 != 0:
		return false, fmt.Errorf("%s can be written to by others (mode %v): "+
			"name a directory that only this user writes to",
			path, info.Mode().Perm())
	}
	return shared, nil
}

// lock locks the directory: exclusively (unix.LOCK_EX) to charge, shared (unix.LOCK_SH) to look.
func (g *gpuDir) lock(how int, until time.Time) error {
	for delay := 10 * time.Microsecond; ; delay = min(2*delay, time.Millisecond) {
		if err := flock(g.dir, how); err != unix.EWOULDBLOCK {
			return err
		}
		if time.Now().After(until) {
			return fmt.Errorf("%s has been locked for %v: a process that uses it is stopped", g.dir.Name(), lockFor)
		}
		time.Sleep(delay)
	}
}

// flock locks f, or returns unix.EWOULDBLOCK if another process has it locked.
func flock(f *os.File, how int) error {
	err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
	if err != nil && err != unix.EWOULDBLOCK {
		err = fmt.Errorf("%s cannot be locked: %w: %w", f.Name(), err, tier.ErrNotSupported)
	}
	return err
}

// read returns the records of the other live processes. With reap it removes the files of dead
// ones, as far as this user may. The error names each file that cannot be read and whose process is
// alive. The caller has the directory locked.
func (g *gpuDir) read(reap bool) (live []record, err error) {
	entries, err := os.ReadDir(g.dir.Name())
	errs := []error{err}
	for _, e := range entries {
		path := filepath.Join(g.dir.Name(), e.Name())
		if !strings.HasPrefix(e.Name(), "lease-") || !e.Type().IsRegular() || g.file != nil && path == g.file.Name() {
			continue
		}
		r, err := readRecord(path)
		switch {
		case errors.Is(err, fs.ErrNotExist): // Close has removed it
		case err != nil:
			errs = append(errs, fmt.Errorf("%s, whose process is alive, cannot be read: %w", path, err))
		case r != nil:
			live = append(live, *r)
		case reap:
			if ours, _ := filepath.Match("lease-[0-9]*-*", e.Name()); ours { // other files stay
				_ = os.Remove(path) // where that is not allowed, the file counts for nothing
			}
		}
	}
	return live, errors.Join(errs...)
}

// readRecord reads the file of a process. It returns nil if the process is dead: nobody has its
// file locked.
func readRecord(path string) (*record, error) {
	f, err := os.OpenFile(path, readOnly, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := flock(f, unix.LOCK_SH); err != unix.EWOULDBLOCK {
		return nil, err
	}
	r := record{file: path}
	err = json.NewDecoder(io.LimitReader(f, recordSize)).Decode(&r)
	if err == nil && (r.Version != version || min(r.Quota, r.Joined, r.Physical, r.Advertised) <= 0 ||
		min(r.Granted, r.Live, r.Peak) < 0) {
		err = fmt.Errorf("its format is not of version %d, or its numbers make no sense: %+v", version, r)
	}
	return &r, err
}

// write replaces the content of this process's file. The first write creates the file, and locks it
// for as long as the process lives. The caller has the directory locked, so nobody reads half of
// it.
func (g *gpuDir) write(r record) error {
	text, err := json.Marshal(r)
	if err == nil && g.file == nil {
		path := filepath.Join(g.dir.Name(), fmt.Sprintf("lease-%d-%x", os.Getpid(), rand.Uint64()))
		g.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err == nil {
			err = flock(g.file, unix.LOCK_EX)
		}
		if err == nil && g.shared {
			err = g.file.Chmod(0o644) // other users read it
		}
	}
	if err == nil {
		_, err = g.file.WriteAt(fmt.Appendf(nil, "%-*s\n", recordSize-1, text), 0)
	}
	return err
}

// close removes the file of this process, and unlocks and closes all. It unlocks explicitly,
// because a child process that is just being started has the files open, too. A nil gpuDir has
// nothing to close.
func (g *gpuDir) close() {
	if g == nil {
		return
	}
	if g.file != nil {
		_ = os.Remove(g.file.Name()) // a file that stays counts for nothing
		_ = flock(g.file, unix.LOCK_UN)
		_ = g.file.Close()
	}
	_ = flock(g.dir, unix.LOCK_UN)
	_ = g.dir.Close()
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
