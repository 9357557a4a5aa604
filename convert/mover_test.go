package convert

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestEveryTypeAlongEveryEdge moves a batch of each type from each tier to each
// other and compares it there.
func TestEveryTypeAlongEveryEdge(t *testing.T) {
	t.Parallel()
	onEachGPUPinnedOrNot(t, func(t *testing.T, g gpus) {
		t.Run("small dictionaries inside", func(t *testing.T) { everyTypeAlongEveryEdge(t, g, false) })
		t.Run("all dictionaries outside", func(t *testing.T) { everyTypeAlongEveryEdge(t, g, true) })
	})
}

func everyTypeAlongEveryEdge(t *testing.T, g gpus, outside bool) {
	m := newMachine(t, machineConfig{gpus: g, outside: outside})
	gen := arrowgen.New(7)
	for i, typ := range arrowgen.Types() {
		if outside && !arrowgen.HasDictionary(typ) || g.skips(i) {
			continue
		}
		for _, rows := range g.rowsOf(i) {
			rec := gen.Record(arrowgen.Schema(typ), rows)
			b := m.put(t, rec, tier.GPU)
			// A walk that takes each of the six edges once.
			for _, k := range []tier.Kind{tier.Host, tier.Disk, tier.GPU, tier.Disk, tier.Host, tier.GPU} {
				if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
					t.Fatalf("%s, %d rows, to %s: %v", typ, rows, k, err)
				}
				if err := m.same(t.Context(), b); err != nil {
					t.Fatalf("%s, %d rows, in %s: %v", typ, rows, k, err)
				}
			}
		}
	}
}

func TestIngestIntoEveryTier(t *testing.T) { onEachGPUPinnedOrNot(t, ingestIntoEveryTier) }

func ingestIntoEveryTier(t *testing.T, g gpus) {
	for _, k := range tier.Kinds() {
		t.Run(k.String(), func(t *testing.T) {
			m := newMachine(t, machineConfig{gpus: g, onDisk: true})
			m.whole(t, m.put(t, numbered(3, 20_000), k), k)
		})
		t.Run(k.String()+"/no bytes", func(t *testing.T) {
			m := newMachine(t, machineConfig{gpus: g})
			b := m.put(t, arrowgen.New(1).Record(arrow.NewSchema(nil, nil), 0), k)
			m.whole(t, b, k)
			other := tier.Kinds()[(int(k))%3]
			if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(other)); err != nil {
				t.Fatal(err)
			}
			m.whole(t, b, other)
		})
	}
}

func TestOversizedGoesToTheFirstTierWhereItFits(t *testing.T) {
	for _, c := range []struct {
		gpu, host int64
		want      tier.Kind
	}{{64 << 10, 4 << 20, tier.Host}, {64 << 10, 256 << 10, tier.Disk}} {
		t.Run(c.want.String(), func(t *testing.T) {
			var told []string
			m := newMachine(t, machineConfig{gpu: c.gpu, host: c.host, events: func(e events.Event) {
				if e.Kind == events.Oversized {
					told = append(told, fmt.Sprint(e.Bytes > c.gpu, e.To.Kind))
				}
			}})
			b := m.put(t, numbered(1, 30_000), tier.GPU)
			m.whole(t, b, c.want)
			if want := fmt.Sprint(true, c.want); len(told) != 1 || told[0] != want {
				t.Errorf("told %q, want %q once", told, want)
			}
			if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.GPU)); !errors.Is(err, reservation.ErrExceeded) {
				t.Errorf("moving it to the GPU: %v", err)
			}
			m.whole(t, b, c.want)
		})
	}
	m := newMachine(t, machineConfig{gpu: 64 << 10, host: 256 << 10, disk: 128 << 10})
	if _, err := m.mover.Ingest(t.Context(), numbered(1, 30_000), reservation.AnyInTier(tier.GPU)); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("a batch that fits nowhere: %v", err)
	}
}

