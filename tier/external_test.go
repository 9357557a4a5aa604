package tier_test

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// teller is a device of which only what is free is ever asked.
type teller struct {
	tier.Device
	free int64
	err  error
	when func() // during the query
}

func (d *teller) MemInfo() (free, total int64, err error) {
	if d.when != nil {
		d.when()
	}
	return d.free, 1 << 40, d.err
}

// limiting is a decorator that shows less.
type limiting struct{ tier.Device }

func (d limiting) Unwrap() tier.Device          { return d.Device }
func (limiting) MemInfo() (int64, int64, error) { return 0, 1, nil }

// TestExternalOn: what is neither free nor in the space's books is others'.
func TestExternalOn(t *testing.T) {
	s := newSpace(t, 1024, &fakePool{})
	b := draw(t, s, 320)
	r := promise(t, s, 128) // only promised: the device has it still
	for _, tt := range []struct {
		name string
		dev  tier.Device
		want int64
		ok   bool
	}{
		{"nobody", &teller{free: 704}, 0, true},
		{"somebody", &teller{free: 504}, 200, true},
		{"all", &teller{free: 0}, 704, true},
		{"a larger device", &teller{free: 5000}, 0, true},
		{"behind decorators", limiting{limiting{&teller{free: 604}}}, 100, true},
		{"no answer", &teller{err: errors.New("no answer")}, 0, false},
	} {
		if n, known := s.ExternalOn(tt.dev); n != tt.want || known != tt.ok {
			t.Errorf("%s: %d bytes, %v; want %d, %v", tt.name, n, known, tt.want, tt.ok)
		}
	}
	// A buffer that comes during the device's query is no external bytes.
	d := &teller{free: 704}
	var more *tier.Buffer
	var err error
	d.when = func() {
		if more != nil {
			return
		}
		more, err = drawFrom(s, r, 128)
		d.free = 576
	}
	if n, known := s.ExternalOn(d); n != 0 || !known || err != nil {
		t.Errorf("%d bytes, %v, with an allocation meanwhile: %v", n, known, err)
	}
	changing := &teller{}
	changing.when = func() {
		if more != nil {
			ok(t, more.Release())
			more = nil
			return
		}
		more = draw(t, s, 128)
	}
	if _, known := s.ExternalOn(changing); known {
		t.Error("a number, though the books change all the time")
	}
	ok(t, more.Release())
	ok(t, b.Release())
}
