package volumes

import (
	"cmp"
	"math"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier/disk"
)

const (
	// window is how long the requests in progress may take together. The system does not cancel a
	// request, neither when a context ends nor when the process does, so this bounds how long a
	// cancelled transfer waits for a slow disk.
	window = 250 * time.Millisecond

	// minRequest is the shortest request on a slow disk. Shorter ones cost more than they save.
	minRequest = 64 << 10

	// firstRequest times the depth is the window until something has been measured: half a second on
	// a disk of 2 MiB/s.
	firstRequest = 256 << 10

	// recent is the time constant of the moving averages: longer than a device's hiccups and
	// shorter than a query.
	recent = time.Second

	// unmeasured is the bandwidth, in bytes a second, that the backlog of a disk is divided by
	// before anything was written: the same for all disks.
	unmeasured = 1 << 30

	// maxBandwidth, in bytes a second, keeps the bandwidth finite where a test's clock shows that
	// writing takes no time.
	maxBandwidth = 1 << 40

	// catchUp bounds the time that a full or failed disk may make up for when it is used again.
	// Otherwise it would get all bytes until it had been busy for as long as the others.
	catchUp = time.Second

	// A disk that failed is ailing for so long, twice as long after the next failure, and so on up
	// to 64 s.
	setback      = time.Second
	maxDoublings = 6
)

// Stripe is shared by disks that are used side by side. The zero value is ready. It must not be
// copied, and is safe for concurrent use.
type Stripe struct {
	front atomic.Int64 // the largest lead at which one of them was given bytes
}

// speed measures one disk: which of several volumes gets the next bytes, and how long requests may be on a
// slow disk, follow from it. There is one moving average of bytes a second for each direction, because reads
// may be much faster than writes. It counts only the time in which at least one request was in progress. It
// is safe for concurrent use.
//
// Its lead is the time in which at least one write was in progress, plus the time that its backlog
// will take. Because the lead counts time, each error of the estimated bandwidth is made up for
// when the bytes are written.
//
// After a failure the disk is ailing, so others come first. When that time is over, one Alloc may
// try it: takeOn counts it as the next failure at once, and a successful write ends the series.
type speed struct {
	request int64   // the maximum length of a request, in bytes
	depth   int64   // requests of one transfer
	stripe  *Stripe // of the disks that are used side by side

	mu struct {
		lockrank.Mutex[lockrank.Device]
		flows    [2]flow // of reading and writing
		running  int64   // bytes of the requests in progress
		backlog  int64   // bytes that were allocated and neither written nor freed since
		promised int64   // bytes, by the last call of Promised
		skipped  time.Duration
		failures int // in a row
		until    time.Time
	}
}

// flow is the requests of one direction.
type flow struct {
	requests       int           // in progress
	since          time.Time     // the busy time counts up to here, while there are requests
	busy           time.Duration // in which there were requests
	bytes, seconds float64       // recent ones; a failed request counts in neither
	bandwidth      int64         // bytes a second; 0: nothing was measured
}

// begin counts a read or a write as begun, and returns its length: at most want bytes, and on a slow
// disk a share of the window, so that several transfers fit into it. helper is for a transfer that has
// other requests in progress: begin returns 0 if they are enough. Otherwise the caller must call finish.
func (d *speed) begin(want int64, what request, helper bool) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := &d.mu.flows[what]
	most, shares := int64(float64(f.bandwidth)*window.Seconds()), 2*d.depth
	if f.bandwidth == 0 { // the first requests show how fast the disk is
		most = d.depth * min(d.request, firstRequest)
		if !helper {
			shares = d.depth
		}
	}
	share := (most - d.mu.running) / shares
	n := min(want, d.request, max(minRequest, share/minRequest*minRequest))
	if helper && d.mu.running+n > max(most/2, d.depth*minRequest) {
		return 0
	}
	if f.requests == 0 {
		f.since = time.Now()
	}
	f.requests++
	d.mu.running += n
	return n
}

// finish ends a request for which begin returned begun. It transferred done bytes, of which settled
// were in the backlog, or it failed and both are 0. The time of a request that failed is no
// measurement: a disk may give up after half a minute.
//
// Older samples of the average lose weight by the time that the request took or would have taken at the
// previous bandwidth, whichever is longer. So the average follows a disk that becomes faster as soon as
// one that becomes slower.
func (d *speed) finish(begun, done, settled int64, what request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := &d.mu.flows[what]
	now := time.Now()
	took := now.Sub(f.since)
	f.since = now
	f.busy += took
	f.requests--
	d.mu.running -= begun
	d.mu.backlog -= settled
	if done > 0 {
		age := took.Seconds()
		if f.bandwidth > 0 {
			age = max(age, float64(done)/float64(f.bandwidth))
		}
		keep := math.Exp(-age / recent.Seconds())
		f.bytes, f.seconds = f.bytes*keep+float64(done), f.seconds*keep+took.Seconds()
		f.bandwidth = int64(max(1, min(f.bytes/f.seconds, maxBandwidth))) // seconds may be 0
	}
	switch {
	case what == reading:
	case done > 0:
		d.mu.failures = 0
	default:
		d.failLocked(now)
	}
}

// fail records that the disk could not be used. Several failures at the same time are one.
func (d *speed) fail() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failLocked(time.Now())
}

func (d *speed) failLocked(now time.Time) {
	if d.mu.failures == 0 || !now.Before(d.mu.until) {
		d.mu.until = now.Add(setback << min(d.mu.failures, maxDoublings))
		d.mu.failures++
	}
}

// takeOn adds n allocated bytes to the backlog. A disk whose lead is more than catchUp behind the
// others' was full or failing, and the time before that does not count. A disk was not skipped if
// others went first because bytes of it are promised: otherwise they would do so for as long as
// there is a reservation.
func (d *speed) takeOn(n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	lead := d.paceLocked(now).After(d.mu.promised).Lead
	front := time.Duration(d.stripe.front.Load())
	for front < lead && !d.stripe.front.CompareAndSwap(int64(front), int64(lead)) {
		front = time.Duration(d.stripe.front.Load())
	}
	d.mu.skipped += max(0, front-lead-catchUp)
	d.mu.backlog += n
	if d.mu.failures > 0 {
		d.failLocked(now)
	}
}

// settle takes n bytes that will not be written off the backlog.
func (d *speed) settle(n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.backlog -= n
}

// Promised sets how many bytes of the space are reserved and not allocated.
func (d *speed) Promised(n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.promised = n
}

// Pace returns how far the disk is ahead of the others of its stripe.
func (d *speed) Pace() books.Pace {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.paceLocked(time.Now())
}

// paceLocked must get a time read with the mutex held: a request may have begun after an earlier one.
func (d *speed) paceLocked(now time.Time) books.Pace {
	w := &d.mu.flows[writing]
	p := books.Pace{
		Lead:      w.busy + d.mu.skipped,
		Bandwidth: cmp.Or(w.bandwidth, unmeasured),
		Ailing:    d.mu.failures > 0 && now.Before(d.mu.until),
	}
	if w.requests > 0 {
		p.Lead += now.Sub(w.since)
	}
	return p.After(d.mu.backlog)
}

// stats returns the figures of writing.
func (d *speed) stats() disk.Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now() // with the mutex held, so that Writing never falls
	w := &d.mu.flows[writing]
	s := disk.Stats{
		Bandwidth: w.bandwidth, Backlog: d.mu.backlog, Writing: w.busy,
		Ailing: d.mu.failures > 0 && now.Before(d.mu.until),
	}
	if w.requests > 0 {
		s.Writing += now.Sub(w.since)
	}
	return s
}
