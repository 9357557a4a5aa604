package batch

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// moody is a program's own form, one of whose methods panics while it is armed.
type moody struct {
	*form
	armed string
}

func (m *moody) call(method string) {
	if m.armed == method {
		panic("in " + method)
	}
}

func (m *moody) OnUnleased(func()) { m.call("OnUnleased") }
func (m *moody) Leased() int       { m.call("Leased"); return 0 }
func (m *moody) Bytes() int64      { m.call("Bytes"); return m.form.Bytes() }
func (m *moody) Type() PayloadType { m.call("Type"); return m.form.Type() }
func (m *moody) Space() *tier.Space {
	m.call("Space")
	return m.form.Space()
}
func (m *moody) Descriptor() *Descriptor {
	m.call("Descriptor")
	return m.form.Descriptor()
}

// TestPayloadMethodPanics: no panic of a method of the payload's leaves a batch in transit, or open
// without a handle, and who waits for a change is woken.
func TestPayloadMethodPanics(t *testing.T) {
	s := newSpace(t, "host:0")
	open := func(b *Batch, _ *moody) (*Handle, error) { return b.Open(t.Context(), tier.ID{}, false) }
	commit := func(b *Batch, p *moody) (h *Handle, err error) {
		tr, err := b.TryTransit()
		if err != nil {
			return nil, err
		}
		return commitAndOpen(t.Context(), tr, p, false)
	}
	for _, tt := range []struct {
		name, armed string
		open        func(*Batch, *moody) (*Handle, error)
		was         bool // the batch has the payload already
	}{
		{"open", "Leased", open, true},
		{"open", "Bytes", open, true},
		{"open", "Space", open, true},
		{"commit", "Leased", commit, false},
		{"commit", "OnUnleased", commit, false},
	} {
		t.Run(tt.name+" "+tt.armed, func(t *testing.T) {
			p := &moody{form: &form{space: s}}
			var b *Batch
			if tt.was {
				b = newBatch(t, p, nil)
			} else {
				b = newBatch(t, &form{space: s}, nil)
			}
			changed := b.Changed()
			p.armed = tt.armed
			h, err := tt.open(b, p)
			if err != nil {
				t.Fatal(err)
			}
			if h.Payload() != Payload(p) || h.Space() != s {
				t.Errorf("the handle is on %v in %v", h.Payload(), h.Space())
			}
			if err := h.Close(); err != nil {
				t.Error(err)
			}
			p.armed = ""
			if now := b.Info(); now.State != Idle || now.Active != 0 {
				t.Errorf("the batch is %+v", now)
			}
			select {
			case <-changed:
			default:
				t.Error("a waiter was not woken")
			}
		})
	}
}

// TestOfferedPayloadPanics: a payload that panics while it is offered is refused, and changes
// nothing.
func TestOfferedPayloadPanics(t *testing.T) {
	s := newSpace(t, "host:0")
	for _, armed := range []string{"Type", "Space", "Bytes", "Descriptor"} {
		t.Run(armed, func(t *testing.T) {
			p := &moody{form: &form{space: s}, armed: armed}
			var panicked *guard.PanicError
			if b, err := New(Options{ID: 1, Payload: p}); b != nil || !errors.As(err, &panicked) {
				t.Errorf("batch %v, error %v", b, err)
			}
			old := &form{space: s}
			b := newBatch(t, old, nil)
			tr, err := b.TryTransit()
			if err != nil {
				t.Fatal(err)
			}
			if err := tr.Commit(p, false); !errors.As(err, &panicked) {
				t.Errorf("error %v", err)
			}
			if now := b.Info(); now.State != InTransit || now.Payload != Payload(old) {
				t.Errorf("the batch is %+v", now)
			}
			if err := tr.Abort(); err != nil {
				t.Error(err)
			}
		})
	}
}
