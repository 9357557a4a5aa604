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
	"github.com/spillway-db/spillway/internal/image/columns"
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
	r, err := m.reservations.TryReserve(reservation.AnyInTier(k), d.Body)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(d.Body)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatal(err)
	}
	switch mem := buf.Memory().(type) {
	case tier.HostMemory:
		err = image.Scatter(mem.Extents(), 0, body)
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
	return func(ctx context.Context, src batch.Payload, r reservation.Reservation) (batch.Payload, error) {
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
		buf, err := r.AllocCuts(s.desc.Body, s.desc.Cuts())
		if err != nil {
			return nil, err
		}
		switch mem := buf.Memory().(type) {
		case tier.HostMemory:
			err = image.Scatter(mem.Extents(), 0, body)
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
			missing := func(what string, err error, to batch.PayloadType) {
				t.Helper()
				var e *NoConverterError
				if !errors.As(err, &e) || e.From != inMind || e.To != to || !strings.Contains(err.Error(), "Registry.Register") {
					t.Errorf("%s without a converter: %v", what, err)
				}
			}
			missing("a record", read(), batch.HostImage)
			_, err := m.columns(t, b, columns.Selection{Columns: []string{"s"}, From: 100, To: 300})
			missing("columns", err, batch.HostImage)
			_, err = m.mover.Clone(t.Context(), b, nil)
			missing("a clone", err, batch.HostImage)

			var calls, there, itself atomic.Int64
			if err := m.registry.Register(inMind, batch.HostImage, unscramble(&calls)); err != nil {
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
			cloned(batch.HostImage, tier.Host)
			if k != tier.Host { // an image where the batch lies comes first
				if err := m.registry.Register(inMind, batch.ImageType(k), unscramble(&there)); err != nil {
					t.Fatal(err)
				}
				cloned(batch.ImageType(k), k)
			}
			again := func(ctx context.Context, src batch.Payload, r reservation.Reservation) (batch.Payload, error) {
				img, err := unscramble(&itself)(ctx, src, r)
				if err != nil {
					return nil, err
				}
				return &scrambled{img.(*batch.Image).Descriptor(), img.(*batch.Image).Buffer()}, nil
			}
			if err := m.registry.Register(inMind, inMind, again); err != nil {
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
	err := m.registry.Register(inMind, batch.HostImage, func(_ context.Context, src batch.Payload, r reservation.Reservation) (batch.Payload, error) {
		buf, err := r.Alloc(src.(*scrambled).desc.Body)
		return &scrambled{src.(*scrambled).desc, buf}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.same(t.Context(), b); err == nil || !strings.Contains(err.Error(), string(inMind)) {
		t.Errorf("got %v", err)
	}
	if u := m.spaces[tier.Host].Usage(); u.Live != m.base || u.Reserved != 0 {
		t.Errorf("host memory holds %+v", u)
	}
}

// A built-in converter can be wrapped: the wrapper sees each conversion, and calls what was
// registered before.
func TestWrapABuiltInConverter(t *testing.T) {
	m := newMachine(t, machineConfig{})
	var seen atomic.Int64
	err := m.registry.Wrap(batch.HostImage, batch.DiskImage, func(inner Func) Func {
		return func(ctx context.Context, src batch.Payload, r reservation.Reservation) (batch.Payload, error) {
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
	inner, err := m.registry.Lookup(batch.DiskImage, batch.HostImage)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.registry.Unregister(batch.DiskImage, batch.HostImage); err != nil {
		t.Fatal(err)
	}
	if err := m.registry.Register(batch.DiskImage, batch.HostImage, inner); err != nil { // it is the same, whatever it is called by
		t.Fatal(err)
	}
	m.move(t, b, tier.Host)
	m.whole(t, b, tier.Host)
}

func TestWrapWhatIsNotThere(t *testing.T) {
	var g Registry
	if err := g.Wrap("a", "b", func(f Func) Func { return f }); !errors.Is(err, ErrNoConverter) {
		t.Errorf("wrapping nothing: %v", err)
	}
	if _, err := g.Lookup("a", "b"); !errors.Is(err, ErrNoConverter) {
		t.Errorf("looking nothing up: %v", err)
	}
	if err := g.Register("a", "b", nothing); err != nil {
		t.Fatal(err)
	}
	if err := g.Wrap("a", "b", func(Func) Func { return nil }); err == nil {
		t.Error("nothing was wrapped around it")
	}
	err := g.Wrap("a", "b", func(f Func) Func { // a replacement meanwhile must not be undone
		if err := errors.Join(g.Unregister("a", "b"), g.Register("a", "b", nothing)); err != nil {
			t.Fatal(err)
		}
		return f
	})
	if err == nil {
		t.Error("the new converter was lost")
	}
}
