package convert

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

func nothing(context.Context, batch.Payload, reservation.Reservation) (batch.Payload, error) {
	return nil, nil
}

func TestRegistryKeepsOneConverterAPair(t *testing.T) {
	var g Registry
	if err := g.Register("a", "b", nothing); err != nil {
		t.Fatal(err)
	}
	if err := g.Register("a", "b", nothing); err == nil || !strings.Contains(err.Error(), "from a to b") {
		t.Errorf("a second converter for a pair: %v", err)
	}
	if err := g.Compose("a", "c", "b", func(context.Context, int64) (reservation.Reservation, error) { return reservation.Reservation{}, nil }); err == nil {
		t.Error("a pair was registered and composed")
	}
	if err := g.Unregister("b", "a"); !errors.Is(err, ErrNoConverter) {
		t.Errorf("unregistering what is not there: %v", err)
	}
	if err := g.Unregister("a", "b"); err != nil {
		t.Error(err)
	}
	if err := g.Register("a", "b", nothing); err != nil {
		t.Errorf("registering again: %v", err)
	}
	for _, bad := range []error{g.Register("", "b", nothing), g.Register("a", "", nothing), g.Register("x", "y", nil),
		g.Compose("a", "a", "c", nil), g.Compose("a", "b", "c", nil)} {
		if bad == nil {
			t.Error("a registration without its parts was taken")
		}
	}
	if got := g.Edges(); len(got) != 1 || got[0] != (Edge{From: "a", To: "b"}) {
		t.Errorf("edges: %v", got)
	}
}

func TestConvertNamesTheMissingPair(t *testing.T) {
	m := newMachine(t, machineConfig{})
	if err := m.registry.Unregister(batch.HostImage, batch.DiskImage); err != nil {
		t.Fatal(err)
	}
	b := m.put(t, numbered(1, 100), tier.Host)
	err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Disk))
	var missing *NoConverterError
	if !errors.As(err, &missing) || missing.From != batch.HostImage || missing.To != batch.DiskImage || !errors.Is(err, ErrNoConverter) {
		t.Fatalf("want the missing pair, got %v", err)
	}
	m.whole(t, b, tier.Host)
}

func TestConverterFailuresLeaveTheSource(t *testing.T) {
	ours := errors.New("ours")
	for name, c := range map[string]struct {
		f    Func
		want string
	}{
		"error": {func(context.Context, batch.Payload, reservation.Reservation) (batch.Payload, error) {
			return nil, ours
		}, "ours"},
		"panic": {func(context.Context, batch.Payload, reservation.Reservation) (batch.Payload, error) { panic("boom") }, "boom"},
		"nil":   {nothing, "returned nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{})
			if err := m.registry.Unregister(batch.HostImage, batch.DiskImage); err != nil {
				t.Fatal(err)
			}
			if err := m.registry.Register(batch.HostImage, batch.DiskImage, c.f); err != nil {
				t.Fatal(err)
			}
			b := m.put(t, numbered(1, 100), tier.Host)
			err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Disk))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v", err)
			}
			m.whole(t, b, tier.Host)
		})
	}
}

// A composed edge goes by way of host memory, and gives its room there back.
func TestComposedEdge(t *testing.T) {
	m := newMachine(t, machineConfig{})
	if err := m.registry.Unregister(batch.GPUImage, batch.DiskImage); err != nil {
		t.Fatal(err)
	}
	err := m.registry.Compose(batch.GPUImage, batch.HostImage, batch.DiskImage, func(ctx context.Context, n int64) (reservation.Reservation, error) {
		return m.reservations.Reserve(ctx, reservation.AnyInTier(tier.Host), n)
	})
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for _, e := range m.registry.Edges() {
		found = found || e == Edge{From: batch.GPUImage, To: batch.DiskImage, Via: batch.HostImage}
	}
	if !found {
		t.Errorf("the composed edge is not visible in %v", m.registry.Edges())
	}
	b := m.put(t, numbered(1, 5000), tier.GPU)
	if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err != nil {
		t.Fatal(err)
	}
	m.whole(t, b, tier.Disk)
}

// What is between is not compressed, although the source is: there is room for all of it.
func TestComposedEdgeFromPacked(t *testing.T) {
	m := newMachine(t, machineConfig{codec: CodecS2, outside: true})
	if err := m.registry.Unregister(batch.DiskPacked, batch.GPUImage); err != nil {
		t.Fatal(err)
	}
	err := m.registry.Compose(batch.DiskPacked, batch.HostImage, batch.GPUImage, func(ctx context.Context, n int64) (reservation.Reservation, error) {
		return m.reservations.Reserve(ctx, reservation.AnyInTier(tier.Host), n)
	})
	if err != nil {
		t.Fatal(err)
	}
	b := m.put(t, coded(1, 50_000), tier.Disk)
	if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.GPU)); err != nil {
		t.Fatal(err)
	}
	m.whole(t, b, tier.GPU)
}
