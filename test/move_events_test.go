package test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// movePairs checks the events of moves as they arrive. For each batch they must alternate, a
// beginning and its end, and a move must begin in the space where the last one that succeeded ended.
type movePairs struct {
	mu      sync.Mutex
	batches map[uint64]*movingBatch
	moves   int // that have ended
	failed  int // of these
	clean   int // of these, those that found a copy
	wrong   []string
}

// movingBatch is what the events of one batch have reported so far.
type movingBatch struct {
	begun *spillway.Event // the move that is under way
	at    tier.ID         // where the last move that succeeded has ended
}

// event is for Config.Events.
func (p *movePairs) event(e spillway.Event) {
	if e.Kind != events.MoveBegun && e.Kind != events.MoveEnded {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.batches == nil {
		p.batches = make(map[uint64]*movingBatch)
	}
	b := p.batches[e.Batch]
	if b == nil {
		b = new(movingBatch)
		p.batches[e.Batch] = b
	}
	if e.Kind == events.MoveBegun {
		switch {
		case b.begun != nil:
			p.wrong = append(p.wrong, fmt.Sprintf("%s: begun before the end of %s", e, b.begun))
		case b.at.Valid() && b.at != e.From:
			p.wrong = append(p.wrong, fmt.Sprintf("%s: the batch was moved to %s before", e, b.at))
		case !e.From.Valid() || !e.To.Valid():
			p.wrong = append(p.wrong, fmt.Sprintf("%s: a space is not named", e))
		}
		b.begun = &e
		return
	}
	p.moves++
	switch begun := b.begun; {
	case begun == nil:
		p.wrong = append(p.wrong, fmt.Sprintf("%s: ended without a beginning", e))
	case begun.From != e.From || begun.To != e.To || begun.Reason != e.Reason || begun.Origin != e.Origin:
		p.wrong = append(p.wrong, fmt.Sprintf("%s: is not the end of %s", e, begun))
	case e.Took < 0 || e.At.Before(begun.At):
		p.wrong = append(p.wrong, fmt.Sprintf("%s at %v: ended before it began at %v", e, e.At, begun.At))
	}
	b.begun = nil
	switch {
	case e.Err != nil:
		p.failed++
		return
	case e.Copy:
		p.clean++
	}
	b.at = e.To
}

// check reports what was wrong. No move may be under way.
func (p *movePairs) check(t *testing.T) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, b := range p.batches {
		if b.begun != nil {
			p.wrong = append(p.wrong, fmt.Sprintf("batch %d: %s has no end", id, b.begun))
		}
	}
	for _, text := range p.wrong[:min(10, len(p.wrong))] {
		t.Error(text)
	}
	if len(p.wrong) > 10 {
		t.Errorf("%d more", len(p.wrong)-10)
	}
}

// TestMoveEventsPair: in a storm of random operations, with faults of the GPU and of the disk,
// callers that give up, little memory and shared dictionaries, each beginning of a move has one end,
// and those of one batch alternate. In every other run the engine is closed in the middle.
func TestMoveEventsPair(t *testing.T) {
	t.Parallel()
	moves, failed, clean := 0, 0, 0
	for seed := range testseed.Each(t, testseed.Rounds(6, 2)) {
		pairs := moveStorm(t, seed)
		pairs.check(t)
		moves, failed, clean = moves+pairs.moves, failed+pairs.failed, clean+pairs.clean
	}
	if moves < 100 || failed < 5 || clean == 0 {
		t.Errorf("the storm is too calm: %d moves, %d failed, %d found a copy", moves, failed, clean)
	}
}

