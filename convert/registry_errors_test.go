package convert

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestWhoseFailure: what a converter says about the batch is the batch's failure; what memory,
// a volume or a device says is not, for other batches meet it as well.
func TestWhoseFailure(t *testing.T) {
	fails := func(err error) Func {
		return func(context.Context, batch.Payload, *reservation.Reservation) (batch.Payload, error) { return nil, err }
	}
	for _, tt := range []struct {
		name string
		f    Func // nil: there is no converter
		own  bool
	}{
		{"no converter", nil, true},
		{"it returns an error", fails(errors.New("I do not like it")), true},
		{"it returns nothing", fails(nil), true},
		{"corrupt bytes", fails(&image.CorruptError{}), true},
		{"it panics", func(context.Context, batch.Payload, *reservation.Reservation) (batch.Payload, error) { panic("no") }, true},
		{"a batch of other rows", func(_ context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			d := *src.(*batch.Image).Descriptor()
			d.Rows--
			buf, err := r.Alloc(d.Body, d.Cuts()...)
			return batch.NewImage(&d, buf, r.Space()), err
		}, true},
		{"no room", fails(&tier.NoSpaceError{Space: tier.ID{Kind: tier.Host}}), false},
		{"no room elsewhere", fails(&tier.NoSpaceError{Space: tier.ID{Kind: tier.Disk}}), true},
		{"no room in a pool of its own", fails(tier.ErrNoSpace), true},
		{"a file of its own", fails(fmt.Errorf("writing: %w", syscall.EIO)), true},
		{"a device of its own is lost", fails(&tier.LostError{}), true},
		{"a pool of its own is closed", fails(tier.ErrClosed), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := newMachine(t, machineConfig{})
			b := m.put(t, numbered(1, 1000), tier.GPU)
			was := m.registry.Changes()
			err := m.registry.Unregister(ImageIn(tier.GPU), ImageIn(tier.Host))
			if tt.f != nil {
				err = errors.Join(err, m.registry.Register(ImageIn(tier.GPU), ImageIn(tier.Host), tt.f))
			}
			if err != nil {
				t.Fatal(err)
			}
			if m.registry.Changes() == was {
				t.Error("the registry does not count the change")
			}
			err = evictOne(t.Context(), m.mover, b, tier.ID{Kind: tier.Host}, ReasonTrigger)
			var own *batch.UnmovableError
			if err == nil || errors.As(err, &own) != tt.own || errors.Is(err, batch.ErrUnmovable) != tt.own {
				t.Errorf("the error is %v", err)
			}
			if tt.own && own.Batch != b.ID() {
				t.Errorf("the error is about batch %d, want %d", own.Batch, b.ID())
			}
			m.rests(t, b, tier.GPU)
		})
	}
}

// TestPanicOfAWrapper: a function that wraps a built-in converter and panics fails because of the batch.
func TestPanicOfAWrapper(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 1000), tier.GPU)
	err := m.registry.Wrap(ImageIn(tier.GPU), ImageIn(tier.Host), func(Func) Func {
		return func(context.Context, batch.Payload, *reservation.Reservation) (batch.Payload, error) { panic("no") }
	})
	if err != nil {
		t.Fatal(err)
	}
	err = evictOne(t.Context(), m.mover, b, tier.ID{Kind: tier.Host}, ReasonTrigger)
	if own, ok := errors.AsType[*batch.UnmovableError](err); !ok || own.Batch != b.ID() {
		t.Errorf("the error is %v", err)
	}
	m.rests(t, b, tier.GPU)
}

// refusing is a device whose copies to the host fail.
type refusing struct{ tier.Device }

func (d refusing) CopyRegions(s tier.Stream, regions []tier.Region) error {
	if regions[0].HostDst != nil {
		return errors.New("in the device")
	}
	return d.Device.CopyRegions(s, regions)
}

func TestWhoseFailureInTheDevice(t *testing.T) {
	m := newMachine(t, machineConfig{wrap: func(d tier.Device) tier.Device { return refusing{d} }})
	b := m.put(t, numbered(1, 1000), tier.GPU)
	err := evictOne(t.Context(), m.mover, b, tier.ID{Kind: tier.Host}, ReasonTrigger)
	if err == nil || errors.Is(err, batch.ErrUnmovable) {
		t.Errorf("the error is %v", err)
	}
}

// losableHeap is a pool of ordinary memory whose device may be lost.
type losableHeap struct {
	tier.Pool
	devpool.Loss
}

// TestWhoseFailureWhenOthersMeetIt: what a converter of the program's returns is not the
// batch's failure when the conversion was broken off, or when a space of the move is lost.
func TestWhoseFailureWhenOthersMeetIt(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	space := func(id tier.ID) (*tier.Space, *losableHeap) {
		p := &losableHeap{}
		s, err := tier.NewSpace(tier.SpaceConfig{ID: id, Capacity: 1 << 20, Pool: p, Marks: tier.Marks{Limit: 1}})
		if err != nil {
			t.Fatal(err)
		}
		return s, p
	}
	whole, _ := space(tier.ID{Kind: tier.Host})
	gone, pool := space(tier.ID{Kind: tier.GPU})
	pool.Lose(errors.New("fell off its bus"))
	lost, strange := &tier.LostError{}, errors.New("strange")
	for _, tt := range []struct {
		name     string
		ctx      context.Context
		err      error
		from, to *tier.Space
		own      bool
	}{
		{"nothing happened", t.Context(), strange, whole, whole, true},
		{"the context ended", ended, strange, whole, whole, false},
		{"somebody else's context ended", t.Context(), context.Canceled, whole, whole, true},
		{"the source is lost", t.Context(), lost, gone, whole, false},
		{"the target is lost", t.Context(), lost, whole, gone, false},
		{"neither is lost", t.Context(), lost, whole, whole, true},
		{"something else, and the target is lost", t.Context(), strange, whole, gone, true},
		{"there is no space", t.Context(), lost, nil, nil, true},
		{"no room, and no space", t.Context(), &tier.NoSpaceError{}, nil, nil, true},
	} {
		if err := ofConverter(tt.ctx, tt.err, false, tt.from, tt.to); errors.Is(err, batch.ErrUnmovable) != tt.own || !errors.Is(err, tt.err) {
			t.Errorf("%s: the error is %v", tt.name, err)
		}
	}
	// A built-in converter's words about the batch are not believed beside those of a device.
	for _, machine := range []error{tier.ErrNoSpace, tier.ErrLost, tier.ErrClosed, syscall.EIO} {
		if err := ofConverter(t.Context(), errors.Join(image.ErrCorrupt, machine), true, whole, whole); errors.Is(err, batch.ErrUnmovable) {
			t.Errorf("corrupt bytes beside %v: %v", machine, err)
		}
	}
}
