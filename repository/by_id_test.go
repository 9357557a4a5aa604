package repository

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

func TestTakeByID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		gpu := m.space(tier.GPU)
		for id := range batch.ID(5) {
			check(t, r.PutBatch(int(id%2), newBatch(t, id+1, gpu)))
		}
		_, err := r.TakeByID(background, 77, batch.Idle)
		wantError(t, err, ErrUnknown)
		four, err := r.TakeByID(background, 4, batch.TaskCreated)
		check(t, err)
		if four.ID() != 4 || four.Info().State != batch.TaskCreated || r.Len(1) != 1 {
			t.Errorf("took %d, %s, %d left", four.ID(), four.Info().State, r.Len(1))
		}
		_, err = r.TakeByID(background, 4, batch.Idle)
		wantError(t, err, ErrUnknown)

		// It waits for the state, and gets an error if another takes the batch.
		one, _ := r.Peek(0)
		transit, err := one.TryTransit()
		check(t, err)
		byID := func(ctx context.Context, id batch.ID, s batch.State) <-chan result {
			ch := taken(func() (*batch.Batch, error) { return r.TakeByID(ctx, id, s) })
			synctest.Wait()
			if len(ch) != 0 {
				t.Fatalf("it does not wait: %v", <-ch)
			}
			return ch
		}
		first, second := byID(background, 1, batch.TaskCreated), byID(background, 1, batch.TaskCreated)
		cause := errors.New("gave up")
		ctx, cancel := context.WithCancelCause(background)
		third := byID(ctx, 1, batch.Idle)
		cancel(cause)
		(<-third).check(t, nil, cause)
		check(t, transit.Abort())
		x, y := <-first, <-second
		if x.err != nil {
			x, y = y, x
		}
		x.check(t, one, nil)
		y.check(t, nil, ErrUnknown)

		// Closing wakes it.
		three, _ := r.Peek(0)
		check(t, three.TryCreateTask())
		h, err := three.TryLock(gpu.ID())
		check(t, err)
		last := byID(background, 3, batch.Idle)
		check(t, r.Close(background))
		(<-last).check(t, nil, tier.ErrClosed)
		_, err = r.TakeByID(background, 2, batch.Idle)
		wantError(t, err, tier.ErrClosed)
		check(t, h.Close())
		check(t, one.Drop())
		check(t, four.Drop())
	})
}

// TestTakeByIDInTransit: it waits for the batch of that id, and takes no other.
func TestTakeByIDInTransit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		for id := range batch.ID(3) {
			check(t, r.PutBatch(0, newBatch(t, id+1, m.space(tier.GPU))))
		}
		var transit *batch.Transit
		_, err := r.TakeByID(background, 9, batch.InTransit, Into(&transit))
		wantError(t, err, ErrUnknown)
		second := nth(r, 1)
		check(t, second.TryCreateTask())
		h, err := second.TryLock(m.space(tier.GPU).ID())
		check(t, err)
		take := taken(func() (*batch.Batch, error) {
			b, err := r.TakeByID(background, 2, batch.InTransit, Into(&transit))
			if err != nil {
				return nil, err
			}
			return b, transit.Abort()
		})
		mustWait(t, take) // a handle is open
		check(t, h.Close())
		(<-take).check(t, second, nil)
		if second.Info().State != batch.Idle || r.Len(0) != 2 {
			t.Errorf("it is %s, %d are left", second.Info().State, r.Len(0))
		}
		check(t, second.Drop())
	})
}

// TestTakenIsLockedWhereItIs: a batch that was taken with a task is locked in the space
// that has it, and not for another GPU.
func TestTakenIsLockedWhereItIs(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	r := ensure(t, newPlan(t, m), "join")
	check(t, r.Put(background, 0, record(1)))
	b, err := r.Take(background, 0, batch.TaskCreated)
	check(t, err)
	at := m.space(tier.GPU).ID()
	other := tier.ID{Kind: tier.GPU, Ordinal: at.Ordinal + 1}
	_, err = b.TryLock(other)
	var se *batch.StateError
	if !errors.As(err, &se) || se.Status != batch.SpaceMismatch || se.Space != at || se.Want != other {
		t.Errorf("in another GPU: %v", err)
	}
	h, err := b.TryLock(at)
	check(t, err)
	check(t, b.Drop())
	check(t, h.Close())
}

// TestDropInPlaceEndsWaits: a taker that waits for the last batch, which is in use, gets
// the end of the input when that is dropped in place.
func TestDropInPlaceEndsWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		b := newBatch(t, 1, m.space(tier.GPU))
		check(t, b.TryCreateTask())
		check(t, r.PutBatch(0, b))
		r.CloseInput()
		take := taken(func() (*batch.Batch, error) { return r.Take(background, 0, batch.Idle) })
		mustWait(t, take)
		check(t, b.Drop())
		(<-take).check(t, nil, io.EOF)
	})
}
