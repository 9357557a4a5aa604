package convert

import (
	"context"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// VerifyDictionary reads all bytes of a dictionary on disk and compares them with their
// checksums.
func (m *Mover) VerifyDictionary(ctx context.Context, shared batch.Shared) error {
	return m.verify(ctx, shared.Buffer().Space(), func(ctx context.Context) error {
		return m.cfg.Builtin.VerifyBody(ctx, shared.Descriptor(), shared.Buffer())
	})
}

// Verify reads all bytes of an image on disk, compressed or not, and compares them with
// their checksums. Other bytes are a *CorruptError. Its dictionaries are not read.
func (m *Mover) Verify(ctx context.Context, p batch.Payload) error {
	return m.verify(ctx, p.Space(), func(ctx context.Context) error { return m.cfg.Builtin.Verify(ctx, p) })
}

// verify runs f with a permit to read from a disk.
func (m *Mover) verify(ctx context.Context, at *tier.Space, f func(context.Context) error) error {
	ctx, end, err := m.operations.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	pinned, err := m.cfg.Builtin.StagedAtOnce(at.Node())
	if err != nil {
		return err
	}
	return m.cfg.Builtin.OnDisk(ctx, pinned, false, f)
}
