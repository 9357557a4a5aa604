package reservation_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// What the tests of crowd_test.go share: spaces whose books a second ledger keeps, from the
// callers' results alone. A seed repeats the operations; where goroutines race, not their
// interleaving.
var seedCount = flag.Uint64("seeds", 1, "with "+testseed.Variable+": run as many seeds, from that one on")

// crowdSeeds returns the seeds of a test: so many and a new one, or fewer where each costs
// more, or those that were asked for.
func crowdSeeds(t *testing.T, all int) (seeds []uint64) {
	if seed, ok := testseed.Given(t); ok {
		for i := range max(1, *seedCount) {
			seeds = append(seeds, seed+i)
		}
		return seeds
	}
	if testing.Short() {
		all /= 10
	}
	if invariants.Enabled {
		all /= 50 // its locks are a hundred times slower
	}
	for seed := range max(1, uint64(all)) {
		seeds = append(seeds, seed+1)
	}
	return append(seeds, rand.Uint64())
}

func repeat(t *testing.T, seed uint64) string {
	return fmt.Sprintf("seed %d (repeat with: %s=%d go test ./reservation -run '^%s$' -count=20)", seed, testseed.Variable, seed, t.Name())
}

// tallyPool is a tier.Pool that hands out numbers and no memory. With lazy, what is freed stays
// retired until the next reap, as with a device that is at work.
type tallyPool struct {
	granule  int64
	lazy     bool
	onCharge func() // called in the midst of what the manager does

	live, retired atomic.Int64 // as the ledger should have them

	mu   sync.Mutex
	wait []func()
}

// tallyMemory knows whose promise it was drawn from.
type tallyMemory struct {
	size  int64
	owner *entry
}

func (m *tallyMemory) Size() int64 { return m.size }

func (p *tallyPool) Charge(size int64) int64 {
	if p.onCharge != nil {
		p.onCharge()
	}
	return p.round(size)
}

func (p *tallyPool) round(size int64) int64 { return (size + p.granule - 1) / p.granule * p.granule }

func (p *tallyPool) Alloc(size int64, _ []int64) (tier.Memory, error) {
	p.live.Add(p.round(size))
	return &tallyMemory{size: size}, nil
}

func (p *tallyPool) Free(mem tier.Memory, reclaimed func()) {
	m := mem.(*tallyMemory)
	n := p.round(m.size)
	p.live.Add(-n)
	p.retired.Add(n)
	done := func() {
		reclaimed()
		p.retired.Add(-n)
		m.owner.drawn.Add(-n)
	}
	if !p.lazy {
		done()
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wait = append(p.wait, done)
}

// reap gives back up to n of what was freed, the oldest first.
func (p *tallyPool) reap(n int) {
	p.mu.Lock()
	n = min(n, len(p.wait))
	done := p.wait[:n:n]
	p.wait = p.wait[n:]
	p.mu.Unlock()
	for _, f := range done {
		f()
	}
}

func (p *tallyPool) Close() error { return nil }

// entry is a reservation in the second ledger.
type entry struct {
	r        *reservation.Reservation
	space    int
	policy   reservation.LimitPolicy
	promised int64        // changed by its owner
	drawn    atomic.Int64 // changed by the goroutine that frees
}

func (e *entry) unused() int64 { return max(0, e.promised-e.drawn.Load()) }

// field is spaces, their manager, and the second ledger's part of them.
type field struct {
	m      *reservation.Manager
	spaces []*tier.Space
	pools  []*tallyPool
	bypass int
	limits []atomic.Int64 // by space, how often its limit was set
	calm   atomic.Bool    // no worker meddles

	mu      sync.Mutex
	wrong   []string       // what observers saw
	buffers []*tier.Buffer // drawn by any worker, to be freed by any
}

// leastLimit is how low the random tests set a limit: an eighth of the capacity.
// What needs no more than that must never be refused.
func (f *field) leastLimit(space int) int64 { return f.spaces[space].Capacity / 8 }

// newField makes three spaces: one that counts bytes, one that rounds, and one
// that rounds and does not reclaim at once.
func newField(t testing.TB, bypass int) *field {
	t.Helper()
	f := &field{bypass: bypass, limits: make([]atomic.Int64, 3)}
	for i, c := range []struct {
		id       string
		capacity int64
		pool     *tallyPool
	}{
		{"gpu:0", 1000, &tallyPool{granule: 1}},
		{"gpu:1", 1024, &tallyPool{granule: 16}},
		{"host:0", 2000, &tallyPool{granule: 10, lazy: true}},
	} {
		s, err := tier.NewSpace(tier.SpaceConfig{
			ID: idOf(t, c.id), Capacity: c.capacity, Node: -1, Pool: c.pool,
			Marks: tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.5},
		})
		if err != nil {
			t.Fatal(err)
		}
		s.Subscribe(func(bool) { f.observe(i) })
		f.spaces, f.pools = append(f.spaces, s), append(f.pools, c.pool)
	}
	var err error
	if f.m, err = reservation.NewManager(reservation.Config{Spaces: f.spaces, Bypass: bypass}); err != nil {
		t.Fatal(err)
	}
	return f
}

