package faultdev

import (
	"time"

	"github.com/spillway-db/spillway/internal/faultrule"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// The operations: those of tier.Device that may fail, and of tier.Computer.
const (
	opAlloc        = "alloc"
	opFree         = "free"
	opCopyToDevice = "copy-to-device"
	opCopyToHost   = "copy-to-host"
	opCopyPeer     = "copy-to-peer"
	opCopyRegions  = "copy-regions"
	opFill         = "fill"
	opDigest       = "digest"
	opNewStream    = "new-stream"
	opRecord       = "record"
	opWaitEvent    = "wait-event"
)

// Rule says which operations something happens to. Zero fields choose all.
type Rule struct {
	// Ops are patterns of path.Match for the names of operations, which are "alloc", "free",
	// "copy-to-device", "copy-to-host", "copy-to-peer", "copy-regions", "fill", "digest",
	// "new-stream", "record" and "wait-event".
	Ops []string
	// Skip is how many of the operations chosen so far pass before the rule
	// begins; Times is how many it applies to then, 0 for all.
	Skip, Times int
	// Probability is the chance that an operation which is chosen so is
	// hit; 0 is certainty.
	Probability float64
	// Hit, if set, is called before each operation that the rule is applied to; no
	// lock is held.
	Hit func(op string, bytes int64)

	Effect Effect
}

// Effect is what happens to an operation; Fail, FailWork, OutOfMemory, BitFlip, Slow and
// Do make one.
type Effect struct {
	err   error
	work  error
	full  bool
	flip  bool
	delay time.Duration
	hook  func(op string, bytes int64)
}

// Fail makes calls return err and do nothing.
func Fail(err error) Effect { return Effect{err: err} }

// FailWork lets calls pass, but the work that they put on a stream is not done. The stream fails
// with err, as real devices report most errors. A call that puts no work on a stream that moves or
// computes bytes returns err, as with Fail. So does each call where the backend cannot wait for
// events that are not its own.
func FailWork(err error) Effect { return Effect{work: err} }

// OutOfMemory refuses allocations as a device does that is full, whatever it has. Other
// operations are not affected.
func OutOfMemory() Effect { return Effect{full: true} }

// BitFlip changes one bit of what a copy or a fill has written, silently. The call waits
// for the work on its stream, so that the bit is changed before anything that comes after
// it; it takes a byte of host memory that is not pinned. Other operations are not
// affected.
func BitFlip() Effect { return Effect{flip: true} }

// Slow delays calls.
func Slow(d time.Duration) Effect { return Effect{delay: d} }

// Do calls f before the operation, which is then done; f may block. bytes is what the
// operation is about, 0 for those without.
func Do(f func(op string, bytes int64)) Effect { return Effect{hook: f} }

// Device is a tier.Device whose operations can fail. It implements tier.Computer and tier.Losable,
// too.
type Device struct{ device }

// New wraps inner. seed makes chance repeatable, as far as the order of operations is.
func New(inner tier.Device, seed uint64, rules ...Rule) *Device {
	d := &Device{device{inner: inner, rules: faultrule.New[Rule](seed,
		opAlloc, opFree, opCopyToDevice, opCopyToHost, opCopyPeer, opCopyRegions,
		opFill, opDigest, opNewStream, opRecord, opWaitEvent)}}
	for _, r := range rules {
		d.Add(r)
	}
	return d
}

// Add adds a rule, behind those that are there, and returns what removes it. It panics if a pattern
// of Ops fits no operation.
func (d *Device) Add(r Rule) (remove func()) {
	return d.rules.Add(r, faultrule.Turns{Ops: r.Ops, Skip: r.Skip, Times: r.Times, Probability: r.Probability})
}

// Count returns how many operations there were that one of the patterns fits, those that failed
// too; without a pattern, all.
func (d *Device) Count(ops ...string) int { return d.rules.Count(ops...) }

// Hits returns how many operations rules were applied to.
func (d *Device) Hits() int { return d.rules.Hits() }

// Lose makes the device lost, as GPUs are after an error that ends their context. From now on calls
// other than frees fail with why, and recorded events carry it. It may be called at any time, by
// the hook of a rule, too; the first reason counts. It returns when all subscribers were called.
// Running work is done.
func (d *Device) Lose(why error) { d.loss.Lose(why) }

// apply counts an operation and does what is to be done before it. The error is that of
// a call that is refused; what else happens is the caller's to do.
func (d *device) apply(op string, bytes int64) (Effect, error) {
	e, err := d.choose(op, bytes)
	if why := d.loss.Err(); why != nil {
		return Effect{}, why
	}
	return e, err
}

func (d *device) choose(op string, bytes int64) (Effect, error) {
	r := d.rules.Choose(op, nil)
	if r == nil {
		return Effect{}, nil
	}
	lockrank.AssertNone("a fault is made")
	if r.Hit != nil {
		r.Hit(op, bytes)
	}
	e := r.Effect
	if e.hook != nil {
		e.hook(op, bytes)
	}
	if e.delay > 0 {
		time.Sleep(e.delay)
	}
	return e, e.err
}

// ask is apply for a call that puts no work on a stream.
func (d *device) ask(op string, bytes int64) (Effect, error) {
	e, err := d.apply(op, bytes)
	if err == nil {
		err = e.work
	}
	return e, err
}
