package monitor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// joiner is a Mover that can move small batches to a disk together, in much less time for each.
type joiner interface {
	// Together returns how many batches, from the first on, can be moved together now.
	Together(all []*batch.Batch, to tier.ID) int
	// RelieveTogether is Relieve for those. After an error a batch is whole where it was, and
	// Relieve may still move it.
	RelieveTogether(ctx context.Context, all []*batch.Batch, to tier.ID, reason string) []error
}

const (
	// small is below what size batches are moved together: a copy to a pinned chunk takes less than
	// a request to the disk. On two cores and a virtual NVMe disk that is so to 128 KiB at least. It
	// is less than what is worth a thought about compression (payload.FrameSize).
	small = 192 << 10
	// togetherMax bounds how many batches are moved together.
	togetherMax = 256
)

// errTogether is matched by the error of a move that does not concern the batch: several were
// moved together, and that was not possible, or its error is that of another batch. Each is moved
// alone then, or later.
var errTogether = errors.New("monitor: the batch was not moved together with others")

// countTogether returns how many of these batches, from the first on, can be moved together.
func (m *Monitor) countTogether(mover joiner, list []Victim, to *space) (n int) {
	if len(list) < 2 {
		return 1
	}
	all := make([]*batch.Batch, len(list))
	for i, v := range list {
		all[i] = v.Batch
	}
	var err error
	defer guard.Error(&err, "the mover") // it will panic again when it moves the first
	return mover.Together(all, to.ID())
}

// moveTogether moves batches of a job together, and returns the error of each.
func (m *Monitor) moveTogether(ctx context.Context, mover joiner, list []Victim, j *job) []error {
	to := j.to.ID()
	moves, all := make([]Move, len(list)), make([]*batch.Batch, len(list))
	for i, v := range list {
		all[i] = v.Batch
		moves[i] = Move{Batch: v.ID, From: j.from.ID(), To: to, Bytes: v.Bytes, Reason: j.reason}
		m.events.moveBegun(moves[i])
	}
	start := time.Now()
	errs := make([]error, len(all))
	var panicked error
	func() {
		defer guard.Error(&panicked, "the mover")
		errs = mover.RelieveTogether(ctx, all, to, j.reason)
	}()
	took, reported := time.Since(start), false
	for i := range errs {
		if errs[i] = ofEnding(ctx, errs[i]); panicked != nil {
			errs[i] = panicked
		}
		err := errs[i]
		switch kindOf(err, to) {
		case noRoom, unmovable, failed: // it is the error of all, and reported once
			if reported || errors.Is(err, tier.ErrNotSupported) {
				err = fmt.Errorf("%w: %w", errTogether, err)
			} else {
				reported = true
			}
		}
		m.events.moveEnded(moves[i], took, err)
	}
	return errs
}
