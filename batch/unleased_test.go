package batch

import (
	"testing"

	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// leasedSeen notes what each announcement said.
type leasedSeen []bool

func (s *leasedSeen) BatchChanged(_ *Batch, now Info) { *s = append(*s, now.Leased) }

// TestEndOfLeaseIsAnnounced: the end of the last lease on a batch's memory is a change of
// the batch, in each form that it takes; that of an earlier lease, or of one that is left
// from a form that the batch has no more, is none.
func TestEndOfLeaseIsAnnounced(t *testing.T) {
	host, gpu := newSpace(t, "host:0"), newSpace(t, "gpu:0")
	image := func(s *tier.Space) *Image { return NewImage(&Descriptor{Body: 8192}, draw(t, s, 8192), s) }
	table := func() *payload.Image {
		return payload.New(payload.Parts{
			Type: payload.ScatteredImage, Descriptor: &Descriptor{Sums: []uint64{}}, Space: gpu,
			Buffers: []*tier.Buffer{draw(t, gpu, 100), draw(t, gpu, 100)},
		})
	}
	var seen leasedSeen
	first := image(host)
	b := newBatch(t, first, &seen)
	check := func(when string, lease func() (end func())) {
		t.Helper()
		changed := b.Changed()
		one, two := lease(), lease()
		seen = seen[:0]
		one()
		if len(seen) != 0 {
			t.Errorf("%s: with a lease open it announced %v", when, seen)
		}
		two()
		two()
		if len(seen) != 1 || seen[0] {
			t.Errorf("%s: the end of the last lease was announced as %v", when, seen)
		}
		select {
		case <-changed:
		default:
			t.Errorf("%s: who waits for a change was not woken", when)
		}
	}
	check("as it was made", first.Buffer().Lease)
	stale := first.Buffer().Lease()
	second := table()
	move := func(to Payload) {
		t.Helper()
		tr, err := b.TryTransit()
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.Commit(to, false); err != nil {
			t.Fatal(err)
		}
	}
	move(second)
	seen = seen[:0]
	stale()
	if len(seen) != 0 || host.State().Used() != 0 {
		t.Errorf("a lease on the former memory ended as %v, with %d bytes used", seen, host.State().Used())
	}
	check("as a table", second.Buffers()[1].Lease)
	check("all buffers of a table", func() func() { end, _ := second.TryLease(); return end })
	if err := b.Drop(); err != nil {
		t.Fatal(err)
	}
	mustBeEmpty(t, gpu)
}

// endsLease ends a lease while a batch is being registered, as a reader may.
type endsLease struct {
	registrar
	end func()
}

func (r *endsLease) Register(b *Batch, now Info) error {
	err := r.registrar.Register(b, now)
	r.BatchChanged(b, now)
	r.end()
	return err
}

// TestLeaseEndsDuringNew: the end of a lease is announced also if it comes after the batch was
// registered and before New returns.
func TestLeaseEndsDuringNew(t *testing.T) {
	host := newSpace(t, "host:0")
	p := NewImage(&Descriptor{Body: 8192}, draw(t, host, 8192), host)
	r := &endsLease{end: p.Buffer().Lease()}
	b := newBatch(t, p, r)
	if seen := r.take(); len(seen) != 2 || !seen[0].Leased || seen[1].Leased {
		t.Errorf("the observer was told of %+v", seen)
	}
	if err := b.Drop(); err != nil {
		t.Fatal(err)
	}
	mustBeEmpty(t, host)
}

// scripted is a form whose answers to Leased come from a list, and whose last lease has ended when
// it is watched.
type scripted struct {
	*form
	leased []int
}

func (s *scripted) OnUnleased(func()) { s.leased = nil }
func (s *scripted) Leased() int {
	if len(s.leased) == 0 {
		return 0
	}
	n := s.leased[0]
	s.leased = s.leased[1:]
	return n
}

// TestLeaseDuringNewOfAPlainObserver: leases begin and end while the batch is being made. The last
// that an observer, which is no Registrar, hears is that there is none.
func TestLeaseDuringNewOfAPlainObserver(t *testing.T) {
	for _, leased := range [][]int{{0, 1}, {1, 1}, {1, 0}, {0, 0}, {0, 1, 1}, {1}, {}} {
		var seen leasedSeen
		b := newBatch(t, &scripted{&form{space: newSpace(t, "host:0")}, leased}, &seen)
		if len(seen) == 0 || seen[len(seen)-1] || len(seen) > 2 || len(seen) == 2 && !seen[0] {
			t.Errorf("%v: it was announced as %v, and it is %v", leased, seen, b.Info().Leased)
		}
	}
}
