package payload

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// dictionary counts its releases, which panic if they should.
type dictionary struct {
	desc     *Descriptor
	panics   bool
	released int
}

func (d *dictionary) Descriptor() *Descriptor { return d.desc }
func (d *dictionary) Buffer() *tier.Buffer    { return nil }
func (d *dictionary) Release() error {
	d.released++
	if d.panics {
		panic("in Release")
	}
	return nil
}

// TestReleasePanics: of a payload whose first dictionary panics all other parts are released.
func TestReleasePanics(t *testing.T) {
	s := newSpace(t, "host:0")
	first := &dictionary{desc: new(Descriptor), panics: true}
	second := &dictionary{desc: new(Descriptor)}
	desc := &Descriptor{Body: 100, Dictionaries: []*Descriptor{first.desc, second.desc}}
	var p *guard.PanicError
	if err := NewImage(desc, draw(t, s, 100), s, first, second).Release(); !errors.As(err, &p) {
		t.Errorf("the release returned %v", err)
	}
	if first.released != 1 || second.released != 1 {
		t.Errorf("the dictionaries were released %d and %d times", first.released, second.released)
	}
	mustBeEmpty(t, s)
}