// The monitor's moves never wait: neither for room nor for the batch.
func TestMonitorMovesDoNotWait(t *testing.T) {
	m := newMachine(t, machineConfig{host: 512 << 10})
	b := m.put(t, numbered(1, 10_000), tier.GPU)
	all, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Host), m.spaces[tier.Host].State().Available, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = evictOne(t.Context(), m.mover, b, tier.ID{Kind: tier.Host}, ReasonTrigger)
	if !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("without room: %v", err)
	}
	if err := all.Release(); err != nil {
		t.Fatal(err)
	}
	h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	err = evictOne(t.Context(), m.mover, b, tier.ID{Kind: tier.Host}, ReasonDemand)
	if !errors.Is(err, batch.ErrState) {
		t.Errorf("with an open handle: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	m.whole(t, b, tier.GPU)
}

// Acquire waits for a handle elsewhere to close, uses the task that was made for
// it, and leaves none of its own behind when it gives up.
func TestAcquire(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 1000), tier.Host)
	h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	gaveUp := make(chan error)
	go func() {
		_, err := m.mover.Acquire(ctx, b, reservation.AnyInTier(tier.GPU))
		gaveUp <- err
	}()
	why := errors.New("why")
	cancel(why)
	if err := <-gaveUp; !errors.Is(err, why) {
		t.Fatalf("gave up with %v", err)
	}
	if err := b.CreateTask(t.Context()); err != nil {
		t.Fatal(err)
	}
	up := make(chan error)
	go func() {
		g, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
		if err == nil {
			err = g.Close()
		}
		up <- err
	}()
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-up; err != nil {
		t.Fatal(err)
	}
	m.whole(t, b, tier.GPU) // which also says that no task is pending
}

// arrivals counts how often a batch is seen at rest in a tier.
type arrivals struct {
	at   tier.Kind
	seen int
}

func (a *arrivals) BatchChanged(_ *batch.Batch, now batch.Info) {
	if now.Space.Kind == a.at && (now.State == batch.Idle || now.State == batch.TaskCreated) {
		a.seen++
	}
}

// TestAcquiredBatchIsNoVictim: between its arrival and the lock a batch that Acquire brings is
// never one that the monitor could move away again.
func TestAcquiredBatchIsNoVictim(t *testing.T) {
	m := newMachine(t, machineConfig{})
	p, err := m.mover.Ingest(t.Context(), numbered(1, 1000), reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	a := &arrivals{at: tier.GPU}
	b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: p, Observer: a})
	if err != nil {
		t.Fatal(err)
	}
	h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	if a.seen != 0 {
		t.Errorf("it was at rest %d times before it was locked", a.seen)
	}
	if err := errors.Join(h.Close(), b.Drop()); err != nil {
		t.Error(err)
	}
}

// TestConsume: the batch is dropped when it is locked, whether it was moved for that or not. Its
// data goes with the handle.
func TestConsume(t *testing.T) {
	for _, from := range []tier.Kind{tier.GPU, tier.Host, tier.Disk} {
		m := newMachine(t, machineConfig{})
		p, err := m.mover.Ingest(t.Context(), numbered(1, 1000), reservation.AnyInTier(from))
		if err != nil {
			t.Fatal(err)
		}
		b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: p})
		if err != nil {
			t.Fatal(err)
		}
		h, err := m.mover.Consume(t.Context(), b, reservation.AnyInTier(tier.GPU))
		if err != nil {
			t.Fatal(err)
		}
		gpu := m.spaces[tier.GPU]
		state, used := b.Info().State, gpu.State().Used()
		if state != batch.Released || used != h.Payload().Bytes() || h.Space() != gpu {
			t.Errorf("from %s: the batch is %s, with %d bytes in use on the GPU; its data is in %s", from, state, used, h.Space().ID())
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		if m.settle(); gpu.State().Used() != 0 {
			t.Errorf("from %s: %d bytes are in use after the handle is closed", from, gpu.State().Used())
		}
	}
}

// TestFailedAcquireLeavesNoTask: an Acquire that ends while it waits for another transit leaves no
// task behind.
func TestFailedAcquireLeavesNoTask(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 1000), tier.GPU)
	transit, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("gave up")
	failed := make(chan error)
	go func() {
		_, err := m.mover.Acquire(ctx, b, reservation.AnyInTier(tier.GPU))
		failed <- err
	}()
	cancel(cause)
	if err := <-failed; !errors.Is(err, cause) {
		t.Errorf("cancelled: %v", err)
	}
	if err := transit.Abort(); err != nil {
		t.Error(err)
	}
	m.whole(t, b, tier.GPU)
}

