package leases

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"os"
	"path/filepath"
	"time"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"golang.org/x/sys/unix"
)

// Terms are the arguments of Join. Dir, Device and Physical are required.
type Terms struct {
	// Dir is the ledger's directory. Join creates it if it does not exist, for this user only. It
	// must not be a link. It must be this user's or root's own, writable by no other user unless
	// root has shared it (see Share), and on a local file system.
	Dir string
	// Device is the UUID of the GPU. Each GPU is counted by itself.
	Device string
	// Group is the name of the group whose processes together hold at most Quota. At most 128
	// bytes; empty means that the process has a quota of its own.
	Group string
	// Quota is how many bytes the group may hold. 0 means the quota that the group has already, or
	// else all that is advertised.
	Quota int64
	// Physical is the size of the GPU in bytes: all processes together never hold more, with any
	// quotas. All processes must give the same.
	Physical int64
	// Advertised is how much the quotas of all groups may come to; 0 means Physical. See
	// Advertised. All processes must give the same.
	Advertised int64
	// OnBroken, if set, is called when this process's file was removed, by the goroutine that
	// noticed, with no lock held. It must not close the lease.
	OnBroken func()
	// OnOver, if set, is called when the group holds more than its quota allows, because one of its
	// processes has lowered that. It is called once, until use is within the quota again. A process
	// that did not lower it notices when it looks at the ledger; see Lease.Subscribe. No lock is
	// held. It must not close the lease.
	OnOver func(quota.Over)
}

// Lease is one process's part in the ledger of a node, for one GPU. It is a tier.Quota over the
// live processes of the node: it refuses bytes beyond the group's quota, and beyond the GPU's
// memory. It is safe for concurrent use. Join returns it, and the caller must Close it.
//
// A lease is attached while it has a locked file in the ledger. If somebody removes the file, the
// lease is detached until its next look at the ledger, which refuses one charge and creates a new
// file. If that fails, the lease stays detached until a later look succeeds. Close detaches it for
// good.
type Lease struct {
	terms       Terms
	subscribers guard.List[struct{}]

	files chan struct{} // holds one element while a goroutine uses gpu; acquired before mu
	gpu   *gpuDir       // nil while the lease is detached

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		books
		over    bool // the group held more than its limit at the last look, and has since then
		blocked bool // the last look could not lock the directory
		closed  bool
		poll    *time.Timer // nil before the first subscription
	}
}

// books are the numbers of a lease. All but own are as of its last look at the ledger.
type books struct {
	// own has this process's numbers as they are now. Granted is what the file has, or less while a
	// look is about to lower the file. Live is at most Granted, except while a look charges. Quota
	// is 0 until the process has joined.
	own   record
	peers int   // how many other processes use the GPU
	live  int64 // bytes that the other processes of the group hold
	limit int64 // of the group: the smallest quota that one of its processes asks for
	room  int64 // how many bytes this process may hold, including those that it holds
	grain int64
}

var _ tier.Quota = (*Lease)(nil)

const (
	maxGrain = 64 << 20 // bytes that a process may have counted without using them

	// How often a lease with subscribers looks at the ledger. Each look takes about 15 µs for each
	// peer, with the directory locked. So the looks of n processes take 15 µs × n² in each period,
	// which grows with n to keep the directory unlocked most of the time, up to a few hundred
	// processes.
	pollEvery   = 50 * time.Millisecond
	pollPerPeer = 10 * time.Millisecond // if that comes to more
)

// ErrBroken is the error of a charge that finds that the file of this process was removed, alone or
// with its directory. Until then other processes did not count this one, so that together they may
// hold more than they should.
var ErrBroken = errors.New("the ledger is broken")

