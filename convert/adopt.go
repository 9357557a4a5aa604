package convert

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// AdoptDictionary makes an image on disk, whose bytes are in buf, known as the dictionary d, and
// returns a reference. It takes buf over, also when it fails. The caller
// has references to d.Dictionaries in the same space.
func (b *Builtin) AdoptDictionary(ctx context.Context, d *batch.Descriptor, buf *tier.Buffer) (batch.Shared, error) {
	s := &b.dicts
	dict := &dictionary{
		store: s, valueType: d.Schema.Field(0).Type, nodes: d.Nodes, spans: d.Buffers, body: d.Body,
		parts: s.of(d.Dictionaries), users: 1,
	}
	defer s.letGo(dict)
	return s.acquire(ctx, dict, buf.Space(), func() (*tier.Buffer, *batch.Descriptor, error) { return buf, d, nil })
}

// Again returns another reference to a dictionary, to which the caller has one.
func (b *Builtin) Again(shared batch.Shared) (batch.Shared, error) {
	c, ok := shared.(*dictCopy)
	if !ok {
		return nil, fmt.Errorf("convert: sharing %T: %w", shared, tier.ErrNotSupported)
	}
	pins, _ := b.dicts.pin(c.space, []*dictionary{c.dict})
	if len(pins) != 1 {
		return nil, tier.ErrReleased
	}
	return pins[0], nil
}

// VerifyDictionary reads all bytes of a dictionary on disk and compares them with their
// checksums.
func (m *Mover) VerifyDictionary(ctx context.Context, shared batch.Shared) error {
	return m.verify(ctx, shared.Buffer().Space(), func(ctx context.Context) error {
		return m.cfg.Builtin.verifyBody(ctx, shared.Descriptor(), shared.Buffer())
	})
}

// Verify reads all bytes of an image on disk, compressed or not, and compares them with
// their checksums. Other bytes are a *CorruptError. Its dictionaries are not read.
func (m *Mover) Verify(ctx context.Context, p batch.Payload) error {
	return m.verify(ctx, p.Space(), func(ctx context.Context) error {
		b := m.cfg.Builtin
		switch p := p.(type) {
		case *batch.Image:
			return b.verifyBody(ctx, p.Descriptor(), p.Buffer())
		case *batch.Packed:
			return b.inLanes(ctx, p.Space().Node(), len(p.Runs()), func(ctx context.Context, l *lane, i int) error {
				_, err := b.stored(ctx, l, &p.Runs()[i])
				return err
			})
		}
		return fmt.Errorf("convert: verifying %s: %w", p.Type(), tier.ErrNotSupported)
	})
}

// verify runs f with a permit to read from a disk.
func (m *Mover) verify(ctx context.Context, at *tier.Space, f func(context.Context) error) error {
	ctx, end, err := m.operations.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	pinned, err := m.cfg.Builtin.stagedAtOnce(at.Node())
	if err != nil {
		return err
	}
	return m.cfg.Builtin.OnDisk(ctx, pinned, false, f)
}

func (b *Builtin) verifyBody(ctx context.Context, d *batch.Descriptor, buf *tier.Buffer) error {
	src, err := b.fromBuffer(d, buf, buf.Space())
	if err != nil {
		return err
	}
	return b.transfer(ctx, nil, src)
}
