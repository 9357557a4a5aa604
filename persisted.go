package spillway

import (
	"context"
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/persist"
	"github.com/spillway-db/spillway/tier"
)

// Persisted is a batch that an engine before this one left on a disk with DiskConfig.Persist,
// because its process ended before the batch did.
type Persisted struct {
	ID        batch.ID // in the engine that left it
	Plan      string   // where it stood; empty if in no plan
	Operator  string
	Port      int
	Partition int
	Rows      int64
	Schema    *arrow.Schema
	Bytes     int64   // charged in Space, without dictionaries that it shares
	Space     tier.ID // of this engine
	Err       error   // why it cannot be adopted; it can be forgotten

	key *persist.Batch
}

// Persisted lists the batches that were found on disks with DiskConfig.Persist when the engine was
// opened, without those adopted or forgotten since. The order is that in which they came to their
// disks. They take room there, and stay there when the engine is closed.
func (e *Engine) Persisted() []Persisted {
	found := e.found.List()
	out := make([]Persisted, len(found))
	for i, b := range found {
		p := &out[i]
		p.Bytes, p.Space, p.Err, p.key = b.Room, b.Space.ID(), b.Err, b
		if r := b.Entry; r != nil {
			p.ID, p.Plan, p.Operator, p.Port, p.Partition = r.ID, r.Plan, r.Operator, r.Port, r.Partition
			p.Rows, p.Schema = r.Descriptor.Rows, r.Descriptor.Schema
		}
	}
	return out
}

// Adopt makes a persisted batch one of this engine's: it reads all its bytes, compares them with
// their checksums, and returns the batch, idle on its disk and with an id of this engine. The
// caller owns it, as if it had made it: it puts it into a repository, or drops it. Other bytes are
// a *convert.CorruptError. If reading or verifying fails, the batch persists still. One that was
// adopted or forgotten before is tier.ErrReleased.
func (e *Engine) Adopt(ctx context.Context, p Persisted) (*batch.Batch, error) {
	b, err := e.found.Adopt(ctx, p.key, e.mover, e.builtin, e.newBatch)
	if err != nil {
		if c, ok := errors.AsType[*convert.CorruptError](err); ok {
			c.Batch = p.ID
		}
		return nil, fmt.Errorf("spillway: adopting batch %d of %s: %w", p.ID, p.Space, err)
	}
	return b, nil
}

// ForgetPersisted drops a persisted batch: its room is free again. One that was adopted or
// forgotten before is tier.ErrReleased.
func (e *Engine) ForgetPersisted(p Persisted) error {
	if err := e.found.Forget(p.key); err != nil {
		return fmt.Errorf("spillway: forgetting batch %d of %s: %w", p.ID, p.Space, err)
	}
	return nil
}
