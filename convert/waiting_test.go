package convert

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// A wait for room costs reservations elsewhere nothing: each change of a space calls all its
// subscribers, and records that wait are not among them.
func TestWaitingRecordsSubscribeToNothing(t *testing.T) {
	const waiting = 300
	m := newMachine(t, machineConfig{host: 1 << 20})
	b := m.put(t, numbered(1, 3000), tier.GPU)
	before := make(map[tier.Kind]int)
	for k, s := range m.spaces {
		before[k] = s.Subscribers()
	}
	all, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Host), m.spaces[tier.Host].State().Available, nil)
	if err != nil {
		t.Fatal(err)
	}
	h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	ours := errors.New("ours")
	ctx, cancel := context.WithCancelCause(t.Context())
	begun := make(chan struct{}, waiting)
	defer m.onWait(func(context.Context, tier.ID, int64) { begun <- struct{}{} })()
	var wg sync.WaitGroup
	for range waiting {
		wg.Go(func() {
			if _, err := m.mover.Record(ctx, h); !errors.Is(err, ours) {
				t.Errorf("it waited for room: %v", err)
			}
		})
	}
	for range waiting {
		<-begun
	}
	for k, s := range m.spaces {
		if n := s.Subscribers(); n != before[k] {
			t.Errorf("%d subscribe to %s while %d records wait, %d did before", n, s.ID(), waiting, before[k])
		}
	}
	cancel(ours)
	wg.Wait()
	if err := errors.Join(h.Close(), all.Release()); err != nil {
		t.Error(err)
	}
}

// armed panics once, when it is set.
type armed struct{ atomic.Bool }

func (a *armed) call(what string) {
	if a.CompareAndSwap(true, false) {
		panic("in " + what)
	}
}

// panicsInSpace is a payload of a program's own, and panicsInCandidates a strategy.
type (
	panicsInSpace struct {
		strange
		*armed
	}
	panicsInCandidates struct {
		reservation.Strategy
		*armed
	}
)

func (p panicsInSpace) Space() *tier.Space {
	p.call("Space")
	return p.strange.Space()
}

func (s panicsInCandidates) Candidates(all *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	s.call("Candidates")
	return s.Strategy.Candidates(all, dst)
}

// TestPanicsOfTheProgramInAMove: a panic of the program's strategy or payload is the move's error,
// when the move begins and when it has waited for room. The batch stays where it is.
func TestPanicsOfTheProgramInAMove(t *testing.T) {
	for name, program := range map[string]func(*armed, strange) (batch.Payload, reservation.Strategy){
		"payload": func(a *armed, p strange) (batch.Payload, reservation.Strategy) {
			return panicsInSpace{p, a}, reservation.AnyInTier(tier.GPU)
		},
		"strategy": func(a *armed, p strange) (batch.Payload, reservation.Strategy) {
			return p, panicsInCandidates{reservation.AnyInTier(tier.GPU), a}
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{})
			a := new(armed)
			payload, to := program(a, strange{m.draw(t, tier.Host, 8192)})
			b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: payload})
			if err != nil {
				t.Fatal(err)
			}
			panics := func(err error) {
				t.Helper()
				var p *guard.PanicError
				if !errors.As(err, &p) {
					t.Errorf("the move ended with %v", err)
				}
				if now := b.Info(); now.State != batch.Idle || now.Space.Kind != tier.Host {
					t.Errorf("the batch is %s in %s", now.State, now.Space)
				}
			}
			a.Store(true)
			panics(m.mover.Move(t.Context(), b, to))

			gpu := m.spaces[tier.GPU]
			full, err := m.reservations.TryReserve(
				reservation.AnyInTier(tier.GPU), gpu.State().Available/tier.Page*tier.Page, nil)
			if err != nil {
				t.Fatal(err)
			}
			waits := make(chan struct{}, 16)
			defer m.onWait(func(context.Context, tier.ID, int64) { waits <- struct{}{} })()
			moved := make(chan error, 1)
			go func() { moved <- m.mover.Move(t.Context(), b, to) }()
			<-waits
			a.Store(name == "payload") // the strategy has named its spaces
			if err := full.Release(); err != nil {
				t.Error(err)
			}
			if err := <-moved; name == "payload" {
				panics(err)
			} else if !errors.Is(err, ErrNoConverter) {
				t.Errorf("the move ended with %v", err)
			}
			if err := b.Drop(); err != nil {
				t.Error(err)
			}
			if u := gpu.State().Usage; u.Used() != 0 {
				t.Errorf("the GPU has %+v", u)
			}
		})
	}
}

// TestCloseEndsWaits: Close cancels an operation that waits for room.
func TestCloseEndsWaits(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 1000), tier.Host)
	all, err := m.reservations.TryReserve(toGPU, m.spaces[tier.GPU].State().Available/tier.Page*tier.Page, nil)
	if err != nil {
		t.Fatal(err)
	}
	waits := make(chan struct{}, 1)
	defer m.onWait(func(context.Context, tier.ID, int64) { waits <- struct{}{} })()
	moved := make(chan error)
	go func() { moved <- m.mover.Move(t.Context(), b, toGPU) }()
	<-waits
	closed := make(chan error)
	go func() { closed <- m.mover.Close() }()
	if err := <-moved; !errors.Is(err, tier.ErrClosed) {
		t.Errorf("the move ended with %v", err)
	}
	if err := errors.Join(<-closed, all.Release()); err != nil {
		t.Error(err)
	}
}
