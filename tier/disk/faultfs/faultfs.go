// Package faultfs puts faults between a disk volume and its file system: for tests of
// programs that spill, which should know what they do when a disk fails.
//
//	spillway.DiskConfig.FS
//	        │
//	spill volume ──▶ faultfs.FS ──▶ disk.OS()
//	                  rules: which operations, which of them, what happens
//
// A Rule chooses operations by kind, by path, by index and by chance, and has an
// Effect: an error, a short transfer, a flipped bit, a delay, a limit on the rate,
// or a call of the test's. The first rule that chooses an operation is applied to
// it. An operation that fails is not done at all. tier/faultdev does the same for
// devices.
//
// An FS belongs to its maker, serves any number of volumes, and needs no closing; it
// must be there for as long as the volumes are. Its Open says how many files they have
// left open. It is safe for concurrent use. Its mutexes have the rank Device and are not
// held while anything is done.
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
	opLock          = "lock"
	opUnlock        = "unlock"
	opRead          = "read"
	opWrite         = "write"
	opAllocate      = "allocate"
	opPunch         = "punch"
	opClose         = "close"
)

// Rule says which operations something happens to. Zero fields choose all.
type Rule struct {
	// Ops are patterns of path.Match for the names of operations, which are "stat", "usage",
	// "open-anonymous", "create", "reopen", "mkdir", "readdir", "remove", "lock", "unlock",
	// "read", "write", "allocate", "punch" and "close".
	Ops []string
	// Path is a pattern of filepath.Match for the path, its last element, or a
	// directory that it lies in. The path of an anonymous file is its directory's with
	// "#0", "#1", … in the order in which they were opened.
	Path string
	// Skip is how many of the operations chosen so far pass before the rule
	// begins; Times is how many it applies to then, 0 for all.
	Skip, Times int
	// Probability is the chance that an operation which is chosen so is
	// hit; 0 is certainty.
	Probability float64
	// Hit, if set, is called before each operation that the rule is applied to; no
	// lock is held.
	Hit func(op, path string)

	Effect Effect
}

// Effect is what happens to an operation; Fail, Short, BitFlip, Slow, Throttle and Do
// make one.
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

// Short makes reads and writes do about half of what they were asked for, without
// an error; what cannot be done in parts is done.
func Short() Effect { return Effect{short: true} }

// BitFlip changes one bit of what is read or written, silently.
func BitFlip() Effect { return Effect{flip: true} }

// Slow delays operations.
func Slow(d time.Duration) Effect { return Effect{delay: d} }

// Throttle lets reads and writes pass at a rate that those of all operations it
// applies to share, as they would a disk's that is no faster: what the operations take by
// themselves counts, and time in which there are none is not made up for. A rate that
// is not above 0 is no limit.
//
// An operation that a rule before this one is applied to does not come here: to have
// both faults and a rate, put one FS over the other.
func Throttle(bytesPerSecond int64) Effect {
	if bytesPerSecond <= 0 {
		return Effect{}
	}
	return Effect{rate: newRate(bytesPerSecond)}
}

// Do calls f before the operation, which is then done; f may block.
func Do(f func(op, path string)) Effect { return Effect{hook: f} }

// FS is a disk.FS whose operations can fail.
type FS struct{ files }

// New wraps inner. seed makes chance repeatable, as far as the order of operations
// is.
func New(inner disk.FS, seed uint64, rules ...Rule) *FS {
	f := &FS{files{inner: inner, rules: faultrule.New[Rule](seed,
		opStat, opUsage, opOpenAnonymous, opCreate, opReopen, opMkdir, opReadDir, opRemove,
		opLock, opUnlock, opRead, opWrite, opAllocate, opPunch, opClose)}}
	for _, r := range rules {
		f.Add(r)
	}
	return f
}

// Add adds a rule, behind those that are there, and returns what removes it. It panics if a pattern
// of Ops fits no operation.
func (f *FS) Add(r Rule) (remove func()) {
	return f.rules.Add(r, faultrule.Turns{Ops: r.Ops, Skip: r.Skip, Times: r.Times, Probability: r.Probability})
}

// Count returns how many operations there were that one of the patterns fits, those that failed
// too; without a pattern, all.
func (f *FS) Count(ops ...string) int { return f.rules.Count(ops...) }

// Hits returns how many operations rules were applied to.
func (f *FS) Hits() int { return f.rules.Hits() }

// Open returns how many files and locks are open.
func (f *FS) Open() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.open
}

// applied is what happens to an operation under way.
type applied struct {
	Effect
	until time.Time // when its bytes have passed, of a throttled one
}

// apply counts an operation and does what is to be done before it. n is the number of
// bytes that pass.
func (f *files) apply(op, path string, n int) applied {
	r := f.rules.Choose(op, func(r *Rule) bool { return r.matches(path) })
	if r == nil {
		return applied{}
	}
	lockrank.AssertNone("a fault is made")
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

// passed waits until an operation's bytes have passed.
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

func (f *files) opened(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.open += n
}
