package repository

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// aheadMover is a Mover that can bring batches before they are needed.
type aheadMover interface {
	// Ahead moves b to a space of the strategy if nobody needs the room. It waits for nothing but
	// the transfer.
	Ahead(ctx context.Context, b *batch.Batch, to reservation.Strategy) error
}

// defaultAhead is how many batches are prefetched at most without the option ReadAhead. maxAhead is
// the largest value of the option: each look at what comes next goes through all of them.
const (
	defaultAhead = 8
	maxAhead     = 64
)

// adaptive stands for as many batches as the times of work and of moves ask for.
const adaptive = -1

// lookahead brings the batches that a consumer of a partition gets next, while it works. One
// goroutine brings one after the other, so that demand never waits for more than one of them. A nil
// lookahead does nothing.
type lookahead struct {
	r     *Repository
	p     *partition
	mover aheadMover
	to    tier.Kind
	max   int // batches, or adaptive

	ctx     context.Context
	stop    context.CancelFunc
	runs    bool // the goroutine, which looks for more; guarded by r.mu
	running sync.WaitGroup

	since time.Time // when the work began
	// What the last work, and the last move, took: nanoseconds.
	working, moving atomic.Int64
}

// lookAhead returns the lookahead of a consumer that wants batches in a tier. ctx ends with the
// repository, too. The caller must end
// it.
func (r *Repository) lookAhead(ctx context.Context, partition int, to tier.Kind, limit int) *lookahead {
	mover, ok := r.m.cfg.Mover.(aheadMover)
	if !ok || limit == 0 {
		return nil
	}
	r.mu.Lock()
	p, err := r.partitionLocked(partition)
	r.mu.Unlock()
	if err != nil {
		return nil
	}
	l := &lookahead{r: r, p: p, mover: mover, to: to, max: min(limit, maxAhead)}
	l.ctx, l.stop = context.WithCancel(ctx)
	l.working.Store(math.MaxInt64) // not known yet
	return l
}

// begin is called when the consumer's work begins. It starts the goroutine, unless it runs or has
// nothing to do. The goroutine may go on when the work has ended: what it is bringing then is what
// comes next.
func (l *lookahead) begin() {
	if l == nil {
		return
	}
	l.since = time.Now()
	b := l.next(nil)
	if b == nil {
		return
	}
	l.running.Go(func() {
		labels.ReadAhead.Set()
		for ; b != nil; b = l.next(b) {
			if l.bring(b) != nil || b.Info().Space.Kind > l.to {
				// There is no room, for example: the next work starts the goroutine again.
				l.r.mu.Lock()
				l.runs = false
				l.r.mu.Unlock()
				return
			}
		}
	})
}

// worked is called when the work has ended.
func (l *lookahead) worked() {
	if l != nil && !l.since.IsZero() {
		l.working.Store(int64(time.Since(l.since)))
	}
}

func (l *lookahead) bring(b *batch.Batch) (err error) {
	defer guard.Error(&err, "a mover")
	start := time.Now()
	if err = l.mover.Ahead(l.ctx, b, reservation.AnyInTier(l.to)); err == nil { // a refusal takes no time
		l.moving.Store(int64(time.Since(start)))
	}
	return err
}

// end ends what is on its way.
func (l *lookahead) end() {
	if l != nil {
		l.stop()
		l.running.Wait()
	}
}

// depth is how many of the batches that come next should be there. One is enough if it is there
// when the work ends. The longer moves take compared with the work, the more are asked for, so that
// the time of a longer work is used.
func (l *lookahead) depth() int {
	if l.max != adaptive {
		return l.max
	}
	ratio := float64(l.moving.Load()) / float64(max(1, l.working.Load()))
	return 1 + int(min(ratio, defaultAhead-1))
}

// next returns the first of the batches that come next that is to be brought and is not last, or
// nil. Then the goroutine, if it is the caller, runs no more. It is nil for another caller while
// the goroutine runs: last is nil for that.
func (l *lookahead) next(last *batch.Batch) *batch.Batch {
	depth := l.depth()
	coming := make([]*entry, 0, depth)
	l.r.mu.Lock()
	defer l.r.mu.Unlock()
	if last == nil && l.runs {
		return nil
	}
	for _, c := range [...]class{idle, taskCreated, processing, inTransit} {
		n := 0
		l.p.sets[c].Ascend(func(q queued) bool {
			coming = append(coming, q.e)
			n++
			return n < depth
		})
	}
	slices.SortFunc(coming, older)
	for _, e := range coming[:min(depth, len(coming))] {
		if (e.class == idle || e.class == taskCreated) && e.kind > l.to && e.b != last {
			l.runs = true
			return e.b
		}
	}
	l.runs = false
	return nil
}
