// Package faultfs puts faults between a disk volume and its file system.
//
//	disk.Volume ──▶ faultfs.FS ──▶ disk.OS()
//	                  rules: which operations, which of them, what happens
//
// A Rule chooses operations by kind, by path, by index and by chance, and has an
// Effect: an error, a short transfer, a flipped bit, a delay, a limit on the rate,
// or a call of the test's. The first rule that chooses an operation is applied to
// it. An operation that fails is not done at all.
//
// An FS is safe for concurrent use. Its mutex has the rank Device and is not held
// while anything is done.
package faultfs

import (
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier/disk"
)

// Op is a kind of operation.
type Op string

// The operations: those of disk.FS, of disk.Lock and of disk.File.
const (
	Stat          Op = "stat"
	Usage         Op = "usage"
	OpenAnonymous Op = "open-anonymous"
	Create        Op = "create"
	Mkdir         Op = "mkdir"
	ReadDir       Op = "readdir"
	Remove        Op = "remove"
	Lock          Op = "lock"
	Unlock        Op = "unlock"
	Read          Op = "read"
	Write         Op = "write"
	Allocate      Op = "allocate"
	Punch         Op = "punch"
	Close         Op = "close"
)

// Rule says which operations something happens to. Zero fields choose all.
type Rule struct {
	Ops []Op
	// Path is a pattern of filepath.Match for the path or its last element. The
	// path of an anonymous file is its directory's with "#0", "#1", … in the order
	// in which they were opened.
	Path string
	// Skip is how many of the operations chosen so far pass before the rule
	// begins; Times is how many it applies to then, 0 for all.
	Skip, Times int
	// Probability is the chance that an operation which is chosen so is
	// hit; 0 is certainty.
	Probability float64

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
	hook  func(op Op, path string)
}

// Fail makes operations return err and do nothing.
func Fail(err error) Effect { return Effect{err: err} }

// Short makes reads and writes do about half of what they were asked for, without
// an error.
func Short() Effect { return Effect{short: true} }

// BitFlip changes one bit of what is read or written, silently.
func BitFlip() Effect { return Effect{flip: true} }

// Slow delays operations.
func Slow(d time.Duration) Effect { return Effect{delay: d} }

// Throttle lets reads and writes pass at a rate that those of all operations it
// applies to share.
func Throttle(bytesPerSecond int64) Effect {
	return Effect{rate: &rate{bytesPerSecond: bytesPerSecond}}
}

// Do calls f before the operation, which is then done; f may block.
func Do(f func(op Op, path string)) Effect { return Effect{hook: f} }

// rate is a line that operations pass one after the other.
type rate struct {
	bytesPerSecond int64

	mu struct {
		lockrank.Mutex[lockrank.Device]
		next time.Time
	}
}

// wait waits until n bytes have passed.
func (r *rate) wait(n int) {
	took := time.Duration(float64(n) / float64(r.bytesPerSecond) * float64(time.Second))
	r.mu.Lock()
	now := time.Now()
	if r.mu.next.Before(now) {
		r.mu.next = now
	}
	r.mu.next = r.mu.next.Add(took)
	until := r.mu.next
	r.mu.Unlock()
	time.Sleep(time.Until(until))
}

// FS is a disk.FS whose operations can fail.
type FS struct {
	inner disk.FS

	mu struct {
		lockrank.Mutex[lockrank.Device]
		random *rand.Rand
		rules  []*active
		counts map[Op]int
		total  int
		files  int // anonymous ones opened
		open   int // files and locks
	}
}

type active struct {
	Rule
	seen int // operations that Ops and Path choose
	hits int
}

var _ disk.FS = (*FS)(nil)

// New wraps inner. seed makes chance repeatable, as far as the order of operations
// is.
func New(inner disk.FS, seed uint64, rules ...Rule) *FS {
	f := &FS{inner: inner}
	f.mu.random = rand.New(rand.NewPCG(seed, 0))
	f.mu.counts = make(map[Op]int)
	for _, r := range rules {
		f.Add(r)
	}
	return f
}

// Add adds a rule, behind those that are there, and returns what removes it.
func (f *FS) Add(r Rule) (remove func()) {
	a := &active{Rule: r}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.rules = append(slices.Clone(f.mu.rules), a)
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.mu.rules = slices.DeleteFunc(slices.Clone(f.mu.rules), func(b *active) bool { return b == a })
	}
}

// Count returns how many operations of the kinds there were, those that failed too;
// without a kind, all.
func (f *FS) Count(ops ...Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(ops) == 0 {
		return f.mu.total
	}
	n := 0
	for _, op := range ops {
		n += f.mu.counts[op]
	}
	return n
}

