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

// small is below what size batches are moved together: a copy to a pinned chunk takes less than a
// request to the disk. On two cores and a virtual NVMe disk that is so to 128 KiB at least. It is
// less than what is worth a thought about compression (payload.FrameSize).
const small = 192 << 10

// joint moves what is small of a job together.
type joint struct {
	m     *Monitor
	mover joiner // nil if nothing more is moved together
	job   []choice
	all   []*batch.Batch // of the job
	end   int            // of those in the job that may follow each other, behind the last that was looked at
	done  []bool         // which have been moved so
}

func (m *Monitor) jointOf(job []choice) *joint {
	j := &joint{m: m, job: job, done: make([]bool, len(job))}
	if len(job) == 1 || m.spaces[job[0].To].Kind() != tier.Disk {
		return j
	}
	j.mover, _ = m.cfg.Mover.(joiner)
	for _, c := range job {
		j.all = append(j.all, c.Victim.Batch)
	}
	return j
}

// move moves the i-th batch of the job together with those that follow it, and reports whether it
// has moved that one. If any was not, all that are left are moved alone: then an error is of the
// batch that it concerns.
func (j *joint) move(ctx context.Context, i int) bool {
	all := j.following(i)
	if len(all) < 2 {
		return false
	}
	c := j.job[i]
	from, to := j.m.spaces[c.From].ID(), j.m.spaces[c.To].ID()
	moves := make([]Move, len(all))
	for k := range all {
		v := j.job[i+k].Victim
		moves[k] = Move{Batch: v.ID, From: from, To: to, Bytes: v.Bytes, Reason: c.Reason}
		j.m.events.moveBegun(moves[k])
	}
	start := time.Now()
	errs, mover := make([]error, len(all)), j.mover
	var panicked error
	func() {
		defer guard.Error(&panicked, "the mover")
		errs = mover.RelieveTogether(ctx, all, to, c.Reason)
	}()
	took, told := time.Since(start), false
	for k := range all {
		err := panicked
		if err == nil {
			err = ofEnding(ctx, errs[k])
		}
		if j.done[i+k] = err == nil; err != nil {
			j.mover = nil
		}
		switch kindOf(err, to) {
		case noRoom, unmovable, failed: // it is the error of all, and told once
			if told || errors.Is(err, tier.ErrNotSupported) {
				err = fmt.Errorf("%w: %w", errTogether, err)
			} else {
				told = true
			}
		}
		j.m.events.moveEnded(moves[k], took, err)
	}
	return j.done[i]
}

// errTogether is matched by the error of a move that says nothing about the batch: several were
// moved together, and that was not possible, or its error is that of another batch. Each is moved
// alone then, or later.
var errTogether = errors.New("monitor: the batch was not moved together with others")

// following returns the batches from the i-th on that can be moved together. One with a copy on the
// disk moves no bytes, and ends them: the batches leave in order, and it may be enough.
func (j *joint) following(i int) []*batch.Batch {
	if j.mover == nil {
		return nil
	}
	for j.end = max(j.end, i); j.end < len(j.job); j.end++ {
		if c := j.job[j.end]; c.Victim.Bytes >= small || c.Victim.copied.Has(c.To) {
			break
		}
	}
	if j.end-i < 2 {
		return nil
	}
	from, to := j.m.spaces[j.job[i].From].ID(), j.m.spaces[j.job[i].To].ID()
	most := 0
	var err error
	func() {
		defer guard.Error(&err, "the mover") // it will do so again
		most = j.mover.Together(j.all[i:j.end], to)
	}()
	for n := range most {
		if !j.m.canLeave(j.all[i+n].Info(), from) {
			return j.all[i : i+n]
		}
	}
	return j.all[i : i+most]
}
