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
// Links, directories, sockets, FIFOs and files with other names are ignored, and stay. A file with
// the name of a lease that somebody has locked and that makes no sense is an error in every charge
// that takes a grain, never nothing.
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
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
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
	Peak    int64     `json:"peak"`            // largest Live that the process has written
	Lost    int64     `json:"lost,omitempty"`  // how often its files were removed while it used them

	Granted    int64 `json:"granted"`    // counted against the limits: Live in whole grains
	Physical   int64 `json:"physical"`   // size of the GPU
	Advertised int64 `json:"advertised"` // how much quotas may promise of the GPU
}

// valid reports whether the numbers make sense, and sums of thousands of them fit into an int64.
func (h *Holder) valid() bool {
	return min(h.Quota, h.Physical, h.Advertised) > 0 && min(h.Granted, h.Live, h.Peak) >= 0 &&
		max(h.Quota, h.Physical, h.Advertised, h.Granted, h.Live) <= maxBytes
}

// record is the content of a lease's file: one JSON object, spaces up to recordSize bytes, and a
// newline.
type record struct {
	Version int `json:"version"`
	Holder
}

const (
	version    = 3
	recordSize = 4096
	readOnly   = os.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK // follows no link and waits for no FIFO

	// maxBytes is the largest size of a GPU or a quota.
	maxBytes = 1 << 50

	// lockFor is how long a process waits for the lock of a directory. Processes keep it for well
	// under a millisecond, unless they are stopped.
	lockFor = 5 * time.Second
)

// Holders returns the holders on all GPUs of a ledger, by GPU and process. It changes nothing. The
// error names files that cannot be read, which are left out. A directory that does not exist is an
// empty ledger.
func Holders(dir string) ([]Holder, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	errs := []error{err}
	var all []Holder
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		gpu, err := lockGPU(dir, e.Name(), unix.LOCK_SH, time.Now().Add(lockFor))
		if err == nil {
			var held []Holder
			held, err = read(gpu, nil, false)
			unlock(gpu)
			all = append(all, held...)
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return all, fmt.Errorf("quota: the ledger in %s: %w", dir, err)
	}
	return all, nil
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

// Share creates a ledger that all users may join, for the named GPUs, and removes the files that
// dead processes left there. Only root can call it.
//
// A ledger that several users share is root's, and only root can add GPUs to it:
//
//	DIR                mode 755
//	DIR/<GPU>          mode 1777: root lets all users join
//	DIR/<GPU>/lease-…  written by its user, read by all
//
// Users cannot change, remove or replace the files of others. But every user who reaches the
// directory of a GPU can create files with false numbers in it, or keep it locked. So root creates
// the ledger where only those users reach it who are to share: below a directory of its own, from
// which containers mount it.
//
// An existing directory must belong to root, and must be writable only by root. The directories
// above it must belong to root, and be writable only by root or sticky, so that no other user can
// replace it. A call that failed can be repeated.
func Share(dir string, devices ...string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("quota: sharing the ledger in %s: %w", dir, err)
		}
	}()
	if os.Geteuid() != 0 {
		return fmt.Errorf("user %d is not root: %w", os.Geteuid(), fs.ErrPermission)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	path, err := filepath.EvalSymlinks(dir)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	for at, below := path, ""; err == nil && at != below; at, below = filepath.Dir(at), at {
		err = checkDir(at, true) // lockGPU checks path itself
	}
	if err != nil {
		return err
	}
	for _, d := range devices {
		gpu, err := lockGPU(path, dirName(cudaName(d)), unix.LOCK_EX, time.Now().Add(lockFor))
		if err != nil {
			return err
		}
		_, _ = read(gpu, nil, true) // removes files; those that cannot be read do not keep root from sharing
		err = gpu.Chmod(0o777 | fs.ModeSticky)
		unlock(gpu)
		if err != nil {
			return err
		}
	}
	return os.Chmod(path, 0o755)
}

// cudaName returns CUDA's name of a GPU or of an instance, which NVML calls MIG-….
func cudaName(device string) string {
	if digits, ok := strings.CutPrefix(device, "MIG-"); ok {
		return "GPU-" + digits
	}
	return device
}

// dirName returns the name of a GPU's directory: CUDA's name of the GPU, escaped as in URLs.
func dirName(device string) string { return strings.ReplaceAll(url.PathEscape(device), ".", "%2E") }

