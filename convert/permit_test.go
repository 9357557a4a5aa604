package convert

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Without permits there are no disk converters.
func TestPermitsAreRequired(t *testing.T) {
	pool, err := permit.New(permit.Config{Budgets: []permit.Budget{{Name: "other", Bytes: 1}}})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	m := newMachine(t, machineConfig{})
	for name, b := range map[string]*transfer.Builtin{"no pool": {}, "a pool without the budget": {Permits: pool}} {
		if _, err := NewMover(MoverConfig{Reservations: m.reservations, Registry: new(Registry), Builtin: b}); err == nil {
			t.Errorf("%s: there is a mover", name)
		}
	}
}

// underWay is a call on a goroutine of its own.
type underWay struct {
	done   chan struct{}
	err    error
	cancel context.CancelCauseFunc
}

func (m *machine) start(t *testing.T, f func(context.Context) error) *underWay {
	ctx, cancel := context.WithCancelCause(t.Context())
	u := &underWay{done: make(chan struct{}), cancel: cancel}
	go func() {
		defer close(u.done)
		u.err = f(ctx)
	}()
	t.Cleanup(func() {
		cancel(nil)
		<-u.done
	})
	return u
}

// waits returns when so many wait for a permit, with u among them.
func (u *underWay) waits(t *testing.T, m *machine, n int) {
	t.Helper()
	for m.permits.Stats().Waiting < n {
		select {
		case <-u.done:
			t.Fatalf("it did not wait for a permit: %v", u.err)
		default:
			runtime.Gosched()
		}
	}
}

func (u *underWay) ended(t *testing.T, want error) {
	t.Helper()
	<-u.done
	if !errors.Is(u.err, want) {
		t.Fatalf("it ended with %v, want %v", u.err, want)
	}
}

// users are permits that a program holds.
type users []*permit.Permit

// freeHost is how many bytes of the budget permit.Host no permit has.
func (m *machine) freeHost() int64 {
	for _, b := range m.permits.Stats().Budgets {
		if b.Name == permit.Host {
			return b.Total - b.Held
		}
	}
	return 0
}

func (u *users) release(t *testing.T) {
	t.Helper()
	for _, p := range *u {
		if err := p.Release(); err != nil {
			t.Error(err)
		}
	}
	*u = nil
}

// take takes all that users can have: slots, and bytes of host memory.
func (m *machine) take(t *testing.T, slots, bytes bool) *users {
	t.Helper()
	var u users
	if free := m.freeHost(); bytes {
		p, err := m.permits.TryAcquire(permit.Request{Bytes: map[string]int64{permit.Host: free}})
		if err != nil {
			t.Fatal(err)
		}
		u = append(u, p)
	}
	for slots {
		p, err := m.permits.TryAcquire(permit.Request{Spill: true})
		if err != nil {
			break
		}
		u = append(u, p)
	}
	t.Cleanup(func() { u.release(t) })
	return &u
}

