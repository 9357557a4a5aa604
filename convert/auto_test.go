package convert

import (
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// TestAutoCompresses: on a disk that is slow all but the first run of a batch is
// compressed, and it comes back; on one that is not, batches stay as they are.
func TestAutoCompresses(t *testing.T) {
	m := newMachine(t, machineConfig{gpu: 8 << 20, host: 24 << 20, disk: 24 << 20, auto: true,
		rules: []faultfs.Rule{{Ops: []string{"read", "write"}, Effect: faultfs.Throttle(20 << 20)}}})
	b := m.put(t, arrowgen.Flights(1, 90_000), tier.GPU)
	m.move(t, b, tier.Disk)
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	p, ok := tr.Payload().(*payload.Image)
	if !ok || p.Parts.Type != payload.CompressedImage {
		t.Fatalf("it is a %s", tr.Payload().Type())
	}
	for i, r := range p.Parts.Runs {
		if (Codec(r.Codec) == CodecNone) != (i == 0) {
			t.Errorf("run %d of %d: %s", i, len(p.Parts.Runs), Codec(r.Codec))
		}
	}
	if err := tr.Abort(); err != nil {
		t.Fatal(err)
	}
	m.whole(t, b, tier.Disk)
	m.move(t, b, tier.GPU)
	m.whole(t, b, tier.GPU)
}

// TestLookingIsNotPacking: where a sample shows that nothing is gained a batch stays as it is, and
// is written so.
func TestLookingIsNotPacking(t *testing.T) {
	for _, k := range []tier.Kind{tier.Host, tier.GPU} {
		m := newMachine(t, machineConfig{gpu: 8 << 20, host: 16 << 20, auto: true})
		b := m.put(t, random(200_000), k)
		c, disk := &m.mover.cfg.Builtin.Choose, tier.ID{Kind: tier.Disk}
		_ = c.Timed(CodecAuto, disk, CodecNone, true, 8<<20, func() error { time.Sleep(time.Millisecond); return nil })
		if _, due := c.Disk(disk); !due {
			t.Fatal("no sample is due")
		}
		m.move(t, b, tier.Disk)
		_, due := c.Disk(disk)
		if got := m.form(t, b); got != batch.PlainImage || due {
			t.Errorf("from %s: it is a %s; a sample is due: %v", k, got, due)
		}
		m.whole(t, b, tier.Disk)
	}
}