// A record that was opened in place outlives its handle and its batch.
func TestRecordOutlivesItsBatch(t *testing.T) {
	m := newMachine(t, machineConfig{})
	source := numbered(5, 3000)
	p, err := m.mover.Ingest(t.Context(), source, reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	b, err := batch.New(batch.Options{ID: 77, Payload: p})
	if err != nil {
		t.Fatal(err)
	}
	h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	rec, err := m.mover.Record(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	column := rec.Column(1)
	column.Retain()
	if err := errors.Join(h.Close(), b.Drop(), equal.Records(source, rec)); err != nil {
		t.Fatal(err)
	}
	rec.Release()
	if used := m.spaces[tier.Host].State().Used(); used <= m.base {
		t.Errorf("%d bytes are in use while a column is held", used)
	}
	column.Release()
	if used := m.spaces[tier.Host].State().Used(); used != m.base {
		t.Errorf("%d bytes are in use after the last release, want %d", used, m.base)
	}
}

// The digests of the bytes in each tier agree.
func TestDigestIsTheSameEverywhere(t *testing.T) { onEachGPU(t, 1, digestIsTheSameEverywhere) }

func digestIsTheSameEverywhere(t *testing.T, g gpus) {
	m := newMachine(t, machineConfig{gpus: g})
	b := m.put(t, numbered(2, 40_000), tier.GPU)
	var want tier.Digest
	for i, k := range tier.Kinds() {
		if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
			t.Fatal(err)
		}
		h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(k))
		if err != nil {
			t.Fatal(err)
		}
		d, err := m.mover.Digest(t.Context(), h)
		if err := errors.Join(err, h.Close()); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			want = d
		}
		if d != want || d == (tier.Digest{}) {
			t.Errorf("%s: digest %x, want %x", k, d, want)
		}
	}
}

// Room that is there only in pieces is made one by waiting demand: here the test
// plays the monitor.
func TestRoomInOnePiece(t *testing.T) { onEachGPU(t, 1, roomInOnePiece) }

func roomInOnePiece(t *testing.T, g gpus) {
	m := newMachine(t, machineConfig{gpus: g, gpu: 1 << 20})
	var small []*batch.Batch
	for i := range 8 {
		small = append(small, m.put(t, numbered(int64(i), 6000), tier.GPU))
	}
	gpu := m.spaces[tier.GPU]
	for i := 0; i < len(small); i += 2 { // holes
		if err := m.mover.Move(t.Context(), small[i], reservation.AnyInTier(tier.Disk)); err != nil {
			t.Fatal(err)
		}
	}
	m.settle()
	stop := m.onWait(func(context.Context, tier.ID, int64) {
		for _, b := range small {
			if b.Info().Space.Kind == tier.GPU && gpu.State().Used() > 0 {
				if err := evictOne(t.Context(), m.mover, b, tier.ID{Kind: tier.Disk}, ReasonDemand); err != nil {
					t.Error(err)
				}
			}
		}
	})
	defer stop()
	big := m.put(t, numbered(100, 20_000), tier.GPU)
	if err := m.same(t.Context(), big); err != nil {
		t.Error(err)
	}
	if k := big.Info().Space.Kind; k != tier.GPU {
		t.Errorf("the batch lies in %s", k)
	}
}

// strange is a payload of a program's own, without a descriptor.
type strange struct{ buf *tier.Buffer }

func (strange) Type() batch.PayloadType { return "strange" }
func (s strange) Space() *tier.Space    { return s.buf.Space() }
func (s strange) Bytes() int64          { return s.buf.Charge() }
func (s strange) Release() error        { return s.buf.Release() }

// Converters with wrong results, and payloads without an image, are errors that lose nothing.
func TestWrongAnswersAndForeignPayloads(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 1000), tier.GPU)
	for name, f := range map[string]Func{
		"another batch": func(_ context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			d := *src.(*batch.Image).Descriptor()
			d.Rows--
			buf, err := r.Alloc(d.Body, d.Cuts()...)
			return batch.NewImage(&d, buf, r.Space()), err
		},
		"another space": func(_ context.Context, src batch.Payload, _ *reservation.Reservation) (batch.Payload, error) {
			d := src.(*batch.Image).Descriptor()
			r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Disk), d.Body, nil)
			if err != nil {
				return nil, err
			}
			buf, err := r.Alloc(d.Body)
			return batch.NewImage(d, buf, r.Space()), errors.Join(err, r.Release())
		},
	} {
		if err := errors.Join(m.registry.Unregister(ImageIn(tier.GPU), ImageIn(tier.Host)), m.registry.Register(ImageIn(tier.GPU), ImageIn(tier.Host), f)); err != nil {
			t.Fatal(err)
		}
		if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Host)); err == nil {
			t.Errorf("%s was taken", name)
		}
		m.rests(t, b, tier.GPU)
	}
	r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Host), 4096, nil)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(4096)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatal(err)
	}
	x, err := batch.New(batch.Options{ID: 99, Payload: strange{buf}})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.mover.Move(t.Context(), x, reservation.AnyInTier(tier.GPU)); !errors.Is(err, ErrNoConverter) {
		t.Errorf("moving a strange payload: %v", err)
	}
	if err := x.Drop(); err != nil {
		t.Error(err)
	}
}