// diskOperations are all ways from and to a disk; each ends with the batch where it
// says.
var diskOperations = []struct {
	name     string
	from, to tier.Kind
	writes   bool
	run      func(context.Context, *machine, *batch.Batch) error
}{
	{"GPU to disk", tier.GPU, tier.Disk, true, moveTo(tier.Disk)},
	{"host to disk", tier.Host, tier.Disk, true, moveTo(tier.Disk)},
	{"disk to host", tier.Disk, tier.Host, false, moveTo(tier.Host)},
	{"disk to GPU", tier.Disk, tier.GPU, false, moveTo(tier.GPU)},
	{"disk to disk", tier.Disk, tier.Disk, true, func(ctx context.Context, m *machine, b *batch.Batch) error {
		c, err := m.mover.Clone(ctx, b, nil)
		if err != nil {
			return err
		}
		return c.Drop()
	}},
	{"record from disk", tier.Disk, tier.Disk, false, func(ctx context.Context, m *machine, b *batch.Batch) error {
		h, err := m.mover.Acquire(ctx, b, reservation.AnyInTier(tier.Disk))
		if err != nil {
			return err
		}
		rec, err := m.mover.Record(ctx, h)
		if err == nil {
			rec.Release()
		}
		return errors.Join(err, h.Close())
	}},
	{"columns from disk", tier.Disk, tier.Disk, false, func(ctx context.Context, m *machine, b *batch.Batch) error {
		return m.columnsOf(ctx, b, image.Selection{Fields: []int{0}, From: 1000, To: 2000})
	}},
	{"digest from disk", tier.Disk, tier.Disk, false, func(ctx context.Context, m *machine, b *batch.Batch) error {
		h, err := m.mover.Acquire(ctx, b, reservation.AnyInTier(tier.Disk))
		if err != nil {
			return err
		}
		_, err = m.mover.Digest(ctx, h)
		return errors.Join(err, h.Close())
	}},
	{"a record laid out to disk", tier.GPU, tier.GPU, true, func(ctx context.Context, m *machine, b *batch.Batch) error {
		p, err := m.mover.Ingest(ctx, m.records[b.ID()], reservation.AnyInTier(tier.Disk))
		if err != nil {
			return err
		}
		return p.Release()
	}},
}

func moveTo(k tier.Kind) func(context.Context, *machine, *batch.Batch) error {
	return func(ctx context.Context, m *machine, b *batch.Batch) error {
		return m.mover.Move(ctx, b, reservation.AnyInTier(k))
	}
}

// eachDiskOperation runs f for each of diskOperations, with and without a dictionary.
func eachDiskOperation(t *testing.T, f func(t *testing.T, m *machine, b *batch.Batch, op int)) {
	for i, op := range diskOperations {
		for _, dictionary := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/dictionary %v", op.name, dictionary), func(t *testing.T) {
				m := newMachine(t, machineConfig{permits: permit.Config{Slots: new(2)}})
				rec := numbered(1, 3000)
				if dictionary {
					rec = coded(1, 3000)
				}
				f(t, m, m.put(t, rec, op.from), i)
			})
		}
	}
}

// Every transfer with a disk waits for a permit: for bytes, and for a slot if it
// writes. What reads does not need a slot.
func TestDiskTransfersRequireAPermit(t *testing.T) {
	eachDiskOperation(t, func(t *testing.T, m *machine, b *batch.Batch, i int) {
		op := diskOperations[i]
		for _, bytes := range []bool{true, false} {
			held := m.take(t, !bytes, bytes)
			u := m.start(t, func(ctx context.Context) error { return op.run(ctx, m, b) })
			if bytes || op.writes {
				u.waits(t, m, 1)
				held.release(t)
			}
			u.ended(t, nil)
			held.release(t)
			if bytes && op.to != op.from {
				if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(op.from)); err != nil {
					t.Fatal(err)
				}
			}
		}
		m.whole(t, b, op.to)
	})
}

// Moves between memories need no permit.
func TestOtherTransfersRequireNone(t *testing.T) {
	m := newMachine(t, machineConfig{})
	m.take(t, true, true)
	b := m.put(t, coded(1, 3000), tier.GPU)
	for _, k := range []tier.Kind{tier.Host, tier.GPU, tier.Host} {
		if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
			t.Fatal(err)
		}
	}
	m.whole(t, b, tier.Host)
}

