package convert

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Making room in one piece ends at once with whatever else goes wrong, such as a
// file system that is really full, and with a piece that is too large for the whole
// space.
func TestClearEnds(t *testing.T) {
	m := newMachine(t, machineConfig{})
	disk := m.spaces[tier.Disk]
	for name, err := range map[string]error{
		"full":      &tier.NoSpaceError{Cause: syscall.ENOSPC},
		"other":     syscall.EIO,
		"too large": &tier.NoSpaceError{Largest: 4096},
	} {
		tries := 0
		got := m.mover.clear(t.Context(), disk, disk.Room(), func() error {
			tries++
			return err
		})
		if got != err || tries != 1 {
			t.Errorf("%s: %v after %d tries", name, got, tries)
		}
	}
	tries := 0
	err := m.mover.clear(t.Context(), disk, 4096, func() error {
		if tries++; tries < 5 {
			return errRefused
		}
		return nil
	})
	if err != nil || tries != 5 {
		t.Errorf("refused four times: %v after %d tries", err, tries)
	}
}

// TestClearTriesAgain: room that is still in pieces is requested twice over, to the whole of the
// space. What is released meanwhile is worth a try at once, but not what the try had itself.
func TestClearTriesAgain(t *testing.T) {
	m := newMachine(t, machineConfig{})
	disk := m.spaces[tier.Disk]
	pieces := &tier.NoSpaceError{Largest: tier.Page}
	hold := func(n int64) func() {
		t.Helper()
		r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Disk), n)
		if err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := r.Release(); err != nil {
				t.Error(err)
			}
		}
	}

	tries := 0
	err := m.mover.clear(t.Context(), disk, disk.Room()/8, func() error {
		if tries++; tries > 10 {
			return errors.New("too many tries")
		}
		hold(tier.Page)()
		return pieces
	})
	if err != error(pieces) || tries != 3 { // with a quarter, a half and all of the room
		t.Errorf("in pieces for good: %v after %d tries", err, tries)
	}

	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	held, demands := []func(){hold(tier.Page), hold(tier.Page), hold(tier.Page), hold(tier.Page)}, 0
	release := func() { held[0](); held = held[1:] }
	defer m.onWait(func(context.Context, tier.ID, int64) {
		if demands++; demands > 2 {
			cancel(errors.New("more was asked for, and there is no more"))
			return
		}
		release()
	})()
	tries = 0
	err = m.mover.clear(ctx, disk, disk.Room(), func() error {
		switch tries++; tries {
		case 1: // nothing is free in one piece, but more may be released
			return pieces
		case 2:
			release()
			return pieces
		}
		return nil
	})
	release()
	if err != nil || tries != 3 || demands != 2 {
		t.Errorf("%v after %d tries, and room was asked for %d times", err, tries, demands)
	}
}

// TestClearInASpaceThatShrinks: a limit that falls while all of the room is waited for refuses no
// batch that is smaller.
func TestClearInASpaceThatShrinks(t *testing.T) {
	m := newMachine(t, machineConfig{})
	disk := m.spaces[tier.Disk]
	room := disk.Room()
	r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Disk), tier.Page)
	if err != nil {
		t.Fatal(err)
	}
	demands := 0
	defer m.onWait(func(context.Context, tier.ID, int64) {
		if demands++; demands == 1 {
			if err := errors.Join(disk.SetLimit(room/2), r.Release()); err != nil {
				t.Error(err)
			}
		}
	})()
	tries := 0
	err = m.mover.clear(t.Context(), disk, room, func() error {
		tries++
		return nil
	})
	if err != nil || tries != 1 || demands != 1 {
		t.Errorf("%v after %d tries; room was asked for %d times", err, tries, demands)
	}
}

// TestOneClearsASpaceAtATime: the goroutine that makes room in one piece has the space's token
// until the end.
func TestOneClearsASpaceAtATime(t *testing.T) {
	m := newMachine(t, machineConfig{})
	gpu := m.spaces[tier.GPU]
	token := m.mover.clearing[gpu.ID()]
	what := takes{body: tier.Page}
	tries := 0
	err := (&try{m: m.mover, pieces: gpu, need: tier.Page, errand: &errand{what: &what, origin: reservation.Incoming(), do: func(reservation.Reservation) error {
		if tries++; len(token) != 1 {
			t.Error("another could clear the space, too")
		}
		return nil
	}}}).clear(t.Context())
	if err != nil || tries != 1 || len(token) != 0 {
		t.Errorf("%v after %d tries; tokens taken: %d", err, tries, len(token))
	}
	token <- struct{}{}
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("gave up")
	cancel(cause)
	if err := (&try{m: m.mover, pieces: gpu, errand: &errand{origin: reservation.Incoming()}}).clear(ctx); !errors.Is(err, cause) {
		t.Errorf("the wait for the token: %v", err)
	}
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
