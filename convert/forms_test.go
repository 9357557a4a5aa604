package convert

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/image/imagetest"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// scrambled is a program's own form: the bytes of an image, each with other bits, in host memory or
// on disk. It has no descriptor.
type scrambled struct {
	desc *batch.Descriptor
	buf  *tier.Buffer
}

const inMind batch.PayloadType = "scrambled"

func (*scrambled) Type() batch.PayloadType { return inMind }
func (s *scrambled) Space() *tier.Space    { return s.buf.Space() }
func (s *scrambled) Bytes() int64          { return s.buf.Charge() }
func (s *scrambled) Release() error        { return s.buf.Release() }

// told is a scrambled that has a descriptor.
type told struct{ *scrambled }

func (t told) Descriptor() *batch.Descriptor { return t.desc }

func scramble(p []byte) {
	for i := range p {
		p[i] ^= 0x5a
	}
}

// scrambled makes a batch of rec in that form.
func (m *machine) scrambled(t *testing.T, rec arrow.RecordBatch, k tier.Kind, tells bool) *batch.Batch {
	t.Helper()
	d, body := imagetest.LaidOut(t, rec)
	scramble(body)
	r, err := m.reservations.TryReserve(reservation.AnyInTier(k), d.Body, nil)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(d.Body)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatal(err)
	}
	switch mem := buf.Memory().(type) {
	case tier.HostMemory:
		err = scatter(mem.Extents(), 0, body)
	case tier.FileMemory:
		err = mem.WriteAt(t.Context(), body, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	s := &scrambled{d, buf}
	if tells {
		return m.adopt(t, rec, told{s})
	}
	return m.adopt(t, rec, s)
}

// unscramble is the converter to an image in host memory or on disk, and counts its calls.
func unscramble(calls *atomic.Int64) Func {
	return func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
		calls.Add(1)
		s, ok := src.(*scrambled)
		if !ok {
			s = src.(told).scrambled
		}
		body := make([]byte, s.desc.Body)
		var err error
		switch mem := s.buf.Memory().(type) {
		case tier.HostMemory:
			err = image.Gather(body, mem.Extents(), 0)
		case tier.FileMemory:
			err = mem.ReadAt(ctx, body, 0)
		}
		if err != nil {
			return nil, err
		}
		scramble(body)
		buf, err := r.Alloc(s.desc.Body, s.desc.Cuts()...)
		if err != nil {
			return nil, err
		}
		switch mem := buf.Memory().(type) {
		case tier.HostMemory:
			err = scatter(mem.Extents(), 0, body)
		case tier.FileMemory:
			err = mem.WriteAt(ctx, body, 0)
		}
		if err != nil {
			return nil, errors.Join(err, buf.Release())
		}
		return batch.NewImage(s.desc, buf, r.Space()), nil
	}
}

// A batch in a program's own form opens, whole and in parts, and is cloned by the converters
// that are registered for it, whether it has a descriptor or not.
func TestOwnFormOpensAndIsCloned(t *testing.T) {
	for _, k := range []tier.Kind{tier.Host, tier.Disk} {
		for _, tells := range []bool{false, true} {
			m := newMachine(t, machineConfig{})
			rec := numbered(7, 9000)
			b := m.scrambled(t, rec, k, tells)
			read := func() error {
				h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(k))
				if err != nil {
					t.Fatal(err)
				}
				defer h.Close()
				got, err := m.mover.Record(t.Context(), h)
				if err != nil {
					return err
				}
				defer got.Release()
				return equal.Records(rec, got)
			}
			missing := func(what string, err error) {
				t.Helper()
				var e *NoConverterError
				if !errors.As(err, &e) || e.From != (Form{inMind, k}) || e.To != ImageIn(tier.Host) || !strings.Contains(err.Error(), "Registry.Register") {
					t.Errorf("%s without a converter: %v", what, err)
				}
			}
			missing("a record", read())
			_, err := m.columns(t, b, image.Selection{Columns: []string{"s"}, From: 100, To: 300})
			missing("columns", err)
			_, err = m.mover.Clone(t.Context(), b, nil)
			missing("a clone", err)

			var calls, there, itself atomic.Int64
			if err := m.registry.Register(Form{inMind, k}, ImageIn(tier.Host), unscramble(&calls)); err != nil {
				t.Fatal(err)
			}
			if err := read(); err != nil {
				t.Fatalf("a record of %s: %v", k, err)
			}
			m.picked(t, b, []int{1}, 100, 300)
			m.picked(t, b, []int{1, 0}, 0, 9000)
			if calls.Load() < 2 {
				t.Errorf("the converter was called %d times", calls.Load())
			}
			cloned := func(form batch.PayloadType, at tier.Kind) {
				t.Helper()
				c, err := m.mover.Clone(t.Context(), b, nil)
				if err != nil {
					t.Fatal(err)
				}
				if c.Info().Payload.Type() != form || c.Info().Space.Kind != at || c.ID() == b.ID() {
					t.Errorf("the clone is batch %d, a %s in %s, want a %s in %s", c.ID(), c.Info().Payload.Type(), c.Info().Space, form, at)
				}
				if form != inMind {
					m.records[c.ID()] = rec
					if err := m.same(t.Context(), c); err != nil {
						t.Errorf("the clone: %v", err)
					}
				}
				if err := c.Drop(); err != nil {
					t.Error(err)
				}
			}
			cloned(batch.PlainImage, tier.Host)
			if k != tier.Host { // an image where the batch lies comes first
				if err := m.registry.Register(Form{inMind, k}, ImageIn(k), unscramble(&there)); err != nil {
					t.Fatal(err)
				}
				cloned(batch.PlainImage, k)
			}
			again := func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
				img, err := unscramble(&itself)(ctx, src, r)
				if err != nil {
					return nil, err
				}
				return &scrambled{img.(*batch.Image).Descriptor(), img.(*batch.Image).Buffer()}, nil
			}
			if err := m.registry.Register(Form{inMind, k}, Form{inMind, k}, again); err != nil {
				t.Fatal(err)
			}
			if !tells { // the clone does not either
				cloned(inMind, k)
			}
		}
	}
}

