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

func nothing(context.Context, batch.Payload, *reservation.Reservation) (batch.Payload, error) {
	return nil, nil
}

func TestRegistryKeepsOneConverterAPair(t *testing.T) {
	var g Registry
	a, b := Form{"a", tier.GPU}, Form{"b", tier.Host}
	if err := g.Register(a, b, nothing); err != nil {
		t.Fatal(err)
	}
	if err := g.Register(a, b, nothing); err == nil || !strings.Contains(err.Error(), "from a in gpu to b in host") {
		t.Errorf("a second converter for a pair: %v", err)
	}
	if err := g.Unregister(b, a); !errors.Is(err, ErrNoConverter) {
		t.Errorf("unregistering what is not there: %v", err)
	}
	if err := g.Unregister(a, b); err != nil {
		t.Error(err)
	}
	if err := g.Register(a, b, nothing); err != nil {
		t.Errorf("registering again: %v", err)
	}
	for _, bad := range []error{
		g.Register(Form{"", tier.GPU}, b, nothing), g.Register(Form{"a", 0}, b, nothing), g.Register(a, Form{}, nothing),
		g.Register(a, a, nil),
	} {
		if bad == nil {
			t.Error("a registration without its parts was taken")
		}
	}
	if got := g.Edges(); len(got) != 1 || got[0] != (Edge{a, b}) {
		t.Errorf("edges: %v", got)
	}
}

func TestConvertNamesTheMissingPair(t *testing.T) {
	m := newMachine(t, machineConfig{})
	if err := m.registry.Unregister(ImageIn(tier.Host), ImageIn(tier.Disk)); err != nil {
		t.Fatal(err)
	}
	b := m.put(t, numbered(1, 100), tier.Host)
	err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Disk))
	var missing *NoConverterError
	if !errors.As(err, &missing) || missing.From != ImageIn(tier.Host) || missing.To != ImageIn(tier.Disk) || !errors.Is(err, ErrNoConverter) {
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
		"error": {func(context.Context, batch.Payload, *reservation.Reservation) (batch.Payload, error) {
			return nil, ours
		}, "ours"},
		"panic": {func(context.Context, batch.Payload, *reservation.Reservation) (batch.Payload, error) { panic("boom") }, "boom"},
		"nil":   {nothing, "returned nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{})
			if err := m.registry.Unregister(ImageIn(tier.Host), ImageIn(tier.Disk)); err != nil {
				t.Fatal(err)
			}
			if err := m.registry.Register(ImageIn(tier.Host), ImageIn(tier.Disk), c.f); err != nil {
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