// panicky is a device whose copies to the host panic.
type panicky struct{ tier.Device }

func (d panicky) CopyRegions(s tier.Stream, regions []tier.Region) error {
	if regions[0].HostDst != nil {
		panic("in the device")
	}
	return d.Device.CopyRegions(s, regions)
}

func TestDevicePanicsGiveEverythingBack(t *testing.T) {
	m := newMachine(t, machineConfig{wrap: func(d tier.Device) tier.Device { return panicky{d} }})
	b := m.put(t, numbered(1, 5000), tier.GPU)
	for range 20 { // more often than there are chunks
		for _, k := range []tier.Kind{tier.Host, tier.Disk} {
			if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); err == nil {
				t.Fatalf("moved to %s", k)
			}
			m.rests(t, b, tier.GPU)
		}
	}
}

// TestVerifyNeedsADisk: bytes that have no checksums where they are cannot be verified, and are not
// said to be sound.
func TestVerifyNeedsADisk(t *testing.T) {
	for _, k := range []tier.Kind{tier.Host, tier.GPU} {
		m := newMachine(t, machineConfig{})
		b := m.put(t, numbered(1, 2000), k)
		if err := m.mover.Verify(t.Context(), b.Info().Payload); !errors.Is(err, tier.ErrNotSupported) {
			t.Errorf("in %s: %v", k, err)
		}
	}
}

// TestQuietIsNotByTheWallClock: the time since a batch was evicted has a monotonic clock. So
// nothing changes when the system's clock is set.
func TestQuietIsNotByTheWallClock(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b, other := m.put(t, numbered(1, 30_000), tier.Disk), m.put(t, numbered(2, 1000), tier.Host)
	if err := m.mover.Ahead(t.Context(), b, reservation.AnyInTier(tier.Host)); err != nil {
		t.Errorf("at the beginning: %v", err)
	}
	if err := evictOne(t.Context(), m.mover, other, theDisk, ReasonDemand); err != nil {
		t.Fatal(err)
	}
	if last := m.mover.stats.evictedAt[tier.ID{Kind: tier.Host}]; last.IsZero() || last == last.Round(0) {
		t.Errorf("%v has no monotonic reading", last)
	}
}

// TestADiskInPieces: what is free on a disk lies in pieces of two pages, and there is enough. A
// batch goes there, also one that is laid out there, and is whole when it comes back.
func TestADiskInPieces(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]machineConfig{
		"plain": {disk: 1 << 20}, "encrypted": {disk: 1 << 20, encrypt: true}, "dictionaries": {disk: 1 << 20, outside: true},
	} {
		t.Run(name, func(t *testing.T) {
			m, _ := copyMachine(t, cfg)
			disk := m.spaces[tier.Disk]
			var all, rest []*batch.Batch
			for i := int64(0); disk.State().Available >= 2*tier.Page; i++ {
				all = append(all, m.put(t, numbered(i, 400), tier.Disk))
			}
			for i, b := range all {
				if i%2 == 1 {
					rest = append(rest, b)
				} else if err := b.Drop(); err != nil {
					t.Fatal(err)
				}
			}
			for i, from := range []tier.Kind{tier.Host, tier.GPU, tier.Disk} {
				b := m.put(t, coded(int64(i), 3_000), from)
				m.move(t, b, tier.Disk)
				rest = append(rest, b)
			}
			for _, b := range rest {
				if err := m.same(t.Context(), b); err != nil {
					t.Error(err)
				}
			}
			m.move(t, rest[len(rest)-1], tier.Host)
			if err := m.same(t.Context(), rest[len(rest)-1]); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestPrefetchMovesNothingDown: a prefetch leaves a batch alone that another caller has brought to a
// faster tier, before it looks or between its look and its move.
func TestPrefetchMovesNothingDown(t *testing.T) {
	for _, at := range []tier.Kind{tier.GPU, tier.Disk} {
		m := newMachine(t, machineConfig{})
		b := m.put(t, numbered(1, 1000), at)
		m.mover.cfg.Persists = func(tier.ID) bool { // which a prefetch calls after its look
			if err := m.mover.Move(t.Context(), b, toGPU); err != nil {
				t.Error(err)
			}
			return false
		}
		if err := m.mover.Ahead(t.Context(), b, reservation.AnyInTier(tier.Host)); err != nil {
			t.Error(err)
		}
		m.whole(t, b, tier.GPU)
	}
}
