package convert

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// remembering makes a batch in a tier, an image that remembers the type of payloads on the GPU to and
// from which only images in host memory can be converted.
func (m *machine) remembering(t *testing.T, k tier.Kind) *batch.Batch {
	t.Helper()
	err := errors.Join(
		m.registry.Register(Form{inMind, tier.GPU}, ImageIn(tier.Host),
			func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
				return m.builtIn(t, tier.GPU, tier.Host)(ctx, src.(onGPU).Image, r)
			}),
		m.registry.Register(ImageIn(tier.Host), Form{inMind, tier.GPU},
			func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
				out, err := m.builtIn(t, tier.Host, tier.GPU)(ctx, src, r)
				if err != nil {
					return nil, err
				}
				return onGPU{out.(*batch.Image)}, nil
			}))
	if err != nil {
		t.Fatal(err)
	}
	b := m.put(t, numbered(7, 9000), k)
	b.Info().Payload.(*batch.Image).Parts.Program = inMind
	return b
}

// fill reserves all that is available in host memory.
func (m *machine) fill(t *testing.T, o *reservation.Owner) *reservation.Reservation {
	t.Helper()
	free := m.spaces[tier.Host].State().Available / tier.Page * tier.Page
	r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Host), free, &reservation.Options{Owner: o})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestByWayOfHostWaitsForHandles: a batch that is opened where it is, while it waits for room in host
// memory on its way to the GPU, moves on when it is closed.
func TestByWayOfHostWaitsForHandles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(t, machineConfig{})
		b := m.remembering(t, tier.Disk)
		full := m.fill(t, nil)
		var h *batch.Handle
		var err error
		over := make(chan struct{})
		go func() {
			defer close(over)
			h, err = m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
		}()
		synctest.Wait() // for room
		there, failed := b.Read(t.Context(), theDisk)
		if failed != nil {
			t.Fatal(failed)
		}
		if err := full.Release(); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if err := there.Close(); err != nil {
			t.Error(err)
		}
		if <-over; err != nil {
			t.Fatal(err)
		}
		if now := b.Info(); now.Form != inMind || now.Space.Kind != tier.GPU {
			t.Errorf("the batch is a %s in %s", now.Form, now.Space)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestByWayOfHostInADeadlock: where two owners each need the room that the other one has, the one that
// brings a batch by way of host memory waits as for any room, and one of them gets an error.
func TestByWayOfHostInADeadlock(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.remembering(t, tier.Disk)
	one, two := reservation.NewOwner("one"), reservation.NewOwner("two")
	r, err := m.reservations.TryReserve(
		reservation.AnyInTier(tier.GPU), m.spaces[tier.GPU].Capacity, &reservation.Options{Owner: one})
	if err != nil {
		t.Fatal(err)
	}
	full := m.fill(t, two)
	other := make(chan error)
	go func() {
		more, err := m.reservations.Reserve(
			t.Context(), reservation.AnyInTier(tier.GPU), tier.Page, &reservation.Options{Owner: two})
		other <- errors.Join(err, full.Release(), more.Release())
	}()
	h, err := m.mover.AcquireIn(t.Context(), b, r)
	if err == nil {
		err = h.Close()
	} else if !errors.Is(err, reservation.ErrDeadlock) {
		t.Error(err)
	}
	if e := r.Release(); e != nil {
		t.Error(e)
	}
	e := <-other
	if errors.Is(err, reservation.ErrDeadlock) == errors.Is(e, reservation.ErrDeadlock) {
		t.Errorf("the errors are %v and %v; want one deadlock", err, e)
	}
	if err := m.same(t.Context(), b); err != nil {
		t.Error(err)
	}
}

// TestNotAheadByWayOfHost: a batch that is in a GPU is not brought ahead to another one by way of host
// memory, which is slower than both.
func TestNotAheadByWayOfHost(t *testing.T) {
	m, _ := twoGPUs(t, gpus{}, func(d tier.Device) tier.Device { return d })
	m.records = make(map[batch.ID]arrow.RecordBatch)
	b := m.remembering(t, tier.GPU)
	other := reservation.Specific(tier.ID{Kind: tier.GPU, Ordinal: 1})
	if err := m.mover.Ahead(t.Context(), b, other); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("it is brought ahead: %v", err)
	}
	if now := b.Info(); now.Space.Kind != tier.GPU || now.Space.Ordinal != 0 || now.State != batch.Idle {
		t.Errorf("the batch is %s in %s", now.State, now.Space)
	}
	if err := m.mover.Move(t.Context(), b, other); err != nil {
		t.Fatal(err)
	}
	if now := b.Info(); now.Form != inMind || now.Space.Ordinal != 1 {
		t.Errorf("the batch is a %s in %s", now.Form, now.Space)
	}
}

// TestPlainWithoutAConverterToCompressed: where the program has taken the converter to compressed images
// away, batches come to disk as they are.
func TestPlainWithoutAConverterToCompressed(t *testing.T) {
	m := newMachine(t, machineConfig{codec: CodecZstd})
	for _, from := range []Form{ImageIn(tier.Host), {batch.CompressedImage, tier.Host}} {
		if err := m.registry.Unregister(from, Form{batch.CompressedImage, tier.Disk}); err != nil {
			t.Fatal(err)
		}
	}
	b := m.put(t, numbered(1, 72_000), tier.Host)
	for range 2 {
		m.move(t, b, tier.Disk)
		if got := m.form(t, b); got != batch.PlainImage {
			t.Errorf("it is a %s", got)
		}
		m.whole(t, b, tier.Disk)
		m.move(t, b, tier.Host)
		if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(tier.Host), batch.CompressedImage); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOwnTypeInHostAgain: a payload in host memory whose converters are to and from an image there gets
// its type again when it comes back from disk, however it is asked for.
func TestOwnTypeInHostAgain(t *testing.T) {
	m := newMachine(t, machineConfig{})
	var calls atomic.Int64
	toOwn := func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
		d := src.(*batch.Image).Descriptor()
		buf, err := r.Alloc(d.Body)
		if err != nil {
			return nil, err
		}
		body := make([]byte, d.Body)
		err = image.Gather(body, src.(*batch.Image).Buffer().Memory().(tier.HostMemory).Extents(), 0)
		scramble(body)
		err = errors.Join(err, scatter(buf.Memory().(tier.HostMemory).Extents(), 0, body))
		return told{&scrambled{d, buf}}, err
	}
	err := errors.Join(m.registry.Register(Form{inMind, tier.Host}, ImageIn(tier.Host), unscramble(&calls)),
		m.registry.Register(ImageIn(tier.Host), Form{inMind, tier.Host}, toOwn))
	if err != nil {
		t.Fatal(err)
	}
	b := m.scrambled(t, numbered(7, 9000), tier.Host, true)
	toHost := reservation.AnyInTier(tier.Host)
	for name, back := range map[string]func() error{
		"Move":   func() error { return m.mover.Move(t.Context(), b, toHost) },
		"MoveAs": func() error { return m.mover.MoveAs(t.Context(), b, toHost, inMind) },
		"Ahead":  func() error { return m.mover.Ahead(t.Context(), b, toHost) },
		"Acquire": func() error {
			h, err := m.mover.Acquire(t.Context(), b, toHost)
			if err != nil {
				return err
			}
			return h.Close()
		},
	} {
		m.move(t, b, tier.Disk)
		if err := back(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if now := b.Info(); now.Form != inMind || now.Space.Kind != tier.Host {
			t.Errorf("%s: it is a %s in %s", name, now.Form, now.Space)
		}
		if err := m.same(t.Context(), b); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