// A wait for a permit that is cancelled, or ended by closing the mover or the pool,
// leaves the batch whole where it was, and gives back all that was taken.
func TestEndedWaitForAPermit(t *testing.T) {
	cause := errors.New("enough")
	t.Run("cancelled", func(t *testing.T) {
		eachDiskOperation(t, func(t *testing.T, m *machine, b *batch.Batch, i int) {
			op := diskOperations[i]
			held := m.take(t, true, true)
			u := m.start(t, func(ctx context.Context) error { return op.run(ctx, m, b) })
			u.waits(t, m, 1)
			u.cancel(cause)
			u.ended(t, cause)
			m.rests(t, b, op.from)
			held.release(t)
			m.whole(t, b, op.from)
			if err := op.run(t.Context(), m, b); err != nil { // it can be done again
				t.Error(err)
			}
		})
	})
	t.Run("the mover is closed", func(t *testing.T) {
		eachDiskOperation(t, func(t *testing.T, m *machine, b *batch.Batch, i int) {
			m.take(t, true, true)
			u := m.start(t, func(ctx context.Context) error { return diskOperations[i].run(ctx, m, b) })
			u.waits(t, m, 1)
			if err := m.mover.Close(); err != nil {
				t.Error(err)
			}
			u.ended(t, tier.ErrClosed)
			m.rests(t, b, diskOperations[i].from)
		})
	})
	t.Run("the pool is closed", func(t *testing.T) {
		m := newMachine(t, machineConfig{})
		b := m.put(t, coded(1, 3000), tier.Host)
		m.take(t, true, true)
		u := m.start(t, func(ctx context.Context) error { return moveTo(tier.Disk)(ctx, m, b) })
		u.waits(t, m, 1)
		var leak *permit.LeakError
		if err := m.permits.Close(); !errors.As(err, &leak) {
			t.Errorf("closing: %v", err)
		}
		u.ended(t, tier.ErrClosed)
		m.rests(t, b, tier.Host)
	})
}

// The monitor's moves to disk are not held up by users: not by all their permits, nor by those that
// wait for one.
func TestMonitorMovesPastUsers(t *testing.T) {
	for _, from := range []tier.Kind{tier.GPU, tier.Host} {
		for _, reason := range []string{ReasonTrigger, ReasonDemand} {
			for slots := 1; slots <= 3; slots++ {
				t.Run(fmt.Sprintf("%s, %s, %d slots", from, reason, slots), func(t *testing.T) {
					m := newMachine(t, machineConfig{permits: permit.Config{Slots: new(slots), Bypass: -1}})
					dict := words(1)
					mine := m.put(t, codedBy(dict, 1, 2000), from)
					theirs := m.put(t, codedBy(dict, 2, 2000), from) // has the same dictionary
					held := m.take(t, true, true)
					u := m.start(t, func(ctx context.Context) error { return moveTo(tier.Disk)(ctx, m, theirs) })
					u.waits(t, m, 1)
					p := m.start(t, func(ctx context.Context) error { // a new record waits as well
						p, err := m.mover.Ingest(ctx, codedBy(dict, 3, 2000), reservation.AnyInTier(tier.Disk))
						if err != nil {
							return err
						}
						return p.Release()
					})
					p.waits(t, m, 2)
					if err := evictOne(t.Context(), m.mover, mine, tier.ID{Kind: tier.Disk}, reason); err != nil {
						t.Fatal(err)
					}
					if k := mine.Info().Space.Kind; k != tier.Disk {
						t.Errorf("it is in %s", k)
					}
					held.release(t)
					u.ended(t, nil)
					p.ended(t, nil)
				})
			}
		}
	}
}

// TestMonitorWritesWithoutASlot: while users have all slots, one move of the monitor at a time
// writes. The next one waits for it, and ends with its context. With a free slot, two write.
func TestMonitorWritesWithoutASlot(t *testing.T) {
	inBubble(t, "one slot", func(t *testing.T) {
		m := newMachine(t, machineConfig{permits: permit.Config{Slots: new(1)}})
		held := m.take(t, true, true)
		var writing atomic.Int64
		gate := make(chan struct{})
		write := func() *underWay {
			u := m.start(t, func(ctx context.Context) error {
				return m.mover.cfg.Builtin.OnDisk(transfer.ForMonitor(ctx), 1, true, func(context.Context) error {
					writing.Add(1)
					defer writing.Add(-1)
					<-gate
					return nil
				})
			})
			synctest.Wait()
			return u
		}
		want := func(n int64) {
			t.Helper()
			if got := writing.Load(); got != n {
				t.Errorf("%d write, want %d", got, n)
			}
		}
		first, second, third := write(), write(), write()
		want(1)
		cause := errors.New("enough")
		second.cancel(cause)
		second.ended(t, cause)
		gate <- struct{}{}
		first.ended(t, nil)
		synctest.Wait()
		want(1) // the third
		held.release(t)
		fourth := write()
		want(2)
		close(gate)
		third.ended(t, nil)
		fourth.ended(t, nil)
	})
}