// Join attaches this process to the ledger of a node: from now on its quota counts for others, and
// theirs for it. It holds nothing yet. The caller must Close the lease.
//
// The error is tier.ErrOutOfBudget if the quotas of all groups would exceed what is advertised.
// Another quota for the group or another size of the GPU than other processes have is an error too.
// Where the file system has no reliable locks, the error is tier.ErrNotSupported.
func Join(t Terms) (*Lease, error) {
	if t.Dir == "" || t.Device == "" || t.Physical <= 0 || t.Quota < 0 || t.Advertised < 0 {
		return nil, fmt.Errorf("quota: joining the ledger %q for the GPU %q of %d bytes, %d of %d advertised: "+
			"it needs a directory, a GPU and its size, and no number may be negative",
			t.Dir, t.Device, t.Physical, t.Quota, t.Advertised)
	}
	err := (&quota.Settings{Group: t.Group, Ledger: t.Dir}).Validate()
	if err == nil {
		t.Dir, err = filepath.Abs(t.Dir) // the process may change its directory
	}
	if err != nil {
		return nil, err
	}
	l := &Lease{terms: t, files: make(chan struct{}, 1)}
	l.mu.own = record{Version: version, Joined: t.Quota, Holder: Holder{
		Device: t.Device, Group: t.Group, PID: os.Getpid(), Started: time.Now().UTC(),
		Physical: t.Physical, Advertised: cmp.Or(t.Advertised, t.Physical),
	}}
	if err := l.look(0, 0); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Charge implements tier.Quota. It takes no system call if the bytes fit into the grains that this
// process has. Otherwise it takes grains, for which it reads the files of all live processes.
//
// If the file of this process was removed, Charge returns ErrBroken and charges nothing. If another
// process is stopped while it has the ledger locked, or the file cannot be written, Charge returns
// an error too; grains that the process already has can still be charged.
func (l *Lease) Charge(n int64) error {
	if n <= 0 {
		return fmt.Errorf("quota: cannot charge %d bytes", n)
	}
	l.mu.Lock()
	if n <= l.mu.own.Granted-l.mu.own.Live {
		l.mu.own.charge(n)
		l.mu.Unlock()
		return nil
	}
	l.mu.Unlock()
	return l.look(n, 0)
}

// Credit implements tier.Quota. It returns grains once more than one is unused. If that fails, this
// process keeps them until its next look. While the ledger is locked by a process that is stopped,
// only the first Credit waits for it.
func (l *Lease) Credit(n int64) {
	l.mu.Lock()
	if !l.mu.closed {
		l.mu.own.Live -= n
	}
	live := l.mu.own.Live
	l.mu.over = l.mu.over && add(l.mu.live, live) > l.mu.limit
	l.mu.Unlock()
	if live < 0 {
		panic(fmt.Sprintf("quota: %d bytes of %s were credited that were not charged", n, l.terms.Device))
	}
	l.returnGrains()
	l.notify()
}

// returnGrains looks at the ledger if more than one grain is unused, and the last look found it
// unlocked.
func (l *Lease) returnGrains() {
	l.mu.Lock()
	returns := !l.mu.blocked && l.mu.own.Granted-l.mu.own.Live > l.mu.grain
	l.mu.Unlock()
	if returns {
		_ = l.look(0, 0)
	}
}

// Remaining implements tier.Quota, without a system call. It may be out of date, because it counts
// others as of the last look; Charge decides. A lease looks when it takes or returns grains, and
// periodically while it has subscribers. While the group holds more than a lowered limit, Remaining
// is negative: this process's share of the excess.
func (l *Lease) Remaining() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	own, limit, held := l.mu.own.Live, l.mu.limit, add(l.mu.live, l.mu.own.Live)
	if held > limit {
		hi, lo := bits.Mul64(uint64(limit), uint64(own))
		keeps, _ := bits.Div64(hi, lo, uint64(held)) // rounded down, so that together all are within the limit
		return int64(keeps) - own
	}
	return max(0, l.mu.room-own)
}

// Limit implements tier.Quota: the group's quota, and at most the GPU's memory, as of the last
// look.
func (l *Lease) Limit() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return min(l.mu.limit, l.mu.own.Physical)
}

// SetLimit changes the quota that this process asks for its group, to n > 0 bytes; the smallest one
// that a process of the group asks for is the group's limit. It revokes nothing. After an increase
// the quotas of all groups must still be within what is advertised.
func (l *Lease) SetLimit(n int64) error {
	if n <= 0 {
		return fmt.Errorf("quota: a limit of %d bytes: it must be above 0", n)
	}
	return l.look(0, n)
}

// Live returns how many bytes this process holds.
func (l *Lease) Live() int64 { return l.own().Live }

// Lost returns how often this process's file was removed while the process used it.
func (l *Lease) Lost() int64 { return l.own().Lost }

