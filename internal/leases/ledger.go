// Package leases is a process's part in the ledger of a node: one lease for each GPU that it uses.
// Package reservation/quota says what a ledger is, and which rules hold.
//
//	Join(Terms) ──▶ Lease (a tier.Quota) ──▶ a page of a file that all processes of the node map
//	Holders, Loads, LeastLoaded ── read the pages of others
//
// The caller of Join closes the lease, after the spaces over it. The mutexes here have the rank
// Backend. With one held, subscribers and events are never called, and files never read.
package leases

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// Terms are what a process joins a node's ledger with. Dir, Device and Physical are
// required.
type Terms struct {
	// Dir is the ledger's directory. It is made if it is not there, for this user only. It must not
	// be a link. It must be this user's or root's own, writable by no other user unless root has
	// shared it (see Share), and on a local file system.
	Dir string
	// Device says which GPU it is, by UUID. GPUs have books of their own.
	Device string
	// Group is whose quota it is: what all processes of a group hold together is within
	// it. At most 128 bytes; empty means that the process has a quota of its own.
	Group string
	// Quota is how many bytes the group may hold. 0 means what the group has already,
	// or else all that is advertised.
	Quota int64
	// Physical is how many bytes the GPU has: no more is ever held on it, whatever the
	// quotas say. All processes must say the same.
	Physical int64
	// Advertised is how much the quotas of all groups may come to; 0 means Physical.
	// See Advertised. All processes must say the same.
	Advertised int64
	// OnBroken, if set, is called when files of the ledger that this process uses were removed. The
	// caller is the goroutine that noticed: by a charge, or a look at the ledger. No lock is held.
	// It must not close the lease.
	OnBroken func(*BrokenError)
	// OnOver, if set, is called when the group holds more than its quota allows, because one of its
	// processes has lowered that. It is called once, until use is within the quota again. A process
	// that did not lower it notices when it looks at the ledger; see Lease.Subscribe. No lock is
	// held. It must not close the lease.
	OnOver func(quota.Over)
}

func (t *Terms) validate() error {
	switch {
	case t.Dir == "":
		return errors.New("quota: a ledger needs a directory")
	case t.Device == "":
		return errors.New("quota: a ledger needs the name of the GPU that it is for")
	case t.Quota < 0 || t.Advertised < 0:
		return fmt.Errorf("quota: a quota of %d bytes of %d: neither may be negative", t.Quota, t.Advertised)
	case t.Physical <= 0:
		return fmt.Errorf("quota: a GPU of %d bytes: it must be above 0", t.Physical)
	}
	if t.Advertised == 0 {
		t.Advertised = t.Physical
	}
	t.Physical = min(t.Physical, math.MaxInt64-1) // for the largest number is what a sum that overflows comes to
	if err := (&quota.Settings{Group: t.Group, Ledger: t.Dir}).Validate(); err != nil {
		return err
	}
	if t.Quota > t.Advertised {
		return fmt.Errorf("quota: %w", &tier.OutOfBudgetError{
			Budget: "what is advertised of " + t.Device, Requested: t.Quota, Remaining: t.Advertised, Limit: t.Advertised,
		})
	}
	return nil
}

// Join takes a lease in the ledger of a node: from now on this process's quota counts
// for others, and theirs for this one. Nothing is held yet. The caller must Close the
// lease; if it is killed instead, others find that out as soon as they look.
//
// The error is tier.ErrOutOfBudget if the quotas of all groups would exceed what is advertised.
// Another quota for the group or another size for the GPU than other processes have is an error
// too. Where file locks do not work as needed, it is tier.ErrNotSupported.
func Join(t Terms) (*Lease, error) {
	if err := t.validate(); err != nil {
		return nil, err
	}
	n, err := openNode(t.Dir, t.Device, true)
	if err != nil {
		return nil, fmt.Errorf("quota: the ledger in %s: %w", t.Dir, err)
	}
	if t.Dir, err = filepath.Abs(t.Dir); err != nil { // for the process may change its directory
		return nil, errors.Join(fmt.Errorf("quota: the ledger in %s: %w", t.Dir, err), n.close())
	}
	l, err := join(n, t)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("quota: the ledger in %s: %w", t.Dir, err), n.close())
	}
	return l, nil
}