// lockGPU opens and locks the directory of a GPU: exclusively (unix.LOCK_EX) to charge, and then it
// creates the directory, or shared (unix.LOCK_SH) to look.
func lockGPU(dir, name string, how int, until time.Time) (*os.File, error) {
	path := filepath.Join(dir, name)
	for _, d := range []string{filepath.Dir(path), path} { // no slash at the end, which would follow a link
		if how == unix.LOCK_EX {
			if err := os.MkdirAll(d, 0o700); err != nil {
				return nil, fmt.Errorf("root has not shared %s in the ledger %s, and it cannot be created: %w",
					name, dir, err)
			}
		}
		if err := checkDir(d, d == path); err != nil {
			return nil, err
		}
	}
	if on, err := fsinfo.Of(path); err == nil && on.Remote {
		return nil, fmt.Errorf("%s is on a network file system (%s), whose locks are not reliable: "+
			"name a local one, such as a directory in /dev/shm or /run: %w", path, on.Name, tier.ErrNotSupported)
	}
	d, err := os.OpenFile(path, readOnly, 0)
	if err != nil {
		return nil, err
	}
	for err = flock(d, how); err != nil; err = flock(d, how) {
		if time.Now().After(until) {
			_ = d.Close()
			return nil, fmt.Errorf("%s cannot be locked for %v: is a process that uses it stopped? %w",
				path, lockFor, err)
		}
		time.Sleep(100 * time.Microsecond)
	}
	if !isAt(d) { // the directory was replaced while this process waited
		unlock(d)
		return lockGPU(dir, name, how, until)
	}
	return d, nil
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

// checkDir refuses a link, and a directory to which other users can write. One that may be shared
// can be root's and sticky, so that users cannot remove the files of others.
func checkDir(path string, mayBeShared bool) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	uid := int(info.Sys().(*syscall.Stat_t).Uid)
	shared := mayBeShared && uid == 0 && info.Mode()&fs.ModeSticky != 0
	if !info.IsDir() || uid != os.Geteuid() && uid != 0 || !shared && info.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s belongs to user %d and has mode %v: want a directory, not a link, of this user or root, "+
			"that cannot be written to by others", path, uid, info.Mode())
	}
	return nil
}

// flock locks f, or returns unix.EWOULDBLOCK if another process has it locked.
func flock(f *os.File, how int) error { return unix.Flock(int(f.Fd()), how|unix.LOCK_NB) }

// unlock unlocks and closes f. Close alone would not unlock it while a child process that is just
// being started has it open, too.
func unlock(f *os.File) {
	_ = flock(f, unix.LOCK_UN)
	_ = f.Close()
}

// read returns the holders that have a lease in dir, other than own. With reap it removes the files
// of dead ones, as far as this user may. The error names each file that cannot be read and whose
// process is alive. The caller has dir locked.
func read(dir, own *os.File, reap bool) (live []Holder, err error) {
	entries, err := os.ReadDir(dir.Name())
	errs := []error{err}
	for _, e := range entries {
		path := filepath.Join(dir.Name(), e.Name())
		lease, _ := filepath.Match("lease-[0-9]*-*", e.Name())
		if !lease || !e.Type().IsRegular() || own != nil && path == own.Name() {
			continue
		}
		h, err := readLease(path)
		switch {
		case errors.Is(err, fs.ErrNotExist): // Close has removed it
		case err != nil:
			errs = append(errs, fmt.Errorf("%s, whose process is alive, cannot be read: %w", path, err))
		case h != nil:
			live = append(live, *h)
		case reap:
			_ = os.Remove(path) // others ignore a file that stays
		}
	}
	return live, errors.Join(errs...)
}

// readLease reads the file of a process. It returns nil if the process is dead: nobody has its file
// locked.
func readLease(path string) (*Holder, error) {
	f, err := os.OpenFile(path, readOnly, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := flock(f, unix.LOCK_SH); err != unix.EWOULDBLOCK {
		return nil, err
	}
	var r record
	err = json.NewDecoder(io.LimitReader(f, recordSize)).Decode(&r)
	if err == nil && (r.Version != version || !r.valid()) {
		err = fmt.Errorf("its format is not of version %d, or its numbers make no sense: %+v", version, r)
	}
	return &r.Holder, err
}

// write replaces the content of file, the lease of this process. If it is nil, write creates one in
// dir, which it locks for as long as the process lives, and removes it if it cannot be written. The
// caller has dir locked, so nobody reads half of the content.
func write(dir, file *os.File, h Holder) (*os.File, error) {
	if !h.valid() {
		return file, fmt.Errorf("%+v: sizes must be from 1 to %d bytes", h, int64(maxBytes))
	}
	creates := file == nil
	text, err := json.Marshal(record{version, h})
	if err == nil && creates {
		if file, err = os.CreateTemp(dir.Name(), fmt.Sprintf("lease-%d-*", os.Getpid())); err != nil {
			return nil, err
		}
		err = errors.Join(flock(file, unix.LOCK_EX), file.Chmod(0o644)) // the users of a shared ledger read it
	}
	if err == nil {
		_, err = file.WriteAt(fmt.Appendf(nil, "%-*s\n", recordSize-1, text), 0)
	}
	if err != nil && creates && file != nil {
		_ = os.Remove(file.Name()) // a file that stays counts for nothing
		unlock(file)
		file = nil
	}
	return file, err
}
