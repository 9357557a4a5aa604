package convert

import (
	"errors"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestAcquireIn: the bytes of a batch that is brought come out of the reservation, to the
// byte what Charges said, dictionaries too, and they outlive it.
func TestAcquireIn(t *testing.T) {
	for _, k := range []tier.Kind{tier.Host, tier.Disk} {
		t.Run(k.String(), func(t *testing.T) {
			m := newMachine(t, machineConfig{})
			gpu := m.spaces[tier.GPU]
			dict := words(1)
			one, two := m.make(t, codedBy(dict, 1, 5000), k), m.make(t, codedBy(dict, 2, 3000), k)
			there, missing := m.mover.Charges(gpu, one, two, one)
			if want := gpu.Charge(one.Info().Descriptor.Body)*2 + gpu.Charge(two.Info().Descriptor.Body) + gpu.Charge(shared(one).Body); there != 0 || missing != want {
				t.Fatalf("%d bytes are there and %d missing, want none and %d", there, missing, want)
			}
			_, missing = m.mover.Charges(gpu, one, two)
			const more = 1 << 20
			r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), missing+more, nil)
			if err != nil {
				t.Fatal(err)
			}
			used := gpu.State().Used()
			var handles []*batch.Handle
			for _, b := range []*batch.Batch{one, two, one} {
				h, err := m.mover.AcquireIn(t.Context(), b, r)
				if err != nil {
					t.Fatal(err)
				}
				if h.Space() != gpu {
					t.Errorf("the batch is in %s", h.Space().ID())
				}
				handles = append(handles, h)
			}
			if gpu.State().Used() != used || r.Unused() != more {
				t.Errorf("%d bytes are used, before %d, and %d unused, want %d",
					gpu.State().Used(), used, r.Unused(), more)
			}
			if there, absent := m.mover.Charges(gpu, one, two); there != missing || absent != 0 {
				t.Errorf("%d bytes are there and %d missing, want %d and none", there, absent, missing)
			}
			for _, h := range handles {
				if err := h.Close(); err != nil {
					t.Error(err)
				}
			}
			if err := r.Release(); err != nil {
				t.Fatal(err)
			}
			if gpu.State().Used() != missing {
				t.Errorf("%d bytes are used after the release, want %d", gpu.State().Used(), missing)
			}
			for _, b := range []*batch.Batch{one, two} {
				if err := m.same(t.Context(), b); err != nil {
					t.Error(err)
				}
			}
			drop(t, one, two)
			if there, absent := m.mover.Charges(gpu, one, two); there != 0 || absent != 0 {
				t.Errorf("dropped batches count %d and %d bytes", there, absent)
			}
		})
	}
}

// TestReadIn: tasks of others stay pending, whether the batch is there or is brought.
func TestReadIn(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.make(t, codedBy(words(1), 1, 5000), tier.Host)
	_, missing := m.mover.Charges(m.spaces[tier.GPU], b)
	r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), missing, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.TryCreateTask(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		h, err := m.mover.ReadIn(t.Context(), b, r)
		if err != nil {
			t.Fatal(err)
		}
		if now := b.Info(); now.Pending != 1 || now.Active != 1 || h.Space() != m.spaces[tier.GPU] {
			t.Errorf("it is %+v", now)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := r.Release(); err != nil {
		t.Error(err)
	}
	drop(t, b)
}

// TestChargesOfWhatLeaves: a batch that is being moved is not there any more, nor is a dictionary
// that only such batches have.
func TestChargesOfWhatLeaves(t *testing.T) {
	m := newMachine(t, machineConfig{})
	gpu := m.spaces[tier.GPU]
	dict := words(1)
	one, two := m.make(t, codedBy(dict, 1, 5000), tier.GPU), m.make(t, codedBy(dict, 2, 3000), tier.GPU)
	list := gpu.Charge(shared(one).Body)
	first, second := gpu.Charge(one.Info().Descriptor.Body), gpu.Charge(two.Info().Descriptor.Body)
	want := func(there, missing int64) {
		t.Helper()
		if a, b := m.mover.Charges(gpu, one, two); a != there || b != missing {
			t.Errorf("%d bytes are there and %d missing, want %d and %d", a, b, there, missing)
		}
	}
	want(first+second+list, 0)
	var transits []*batch.Transit
	for _, b := range []*batch.Batch{one, two} {
		transit, err := b.TryTransit()
		if err != nil {
			t.Fatal(err)
		}
		transits = append(transits, transit)
		if len(transits) == 1 {
			want(second+list, first)
		}
	}
	want(0, first+second+list)
	for _, transit := range transits {
		if err := transit.Abort(); err != nil {
			t.Error(err)
		}
	}
	want(first+second+list, 0)
	drop(t, one, two)
}

// TestAcquireInTooLittle: what the reservation does not hold is an error at once, and the
// batch is whole where it was, with no task left on it.
func TestAcquireInTooLittle(t *testing.T) {
	for name, rec := range map[string]arrow.RecordBatch{"plain": numbered(1, 5000), "dictionary": coded(1, 5000)} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{})
			b := m.put(t, rec, tier.Host)
			gpu := m.spaces[tier.GPU]
			_, missing := m.mover.Charges(gpu, b)
			for _, n := range []int64{0, 1, missing - 1} {
				r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), n, nil)
				if err != nil {
					t.Fatal(err)
				}
				if n = r.Bytes(); n >= missing { // it was rounded up
					if err := r.Shrink(n - missing + 1); err != nil {
						t.Fatal(err)
					}
				}
				h, err := m.mover.AcquireIn(t.Context(), b, r)
				var ee *reservation.ExceededError
				if h != nil || !errors.As(err, &ee) || ee.Requested <= ee.Available {
					t.Errorf("with %d of %d bytes: %v", r.Bytes(), missing, err)
				}
				if m.settle(); r.Unused() != r.Bytes() {
					t.Errorf("%d of %d bytes are unused", r.Unused(), r.Bytes())
				}
				if err := r.Release(); err != nil {
					t.Fatal(err)
				}
				m.whole(t, b, tier.Host)
			}
		})
	}
}

// TestAcquireInDoesNotClear: room that is not in one piece is an error, and no more is
// waited for while the reservation is held.
func TestAcquireInDoesNotClear(t *testing.T) {
	m := newMachine(t, machineConfig{gpu: 1 << 20})
	b := m.put(t, numbered(1, 10_000), tier.Host)
	gpu := m.spaces[tier.GPU]
	need := gpu.Charge(b.Info().Descriptor.Body)
	all, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), gpu.State().Room, nil)
	if err != nil {
		t.Fatal(err)
	}
	var holes, walls []*tier.Buffer
	for i := int64(0); all.Unused() >= need/2; i++ {
		buf, err := all.Alloc(need / 2)
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			holes = append(holes, buf)
		} else {
			walls = append(walls, buf)
		}
	}
	for _, h := range holes {
		if err := h.Release(); err != nil {
			t.Fatal(err)
		}
	}
	m.settle()
	if all.Unused() < need {
		t.Fatalf("%d bytes are unused: the test needs %d", all.Unused(), need)
	}
	var full *tier.NoSpaceError
	if _, err := m.mover.AcquireIn(t.Context(), b, all); !errors.As(err, &full) || full.Largest == 0 {
		t.Errorf("without one piece: %v", err)
	}
	for _, w := range walls {
		if err := w.Release(); err != nil {
			t.Fatal(err)
		}
	}
	m.settle()
	h, err := m.mover.AcquireIn(t.Context(), b, all)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(h.Close(), all.Release()); err != nil {
		t.Fatal(err)
	}
	m.whole(t, b, tier.GPU)
}
