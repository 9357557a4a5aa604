package monitor

import (
	"testing"
	"time"
)

// TestRefusedFromAnotherSpace: the disk has no piece for the batches of the host memory, which go first but
// cannot. Those of the GPU are smaller, and go to the disk instead of into room that the host cannot make.
func TestRefusedFromAnotherSpace(t *testing.T) {
	bubble(t, "room in pieces", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib, disk0: 1000 * kib}, func(_ *Config, w *world) {
			w.stall = refusedAfter
		})
		w.pools[disk0].refuse.Store(8 * kib)
		all := w.fillSpace(gpu0, 16, 4*kib)
		for i := range 4 {
			all = append(all, w.put(host0, 16*kib, seq(100+i)))
		}
		w.start()
		settle(time.Second)
		o := <-w.reserve(t.Context(), gpu0, 48*kib)
		if o.err != nil {
			t.Fatalf("%v; %d bytes have moved", o.err, w.moved())
		}
		o.r.Release()
		w.end(all...)
	})
}