// moveStorm runs a storm to its end.
func moveStorm(t *testing.T, seed uint64) *movePairs {
	rng := rand.New(rand.NewPCG(seed, 0))
	dir, pairs := testfs.MemoryDir(t), new(movePairs)
	files := faultfs.New(testfs.DiskFS(dir, disk.OS()), seed,
		faultfs.Rule{Ops: []string{"read", "write"}, Skip: 20, Probability: 0.02, Effect: faultfs.Fail(syscall.EIO)},
		faultfs.Rule{Ops: []string{"allocate"}, Skip: 5, Probability: 0.05, Effect: faultfs.Fail(syscall.ENOSPC)})
	broken := faultdev.FailWork(errors.New("injected"))
	gpu := func(dev tier.Device) (tier.Device, error) {
		return faultdev.New(dev, seed,
			faultdev.Rule{Ops: []string{"alloc"}, Skip: 20, Probability: 0.05, Effect: faultdev.OutOfMemory()},
			faultdev.Rule{Ops: []string{"copy-to-*"}, Skip: 20, Probability: 0.02, Effect: broken}), nil
	}
	sim := func() spillway.GPUConfig {
		memory := int64(192+rng.IntN(256)) << 10
		return spillway.GPUConfig{Backend: spillway.Sim, Memory: spillway.Bytes(memory), Wrap: gpu}
	}
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:          []spillway.GPUConfig{sim(), sim()},
		HostMemory:    spillway.Bytes(int64(256+rng.IntN(512)) << 10),
		Disks:         []spillway.DiskConfig{{Dir: dir, FS: files, Capacity: spillway.Bytes(64 << 20)}},
		MonitorPeriod: time.Millisecond,
		Logger:        slog.New(slog.NewTextHandler(io.Discard, nil)),
		Events:        pairs.event,
	})
	if err != nil {
		t.Fatal(err)
	}
	plan, err := eng.Plan("storm")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	run := &randomRun{eng: eng, repo: repo, words: wordList(seed, 1500), sources: make(map[int64]*source)}
	storm, end := context.WithCancel(t.Context())
	defer end()
	var workers sync.WaitGroup
	for w := range randomWorkers {
		workers.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w+1)))
			for op := 0; op < testseed.Rounds(150, 80) && storm.Err() == nil; op++ {
				if seed%2 == 1 && w == 0 && op == testseed.Rounds(75, 40) {
					end()
					_ = eng.Close() // reports what the others hold
					return
				}
				stormStep(storm, run, rng)
			}
		})
	}
	workers.Wait()
	if seed%2 == 0 { // the monitor may be at work until then
		_ = eng.Close()
	}
	return pairs
}

// stormStep does one random thing. Its error does not matter: faults are injected.
func stormStep(ctx context.Context, run *randomRun, rng *rand.Rand) {
	if rng.IntN(4) == 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.IntN(1000))*time.Microsecond)
		defer cancel()
	}
	if rng.IntN(8) == 0 {
		_ = stormTask(ctx, run, rng)
		return
	}
	_ = run.step(ctx, rng)
}

// stormTask runs a task on some batches of a partition.
func stormTask(ctx context.Context, run *randomRun, rng *rand.Rand) error {
	claim, err := run.repo.Claim(ctx, rng.IntN(randomPartitions), 1+rng.IntN(3), repository.NoWait())
	if err != nil || claim == nil {
		return err
	}
	task := spillway.Task{Operator: "sort", Inputs: []*spillway.Claim{claim}, Output: int64(rng.IntN(64 << 10))}
	return run.eng.RunTask(ctx, task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil })
}

// moveLog is the kinds of a batch's events of moves, with where each went and whether it failed.
func moveLog(r *heard, b *batch.Batch) (log []string) {
	for _, e := range r.of(events.MoveBegun, events.MoveEnded) {
		if e.Batch != uint64(b.ID()) {
			continue
		}
		line := fmt.Sprintf("%s to %s", e.Kind, e.To)
		if e.Err != nil {
			line += ", failed"
		}
		if e.Copy {
			line += ", onto a copy"
		}
		log = append(log, line)
	}
	return log
}

