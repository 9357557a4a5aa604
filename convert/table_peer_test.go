package convert

import (
	"errors"
	"fmt"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// apart is a device that no other can be reached from.
type apart struct{ tier.Device }

func (d apart) Unwrap() tier.Device { return d.Device }

func (apart) CopyPeer(tier.Stream, tier.Addr, tier.Device, tier.Addr, int64) error {
	return fmt.Errorf("no way: %w", tier.ErrNotSupported)
}

// twoGPUs is a machine with a second GPU.
func twoGPUs(t *testing.T, g gpus, wrap func(tier.Device) tier.Device) (*machine, [2]*faultdev.Device) {
	t.Helper()
	const capacity, chunk = 4 << 20, 16 << 10
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m := &machine{spaces: make(map[tier.Kind]*tier.Space)}
	full := tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9}
	var devs [2]*faultdev.Device
	var streams [2]*devpool.Streams
	var spaces []*tier.Space
	for i := range devs {
		dev := g.open(t, i, sim.Config{Memory: capacity}, nil)
		devs[i] = faultdev.New(wrap(dev), 1)
		pool, err := devpool.NewMemory(dev)
		check(err)
		s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU, Ordinal: i}, Capacity: capacity,
			Pool: pool, Backend: g.backend(), Marks: full})
		check(err)
		streams[i], err = devpool.NewStreams(devs[i], 1) // a second one would be one too many
		check(err)
		spaces = append(spaces, s)
	}
	arena, err := host.NewArena(host.Config{Capacity: capacity, Node: -1})
	check(err)
	g.pin(t, arena, devs[0])
	h, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.Host}, Capacity: capacity, Pool: arena,
		Backend: "host", Marks: full})
	check(err)
	m.reservations, err = reservation.NewManager(reservation.Config{Spaces: append(spaces, h)})
	check(err)
	r, err := m.reservations.TryReserve(toHost, 4*chunk, nil)
	check(err)
	buf, err := r.Alloc(4 * chunk)
	check(err)
	check(r.Release())
	staging := host.NewStaging(buf, chunk)
	m.permits, err = permit.New(permit.Config{})
	check(err)
	builtin := &transfer.Builtin{
		Codec:   CodecNone,
		Streams: func(id tier.ID) (*devpool.Streams, error) { return streams[id.Ordinal], nil },
		Staging: func(int) (transfer.Staging, error) { return staging, nil },
		Permits: m.permits,
	}
	m.mover, err = NewMover(MoverConfig{Reservations: m.reservations, Registry: &m.registry, Builtin: builtin, IDs: &m.ids})
	check(err)
	t.Cleanup(func() {
		err := errors.Join(m.reservations.Close(), staging.Close(), streams[0].Close(), streams[1].Close(), m.permits.Close())
		for _, s := range append(spaces, h) {
			if len(s.Leaks()) > 0 {
				t.Errorf("leaked: %+v", s.Leaks())
			}
			err = errors.Join(err, s.Close())
			if s.State().Used() != 0 {
				t.Errorf("%s ends with %+v", s.ID(), s.State().Usage)
			}
		}
		if err := errors.Join(err, devs[0].Close(), devs[1].Close()); err != nil {
			t.Error(err)
		}
	})
	return m, devs
}

// Tables and images go from GPU to GPU: by the devices' own copies where they reach each
// other, and else through host memory.
func TestFromGPUToGPU(t *testing.T) { onEachGPU(t, 2, fromGPUToGPU) }

func fromGPUToGPU(t *testing.T, g gpus) {
	for _, reach := range []bool{true, false} {
		m, devs := twoGPUs(t, g, func(d tier.Device) tier.Device {
			if reach {
				return d
			}
			return apart{d}
		})
		at := [2]reservation.Strategy{reservation.Specific(tier.ID{Kind: tier.GPU}), reservation.Specific(tier.ID{Kind: tier.GPU, Ordinal: 1})}
		for i, dt := range arrowgen.Types() {
			if g.skips(i) {
				continue
			}
			rec := arrowgen.New(uint64(i)).Record(arrowgen.Schema(dt), 90)
			p, err := m.mover.Ingest(t.Context(), rec, at[0])
			if err != nil {
				t.Fatal(err)
			}
			b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: p})
			if err != nil {
				t.Fatal(err)
			}
			for n, form := range []batch.PayloadType{batch.ScatteredImage, batch.ScatteredImage, batch.PlainImage, batch.PlainImage, batch.ScatteredImage, batch.PlainImage} {
				peers := devs[n%2].Count("copy-to-peer")
				back := devs[n%2].Count("copy-to-host", "copy-regions")
				if err := m.mover.MoveAs(t.Context(), b, at[(n+1)%2], form); err != nil {
					t.Fatalf("%s: %v", dt, err)
				}
				if got := b.Info(); got.Space.Ordinal != (n+1)%2 || b.Info().Payload.Type() != form {
					t.Fatalf("the batch is %s in %s", b.Info().Payload.Type(), got.Space)
				}
				if b.Info().Descriptor.Body > 0 && devs[n%2].Count("copy-to-peer") == peers {
					t.Errorf("%s to %s: no copy to the peer was tried", dt, form)
				}
				if reach && devs[n%2].Count("copy-to-host", "copy-regions") > back {
					t.Errorf("%s to %s: went through host memory", dt, form)
				}
				m.says(t, b, rec, tier.GPU)
			}
			m.drop(t, b)
			rec.Release()
		}
	}
}

// TestPanicOfACopyToThePeer: a device that panics fails the move. The batch is whole where it was, and
// what was taken in the target is given back, which the end of the machine checks.
func TestPanicOfACopyToThePeer(t *testing.T) {
	onEachGPU(t, 2, func(t *testing.T, g gpus) {
		m, devs := twoGPUs(t, g, func(d tier.Device) tier.Device { return d })
		rec := arrowgen.Flights(1, 1000)
		defer rec.Release()
		p, err := m.mover.Ingest(t.Context(), rec, reservation.Specific(tier.ID{Kind: tier.GPU}))
		if err != nil {
			t.Fatal(err)
		}
		b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: p})
		if err != nil {
			t.Fatal(err)
		}
		to := reservation.Specific(tier.ID{Kind: tier.GPU, Ordinal: 1})
		remove := devs[0].Add(faultdev.Rule{
			Ops: []string{"copy-to-peer"}, Times: 1, Effect: faultdev.Do(func(string, int64) { panic("boom") }),
		})
		if err := m.mover.Move(t.Context(), b, to); !errors.Is(err, batch.ErrUnmovable) {
			t.Errorf("a move whose device panics: %v", err)
		}
		remove()
		m.says(t, b, rec, tier.GPU)
		if err := m.mover.Move(t.Context(), b, to); err != nil {
			t.Error(err)
		}
		m.says(t, b, rec, tier.GPU)
		m.drop(t, b)
	})
}
