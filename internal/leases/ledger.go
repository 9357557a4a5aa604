// Package leases counts the GPU memory of all processes of a node, so that they share quotas without a
// daemon. Package reservation/quota documents the rules.
//
//	Join(Terms) ──▶ Lease, a tier.Quota for one GPU
//	Holders ── what all live processes hold
//	Share, Strangers ── a ledger for several users, which only root creates
//
// # Grains
//
// A process counts memory in grains: a 64th of its group's limit, at most 64 MiB. It takes a grain when
// a charge does not fit into those that it has, and returns grains once more than one is unused. So most
// charges take no system call, and at most one grain of each process is counted without being used. A
// grain that does not fit into the quota any more is taken in part: as many bytes as the charge needs.
// Thus a process can have a quota to its last byte.
//
// # Files
//
//	DIR/shared               only where root shares the ledger with all users
//	DIR/<GPU>/               locked for a moment by a process that reads or writes files in it
//	DIR/<GPU>/lease-PID-…    one for each process (or engine, if it has several), locked while it lives
//
// A lease file is a JSON object: the process, its group, the limit that it asks for, the bytes that it
// has granted itself in grains, and those that it held when it wrote the file. Only its process writes
// it. Each GPU has a directory, so that charges on several GPUs do not wait for each other, and root can
// open each GPU to users by itself.
//
// All locks are flock(2). A process that joins, charges, returns grains or changes its limit has the
// directory locked exclusively: it reads all files, decides, and writes its own. Observers have it locked
// shared. Thus nobody reads half a record, and two processes cannot take the same bytes. While a process
// is stopped with the lock, other processes cannot take grains: after 5 seconds a charge fails with an
// error. Charges within their grains succeed.
//
// A file counts while its process has it locked. The kernel releases a process's locks when the process
// ends in any way, so kill -9 is harmless at any point:
//
//   - before it has created its file: nothing is there;
//   - with an empty or half-written file: the file is unlocked, so nobody reads it;
//   - while it charges, before or after the write: its file does not count any more, whatever it says;
//   - with the directory locked: the lock is gone, and the next process gets it.
//
// The next process that looks removes unlocked files. Process IDs in names and records are for people;
// that they are reused does not matter. Files are open with O_CLOEXEC, so programs that the process
// starts do not keep the locks. A child that is forked without exec keeps them until it ends, and counts
// as the process until then. Nothing is synced to disk: after a power failure no process is left to
// count. A network file system is refused, because its locks may not reach all processes. If a file cannot
// be written, as on a full disk, the charge fails with the system's error, and nothing is charged.
//
// Links, directories, sockets and FIFOs are ignored, and files with other names stay. A file named like
// a lease that somebody has locked and that makes no sense is an error in every charge that takes a
// grain, never nothing.
//
// # Locks
//
// Lease.files is acquired before Lease.mu, which has the rank Backend. With mu locked, subscribers and
// events are not called, and files are not used.
package leases

import (
	"cmp"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spillway-db/spillway/reservation/quota"
	"golang.org/x/sys/unix"
)

// Terms are what a process joins a node's ledger with. Dir, Device and Physical are required.
type Terms struct {
	// Dir is the ledger's directory. Join creates it if it does not exist, for this user only. It must
	// not be a link. It must be this user's or root's own, writable by no other user unless root has
	// shared it (see Share), and on a local file system.
	Dir string
	// Device is the UUID of the GPU. Each GPU is counted by itself.
	Device string
	// Group is the name of the group whose processes together hold at most Quota. At most 128 bytes;
	// empty means that the process has a quota of its own.
	Group string
	// Quota is how many bytes the group may hold. 0 means what the group has already, or else all that
	// is advertised.
	Quota int64
	// Physical is the size of the GPU in bytes: all processes together never hold more, whatever the
	// quotas are. All processes must give the same.
	Physical int64
	// Advertised is how much the quotas of all groups may come to; 0 means Physical. See Advertised.
	// All processes must give the same.
	Advertised int64
	// OnBroken, if set, is called when this process's file was removed, by the goroutine that noticed,
	// with no lock held. It must not close the lease.
	OnBroken func(*BrokenError)
	// OnOver, if set, is called when the group holds more than its quota allows, because one of its
	// processes has lowered that. It is called once, until use is within the quota again. A process
	// that did not lower it notices when it looks at the ledger; see Lease.Subscribe. No lock is
	// held. It must not close the lease.
	OnOver func(quota.Over)
}

