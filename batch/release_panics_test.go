package batch

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// panicsOnRelease is a program's own form, whose release panics.
type panicsOnRelease struct{ *form }

func (panicsOnRelease) Release() error { panic("in Release") }

// TestReleasePanics: the panic is the error of what has ended the batch.
func TestReleasePanics(t *testing.T) {
	for name, end := range map[string]func(*Batch) error{
		"drop": (*Batch).Drop,
		"close of the last handle": func(b *Batch) error {
			h, err := b.Open(t.Context(), tier.ID{}, true)
			if err != nil {
				return err
			}
			return h.Close()
		},
	} {
		b := newBatch(t, panicsOnRelease{&form{space: newSpace(t, "host:0")}}, nil)
		var p *guard.PanicError
		if err := end(b); !errors.As(err, &p) || p.Value != "in Release" {
			t.Errorf("%s: %v", name, err)
		}
		if now := b.Info(); now.State != Released || now.Payload != nil || now.Active != 0 {
			t.Errorf("%s: the batch is %+v", name, now)
		}
	}
}