// A form whose converter to a host image makes something else is refused, and nothing stays.
func TestOwnFormThatIsNoImage(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.scrambled(t, numbered(3, 500), tier.Disk, false)
	err := m.registry.Register(Form{inMind, tier.Disk}, ImageIn(tier.Host), func(_ context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
		buf, err := r.Alloc(src.(*scrambled).desc.Body)
		return &scrambled{src.(*scrambled).desc, buf}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.same(t.Context(), b); err == nil || !strings.Contains(err.Error(), string(inMind)) {
		t.Errorf("got %v", err)
	}
	if u := m.spaces[tier.Host].State().Usage; u.Live != m.base || u.Reserved != 0 {
		t.Errorf("host memory holds %+v", u)
	}
}

// A built-in converter can be wrapped: the wrapper sees each conversion, and calls what was
// registered before.
func TestWrapABuiltInConverter(t *testing.T) {
	m := newMachine(t, machineConfig{})
	var seen atomic.Int64
	err := m.registry.Wrap(ImageIn(tier.Host), ImageIn(tier.Disk), func(inner Func) Func {
		return func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			seen.Add(1)
			return inner(ctx, src, r)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	b := m.put(t, numbered(1, 3000), tier.Host)
	m.move(t, b, tier.Disk)
	m.whole(t, b, tier.Disk)
	if seen.Load() != 1 {
		t.Errorf("the wrapper saw %d conversions", seen.Load())
	}
	inner, err := m.registry.Lookup(ImageIn(tier.Disk), ImageIn(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.registry.Unregister(ImageIn(tier.Disk), ImageIn(tier.Host)); err != nil {
		t.Fatal(err)
	}
	if err := m.registry.Register(ImageIn(tier.Disk), ImageIn(tier.Host), inner); err != nil { // it is the same, whatever it is called by
		t.Fatal(err)
	}
	m.move(t, b, tier.Host)
	m.whole(t, b, tier.Host)
}

func TestWrapWhatIsNotThere(t *testing.T) {
	var g Registry
	a, b := Form{"a", tier.GPU}, Form{"b", tier.Host}
	if err := g.Wrap(a, b, func(f Func) Func { return f }); !errors.Is(err, ErrNoConverter) {
		t.Errorf("wrapping nothing: %v", err)
	}
	if _, err := g.Lookup(a, b); !errors.Is(err, ErrNoConverter) {
		t.Errorf("looking nothing up: %v", err)
	}
	if err := g.Register(a, b, nothing); err != nil {
		t.Fatal(err)
	}
	if err := g.Wrap(a, b, func(Func) Func { return nil }); err == nil {
		t.Error("nothing was wrapped around it")
	}
	err := g.Wrap(a, b, func(f Func) Func { // a replacement meanwhile must not be undone
		if err := errors.Join(g.Unregister(a, b), g.Register(a, b, nothing)); err != nil {
			t.Fatal(err)
		}
		return f
	})
	if err == nil {
		t.Error("the new converter was lost")
	}
}

// TestOwnPayloadMovesLikeAnyOther: a payload with converters to and from an image in host memory only is
// evicted from the GPU to disk and fetched again, by way of host memory, and gets its type again on the
// GPU. Its clone on disk remembers the type too. Without room in host memory the monitor gets that as
// the error, and the batch is whole.
func TestOwnPayloadMovesLikeAnyOther(t *testing.T) {
	m := newMachine(t, machineConfig{copies: true})
	var down, up atomic.Int64
	toImage := unscramble(&down)
	toOwn := func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
		up.Add(1)
		out, err := m.builtIn(t, tier.Host, tier.GPU)(ctx, src, r)
		if err != nil {
			return nil, err
		}
		return onGPU{out.(*batch.Image)}, nil
	}
	fromOwn := func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
		down.Add(1)
		return m.builtIn(t, tier.GPU, tier.Host)(ctx, src.(onGPU).Image, r)
	}
	err := errors.Join(m.registry.Register(Form{inMind, tier.Host}, ImageIn(tier.Host), toImage),
		m.registry.Register(Form{inMind, tier.GPU}, ImageIn(tier.Host), fromOwn),
		m.registry.Register(ImageIn(tier.Host), Form{inMind, tier.GPU}, toOwn))
	if err != nil {
		t.Fatal(err)
	}
	rec := numbered(7, 9000)
	b := m.scrambled(t, rec, tier.Host, true)
	is := func(k tier.Kind, as batch.PayloadType) {
		t.Helper()
		if now := b.Info(); now.Space.Kind != k || now.Form != as || now.State != batch.Idle {
			t.Fatalf("the batch is a %s in %s, %s; want a %s in %s", now.Form, now.Space, now.State, as, k)
		}
		if err := m.same(t.Context(), b); err != nil {
			t.Error(err)
		}
	}
	m.move(t, b, tier.GPU)
	is(tier.GPU, inMind)
	for range 2 {
		if err := evictOne(t.Context(), m.mover, b, theDisk, ReasonTrigger); err != nil {
			t.Fatal(err)
		}
		is(tier.Disk, batch.PlainImage)
		c, err := m.mover.Clone(t.Context(), b, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.mover.Move(t.Context(), c, reservation.AnyInTier(tier.GPU)); err != nil {
			t.Fatal(err)
		}
		if now := c.Info(); now.Form != inMind || now.Space.Kind != tier.GPU {
			t.Errorf("the clone is a %s in %s", now.Form, now.Space)
		}
		if err := c.Drop(); err != nil {
			t.Error(err)
		}
		h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		is(tier.GPU, inMind)
		m.spaces[tier.Host].DropAllClean()
		before := down.Load()
		if err := evictOne(t.Context(), m.mover, b, theDisk, ReasonTrigger); err != nil {
			t.Fatal(err)
		}
		if n := down.Load() - before; n != 0 {
			t.Errorf("%d conversions although the disk has a clean image", n)
		}
		m.move(t, b, tier.GPU)
		is(tier.GPU, inMind)
		for _, s := range m.spaces { // the next move writes the bytes again
			s.DropAllClean()
		}
	}
	if down.Load() < 3 || up.Load() != 7 {
		t.Errorf("%d conversions to an image, %d from one", down.Load(), up.Load())
	}
	host := m.spaces[tier.Host]
	full, err := m.reservations.TryReserve(
		reservation.AnyInTier(tier.Host), host.State().Available/tier.Page*tier.Page, nil)
	if err != nil {
		t.Fatal(err)
	}
	var none *tier.NoSpaceError
	err = evictOne(t.Context(), m.mover, b, theDisk, ReasonTrigger)
	if !errors.As(err, &none) || none.Space != host.ID() {
		t.Errorf("without room in host memory: %v", err)
	}
	if err := full.Release(); err != nil {
		t.Error(err)
	}
	is(tier.GPU, inMind)
	if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(tier.GPU), batch.PlainImage); err != nil {
		t.Fatal(err)
	}
	is(tier.GPU, batch.PlainImage)
}

// onGPU is a payload of the same type on a GPU.
type onGPU struct{ *batch.Image }

func (onGPU) Type() batch.PayloadType { return inMind }

// scatter copies src to off of extents.
func scatter(extents [][]byte, off int64, src []byte) error {
	return image.Across(extents, off, int64(len(src)), func(p []byte) error { src = src[copy(p, src):]; return nil })
}