func (l *Lease) own() record {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.own
}

// Subscribe implements tier.Quota. From the first subscription on, the lease looks at the ledger
// every 50 ms, or every 10 ms × peers if that is more: for bytes that other processes returned, for
// killed processes, and for changed quotas.
func (l *Lease) Subscribe(f func()) (cancel func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.poll == nil {
		l.mu.poll = time.AfterFunc(pollEvery, func() {
			labels.Quota.Set()
			if l.look(0, 0) != nil {
				l.notify() // a waiter charges again, and gets the error
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			if !l.mu.closed {
				l.mu.poll.Reset(max(pollEvery, pollPerPeer*time.Duration(l.mu.peers)))
			}
		})
	}
	return l.subscribers.Add(func(struct{}) { f() })
}

func (l *Lease) notify() { l.subscribers.Call("a subscriber of a quota", struct{}{}) }

// Close returns everything that this process holds, and removes its file. A second Close returns
// tier.ErrClosed.
func (l *Lease) Close() error {
	l.files <- struct{}{} // so that a charge that has begun ends first
	defer func() { <-l.files }()
	l.mu.Lock()
	closed := l.mu.closed
	l.mu.closed = true
	l.mu.own.Live, l.mu.own.Granted, l.mu.live, l.mu.room = 0, 0, 0, 0
	if l.mu.poll != nil {
		l.mu.poll.Stop()
	}
	l.mu.Unlock()
	if closed {
		return fmt.Errorf("quota: the lease is %w", tier.ErrClosed)
	}
	l.gpu.close()
	l.gpu = nil
	return nil
}

// look reads the ledger, charges bytes, sets the quota that this process asks for unless asked is
// 0, and writes this process's file, with as many grains as the process needs from then on. If look
// returns an error, it has charged and set nothing. The first look joins the ledger. A look that
// finds that the file was removed creates a new file, and returns ErrBroken.
func (l *Lease) look(bytes, asked int64) (err error) {
	lockrank.AssertNone("the ledger is read")
	until := time.Now().Add(lockFor) // for all goroutines that wait now, so that they fail at the same time
	var joins, broken, exceeded, changed bool
	var over quota.Over
	l.files <- struct{}{}
	defer func() {
		<-l.files
		if broken {
			err = errors.Join(fmt.Errorf("%w: the file of this process was removed from the ledger in %s while the "+
				"process, which holds %d bytes of %s, uses it: "+
				"keep programs that remove old files away from the directory",
				ErrBroken, l.terms.Dir, l.Live(), l.terms.Device), err)
			if l.terms.OnBroken != nil {
				l.subscribers.Panics.Do("Terms.OnBroken", l.terms.OnBroken)
			}
		}
		if exceeded && l.terms.OnOver != nil {
			l.subscribers.Panics.Do("Terms.OnOver", func() { l.terms.OnOver(over) })
		}
		if changed {
			l.notify()
		}
		l.returnGrains() // which are unused if another goroutine has credited bytes in the meantime
		if err != nil {
			err = fmt.Errorf("quota: %w", err)
		}
	}()

	// Lock the directory, and attach the lease.
	if l.gpu != nil {
		err = l.gpu.lock(unix.LOCK_EX, until)
	}
	l.mu.Lock()
	l.mu.blocked = err != nil
	own, closed := l.mu.own, l.mu.closed // own becomes the content of the file
	l.mu.Unlock()
	switch {
	case closed:
		return fmt.Errorf("the lease is %w", tier.ErrClosed)
	case err != nil:
		return err
	}
	joins = own.Quota == 0
	broken = !joins && (l.gpu == nil || !isAt(l.gpu.dir) || !isAt(l.gpu.file))
	if joins || broken {
		l.gpu.close()
		if l.gpu, err = openGPU(l.terms.Dir, deviceDir(own.Device), unix.LOCK_EX); err != nil {
			return err
		}
	}
	defer flock(l.gpu.dir, unix.LOCK_UN)
	if broken {
		own.Lost++
		bytes, asked = 0, 0
		if err := l.gpu.write(own); err != nil { // first of all, so that others count this process
			return err
		}
	}

	// Add up the files of the other processes.
	peers, err := l.gpu.read(true)
	if err != nil {
		return err
	}
	var granted, groupGranted, groupLive, promised int64
	smallest := int64(math.MaxInt64)
	quotas := map[string]int64{} // the largest one of each other group
	for _, p := range peers {
		granted = add(granted, p.Granted)
		peer := own.Group != "" && p.Group == own.Group
		if peer {
			groupGranted, groupLive = add(groupGranted, p.Granted), add(groupLive, p.Live)
			smallest = min(smallest, p.Quota)
			own.Joined = cmp.Or(own.Joined, p.Joined)
		} else {
			group := cmp.Or(p.Group, p.file) // a process without a group is one by itself
			quotas[group] = max(quotas[group], p.Quota)
		}
		if joins && (p.Physical != own.Physical || p.Advertised != own.Advertised || peer && p.Joined != own.Joined) {
			return fmt.Errorf("process %d of the group %q joined %s with %d bytes, %d advertised, and a quota of %d, "+
				"not %d, %d and %d: give all the same", p.PID, p.Group, own.Device,
				p.Physical, p.Advertised, p.Joined, own.Physical, own.Advertised, own.Joined)
		}
	}
	for _, q := range quotas {
		promised = add(promised, q)
	}

	// Check the quota. A process that joins without one gets all that is advertised. If the group's
	// limit was lowered, the process starts with the lowered one.
	if joins {
		own.Joined = cmp.Or(own.Joined, own.Advertised)
		asked = min(own.Joined, smallest)
	}
	if left := max(0, own.Advertised-promised); asked > max(own.Quota, left) {
		return &tier.OutOfBudgetError{
			Budget: "what is advertised of " + own.Device, Requested: asked,
			Remaining: left, Current: promised, Limit: own.Advertised,
		}
	}
	own.Quota = cmp.Or(asked, own.Quota)
	limit := min(own.Quota, smallest)
	grain := max(1, min(maxGrain, limit/64))

	// Either the group's quota or the GPU's memory bounds the bytes of this process.
	whose := "this process"
	if own.Group != "" {
		whose = fmt.Sprintf("the group %q", own.Group)
	}
	title := fmt.Sprintf("the quota of %s on %s (ledger %s)", whose, own.Device, l.terms.Dir)
	bound := tier.OutOfBudgetError{Budget: title, Requested: bytes, Current: groupGranted, Limit: limit}
	if own.Physical-granted < limit-groupGranted {
		bound.Budget = fmt.Sprintf("the memory of %s, which %d processes share by the ledger in %s,",
			own.Device, len(peers)+1, l.terms.Dir)
		bound.Current, bound.Limit = granted, own.Physical
	}
	room := max(0, bound.Limit-bound.Current)

	// Charge. Until the file is written, other goroutines may charge only bytes that count before
	// and after the write.
	l.mu.Lock()
	if bound.Remaining = max(0, room-l.mu.own.Live); bytes > bound.Remaining {
		bound.Current = add(bound.Current, l.mu.own.Live)
		err, bytes = &bound, 0
	}
	l.mu.own.charge(bytes)
	own.Live, own.Peak = l.mu.own.Live, l.mu.own.Peak
	own.Granted = own.Live
	if rest := (grain - own.Live%grain) % grain; rest <= room-own.Live {
		own.Granted += rest // if a whole grain has no room, the process takes only the bytes that it needs
	}
	l.mu.own.Granted = min(l.mu.own.Granted, own.Granted)
	l.mu.Unlock()

	writeErr := l.gpu.write(own)

	l.mu.Lock()
	defer l.mu.Unlock()
	if writeErr != nil {
		l.mu.own.Live -= bytes
		return writeErr
	}
	own.Live, own.Peak = l.mu.own.Live, l.mu.own.Peak
	changed = limit != l.mu.limit || room > l.mu.room
	l.mu.books = books{own: own, peers: len(peers), live: groupLive, limit: limit, room: room, grain: grain}
	over = quota.Over{Quota: title, Used: add(groupLive, own.Live), Limit: limit}
	exceeded = over.Used > limit && !l.mu.over
	l.mu.over = over.Used > limit
	return err
}

// add returns a + b, or the largest number if that is too large. Other users may have written false
// numbers.
func add(a, b int64) int64 { return a + min(b, math.MaxInt64-a) }
