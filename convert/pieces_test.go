package convert

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// pieces is a machine whose GPU has the room for a batch in host memory, but not in one piece:
// buffers of a program lie in between.
type pieces struct {
	*machine
	b      *batch.Batch
	walls  []*tier.Buffer
	begun  chan int64 // what each wait for room lacks
	cancel func()
}

func inPieces(t *testing.T, cfg machineConfig) *pieces {
	t.Helper()
	cfg.gpu = 1 << 20
	m := newMachine(t, cfg)
	p := &pieces{machine: m, b: m.put(t, numbered(1, 10_000), tier.Host), begun: make(chan int64, 16)}
	gpu := m.spaces[tier.GPU]
	half := gpu.Charge(p.b.Info().Descriptor.Body) / 2
	all, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), gpu.State().Room, nil)
	if err != nil {
		t.Fatal(err)
	}
	var holes []*tier.Buffer
	for i := 0; all.Unused() > 0; i++ {
		buf, err := all.Alloc(min(half, all.Unused()))
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 && all.Unused() > 0 {
			holes = append(holes, buf)
		} else {
			p.walls = append(p.walls, buf)
		}
	}
	for _, h := range holes {
		if err := h.Release(); err != nil {
			t.Fatal(err)
		}
	}
	if err := all.Release(); err != nil {
		t.Fatal(err)
	}
	m.settle()
	if gpu.State().Available < 2*half {
		t.Fatalf("%d bytes are free: the test needs %d", gpu.State().Available, 2*half)
	}
	p.cancel = m.onWait(func(_ context.Context, _ tier.ID, bytes int64) { p.begun <- bytes - gpu.State().Available })
	return p
}

// end releases the walls and checks that nothing is left beside the batch.
func (p *pieces) end(t *testing.T, at tier.Kind) {
	t.Helper()
	p.cancel()
	for _, w := range p.walls {
		if err := w.Release(); err != nil {
			t.Error(err)
		}
	}
	p.whole(t, p.b, at)
}

// tear releases a wall.
func (p *pieces) tear(t *testing.T) {
	t.Helper()
	if err := p.walls[0].Release(); err != nil {
		t.Error(err)
	}
	p.walls = p.walls[1:]
}

// TestMoveClearsTheSpace: a move that waits evicts batches for room in one piece, as allocations of
// programs do. Moves that must not wait take other batches from nobody.
func TestMoveClearsTheSpace(t *testing.T) {
	var p *pieces
	calls := 0
	p = inPieces(t, machineConfig{clear: func(space tier.ID, enough func() bool) {
		if calls++; space.Kind != tier.GPU {
			t.Errorf("%s is cleared", space)
		}
		for !enough() && len(p.walls) > 0 {
			p.tear(t)
			p.settle()
		}
	}})
	for name, move := range map[string]func() error{
		"the monitor's": func() error {
			return evictOne(t.Context(), p.mover, p.b, tier.ID{Kind: tier.GPU}, ReasonDemand)
		},
		"prefetch": func() error { return p.mover.Ahead(t.Context(), p.b, toGPU) },
		"put": func() error {
			_, err := p.mover.TryIngest(t.Context(), p.records[p.b.ID()], toGPU)
			return err
		},
	} {
		var full *tier.NoSpaceError
		if err := move(); !errors.As(err, &full) || full.Largest == 0 || calls != 0 {
			t.Errorf("%s: %v, after %d calls", name, err, calls)
		}
	}
	if err := p.mover.Move(t.Context(), p.b, toGPU); err != nil || calls != 1 {
		t.Errorf("%v, after %d calls", err, calls)
	}
	p.end(t, tier.GPU)
}

// TestCancelledMoveClearsNoMore: no further batch is evicted for a move whose context has ended.
func TestCancelledMoveClearsNoMore(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("gave up")
	p := inPieces(t, machineConfig{clear: func(_ tier.ID, enough func() bool) {
		if enough() {
			t.Error("there is one piece")
		}
		cancel(cause)
		for !enough() { // the end of the context is noticed by another goroutine
			runtime.Gosched()
		}
	}})
	if err := p.mover.Move(ctx, p.b, toGPU); !errors.Is(err, cause) {
		t.Error(err)
	}
	p.end(t, tier.Host)
}

