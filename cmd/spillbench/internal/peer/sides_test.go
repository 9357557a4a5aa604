package peer

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/gen"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestPeersFilesFail: an operation on a file of the peer's that fails is an error with its name, and
// nothing is left; the rig looks for that.
func TestPeersFilesFail(t *testing.T) {
	for doing, f := range map[string]func(*ipcFiles) error{
		"syncing": func(p *ipcFiles) error {
			_, err := p.sync(t.Context(), 0)
			return err
		},
		"reading": func(p *ipcFiles) error {
			return p.read(t.Context(), func(arrow.RecordBatch) error { return nil })
		},
		"dropping the page cache of": func(p *ipcFiles) error { return p.drop(p.files[0]) },
	} {
		r := newRig(t, table(1)).runner()
		err := r.withPeer(t.Context(), func(p *ipcFiles) error {
			if _, _, err := p.write(t.Context(), false); err != nil {
				return err
			}
			if err := p.files[0].Close(); err != nil {
				return err
			}
			return f(p)
		})
		if !errors.Is(err, os.ErrClosed) ||
			!strings.HasPrefix(err.Error(), ArrowIPC+": "+doing+" a file in "+r.cfg.Dir) {
			t.Errorf("%s: %v", doing, err)
		}
	}
}

// TestPeerIsCancelledAtTheRate: a batch for whose bytes the disk is waited for is released when the
// context ends.
func TestPeerIsCancelledAtTheRate(t *testing.T) {
	r := newRig(t, table(1)).runner()
	why := errors.New("why")
	err := r.withPeer(t.Context(), func(p *ipcFiles) error {
		if _, _, err := p.write(t.Context(), false); err != nil {
			return err
		}
		r.cfg.Rate, p.cold = 1, true
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Millisecond, func() { cancel(why) })
		return p.read(ctx, func(arrow.RecordBatch) error {
			t.Error("a batch has passed a disk of a byte a second")
			return nil
		})
	})
	if !errors.Is(err, why) {
		t.Errorf("ended with %v", err)
	}
}

// TestOnlyTimedMoves: the monitor must not move what is to be timed, so each batch has a subscriber;
// and when it is written it is on disk.
func TestOnlyTimedMoves(t *testing.T) {
	r := newRig(t, table(1)).runner()
	err := r.with(t.Context(), "test ", ourName, 1, func(s side) error {
		o := s.(*ours)
		moved, put, err := o.write(t.Context(), false)
		if err != nil {
			return err
		}
		if len(o.batches) != 15 || moved <= 0 || put <= 0 {
			t.Errorf("%d batches were put in %v and moved in %v", len(o.batches), put, moved)
		}
		for i, b := range o.batches {
			if in := b.Info(); in.Subscribers != 1 || in.Space.Kind != tier.Disk {
				t.Errorf("batch %d is in %s, with %d subscribers", i, in.Space, in.Subscribers)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestDictionariesNeedRoom: so does a batch whose indices take next to nothing.
func TestDictionariesNeedRoom(t *testing.T) {
	const size = hostMemory - 16<<10
	_, err := newRig(t, recordsOf(t, coded(t, strings.Repeat("x", size)))).run(t.Context())
	var e *reservation.ExceededError
	if !errors.As(err, &e) || e.Requested < size || e.Hint == "" {
		t.Errorf("ended with %v", err)
	}
}

// TestManyReadersShareTheRoom: more goroutines than there is room for may read.
func TestManyReadersShareTheRoom(t *testing.T) {
	r := newRig(t, tableOf(func(int) gen.Config { return gen.Config{Seed: 1, Rows: 3_000, RowsPerBatch: 375} }))
	r.Workers = 8
	if res, err := r.run(t.Context()); err != nil || res.Verified != 2*8 {
		t.Errorf("%+v, %v", res, err)
	}
}