func join(n *node, t Terms) (_ *Lease, err error) {
	l := &Lease{terms: t, scanning: make(chan struct{}, 1), hurry: make(chan struct{}, 1), done: make(chan struct{})}
	l.mu.node = n
	l.mu.floor = math.MaxInt64
	l.group = t.Group
	name := newName()
	if l.group == "" {
		l.group = "\x00" + name // no group can have this name
	}
	unlock, err := n.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	n.sweep()
	defer func() {
		if err != nil {
			l.dropPeers()
		}
	}()
	if err := l.scan(); err != nil {
		return nil, err
	}
	limit, err := l.agree()
	if err != nil {
		return nil, err
	}
	if l.mu.own, err = n.create(name, head{
		pid: int64(os.Getpid()), started: time.Now(), quota: l.terms.Quota, physical: t.Physical, advertised: t.Advertised, group: t.Group,
	}, limit); err != nil {
		return nil, err
	}
	n.generation.Add(1)
	l.mu.known = -1 // the first charge looks again
	return l, nil
}

// newName is what the file of a new lease is called.
func newName() string {
	return leasePrefix + strconv.Itoa(os.Getpid()) + "-" + strconv.FormatUint(rand.Uint64(), 36)
}

// agree checks the terms against those of the living, and makes a quota of none the
// group's. It returns what the quota is now: less if the group's was lowered.
func (l *Lease) agree() (limit int64, err error) {
	t := &l.terms
	limit = math.MaxInt64
	promised := make(map[string]int64) // by group
	for _, p := range l.mu.peers {
		if p.head.physical != t.Physical || p.head.advertised != t.Advertised {
			return 0, fmt.Errorf("process %d says that %s has %d bytes, and %d are advertised, not %d and %d: give all the same",
				p.head.pid, t.Device, p.head.physical, p.head.advertised, t.Physical, t.Advertised)
		}
		now := p.words.limit.Load()
		if p.group == l.group {
			if t.Quota == 0 {
				t.Quota = p.head.quota
			}
			if p.head.quota != t.Quota {
				return 0, fmt.Errorf("process %d says that the quota of the group %q is %d bytes, not %d: give all the same", p.head.pid, t.Group, p.head.quota, t.Quota)
			}
			limit = min(limit, now)
		}
		promised[p.group] = max(promised[p.group], now)
	}
	if t.Quota == 0 {
		t.Quota = t.Advertised
	}
	limit = min(limit, t.Quota)
	return limit, l.fits(promised, limit)
}

// fits reports whether the quotas of all are within what is advertised if the group's is
// quota.
func (l *Lease) fits(promised map[string]int64, quota int64) error {
	others := int64(0)
	for group, n := range promised {
		if group != l.group {
			others = add(others, n)
		}
	}
	quota = max(quota, promised[l.group])
	if quota > l.terms.Advertised-others {
		return &tier.OutOfBudgetError{
			Budget: "what is advertised of " + l.terms.Device, Requested: quota,
			Remaining: max(0, l.terms.Advertised-others), Current: others, Limit: l.terms.Advertised,
		}
	}
	return nil
}

// Holder is a process that has a lease. Sizes are in bytes.
type Holder struct {
	Device  string    `json:"device"`
	Group   string    `json:"group,omitempty"` // empty: the process has a quota of its own
	PID     int       `json:"pid"`             // as the process itself sees it
	Started time.Time `json:"started"`         // when it joined
	Quota   int64     `json:"quota"`           // of the group, as this process has it
	Live    int64     `json:"live"`            // promised or allocated now
	Peak    int64     `json:"peak"`            // largest Live so far
	Lost    int64     `json:"lost,omitempty"`  // how often its files were removed while it used them

	Physical   int64 `json:"-"` // what it says that the GPU has: see Terms
	Advertised int64 `json:"-"`
}

// Holders returns the holders on all GPUs of a ledger, by GPU, group and process. It joins nothing
// and changes nothing. The error names what cannot be read and is left out, and what live processes
// need and is missing. A directory that is not there is an empty ledger. In one that root shares,
// directories that root has not made are no part of it; see Strangers.
func Holders(dir string) ([]Holder, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("quota: the ledger: %w", err)
	}
	strange, err := Strangers(dir)
	if err != nil {
		return nil, err
	}
	var out []Holder
	var errs []error
	for _, e := range entries {
		device, err := url.PathUnescape(e.Name())
		if err != nil || !e.IsDir() || deviceDir(device) != e.Name() || slices.Contains(strange, e.Name()) {
			continue // not ours
		}
		held, err := holders(dir, device)
		out = append(out, held...)
		if err != nil {
			errs = append(errs, fmt.Errorf("quota: the ledger in %s: %w", filepath.Join(dir, e.Name()), err))
		}
	}
	slices.SortFunc(out, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Group, b.Group), a.Started.Compare(b.Started), cmp.Compare(a.PID, b.PID))
	})
	return out, errors.Join(errs...)
}