// TestMoveEventsOfOneBatch: the events of one move, in order. A space that refuses what it has
// promised is a failed move of its own, before that to the next space. Calls that move nothing have
// no events: the batch is there, there is no room, or the batch is in use.
func TestMoveEventsOfOneBatch(t *testing.T) {
	t.Parallel()
	var gpu *faultdev.Device
	var files *faultfs.FS
	eng, r := telling(t, func(c *spillway.Config) {
		c.GPUs[0].Wrap = func(dev tier.Device) (tier.Device, error) {
			gpu = faultdev.New(dev, 1)
			return gpu, nil
		}
		c.GPUs = append(c.GPUs, spillway.GPUConfig{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)})
		files = faultfs.New(disk.OS(), 1)
		c.Disks[0].FS = files
		c.WriteAhead = -1
	})
	b := putOn(t, eng, tier.Host, 500)
	move := func(to reservation.Strategy) error { return eng.Mover().Move(t.Context(), b, to) }
	gpu0, disk0 := reservation.Specific(tier.ID{Kind: tier.GPU}), reservation.AnyInTier(tier.Disk)
	for _, step := range []struct {
		name string
		do   func() error
		err  error
		want []string
	}{
		{"the first GPU refuses", func() error {
			defer gpu.Add(faultdev.Rule{Ops: []string{"alloc"}, Effect: faultdev.OutOfMemory()})()
			return move(reservation.AnyInTierPreferring(tier.GPU, 0))
		}, nil, []string{
			"move begun to gpu:0", "move ended to gpu:0, failed", "move begun to gpu:1", "move ended to gpu:1",
		}},
		{"there already", func() error { return move(reservation.AnyInTier(tier.GPU)) }, nil, nil},
		{"no room", func() error {
			defer full(t, spaceAt(eng, tier.GPU, 0), eng)()
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			return eng.Mover().Move(ctx, b, gpu0)
		}, context.Canceled, nil},
		{"in use", func() error {
			h, err := eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
			if err != nil {
				return err
			}
			return errors.Join(move(gpu0), h.Close())
		}, batch.ErrState, nil},
		{"the disk fails", func() error {
			defer files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.EIO)})()
			return move(disk0)
		}, syscall.EIO, []string{"move begun to disk:0", "move ended to disk:0, failed"}},
		{"to the disk", func() error { return move(disk0) }, nil, []string{"move begun to disk:0", "move ended to disk:0"}},
		{"a bit flips", func() error {
			defer files.Add(faultfs.Rule{Ops: []string{"read"}, Effect: faultfs.BitFlip()})()
			return move(gpu0)
		}, convert.ErrCorrupt, []string{"move begun to gpu:0", "move ended to gpu:0, failed"}},
		{"up, and down onto the copy", func() error { return errors.Join(move(gpu0), move(disk0)) }, nil, []string{
			"move begun to gpu:0", "move ended to gpu:0", "move begun to disk:0", "move ended to disk:0, onto a copy",
		}},
		{"consumed", func() error {
			h, err := eng.Mover().Consume(t.Context(), b, reservation.AnyInTier(tier.Host))
			return errors.Join(err, h.Close())
		}, nil, []string{"move begun to host:0", "move ended to host:0, onto a copy"}},
	} {
		before := len(moveLog(r, b))
		if err := step.do(); !errors.Is(err, step.err) {
			t.Errorf("%s: ended with %v", step.name, err)
		}
		if got := moveLog(r, b)[before:]; !slices.Equal(got, step.want) {
			t.Errorf("%s: %q, want %q", step.name, got, step.want)
		}
	}
	closeEngine(t, eng)
}

