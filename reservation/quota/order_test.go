package quota_test

import (
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// told is a device whose events behind frees are done when the test says so.
type told struct {
	*spy
	events    []gateEvent
	afterReap func()
}

func (d *told) Record(tier.Stream) (tier.Event, error) {
	e := make(gateEvent)
	d.events = append(d.events, e)
	return e, nil
}

func (d *told) Reap() int64 {
	n := d.spy.Reap()
	if d.afterReap != nil {
		d.afterReap()
	}
	return n
}

// TestReapQueriesEventsBeforeTheDevice: a free is credited if its event is done before the device
// is reaped. An event that is done only afterwards counts at the next reap.
func TestReapQueriesEventsBeforeTheDevice(t *testing.T) {
	b := newBudget(t, 64*kib)
	inner := &told{spy: &spy{Device: newSim(t, 256*kib)}}
	d, s := wrap(t, b, inner)
	first, err := d.Alloc(s, 4*kib)
	if err != nil {
		t.Fatal(err)
	}
	second, err := d.Alloc(s, 8*kib)
	if err != nil {
		t.Fatal(err)
	}
	held, err := closeGate(t, inner.spy, s) // so that the device works on both
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []tier.Addr{first, second} {
		if err := d.Free(s, a); err != nil {
			t.Fatal(err)
		}
	}
	if len(inner.events) != 2 {
		t.Fatalf("%d events", len(inner.events))
	}
	if n := d.Reap(); n != 0 {
		t.Errorf("credited %d bytes of frees that are not done", n)
	}
	inner.afterReap = func() { close(inner.events[0]) }
	if n := d.Reap(); n != 0 {
		t.Errorf("credited %d bytes that were done after the device had reaped", n)
	}
	inner.afterReap = nil
	if n := d.Reap(); n != 4*kib {
		t.Errorf("credited %d bytes, want those of the first free", n)
	}
	close(inner.events[1])
	if n := d.Reap(); n != 8*kib {
		t.Errorf("credited %d bytes, want those of the second free", n)
	}
	held.open()
}
