// Package faultfs injects faults between a disk volume and its file system, for tests of programs
// that spill and must handle a failing disk.
//
//	spillway.DiskConfig.FS
//	        │
//	spill volume ──▶ faultfs.FS ──▶ disk.OS()
//	                  rules: which operations, which of them, what happens
//
// A Rule chooses operations by kind, path, index and chance, and has an Effect: an error, a short
// transfer, a flipped bit, a delay, a limit on the rate, or a call of the test's. An operation gets
// the effect of the first rule that chooses it. An operation that fails is not done at all. Package
// tier/faultdev does the same for devices.
//
// An FS serves any number of volumes and needs no closing. It must outlive the volumes. FS.Open
// returns how many files they have left open. An FS is safe for concurrent use. Its mutexes have
// the rank Device and are not held during operations and hooks.
package faultfs

import (
	"path/filepath"
	"time"

	"github.com/spillway-db/spillway/internal/faultrule"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier/disk"
)

// The operations: those of disk.FS, of disk.Lock and of disk.File.
const (
	opStat          = "stat"
	opUsage         = "usage"
	opOpenAnonymous = "open-anonymous"
	opCreate        = "create"
	opReopen        = "reopen"
	opMkdir         = "mkdir"
	opReadDir       = "readdir"
	opRemove        = "remove"
	opRename        = "rename"
	opLock          = "lock"
	opUnlock        = "unlock"
	opRead          = "read"
	opWrite         = "write"
	opAllocate      = "allocate"
	opPunch         = "punch"
	opTruncate      = "truncate"
	opClose         = "close"
)

// Rule chooses operations and gives them an effect. Zero fields choose all operations.
type Rule struct {
	// Ops are patterns of path.Match for the names of operations, which are "stat", "usage",
	// "open-anonymous", "create", "reopen", "mkdir", "readdir", "remove", "rename", "lock", "unlock",
	// "read", "write", "allocate", "punch", "truncate" and "close".
	Ops []string
	// Path is a pattern of filepath.Match for the path, its last element, or one of its parent
	// directories. The path of an anonymous file is its directory's with "#0", "#1", … in the order
	// in which they were opened.
	Path string
	// Skip is how many of the chosen operations pass before the rule begins. Times is how many it
	// applies to after that, 0 for all.
	Skip, Times int
	// Probability is the chance of each operation that is due to be hit; 0 means certainty.
	Probability float64
	// Hit, if set, is called before each operation that the rule applies to, with no lock held.
	Hit func(op, path string)

	Effect Effect
}

// Effect is what happens to an operation. Fail, Short, BitFlip, Slow, Throttle and Do return one.
type Effect struct {
	err   error
	short bool
	flip  bool
	delay time.Duration
	rate  *rate
	hook  func(op, path string)
}

// Fail makes operations return err and do nothing.
func Fail(err error) Effect { return Effect{err: err} }

// Short makes reads and writes transfer about half of the requested bytes without an error. Other
// operations are not affected.
func Short() Effect { return Effect{short: true} }

// BitFlip changes one bit of the bytes that are read or written, silently.
func BitFlip() Effect { return Effect{flip: true} }

// Slow delays operations.
func Slow(d time.Duration) Effect { return Effect{delay: d} }

// Throttle limits the rate of reads and writes, as a slow disk would. All operations that it
// applies to share the rate. The time that an operation takes by itself counts, and idle time earns
// no credit. A rate of 0 or less is no limit.
//
// Throttle does not apply to an operation that an earlier rule has chosen. To have both faults and
// a rate, wrap one FS with another.
func Throttle(bytesPerSecond int64) Effect {
	if bytesPerSecond <= 0 {
		return Effect{}
	}
	return Effect{rate: newRate(bytesPerSecond)}
}

// Do calls f before the operation, which then takes place; f may block.
func Do(f func(op, path string)) Effect { return Effect{hook: f} }

// FS is a disk.FS whose operations can fail.
type FS struct {
	inner disk.FS
	rules *faultrule.Set[Rule]

	mu struct {
		lockrank.Mutex[lockrank.Device]
		anonymous int // anonymous files opened so far
		open      int // files and locks that are open
	}
}

// New wraps inner. seed makes chance repeatable, provided that operations come in the same order.
func New(inner disk.FS, seed uint64, rules ...Rule) *FS {
	f := &FS{inner: inner, rules: faultrule.New[Rule](seed,
		opStat, opUsage, opOpenAnonymous, opCreate, opReopen, opMkdir, opReadDir, opRemove, opRename,
		opLock, opUnlock, opRead, opWrite, opAllocate, opPunch, opTruncate, opClose)}
	for _, r := range rules {
		f.Add(r)
	}
	return f
}

// Add adds a rule after the existing ones and returns a function that removes it. It panics if a
// pattern of Ops matches no operation.
func (f *FS) Add(r Rule) (remove func()) {
	return f.rules.Add(r, faultrule.Turns{Ops: r.Ops, Skip: r.Skip, Times: r.Times, Probability: r.Probability})
}

// Count returns how many operations match one of the patterns, including failed ones. Without a
// pattern it returns the number of all operations.
func (f *FS) Count(ops ...string) int { return f.rules.Count(ops...) }

// Hits returns how many operations rules were applied to.
func (f *FS) Hits() int { return f.rules.Hits() }

// Open returns how many files and locks are open.
func (f *FS) Open() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.open
}

// applied is the effect on an operation that is under way.
type applied struct {
	Effect
	until time.Time // when a throttled operation's bytes have passed
}

// apply counts an operation of n bytes and does the part of its effect that comes before it.
func (f *FS) apply(op, path string, n int) applied {
	r := f.rules.Choose(op, func(r *Rule) bool { return r.matches(path) })
	if r == nil {
		return applied{}
	}
	lockrank.AssertNone("a fault is injected")
	if r.Hit != nil {
		r.Hit(op, path)
	}
	e := applied{Effect: r.Effect}
	if e.hook != nil {
		e.hook(op, path)
	}
	if e.delay > 0 {
		time.Sleep(e.delay)
	}
	if e.rate != nil && n > 0 {
		e.until = e.rate.book(n)
	}
	return e
}

// passed waits until the rate has let the operation's bytes pass.
func (e *applied) passed() {
	if !e.until.IsZero() {
		e.rate.wait(e.until)
	}
}

func (r *Rule) matches(path string) bool {
	if r.Path == "" {
		return true
	}
	if last, _ := filepath.Match(r.Path, filepath.Base(path)); last {
		return true
	}
	for {
		if whole, _ := filepath.Match(r.Path, path); whole {
			return true
		}
		up := filepath.Dir(path)
		if up == path {
			return false
		}
		path = up
	}
}