// allowed is how many may pass a head.
func (f *field) allowed() int {
	switch {
	case f.bypass == 0:
		return reservation.DefaultBypass
	case f.bypass < 0:
		return 0
	}
	return f.bypass
}

func (f *field) index(s *tier.Space) int {
	for i := range f.spaces {
		if f.spaces[i] == s {
			return i
		}
	}
	return -1
}

// meddle lowers a space's limit, now and then, so that a request that looks for room just now may
// find it gone.
func (f *field) meddle(i int, calls uint64) {
	if f.calm.Load() || calls*0x9e3779b97f4a7c15>>32%8 != 0 {
		return
	}
	s := f.spaces[i]
	f.limits[i].Add(1)
	limit := max(f.leastLimit(i), s.State().Used()+s.State().Available/2) // of two moments
	if err := s.SetLimit(min(limit, s.Capacity)); err != nil {
		f.fail("%v", err)
	}
}

// observe checks what must be so at every moment.
func (f *field) observe(i int) {
	s := f.spaces[i]
	u, used := s.State().Usage, s.State().Used()
	if u.Live < 0 || u.Retired < 0 || u.Reserved < 0 || used < 0 || max(u.Used(), used, u.Peak) > s.Capacity {
		f.fail("%s: %d bytes: %+v, and %d used", s.ID(), s.Capacity, u, used)
	}
}

func (f *field) fail(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.wrong) < 10 {
		f.wrong = append(f.wrong, fmt.Sprintf(format, args...))
	}
}

// failures returns what went wrong so far.
func (f *field) failures() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.wrong
}

func (f *field) keep(b *tier.Buffer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.buffers = append(f.buffers, b)
}

// takeBuffer returns any buffer, or nil.
func (f *field) takeBuffer(rng *rand.Rand) *tier.Buffer {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.buffers)
	if n == 0 {
		return nil
	}
	i := rng.IntN(n)
	b := f.buffers[i]
	f.buffers[i] = f.buffers[n-1]
	f.buffers = f.buffers[:n-1]
	return b
}

func (f *field) free(b *tier.Buffer) {
	if err := b.Release(); err != nil {
		f.fail("freeing: %v", err)
	}
}

// close gives back what is in buffers and checks that nothing is left.
func (f *field) close() {
	rng := rand.New(rand.NewPCG(0, 0))
	for b := f.takeBuffer(rng); b != nil; b = f.takeBuffer(rng) {
		f.free(b)
	}
	for i, p := range f.pools {
		p.reap(1 << 30)
		if u := f.spaces[i].State().Usage; u.Used() != 0 || f.spaces[i].State().Used() != 0 {
			f.fail("%s is not empty at the end: %+v", f.spaces[i].ID(), u)
		}
	}
	if d := f.m.Demand(nil); len(d) != 0 {
		f.fail("there is demand at the end: %+v", d)
	}
}

// asked is a request of which the caller knows that it may have to wait.
type asked struct {
	slots []askedSlot
	epoch int     // when it was made; of requests of one epoch it is not known which came first
	seen  int     // the epoch in which it was first seen to wait; the checker's
	maybe []int64 // by space, what lineWatch had when it came

	limits []int64 // by space, how often the limit had changed by then
}

// askedSlot is what a request needs in one space, beside what it holds there
// already.
type askedSlot struct {
	space      int
	need, held int64
}

// in returns what the request needs in a space if it may stand in its line.
func (a *asked) in(space int, limit int64) (need int64, ok bool) {
	for _, s := range a.slots {
		if s.space == space && s.need <= limit-s.held {
			return s.need, true
		}
	}
	return 0, false
}