// Join attaches this process to the ledger of a node: from now on its quota counts for others, and theirs
// for it. It holds nothing yet. The caller must Close the lease.
//
// The error is tier.ErrOutOfBudget if the quotas of all groups would exceed what is advertised. Another
// quota for the group or another size of the GPU than other processes have is an error too. Where the
// file system has no reliable locks, the error is tier.ErrNotSupported.
func Join(t Terms) (*Lease, error) {
	if t.Dir == "" || t.Device == "" || t.Physical <= 0 || t.Quota < 0 || t.Advertised < 0 {
		return nil, fmt.Errorf("quota: joining the ledger %q for the GPU %q of %d bytes, %d of %d advertised: "+
			"it needs a directory, a GPU and its size, and no number may be negative",
			t.Dir, t.Device, t.Physical, t.Quota, t.Advertised)
	}
	if err := (&quota.Settings{Group: t.Group, Ledger: t.Dir}).Validate(); err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(t.Dir) // the process may change its directory
	if err != nil {
		return nil, fmt.Errorf("quota: the ledger in %s: %w", t.Dir, err)
	}
	t.Dir, t.Advertised = dir, cmp.Or(t.Advertised, t.Physical)
	if t.OnBroken == nil {
		t.OnBroken = func(*BrokenError) {}
	}
	if t.OnOver == nil {
		t.OnOver = func(quota.Over) {}
	}
	l := &Lease{terms: t, files: make(chan struct{}, 1)}
	l.mu.dir = dir
	l.mu.own = record{Version: version, Joined: t.Quota, Holder: Holder{
		Device: t.Device, Group: t.Group, PID: os.Getpid(), Started: time.Now().UTC(),
		Physical: t.Physical, Advertised: t.Advertised,
	}}
	if err := l.attach(&l.mu.own, true); err != nil {
		return nil, fmt.Errorf("quota: the ledger in %s: %w", t.Dir, err)
	}
	return l, nil
}

// agree checks what the process joins with against the records of others. A process without a quota gets
// that of its group, or else everything that is advertised. If its group's limit was lowered, the process
// starts with the lowered one.
func (l *Lease) agree(n *node, own *record) error {
	peers, err := n.read(true)
	if err != nil {
		return err
	}
	for _, p := range peers {
		joined := own.Joined // what p must have joined with
		if own.Group != "" && p.Group == own.Group {
			own.Joined = cmp.Or(own.Joined, p.Joined)
			joined = p.Joined
		}
		if own.Physical != p.Physical || own.Advertised != p.Advertised || own.Joined != joined {
			return fmt.Errorf("process %d of the group %q joined %s with %d bytes, %d advertised, and a quota of %d, "+
				"not %d, %d and %d: give all the same", p.PID, p.Group, own.Device,
				p.Physical, p.Advertised, p.Joined, own.Physical, own.Advertised, own.Joined)
		}
	}
	own.Joined = cmp.Or(own.Joined, own.Advertised)
	own.Quota = own.Joined
	l.mu.sum(peers)
	own.Quota = l.mu.limit()
	return l.mu.fits(own.Quota)
}

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

// Holders returns the holders on all GPUs of a ledger, by GPU, group and process. It changes nothing. The
// error names files that cannot be read, which are left out. A directory that does not exist is an empty
// ledger. In a ledger that root shares, directories that root has not created are ignored; see Strangers.
func Holders(dir string) ([]Holder, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	strange, strangeErr := Strangers(dir)
	if err := errors.Join(err, strangeErr); err != nil {
		return nil, fmt.Errorf("quota: the ledger: %w", err)
	}
	var out []Holder
	var errs []error
	for _, e := range entries {
		device, err := url.PathUnescape(e.Name())
		if err != nil || !e.IsDir() || deviceDir(device) != e.Name() || slices.Contains(strange, e.Name()) {
			continue
		}
		records, err := observe(dir, device)
		if err != nil {
			errs = append(errs, fmt.Errorf("quota: the ledger in %s: %w", filepath.Join(dir, e.Name()), err))
		}
		for _, r := range records {
			r.Device, r.Started = device, r.Started.Local()
			out = append(out, r.Holder)
		}
	}
	slices.SortFunc(out, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Group, b.Group), a.Started.Compare(b.Started))
	})
	return out, errors.Join(errs...)
}

// observe reads the records of a GPU, as far as they can be read.
func observe(dir, device string) ([]record, error) {
	n, err := openNode(dir, device, unix.LOCK_SH)
	if err != nil {
		return nil, err
	}
	defer n.close()
	return n.read(false)
}

// Advertised returns ⌊physical × ratio⌋, in bytes: how much quotas may promise of a GPU. A nil ratio is 1.
func Advertised(physical int64, ratio *big.Rat) (int64, error) {
	if ratio == nil {
		ratio = big.NewRat(1, 1)
	}
	product := new(big.Rat).Mul(new(big.Rat).SetInt64(physical), ratio)
	n := new(big.Int).Quo(product.Num(), product.Denom())
	if physical <= 0 || !n.IsInt64() || n.Sign() <= 0 {
		return 0, fmt.Errorf("quota: a GPU of %d bytes, oversubscribed %s times, is less than a byte "+
			"or above the largest size", physical, ratio.RatString())
	}
	return n.Int64(), nil
}