// TestMoveEventsOfSmallBatches: small batches that are written to the disk with one request have
// their own beginnings and ends, also when that request fails and each is then written alone, and
// also for a program that moves them back in the middle.
func TestMoveEventsOfSmallBatches(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]bool{"at once": false, "one by one": true} {
		t.Run(name, func(t *testing.T) {
			pairs := new(movePairs)
			eng, r := telling(t, func(c *spillway.Config) {
				var rules []faultfs.Rule
				if fails {
					eio := faultfs.Fail(syscall.EIO)
					rules = append(rules, faultfs.Rule{Ops: []string{"write"}, Skip: 2, Times: 2, Effect: eio})
				}
				c.Disks[0].FS = faultfs.New(disk.OS(), 1, rules...)
				c.Events = spillway.Tee(c.Events, pairs.event)
				c.MonitorPeriod = time.Millisecond
				c.WriteAhead = -1
			})
			plan, err := eng.Plan("small")
			if err != nil {
				t.Fatal(err)
			}
			repo, err := plan.Repository("scan", 0)
			if err != nil {
				t.Fatal(err)
			}
			host := repository.WithPlacement(reservation.AnyInTier(tier.Host))
			var back sync.WaitGroup
			defer back.Wait()
			for i := range 600 { // 4 MiB in 3 MiB of memory
				rec := arrowgen.Ints(uint64(i), 800, 1)
				if err := repo.Put(t.Context(), 0, rec, host); err != nil {
					t.Fatal(err)
				}
				rec.Release()
				if b, ok := repo.Peek(0); ok && i%50 == 49 {
					back.Go(func() { _ = eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.GPU)) })
				}
			}
			back.Wait()
			if _, err := plan.Close(); err != nil {
				t.Error(err)
			}
			closeEngine(t, eng)
			pairs.check(t)
			began := len(r.of(events.MoveBegun))
			if began != pairs.moves || began < 200 || fails != (pairs.failed > 1) {
				t.Errorf("%d moves began, %d ended, %d of these failed", began, pairs.moves, pairs.failed)
			}
		})
	}
}

// TestMoveEventsComeInTransit: a batch is in transit when the events of its moves are emitted, whether
// it moves alone or is written with others. So no other move of it can begin before the end of one.
func TestMoveEventsComeInTransit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		batches, r := make(map[uint64]*batch.Batch), new(heard)
		eng := openMarked(t, 8*mib, func(c *spillway.Config) {
			c.WriteAhead = -1
			c.Events = func(e spillway.Event) {
				if e.Kind != events.MoveBegun && e.Kind != events.MoveEnded {
					return
				}
				r.add(e)
				if state := batches[e.Batch].Info().State; state != batch.InTransit {
					t.Errorf("%s: the batch is %s", e, state)
				}
			}
		})
		repo := scanOf(t, eng)
		rec := arrowgen.Ints(1, 800, 1)
		defer rec.Release()
		const all = 100
		for i := range all {
			if err := repo.Put(t.Context(), i, rec, in(tier.Host)); err != nil {
				t.Fatal(err)
			}
			b, _ := repo.Peek(i)
			batches[uint64(b.ID())] = b
		}
		host := eng.Reservations().Spaces().InTier(tier.Host)[0]
		if err := host.SetMarks(tier.Marks{Limit: 1, Trigger: 0.001, Stop: 0.00001}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		b, _ := repo.Peek(0)
		moveAlong(t, eng, b, eng.Reservations().Spaces().InTier(tier.GPU)[0].ID())
		if n := len(r.of(events.MoveEnded)); n != all+1 {
			t.Errorf("%d moves ended, want %d", n, all+1)
		}
		closeRepo(t, eng, repo)
	})
}

// TestMoveEventOfARefusedForm: a converter returns the rows of another batch. The batch stays where
// it is, and the end of the move has the error.
func TestMoveEventOfARefusedForm(t *testing.T) {
	t.Parallel()
	eng, r := telling(t, func(c *spillway.Config) { c.WriteAhead = -1 })
	b := putOn(t, eng, tier.Host, 500)
	rec := numberedRecord(0, 400, wordList(1, 10))
	other, err := eng.Mover().Ingest(t.Context(), rec, reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	if err := eng.Registry().Wrap(convert.ImageIn(tier.Host), convert.ImageIn(tier.GPU), func(inner convert.Func) convert.Func {
		return func(ctx context.Context, _ batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			return inner(ctx, other, r)
		}
	}); err != nil {
		t.Fatal(err)
	}
	err = eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.GPU))
	if !errors.Is(err, batch.ErrUnmovable) {
		t.Errorf("the move ended with %v", err)
	}
	want := []string{"move begun to gpu:0", "move ended to gpu:0, failed"}
	if got := moveLog(r, b); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if at := b.Info().Space.Kind; at != tier.Host {
		t.Errorf("the batch is in %s", at)
	}
	if err := other.Release(); err != nil {
		t.Error(err)
	}
	closeEngine(t, eng)
}