func holders(dir, device string) (out []Holder, err error) {
	n, err := openNode(dir, device, false)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	names, err := n.leases()
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, name := range names {
		p, err := n.open(name)
		if err != nil {
			errs = append(errs, err)
		}
		if p == nil {
			continue
		}
		out = append(out, Holder{
			Device: device, Group: p.head.group, PID: int(p.head.pid), Started: p.head.started,
			Quota: p.words.limit.Load(), Live: p.words.live.Load(), Peak: p.words.peak.Load(), Lost: p.words.lost.Load(),
			Physical: p.head.physical, Advertised: p.head.advertised,
		})
		p.close()
	}
	if len(out) > 0 {
		errs = append(errs, n.checkGeneration())
	}
	return out, errors.Join(errs...)
}

// Load is how much one GPU has to carry.
type Load struct {
	UUID  string
	Bytes int64 // promised on it
	Count int   // holders on it
}

// LeastLoaded returns the loads ordered by preference: fewest bytes, then fewest holders, then by
// UUID. So all processes that see the same loads choose alike. It is a pure function: loads stays
// as it is.
func LeastLoaded(loads []Load) []Load {
	out := slices.Clone(loads)
	slices.SortStableFunc(out, func(a, b Load) int {
		return cmp.Or(cmp.Compare(a.Bytes, b.Bytes), cmp.Compare(a.Count, b.Count), cmp.Compare(a.UUID, b.UUID))
	})
	return out
}

// Loads returns, for each of the GPUs that are named, how much the ledger says it
// carries, to be ordered by LeastLoaded. It changes nothing.
func Loads(dir string, devices []string) ([]Load, error) {
	held, err := Holders(dir)
	if err != nil {
		return nil, err
	}
	out := make([]Load, len(devices))
	for i, d := range devices {
		out[i].UUID = d
		for _, h := range held {
			if deviceDir(h.Device) == deviceDir(d) {
				out[i].Bytes = add(out[i].Bytes, h.Live)
				out[i].Count++
			}
		}
	}
	return out, nil
}

const (
	leasePrefix = "lease-"
	draftPrefix = ".lease-"
	genName     = "generation"
)

// deviceDir is the name of a GPU's directory: its own, with what a file name cannot have written as
// URLs do.
func deviceDir(device string) string {
	if digits, ok := strings.CutPrefix(device, "MIG-"); ok {
		device = "GPU-" + digits // as CUDA calls the instance that NVML calls MIG-…
	}
	name := url.PathEscape(device)
	if strings.HasPrefix(name, ".") {
		name = "%2E" + name[1:]
	}
	return name
}

// add is a + b, or the largest number where that is too large.
func add(a, b int64) int64 {
	if s := a + b; s >= a {
		return s
	}
	return 1<<63 - 1
}

// Advertised returns ⌊physical × ratio⌋, in bytes: how much quotas may promise of a GPU.
// A nil ratio is 1.
func Advertised(physical int64, ratio *big.Rat) (int64, error) {
	if physical <= 0 {
		return 0, fmt.Errorf("quota: a GPU of %d bytes: it must be above 0", physical)
	}
	if ratio == nil {
		return physical, nil
	}
	if ratio.Sign() <= 0 {
		return 0, fmt.Errorf("quota: an oversubscription ratio of %s: it must be above 0", ratio.RatString())
	}
	r := new(big.Rat).SetInt64(physical)
	r.Mul(r, ratio)
	n := new(big.Int).Quo(r.Num(), r.Denom())
	switch {
	case !n.IsInt64():
		return 0, fmt.Errorf("quota: a GPU of %d bytes, oversubscribed %s times, is above the largest size", physical, ratio.RatString())
	case n.Sign() == 0:
		return 0, fmt.Errorf("quota: a GPU of %d bytes, oversubscribed %s times, is less than a byte", physical, ratio.RatString())
	}
	return n.Int64(), nil
}
