package convert

import (
	"context"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// inside is a Mover as the engine sees it.
type inside struct{ *Mover }

// Inside returns what only an engine does with its mover. Programs have no use for it.
func (m *Mover) Inside() inside { return inside{m} }

// DictionaryBytes returns what the dictionaries that batches in a space share are
// charged there. It is not part of the batches' own bytes.
func (m inside) DictionaryBytes(space tier.ID) int64 { return m.cfg.Builtin.Dicts.Charged(space) }

// VerifyDictionary reads all bytes of a dictionary on disk and compares them with their
// checksums.
func (m inside) VerifyDictionary(ctx context.Context, shared batch.Shared) error {
	return m.verify(ctx, shared.Buffer().Space(), func(ctx context.Context) error {
		return m.cfg.Builtin.VerifyBody(ctx, shared.Descriptor(), shared.Buffer())
	})
}
