package convert

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// panicsOnRelease is a payload of a program's own, whose release panics when it has freed its
// memory.
type panicsOnRelease struct{ strange }

func (p panicsOnRelease) Release() error {
	_ = p.strange.Release()
	panic("in Release")
}

// TestReleasePanics: a batch arrives although the release of its old form panics, and the caller
// gets its handle.
func TestReleasePanics(t *testing.T) {
	if invariants.Enabled {
		t.Skip("needs a build without -tags invariants, which ends with the panic")
	}
	ways := map[string]func(*Mover, context.Context, *batch.Batch, reservation.Strategy) (*batch.Handle, error){
		"acquire": (*Mover).Acquire,
		"consume": (*Mover).Consume,
		"move": func(m *Mover, ctx context.Context, b *batch.Batch, to reservation.Strategy) (*batch.Handle, error) {
			return nil, m.Move(ctx, b, to)
		},
	}
	for name, bring := range ways {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{})
			img, err := m.mover.Ingest(t.Context(), numbered(1, 10), reservation.AnyInTier(tier.Host))
			if err != nil {
				t.Fatal(err)
			}
			err = m.registry.Register(Form{"strange", tier.Host}, ImageIn(tier.GPU), func(ctx context.Context, _ batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
				return m.builtIn(t, tier.Host, tier.GPU)(ctx, img, r)
			})
			if err != nil {
				t.Fatal(err)
			}
			b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: panicsOnRelease{strange{m.draw(t, tier.Host, 8192)}}})
			if err != nil {
				t.Fatal(err)
			}
			h, err := bring(m.mover, t.Context(), b, reservation.AnyInTier(tier.GPU))
			if err != nil {
				t.Fatal(err)
			}
			if h != nil {
				if err := h.Close(); err != nil {
					t.Error(err)
				}
			}
			if now := b.Info(); now.State != batch.Released {
				if err := b.Drop(); err != nil {
					t.Error(err)
				}
			}
			if err := img.Release(); err != nil {
				t.Error(err)
			}
			if u := m.spaces[tier.GPU].State().Usage; u.Used() != 0 {
				t.Errorf("the GPU has %+v", u)
			}
		})
	}
}

// moody is a payload of a program's own, one of whose methods panics.
type moody struct {
	strange
	method string
}

func (m moody) call(method string) {
	if m.method == method {
		panic("in " + method)
	}
}

func (m moody) Type() batch.PayloadType { m.call("Type"); return "moody" }
func (m moody) Space() *tier.Space      { m.call("Space"); return m.strange.Space() }
func (m moody) Bytes() int64            { m.call("Bytes"); return m.strange.Bytes() }
func (m moody) Descriptor() *batch.Descriptor {
	m.call("Descriptor")
	return nil
}

// TestNewFormPanics: a converter makes a payload one of whose methods panics. That is an error, the
// batch is whole in its source, and every byte that was drawn is back.
func TestNewFormPanics(t *testing.T) {
	ways := map[string]func(*machine, *batch.Batch) error{
		"move": func(m *machine, b *batch.Batch) error {
			return m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(tier.GPU), "moody")
		},
		"clone": func(m *machine, b *batch.Batch) error {
			c, err := m.mover.Clone(t.Context(), b, nil)
			return errors.Join(err, dropOf(c))
		},
		"record": func(m *machine, b *batch.Batch) error {
			h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
			if err != nil {
				t.Fatal(err)
			}
			_, err = m.mover.Record(t.Context(), h)
			return errors.Join(err, h.Close())
		},
	}
	for _, method := range []string{"Type", "Space", "Bytes", "Descriptor"} {
		for name, do := range ways {
			t.Run(name+" "+method, func(t *testing.T) {
				m := newMachine(t, machineConfig{})
				for _, to := range []Form{{"moody", tier.GPU}, {"strange", tier.Host}, ImageIn(tier.Host)} {
					register(t, m, Form{"strange", tier.Host}, to, func(r *reservation.Reservation) (batch.Payload, error) {
						buf, err := r.Alloc(8192)
						return moody{strange{buf}, method}, err
					})
				}
				b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: strange{m.draw(t, tier.Host, 8192)}})
				if err != nil {
					t.Fatal(err)
				}
				if err := do(m, b); err == nil {
					t.Error("no error")
				}
				if now := b.Info(); now.State != batch.Idle {
					t.Errorf("the batch is %s", now.State)
				}
				if err := b.Drop(); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// dropOf drops a batch, if there is one.
func dropOf(b *batch.Batch) error {
	if b == nil {
		return nil
	}
	return b.Drop()
}

// register registers a converter that makes something whatever it is given.
func register(t *testing.T, m *machine, from, to Form, make func(*reservation.Reservation) (batch.Payload, error)) {
	t.Helper()
	if err := m.registry.Register(from, to, func(_ context.Context, _ batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
		return make(r)
	}); err != nil {
		t.Fatal(err)
	}
}

// draw returns memory of n bytes.
func (m *machine) draw(t *testing.T, k tier.Kind, n int64) *tier.Buffer {
	t.Helper()
	r, err := m.reservations.TryReserve(reservation.AnyInTier(k), n, nil)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Release(); err != nil {
		t.Fatal(err)
	}
	return buf
}

// TestConverterFailsWithAStateError: it is about another batch, so nothing is waited for.
func TestConverterFailsWithAStateError(t *testing.T) {
	m := newMachine(t, machineConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	other := &batch.StateError{Batch: 77, State: batch.Processing, Op: "transit", Status: batch.InvalidState}
	register(t, m, Form{"strange", tier.Host}, ImageIn(tier.GPU), func(*reservation.Reservation) (batch.Payload, error) { return nil, other })
	b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: strange{m.draw(t, tier.Host, 8192)}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.mover.Acquire(ctx, b, reservation.AnyInTier(tier.GPU)); !errors.Is(err, other) {
		t.Errorf("it ended with %v", err)
	}
	if err := b.Drop(); err != nil {
		t.Error(err)
	}
}
