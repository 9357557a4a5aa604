package faultdev

import (
	"cmp"
	"time"

	"github.com/spillway-db/spillway/internal/faultrule"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// The operations: those of tier.Device that may fail. One copy between host and device has a name of
// its own.
const (
	opAlloc        = "alloc"
	opFree         = "free"
	opCopyToDevice = "copy-to-device"
	opCopyToHost   = "copy-to-host"
	opCopyPeer     = "copy-to-peer"
	opCopyRegions  = "copy-regions"
	opFill         = "fill"
	opNewStream    = "new-stream"
	opRecord       = "record"
	opWaitEvent    = "wait-event"
)

// Rule chooses operations and gives them an effect. Zero fields choose all operations.
type Rule struct {
	// Ops are patterns of path.Match for the names of operations, which are "alloc", "free",
	// "copy-to-device", "copy-to-host", "copy-to-peer", "copy-regions", "fill",
	// "new-stream", "record" and "wait-event".
	Ops []string
	// Skip is how many of the chosen operations pass before the rule begins. Times is how many it
	// applies to after that, 0 for all.
	Skip, Times int
	// Probability is the chance of each operation that is due to be hit; 0 means certainty.
	Probability float64
	// Hit, if set, is called before each operation that the rule applies to, with no lock held.
	Hit func(op string, bytes int64)

	Effect Effect
}

// Effect is what happens to an operation. Fail, FailWork, OutOfMemory, BitFlip, Slow and Do return
// one.
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

// FailWork lets calls succeed but does not do the work that they put on a stream. The stream fails
// with err, as real devices report most errors. A call that puts no work on a stream that moves or
// computes bytes returns err, as with Fail. So does every call if the backend cannot wait for
// events of others.
func FailWork(err error) Effect { return Effect{work: err} }

// OutOfMemory refuses allocations as a full device does, however much memory is free. Other
// operations are not affected.
func OutOfMemory() Effect { return Effect{full: true} }

// BitFlip silently changes one bit of the bytes that a copy or a fill has written. The call waits
// for the work on its stream, so that the bit changes before any later operation, and uses a byte
// of host memory that is not pinned. Other operations are not affected.
func BitFlip() Effect { return Effect{flip: true} }

// Slow delays calls.
func Slow(d time.Duration) Effect { return Effect{delay: d} }

// Do calls f before the operation, which then takes place; f may block. bytes is the size of the
// operation, 0 for those without.
func Do(f func(op string, bytes int64)) Effect { return Effect{hook: f} }

// Device is a tier.Device whose operations can fail. It also implements tier.Losable.
type Device struct{ device }

// New wraps a device. seed makes chance repeatable, provided that operations come in the same order.
func New(wrapped tier.Device, seed uint64, rules ...Rule) *Device {
	d := &Device{device{inner: wrapped, rules: faultrule.New[Rule](seed,
		opAlloc, opFree, opCopyToDevice, opCopyToHost, opCopyPeer, opCopyRegions,
		opFill, opNewStream, opRecord, opWaitEvent)}}
	for _, r := range rules {
		d.Add(r)
	}
	return d
}

// Add adds a rule after the existing ones and returns a function that removes it. It panics if a
// pattern of Ops matches no operation.
func (d *Device) Add(r Rule) (remove func()) {
	return d.rules.Add(r, faultrule.Turns{Ops: r.Ops, Skip: r.Skip, Times: r.Times, Probability: r.Probability})
}

// Count returns how many operations match one of the patterns, including failed ones. Without a
// pattern it returns the number of all operations.
func (d *Device) Count(ops ...string) int { return d.rules.Count(ops...) }

// Hits returns how many operations rules were applied to.
func (d *Device) Hits() int { return d.rules.Hits() }

// Lose makes the device lost, as GPUs are after an error that ends their context. From now on calls
// other than frees fail with why, and recorded events carry it. It may be called at any time, even
// by the hook of a rule; the first reason counts. It returns after all subscribers were called.
// Work that is running completes.
func (d *Device) Lose(why error) { d.loss.Lose(why) }

// apply counts an operation and does the part of its effect that comes before it. The error is that
// of a refused call. The caller does the rest of the effect.
func (d *device) apply(op string, bytes int64) (e Effect, err error) {
	if r := d.rules.Choose(op, nil); r != nil {
		e = r.Effect
		lockrank.AssertNone("a fault is injected")
		if r.Hit != nil {
			r.Hit(op, bytes)
		}
		if e.hook != nil {
			e.hook(op, bytes)
		}
		if e.delay > 0 {
			time.Sleep(e.delay)
		}
	}
	if why := d.loss.Err(); why != nil {
		return Effect{}, why
	}
	return e, e.err
}

// check is apply for a call that puts no work on a stream. It returns the error of a refused call.
func (d *device) check(op string, bytes int64) error {
	e, err := d.apply(op, bytes)
	if err == nil && e.full && op == opAlloc {
		return &tier.NoSpaceError{Requested: bytes}
	}
	return cmp.Or(err, e.work)
}
