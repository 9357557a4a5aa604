package monitor

import (
	"errors"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/tier"
)

// TestLostSpace: nothing is moved from a lost space, however full it is. That is reported once, and
// nothing is tried again and again. Others are evicted from as before.
func TestLostSpace(t *testing.T) {
	errGone := errors.New("gone")
	bubble(t, "above the trigger", func(t *testing.T) {
		var told []events.Event
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib, disk0: 1000 * kib}, func(c *Config, w *world) {
			c.Events = func(e events.Event) {
				if e.Kind == events.Lost {
					told = append(told, e)
				}
			}
			w.mover.bytesA = time.Millisecond
		})
		all := w.fillSpace(gpu0, 95, kib)
		w.pools[gpu0].Lose(errGone)
		w.start()
		settle(5 * time.Minute)
		if s := w.mon.Stats(); s != (Stats{Looks: s.Looks}) {
			t.Errorf("with nothing that can be done it does %+v", s)
		}
		if len(told) != 1 || told[0].To != gpu0 || !errors.Is(told[0].Err, tier.ErrLost) || !errors.Is(told[0].Err, errGone) {
			t.Errorf("told: %+v", told)
		}
		if e := w.mon.Evict(t.Context(), gpu0, kib); e.Moved != 0 || e.Coming {
			t.Errorf("from the lost space %+v is evicted", e)
		}
		all = append(all, w.fillSpace(host0, 95, kib)...)
		settle(5 * time.Minute)
		w.mu.Lock()
		for _, m := range w.ended {
			if m.From != host0 {
				t.Errorf("moved: %+v", m)
			}
		}
		w.mu.Unlock()
		w.mustBeRelieved(host0)
		w.end(all...)
	})
	bubble(t, "with moves under way", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib, disk0: 1000 * kib}, func(_ *Config, w *world) {
			w.mover.bytesA = time.Second
			w.mover.fault = func(_ *batch.Batch, from, _ tier.ID) error { return w.spaces[from].Lost() }
		})
		all := w.fillSpace(gpu0, 95, kib)
		w.start()
		settle(time.Second / 2)
		w.pools[gpu0].Lose(errGone)
		settle(5 * time.Minute)
		w.mu.Lock()
		begun, failed := len(w.begun), len(w.failed)
		w.mu.Unlock()
		if begun == 0 || begun != failed || begun > w.mon.cfg.MovesPerEdge {
			t.Errorf("%d moves were begun, %d failed", begun, failed)
		}
		w.end(all...)
	})
}