// gatedFS is the real file system; writes wait at a gate, when there is one.
type gatedFS struct {
	disk.FS
	mu      sync.Mutex
	gate    chan struct{}
	arrived chan int // writes at the gate or past it, at each that comes
	now     int
	most    int
}

type gatedFile struct {
	disk.File
	fs *gatedFS
}

func (f *gatedFS) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	file, err := f.FS.OpenAnonymous(dir, direct)
	if err != nil {
		return nil, err
	}
	return gatedFile{file, f}, nil
}

func (f *gatedFS) Create(path string, direct bool) (disk.File, error) {
	file, err := f.FS.Create(path, direct)
	if err != nil {
		return nil, err
	}
	return gatedFile{file, f}, nil
}

func (f gatedFile) WriteAt(p []byte, off int64) (int, error) {
	f.fs.mu.Lock()
	f.fs.now++
	f.fs.most = max(f.fs.most, f.fs.now)
	gate := f.fs.gate
	f.fs.mu.Unlock()
	if gate != nil {
		f.fs.arrived <- 1
		<-gate
	}
	defer func() {
		f.fs.mu.Lock()
		f.fs.now--
		f.fs.mu.Unlock()
	}()
	return f.File.WriteAt(p, off)
}

func (f *gatedFS) shut() (open func()) {
	gate := make(chan struct{})
	f.mu.Lock()
	f.gate, f.most = gate, 0
	f.mu.Unlock()
	return sync.OnceFunc(func() {
		f.mu.Lock()
		f.gate = nil
		f.mu.Unlock()
		close(gate)
	})
}

// TestSlotsLimitConcurrentWrites: as many moves write to disk at a time as there are slots, each
// with its bytes of the host budget. One move of the monitor writes in addition, and a second one
// waits for that.
func TestSlotsLimitConcurrentWrites(t *testing.T) {
	const moves, slots = 7, 3
	files := &gatedFS{FS: disk.OS(), arrived: make(chan int, 100)}
	m := newMachine(t, machineConfig{files: files, permits: permit.Config{Slots: new(slots)}})
	var batches []*batch.Batch
	for i := range moves {
		batches = append(batches, m.put(t, numbered(int64(i), 2000), tier.Host))
	}
	monitors := []*batch.Batch{m.put(t, numbered(98, 2000), tier.Host), m.put(t, numbered(99, 2000), tier.Host)}
	body := batches[0].Info().Descriptor.Body
	open := files.shut()
	defer open()
	var under []*underWay
	for _, b := range batches {
		under = append(under, m.start(t, func(ctx context.Context) error { return moveTo(tier.Disk)(ctx, m, b) }))
	}
	for range slots { // each writes its body with one request
		<-files.arrived
	}
	for m.permits.Stats().Waiting < moves-slots {
		runtime.Gosched()
	}
	if s := m.permits.Stats(); s.HeldSlots != slots || s.FreeSlots != 0 {
		t.Errorf("the slots are %+v", s)
	}
	if n := m.freeHost(); n != 512<<20-slots*body {
		t.Errorf("%d bytes are available, with %d bodies of %d under way", n, slots, body)
	}
	for _, b := range monitors {
		under = append(under, m.start(t, func(ctx context.Context) error {
			return evictOne(ctx, m.mover, b, tier.ID{Kind: tier.Disk}, ReasonTrigger)
		}))
	}
	<-files.arrived // one of them writes in addition
	if s := m.permits.Stats(); s.HeldSlots != slots || s.Slots != slots || s.Waiting != moves-slots {
		t.Errorf("the slots are %+v", s)
	}
	if n := m.freeHost(); n != 512<<20-slots*body {
		t.Errorf("%d bytes are available with the monitor's", n)
	}
	open()
	for _, u := range under {
		u.ended(t, nil)
	}
	if files.most > slots+1 {
		t.Errorf("%d wrote at a time", files.most)
	}
}