// Open returns how many files and locks are open.
func (f *FS) Open() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.open
}

// Hits returns how many operations rules were applied to.
func (f *FS) Hits() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, a := range f.mu.rules {
		n += a.hits
	}
	return n
}

// apply counts an operation and does what can be done before it. n is the number of
// bytes that pass.
func (f *FS) apply(op Op, path string, n int) Effect {
	e := f.choose(op, path)
	if e.hook != nil {
		e.hook(op, path)
	}
	if e.delay > 0 {
		time.Sleep(e.delay)
	}
	if e.rate != nil && n > 0 {
		e.rate.wait(n)
	}
	return e
}

func (f *FS) choose(op Op, path string) Effect {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.total++
	f.mu.counts[op]++
	chosen := Effect{}
	done := false
	for _, a := range f.mu.rules { // all count, the first is applied
		if !a.matches(op, path) {
			continue
		}
		a.seen++
		if done || a.seen <= a.Skip || a.Times > 0 && a.hits >= a.Times {
			continue
		}
		if a.Probability > 0 && f.mu.random.Float64() >= a.Probability {
			continue
		}
		a.hits++
		chosen, done = a.Effect, true
	}
	return chosen
}

func (r *Rule) matches(op Op, path string) bool {
	if len(r.Ops) > 0 && !slices.Contains(r.Ops, op) {
		return false
	}
	if r.Path == "" {
		return true
	}
	whole, _ := filepath.Match(r.Path, path)
	last, _ := filepath.Match(r.Path, filepath.Base(path))
	return whole || last
}

func (f *FS) opened(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.open += n
}

// Stat implements disk.FS.
func (f *FS) Stat(path string) (fs.FileInfo, error) {
	if e := f.apply(Stat, path, 0); e.err != nil {
		return nil, e.err
	}
	return f.inner.Stat(path)
}

// Usage implements disk.FS.
func (f *FS) Usage(dir string) (disk.Usage, error) {
	if e := f.apply(Usage, dir, 0); e.err != nil {
		return disk.Usage{}, e.err
	}
	return f.inner.Usage(dir)
}

// OpenAnonymous implements disk.FS.
func (f *FS) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	f.mu.Lock()
	path := filepath.Join(dir, "#"+strconv.Itoa(f.mu.files))
	f.mu.files++
	f.mu.Unlock()
	return f.openFile(OpenAnonymous, path, func() (disk.File, error) { return f.inner.OpenAnonymous(dir, direct) })
}

// Create implements disk.FS.
func (f *FS) Create(path string, direct bool) (disk.File, error) {
	return f.openFile(Create, path, func() (disk.File, error) { return f.inner.Create(path, direct) })
}

func (f *FS) openFile(op Op, path string, open func() (disk.File, error)) (disk.File, error) {
	if e := f.apply(op, path, 0); e.err != nil {
		return nil, e.err
	}
	inner, err := open()
	if err != nil {
		return nil, err
	}
	f.opened(1)
	return &file{fs: f, path: path, inner: inner}, nil
}

// Mkdir implements disk.FS.
func (f *FS) Mkdir(path string) error {
	if e := f.apply(Mkdir, path, 0); e.err != nil {
		return e.err
	}
	return f.inner.Mkdir(path)
}

// ReadDir implements disk.FS.
func (f *FS) ReadDir(path string) ([]fs.DirEntry, error) {
	if e := f.apply(ReadDir, path, 0); e.err != nil {
		return nil, e.err
	}
	return f.inner.ReadDir(path)
}

// Remove implements disk.FS.
func (f *FS) Remove(path string) error {
	if e := f.apply(Remove, path, 0); e.err != nil {
		return e.err
	}
	return f.inner.Remove(path)
}

// Lock implements disk.FS.
func (f *FS) Lock(path string, create bool) (disk.Lock, error) {
	if e := f.apply(Lock, path, 0); e.err != nil {
		return nil, e.err
	}
	inner, err := f.inner.Lock(path, create)
	if err != nil {
		return nil, err
	}
	f.opened(1)
	return &lock{fs: f, path: path, inner: inner}, nil
}

type lock struct {
	fs    *FS
	path  string
	inner disk.Lock
}

// Close unlocks also when it is told to fail: the system closes a descriptor whatever
// it says.
func (l *lock) Close() error {
	e := l.fs.apply(Unlock, l.path, 0)
	l.fs.opened(-1)
	if err := l.inner.Close(); err != nil {
		return err
	}
	return e.err
}
