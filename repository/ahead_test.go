package repository

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// eager is a mover that brings batches ahead. Each takes a second.
type eager struct {
	*fakeMover
	mu    sync.Mutex
	ahead []int64 // the numbers of the batches, as they were asked for
	fails error
	panic bool
	stays bool // nothing is moved, and from the tenth call on that is an error

	active, most int // calls under way, and the most at once
}

func (m *eager) Ahead(ctx context.Context, b *batch.Batch, to reservation.Strategy) error {
	m.mu.Lock()
	m.ahead = append(m.ahead, m.numberOf(b))
	m.active++
	m.most = max(m.most, m.active)
	defer func() {
		m.mu.Lock()
		m.active--
		m.mu.Unlock()
	}()
	err := m.fails
	if m.stays && len(m.ahead) >= 10 {
		err = errors.New("asked for ever")
	}
	m.mu.Unlock()
	if m.panic {
		panic("ahead")
	}
	if err != nil || m.stays {
		return err
	}
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return m.move(ctx, b, to)
}

func (m *eager) asked() []int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.ahead)
}

// drains puts twelve batches on disk and drains the first two, with work of so long on the first.
func drains(t *testing.T, change func(*eager), work time.Duration, opts ...TakeOption) *eager {
	m := &eager{fakeMover: newMover(t, 1, 20, 20)}
	if change != nil {
		change(m)
	}
	manager := NewManager("p", 1, Config{Mover: m})
	r, err := manager.Create(Key{Operator: "scan"}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for n := range int64(12) {
		if err := r.Put(t.Context(), 0, record(n), WithPlacement(reservation.AnyInTier(tier.Disk))); err != nil {
			t.Fatal(err)
		}
	}
	want := int64(0)
	for h, err := range r.Drain(t.Context(), 0, tier.Host, opts...) {
		if err != nil {
			t.Fatal(err)
		}
		if n := m.numberOf(h.Batch()); n != want {
			t.Errorf("batch %d comes where %d should", n, want)
		}
		time.Sleep(work)
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		if want++; want == 2 {
			break
		}
	}
	synctest.Wait()
	for b := range r.Batches(0) {
		if s := b.Info().State; s != batch.Idle {
			t.Errorf("batch %d is %s when the drain is over", m.numberOf(b), s)
		}
	}
	if err := closeAll(t.Context(), manager); err != nil {
		t.Error(err)
	}
	return m
}

// TestAhead: as many batches are asked for as the option says, in order, and each once.
func TestAhead(t *testing.T) {
	for want, opts := range map[string][]TakeOption{
		"[]":                        {ReadAhead(0)},
		"[1 2 3]":                   {ReadAhead(2)}, // one more when the second is worked on
		"[1 2 3 4 5 6]":             {ReadAhead(5)},
		"[1 2 3 4 5 6 7 8 9 10 11]": {ReadAhead(math.MaxInt)}, // the limit is 64
	} {
		t.Run(want, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if got := fmt.Sprint(drains(t, nil, time.Minute, opts...).asked()); got != want {
					t.Errorf("%s were asked for", got)
				}
			})
		})
	}
}

// TestAheadByDefault: without the option two batches are prefetched, so that a longer work has
// something to overlap with.
func TestAheadByDefault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if got := fmt.Sprint(drains(t, nil, time.Minute).asked()); got != "[1 2 3]" {
			t.Errorf("%s were asked for", got)
		}
	})
}

// TestAheadOneByOne: also where the work takes less time than a prefetch, one follows the other.
func TestAheadOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := drains(t, nil, time.Millisecond, ReadAhead(5))
		if m.most != 1 || m.active != 0 {
			t.Errorf("%d at once, %d under way at the end", m.most, m.active)
		}
	})
}

// TestAheadThatFails: a refusal, an error or a panic is not the consumer's. One try is enough for
// each work, also if nothing is moved without an error.
func TestAheadThatFails(t *testing.T) {
	for name, change := range map[string]func(*eager){
		"refused": func(m *eager) { m.fails = &tier.NoSpaceError{} }, "failed": func(m *eager) { m.fails = errors.New("failed") }, "panic": func(m *eager) { m.panic = true },
		"nothing is moved": func(m *eager) { m.stays = true },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if got := fmt.Sprint(drains(t, change, time.Minute, ReadAhead(5)).asked()); got != "[1 2]" {
					t.Errorf("%s were asked for: want one each time", got)
				}
			})
		})
	}
}