// What is under way is a bounded part of a large body, and never more than the
// budget has.
func TestPermitsBytes(t *testing.T) {
	edges := [][2]tier.Kind{
		{tier.Host, tier.Disk}, {tier.Disk, tier.Host}, {tier.GPU, tier.Disk}, {tier.Disk, tier.GPU}, {tier.Disk, tier.Disk},
	}
	for _, budget := range []int64{512 << 20, 1000} {
		m := newMachine(t, machineConfig{permits: permit.Config{Budgets: []permit.Budget{{Name: permit.Host, Bytes: budget}}}})
		b := m.mover.cfg.Builtin
		for _, edge := range edges {
			for _, body := range []int64{1, 4096, 1 << 40} {
				err := b.Permitted(t.Context(), m.spaces[edge[1]], m.spaces[edge[0]], body, func(ctx context.Context) error {
					free := m.freeHost()
					if got, want := budget-free, min(body, transfer.DiskUnderWay, budget); got != want {
						t.Errorf("%v with a body of %d has %d bytes, want %d", edge, body, got, want)
					}
					if held := m.permits.Stats().HeldSlots; held != map[bool]int{true: 1}[edge[1] == tier.Disk] {
						t.Errorf("%v has %d slots", edge, held)
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// TestTheSmallestPool: a pool of one byte and one slot slows moves down, and all of them succeed.
func TestTheSmallestPool(t *testing.T) {
	m := newMachine(t, machineConfig{permits: permit.Config{
		Budgets: []permit.Budget{{Name: permit.Host, Bytes: 1}}, Slots: new(1)}})
	dict := words(1)
	var batches []*batch.Batch
	for i := range 4 {
		batches = append(batches, m.put(t, codedBy(dict, int64(i), 1500), tier.GPU))
	}
	var wg sync.WaitGroup
	for _, b := range batches {
		wg.Go(func() {
			for _, k := range []tier.Kind{tier.Disk, tier.Host, tier.Disk, tier.GPU, tier.Disk} {
				if err := moveTo(k)(t.Context(), m, b); err != nil {
					t.Errorf("to %s: %v", k, err)
				}
			}
			if err := m.same(t.Context(), b); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// OnDisk within OnDisk asks for nothing more, and writing within reading is refused
// rather than waited for.
func TestOnDiskWithinOnDisk(t *testing.T) {
	m := newMachine(t, machineConfig{permits: permit.Config{Slots: new(1)}})
	b := m.mover.cfg.Builtin
	nothing := func(context.Context) error { return nil }
	ran := 0
	err := b.OnDisk(t.Context(), 10, true, func(ctx context.Context) error {
		for _, writes := range []bool{true, false} {
			err := b.OnDisk(ctx, 10, writes, func(context.Context) error {
				ran++
				if s := m.permits.Stats(); s.HeldSlots != 1 {
					t.Errorf("%+v", s)
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil || ran != 2 {
		t.Errorf("it ran %d times: %v", ran, err)
	}
	err = b.OnDisk(t.Context(), 10, false, func(ctx context.Context) error {
		if err := b.OnDisk(ctx, 10, false, nothing); err != nil {
			t.Error(err)
		}
		return b.OnDisk(ctx, 10, true, nothing)
	})
	if err == nil {
		t.Error("a reader may write")
	}
	if err := b.OnDisk(t.Context(), -1, false, nothing); err == nil {
		t.Error("a negative number of bytes")
	}
}