// TestMoveWaitsForOnePiece: where nothing can be evicted, a move waits until memory is freed, and
// tries again each time. It keeps no more room than it needs.
func TestMoveWaitsForOnePiece(t *testing.T) {
	p := inPieces(t, machineConfig{})
	gpu := p.spaces[tier.GPU]
	need := gpu.Charge(p.b.Info().Descriptor.Body)
	err := p.registry.Wrap(ImageIn(tier.Host), ImageIn(tier.GPU), func(inner Func) Func {
		return func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			if r.Bytes() != need {
				t.Errorf("%d bytes are reserved for %d", r.Bytes(), need)
			}
			return inner(ctx, src, r)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	moved := make(chan error, 1)
	go func() { moved <- p.mover.Move(t.Context(), p.b, toGPU) }()
	for len(p.walls) > 0 {
		select {
		case lack := <-p.begun:
			if lack != tier.Page {
				t.Errorf("it lacks %d bytes", lack)
			}
			p.tear(t)
			continue
		case err := <-moved:
			if err != nil {
				t.Error(err)
			}
		}
		break
	}
	if n := gpu.State().Reserved; n != 0 {
		t.Errorf("%d bytes are reserved at the end", n)
	}
	p.end(t, tier.GPU)
}

// TestMoveSeesWhatWasFreedMeanwhile: memory that is freed while a move fails is worth another
// attempt at once.
func TestMoveSeesWhatWasFreedMeanwhile(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 1000), tier.Host)
	held := m.draw(t, tier.GPU, tier.Page)
	attempts := 0
	m.filter(t, func(err error) error {
		switch attempts++; attempts {
		case 1:
			return errors.Join(&tier.NoSpaceError{Space: tier.ID{Kind: tier.GPU}, Largest: tier.Page}, held.Release())
		}
		return err
	})
	defer m.onWait(func(context.Context, tier.ID, int64) { t.Error("it waits") })()
	if err := m.mover.Move(t.Context(), b, toGPU); err != nil || attempts != 2 {
		t.Errorf("%v after %d attempts", err, attempts)
	}
}

// filter makes f replace the errors of the converter from host memory to the GPU.
func (m *machine) filter(t *testing.T, f func(error) error) {
	t.Helper()
	err := m.registry.Wrap(ImageIn(tier.Host), ImageIn(tier.GPU), func(inner Func) Func {
		return func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			out, err := inner(ctx, src, r)
			if err = f(err); err != nil && out != nil {
				return nil, errors.Join(err, out.Release())
			}
			return out, err
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestMoveEndsWhenAllIsFree: a batch for which there is no piece in the whole space is refused, once
// all of the space was free; other errors end the move at once.
func TestMoveEndsWhenAllIsFree(t *testing.T) {
	gpu := tier.ID{Kind: tier.GPU}
	for name, c := range map[string]struct {
		err      error
		attempts int // with three buffers of others in the space
	}{
		"in pieces": {&tier.NoSpaceError{Space: gpu, Largest: tier.Page}, 4},
		"full":      {&tier.NoSpaceError{Space: gpu, Cause: syscall.ENOSPC}, 1},
		"budget":    {tier.ErrOutOfBudget, 1},
		"other":     {syscall.EIO, 1},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{})
			b := m.put(t, numbered(1, 1000), tier.Host)
			held := []*tier.Buffer{m.draw(t, tier.GPU, tier.Page), m.draw(t, tier.GPU, tier.Page), m.draw(t, tier.GPU, tier.Page)}
			attempts := 0
			m.filter(t, func(error) error { attempts++; return c.err })
			defer m.onWait(func(context.Context, tier.ID, int64) {
				if err := held[0].Release(); err != nil {
					t.Error(err)
				}
				held = held[1:]
			})()
			if err := m.mover.Move(t.Context(), b, toGPU); !errors.Is(err, c.err) || attempts != c.attempts {
				t.Errorf("%v after %d attempts, want %d", err, attempts, c.attempts)
			}
			for _, h := range held {
				if err := h.Release(); err != nil {
					t.Error(err)
				}
			}
			m.whole(t, b, tier.Host)
		})
	}
}

// TestMoveInASpaceThatShrinks: a limit that falls while all of the room is waited for refuses no
// batch that is smaller.
func TestMoveInASpaceThatShrinks(t *testing.T) {
	m := newMachine(t, machineConfig{})
	gpu := m.spaces[tier.GPU]
	b := m.put(t, numbered(1, 1000), tier.Host)
	held := m.draw(t, tier.GPU, tier.Page)
	attempts := 0
	m.filter(t, func(err error) error {
		if attempts++; attempts == 1 {
			return &tier.NoSpaceError{Space: gpu.ID(), Largest: tier.Page}
		}
		return err
	})
	waits := 0
	defer m.onWait(func(context.Context, tier.ID, int64) {
		waits++
		if err := errors.Join(gpu.SetLimit(gpu.State().Limit/2), held.Release()); err != nil {
			t.Error(err)
		}
	})()
	if err := m.mover.Move(t.Context(), b, toGPU); err != nil || attempts != 2 || waits != 1 {
		t.Errorf("%v after %d attempts and %d waits", err, attempts, waits)
	}
	m.whole(t, b, tier.GPU)
}

// TestRefuses: a space refuses what it has promised if it has no room itself, or a budget has
// none; what another space has no room for, staging for example, is no refusal of its own.
func TestRefuses(t *testing.T) {
	s := newMachine(t, machineConfig{}).spaces[tier.GPU]
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{syscall.EIO, false},
		{&tier.NoSpaceError{Space: s.ID()}, true},
		{&tier.NoSpaceError{}, true}, // of a pool that does not know its space
		{&tier.NoSpaceError{Space: tier.ID{Kind: tier.Host}}, false},
		{&tier.NoSpaceError{Space: tier.ID{Kind: tier.GPU, Ordinal: 1}}, false},
		{fmt.Errorf("allocating: %w", tier.ErrOutOfBudget), true},
	} {
		if got := refuses(s, c.err); got != c.want {
			t.Errorf("%v: %v", c.err, got)
		}
	}
}
