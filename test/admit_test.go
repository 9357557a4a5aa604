package test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/apache/arrow-go/v18/arrow/array"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// openTasks opens an engine with a repository of so many records.
func openTasks(t *testing.T, gpu, host int64, records, rows int) (*spillway.Engine, *repository.Repository) {
	t.Helper()
	eng, _ := openSmall(t, gpu, host)
	plan, err := eng.Plan("tasks")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("join", 0)
	if err != nil {
		t.Fatal(err)
	}
	putRecords(t, repo, 0, records, rows)
	return eng, repo
}

// putRecords puts records whose first numbers are [from, to).
func putRecords(t testing.TB, repo *repository.Repository, from, to, rows int) {
	t.Helper()
	for n := from; n < to; n++ {
		words := wordList(uint64(n%3), 300) // some share theirs
		if err := repo.Put(t.Context(), 0, numberedRecord(int64(n), rows, words)); err != nil {
			t.Fatal(err)
		}
	}
}

// closeClean closes an engine of which nothing may be left.
func closeClean(t *testing.T, eng *spillway.Engine) {
	t.Helper()
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
	for _, s := range eng.Stats().Spaces {
		if s.Used() != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
}

// mustClaim claims that many batches, also while the monitor moves some of them.
func mustClaim(t testing.TB, repo *repository.Repository, count int) *repository.Claim {
	t.Helper()
	for {
		c, err := repo.Claim(t.Context(), 0, count)
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Batches()) == count {
			return c
		}
		if err := c.Restore(); err != nil {
			t.Fatal(err)
		}
		runtime.Gosched()
	}
}

func mustClaimAll(t testing.TB, repo *repository.Repository) *repository.Claim {
	t.Helper()
	c, err := repo.ClaimAll(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// numberOf opens what a handle holds, and returns the number that it was put with.
func numberOf(ctx context.Context, eng *spillway.Engine, h *spillway.Handle, rows int) (int, error) {
	rec, err := eng.Mover().Record(ctx, h)
	if err != nil {
		return 0, err
	}
	defer rec.Release()
	n := rec.Column(0).(*array.Int64).Value(0)
	return int(n), convert.Equal(numberedRecord(n, rows, wordList(uint64(n%3), 300)), rec)
}

// TestTasksOnMoreThanTheGPU runs tasks over several times the GPU's and the host's memory,
// while more is put, with an estimate that is far too low at first: they take six times
// their input. All complete, every batch is processed by a task that succeeded, once and
// with its bytes, what the estimator says in the end is enough, and the books end at zero.
func TestTasksOnMoreThanTheGPU(t *testing.T) {
	t.Parallel()
	const records, rows, times = 120, 1200, 6
	eng, repo := openTasks(t, 1<<20, 1<<20, records/2, rows)
	var total atomic.Int64
	for b := range repo.Batches(0) {
		total.Add(b.Info().Bytes)
	}
	if total.Load() < 2<<20 {
		t.Fatalf("%d bytes are too few to fill both memories", total.Load())
	}
	var mu sync.Mutex
	processed := make(map[int]int)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer repo.CloseInput()
		putRecords(t, repo, records/2, records, rows)
	})
	var attempts, tasks atomic.Int64
	for range 4 {
		wg.Go(func() {
			for {
				c, err := repo.Claim(t.Context(), 0, 2, repository.WaitClaims())
				if errors.Is(err, io.EOF) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				tasks.Add(1)
				var input int64
				var seen []int
				err = eng.RunTask(t.Context(), spillway.Task{Operator: "join", Inputs: []*repository.Claim{c}},
					func(ctx context.Context, g *spillway.Grant, handles []*spillway.Handle) error {
						attempts.Add(1)
						seen, input = nil, 0
						for i, h := range handles {
							if h.Batch() != c.Batches()[i] || h.Space() != g.Reservation().Space() {
								return fmt.Errorf("handle %d holds batch %d in %s", i, h.Batch().ID(), h.Space().ID())
							}
							input += h.Batch().Info().Bytes
						}
						var err error
						var bufs []*tier.Buffer
						for range 4 * times { // in pieces, for the GPU's memory is
							var b *tier.Buffer
							if b, err = g.Alloc(input / 4); err != nil {
								break
							}
							bufs = append(bufs, b)
						}
						for _, h := range handles {
							if err != nil {
								break
							}
							var n int
							n, err = numberOf(ctx, eng, h, rows)
							seen = append(seen, n)
						}
						for _, b := range bufs {
							err = errors.Join(err, b.Release())
						}
						g.Produced(input / 2)
						return err
					})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for _, n := range seen {
					processed[n]++
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for n := range records {
		if processed[n] != 1 {
			t.Errorf("batch %d was processed %d times", n, processed[n])
		}
	}
	s := eng.Admitter().Stats()
	if attempts.Load() <= tasks.Load() || s.Retried == 0 || s.Running != 0 || s.Waiting != 0 {
		t.Errorf("%d attempts at %d tasks: %+v", attempts.Load(), tasks.Load(), s)
	}
	output, overhead := eng.Admitter().Estimator().Estimate("join", 1_000_000)
	if output < 490_000 || output > 510_000 || output+overhead < times*1_000_000-10_000 || output+overhead > 7_500_000 {
		t.Errorf("for a million bytes the estimate is %d and %d", output, overhead)
	}
	closeClean(t, eng)
}

// TestTaskInputsAlreadyThere: inputs on the GPU are not reserved again, those elsewhere
// are, to the byte; bringing them up takes no more.
func TestTaskInputsAlreadyThere(t *testing.T) {
	eng, repo := openTasks(t, 4<<20, 4<<20, 4, 1000)
	gpu := eng.Reservations().Spaces().InTier(tier.GPU)[0]
	batches := mustClaimAll(t, repo)
	for i, b := range batches.Batches() {
		k := []tier.Kind{tier.GPU, tier.Host, tier.Disk, tier.GPU}[i]
		if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
			t.Fatal(err)
		}
	}
	there, missing := eng.Mover().Charges(gpu, batches.Batches()...)
	if there == 0 || missing == 0 {
		t.Fatalf("%d are there, %d missing", there, missing)
	}
	task := spillway.Task{Inputs: []*repository.Claim{batches}, Output: 1000, Overhead: admission.None}
	err := eng.RunTask(t.Context(), task, func(_ context.Context, g *spillway.Grant, handles []*spillway.Handle) error {
		if want := gpu.Charge(missing + 1000); g.Need() != want || g.Reservation().Bytes() != want {
			t.Errorf("%d bytes are needed and %d reserved, want %d", g.Need(), g.Reservation().Bytes(), want)
		}
		if g.Reservation().Unused() < 1000 || g.Reservation().Unused() > gpu.Charge(1000) {
			t.Errorf("%d bytes are left for the output", g.Reservation().Unused())
		}
		if u := gpu.State().Usage; u.Used() != there+missing+g.Reservation().Unused() {
			t.Errorf("%+v are in use, %d of them by inputs", u, there+missing)
		}
		if g.Peak() != 0 {
			t.Errorf("the inputs count for the peak: %d", g.Peak())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if repo.Total() != 0 {
		t.Errorf("%d inputs are left", repo.Total())
	}
	closeClean(t, eng)
}

// TestTaskRestoresInPlace: whatever ends a task, its inputs stand where they stood, whole
// and free for others and the monitor.
func TestTaskRestoresInPlace(t *testing.T) {
	const records, rows = 6, 300
	other := errors.New("another error")
	for name, f := range map[string]func(*spillway.Grant) error{
		"out of memory":       func(g *spillway.Grant) error { _, err := g.Alloc(g.Reservation().Bytes() + 1); return err },
		"panic of allocators": func(*spillway.Grant) error { panic(&tier.NoSpaceError{}) },
		"another error":       func(*spillway.Grant) error { return other },
		"panic":               func(*spillway.Grant) error { panic(other) },
	} {
		t.Run(name, func(t *testing.T) {
			eng, repo := openTasks(t, 1<<20, 1<<20, records, rows)
			first, second := mustClaim(t, repo, 2), mustClaim(t, repo, 2)
			runs := 0
			err := func() (err error) {
				defer func() {
					if p := recover(); p != nil {
						err = p.(error)
					}
				}()
				return eng.RunTask(t.Context(), spillway.Task{Inputs: []*repository.Claim{second, first}},
					func(ctx context.Context, g *spillway.Grant, handles []*spillway.Handle) error {
						runs++
						for i, want := range []int{2, 3, 0, 1} {
							if n, err := numberOf(ctx, eng, handles[i], rows); n != want || err != nil {
								t.Errorf("run %d: input %d is %d: %v", runs, i, n, err)
							}
						}
						return f(g)
					})
			}()
			oom := name == "out of memory" || name == "panic of allocators"
			if oom != outOfAttempts(err) || !oom && !errors.Is(err, other) {
				t.Errorf("%v", err)
			}
			switch {
			case name == "out of memory": // until it was given all that there is
				if runs < 2 || runs >= 10 {
					t.Errorf("%d runs", runs)
				}
			case oom && runs != 10 || !oom && runs != 1:
				t.Errorf("%d runs", runs)
			}
			putRecords(t, repo, records, records+1, rows)
			for b := range repo.Batches(0) {
				if info := b.Info(); info.Active != 0 || info.Pending != 0 {
					t.Errorf("%+v", info)
				}
			}
			next := 0
			for h, err := range repo.Drain(t.Context(), 0, tier.Host) {
				if err != nil {
					t.Fatal(err)
				}
				if n, err := numberOf(t.Context(), eng, h, rows); n != next || err != nil {
					t.Errorf("in place %d is %d: %v", next, n, err)
				}
				next++
				if err := h.Close(); err != nil {
					t.Error(err)
				}
			}
			if next != records+1 {
				t.Errorf("%d batches are left", next)
			}
			closeClean(t, eng)
		})
	}
}

// TestTaskThatCannotFit: inputs that are larger than any GPU are refused at once.
func TestTaskThatCannotFit(t *testing.T) {
	eng, repo := openTasks(t, 256<<10, 4<<20, 12, 1000)
	c := mustClaimAll(t, repo)
	err := eng.RunTask(t.Context(), spillway.Task{Operator: "join", Inputs: []*repository.Claim{c}},
		func(context.Context, *spillway.Grant, []*spillway.Handle) error { t.Error("it ran"); return nil })
	var ee *reservation.ExceededError
	if !errors.As(err, &ee) || ee.Requested <= ee.Limit || outOfAttempts(err) {
		t.Errorf("%v", err)
	}
	if repo.Len(0) != 12 {
		t.Errorf("%d inputs are left", repo.Len(0))
	}
	b, err := repo.Take(t.Context(), 0, batch.Idle, repository.NoWait()) // it is free again
	if b == nil || err != nil {
		t.Fatalf("%v, %v", b, err)
	}
	if err := b.Discard(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestAdmissionMakesRoom: a task is admitted to a GPU that is full of batches at rest,
// because the monitor hears of what it waits for.
func TestAdmissionMakesRoom(t *testing.T) {
	eng, repo := openTasks(t, 1<<20, 4<<20, 30, 1000)
	gpu := eng.Reservations().Spaces().InTier(tier.GPU)[0]
	if gpu.State().Used() < gpu.Capacity/2 {
		t.Fatalf("%d bytes are used", gpu.State().Used())
	}
	g, err := eng.Admit(t.Context(), spillway.Estimate{Output: 800 << 10, Overhead: admission.None})
	if err != nil {
		t.Fatal(err)
	}
	if n := g.Reservation().Bytes(); n != 800<<10 {
		t.Errorf("%d bytes are reserved", n)
	}
	if err := g.Done(admission.Measured{}); err != nil {
		t.Fatal(err)
	}
	if repo.Total() != 30 {
		t.Errorf("%d batches are left", repo.Total())
	}
	closeClean(t, eng)
}

// TestLargeTaskBesideAFullGPU: a task larger than the threshold waits for the GPU in which a task
// runs, also if nothing can leave the other GPU, in which none runs.
func TestLargeTaskBesideAFullGPU(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		eng := openMarked(t, 64*mib, func(c *spillway.Config) {
			c.GPUs = append(c.GPUs, c.GPUs[0])
			c.HostMemory, c.StallTimeout = spillway.Bytes(8*mib), time.Second
			c.Disks = []spillway.DiskConfig{}
		})
		id := tier.ID{Kind: tier.GPU, Ordinal: 1}
		var all []*batch.Batch
		for i := range 20 {
			r, err := eng.Reserve(t.Context(), reservation.Specific(id), mib)
			if err != nil {
				t.Fatal(err)
			}
			buf, err := r.Alloc(mib)
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Release(); err != nil {
				t.Fatal(err)
			}
			b, err := eng.NewBatch(batch.NewImage(&batch.Descriptor{Rows: 1, Body: mib}, buf, buf.Space()))
			if err != nil {
				t.Fatal(err)
			}
			b.SetPlace(batch.Place{Plan: 1, Seq: uint64(i)})
			all = append(all, b)
		}
		running, err := eng.Admit(t.Context(), spillway.Estimate{Output: 10 * mib, Overhead: admission.None})
		if err != nil {
			t.Fatal(err)
		}
		if s := running.Reservation().Space().ID(); s == id {
			t.Fatalf("it runs in %s", s)
		}
		go func() {
			time.Sleep(time.Minute)
			if err := running.Done(admission.Measured{}); err != nil {
				t.Error(err)
			}
		}()
		large, err := eng.Admit(t.Context(), spillway.Estimate{Output: 60 * mib, Overhead: admission.None})
		if err != nil {
			t.Error(err)
		} else if err := large.Done(admission.Measured{}); err != nil {
			t.Error(err)
		}
		time.Sleep(2 * time.Minute)
		for _, b := range all {
			if err := b.Drop(); err != nil {
				t.Error(err)
			}
		}
		closeClean(t, eng)
	})
}

// TestCloseWithTasks: tasks that wait, and one that runs, do not hold up a close, and
// nothing is left when they have ended.
func TestCloseWithTasks(t *testing.T) {
	eng, repo := openTasks(t, 1<<20, 1<<20, 8, 300)
	started, goOn := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	run := func(f func(context.Context, *spillway.Grant, []*spillway.Handle) error) {
		c := mustClaim(t, repo, 2)
		wg.Go(func() {
			err := eng.RunTask(t.Context(), spillway.Task{Inputs: []*repository.Claim{c}, Output: 800 << 10}, f) // one at a time
			if err != nil && !errors.Is(err, tier.ErrClosed) {
				t.Error(err)
			}
		})
	}
	run(func(context.Context, *spillway.Grant, []*spillway.Handle) error {
		close(started)
		<-goOn
		return nil
	})
	<-started
	for range 2 {
		run(func(context.Context, *spillway.Grant, []*spillway.Handle) error { return errors.New("it ran") })
	}
	for eng.Admitter().Stats().Waiting < 2 {
		runtime.Gosched()
	}
	mustClaim(t, repo, 1) // which never ends
	var leak *spillway.LeakError
	if err := eng.Close(); !errors.As(err, &leak) {
		t.Errorf("closing while a task runs: %v", err)
	}
	close(goOn)
	wg.Wait()
	for _, s := range eng.Stats().Spaces {
		if s.Used() != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
}

// TestAdmissionConfig: the engine's configuration reaches its admission, and is checked.
func TestAdmissionConfig(t *testing.T) {
	if err := (spillway.Config{Limits: spillway.Limits{Admission: admission.Rules{Threshold: 2}}}).Validate(); err == nil {
		t.Error("a threshold of 2 is valid")
	}
}

// TestTaskWhoseInputIsGone: a task fails with the error of the input that was dropped.
func TestTaskWhoseInputIsGone(t *testing.T) {
	eng, repo := openTasks(t, 4<<20, 4<<20, 2, 1000)
	c := mustClaim(t, repo, 2)
	if err := c.Batches()[0].Drop(); err != nil {
		t.Fatal(err)
	}
	task := spillway.Task{Inputs: []*repository.Claim{c}, Output: 1000, Overhead: admission.None}
	err := eng.RunTask(t.Context(), task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil })
	if gone, ok := errors.AsType[*batch.StateError](err); !ok || gone.Status != batch.MissingData {
		t.Errorf("it ended with %v", err)
	}
	closeClean(t, eng)
}

// TestTaskWhoseInputLeaves: an input that is on its way out of the GPU when the task is
// admitted is reserved for like one that is not there, so that it is brought back without
// a further try.
func TestTaskWhoseInputLeaves(t *testing.T) {
	eng, repo := openTasks(t, 4<<20, 4<<20, 2, 1000)
	c := mustClaim(t, repo, 2)
	leaving := c.Batches()[1]
	if err := eng.Mover().Move(t.Context(), leaving, reservation.AnyInTier(tier.GPU)); err != nil {
		t.Fatal(err)
	}
	tr, err := leaving.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	left := make(chan error)
	go func() {
		for eng.Admitter().Stats().Running == 0 {
			runtime.Gosched()
		}
		r, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.Host), 2<<20)
		if err != nil {
			left <- errors.Join(err, tr.Abort())
			return
		}
		move, err := eng.Registry().Lookup(convert.Form{Type: tr.Payload().Type(), Kind: tr.Payload().Space().Kind()}, convert.ImageIn(tier.Host))
		var p batch.Payload
		if err == nil {
			p, err = move(t.Context(), tr.Payload(), r)
		}
		if err == nil {
			err = tr.Commit(p, false)
		} else {
			err = errors.Join(err, tr.Abort())
		}
		left <- errors.Join(err, r.Release())
	}()
	task := spillway.Task{Inputs: []*repository.Claim{c}, Output: 1000, Overhead: admission.None}
	err = eng.RunTask(t.Context(), task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil })
	if err := errors.Join(err, <-left); err != nil {
		t.Error(err)
	}
	if s := eng.Admitter().Stats(); s.Retried != 0 {
		t.Errorf("it was tried again: %+v", s)
	}
	closeClean(t, eng)
}

// TestTasksOnCompressedInputs: what a task needs does not depend on how small its inputs are on
// disk. Equal tasks run once each, also where half of the inputs are compressed.
func TestTasksOnCompressedInputs(t *testing.T) {
	const tasks = 40
	r := openRefuser(t, 1, 1, convert.CodecZstd)
	words := wordList(1, 10)
	for n := range int64(tasks) {
		if err := r.repo.Put(t.Context(), 0, numberedRecord(n, 2000, words), in([]tier.Kind{tier.Disk, tier.Host}[n%2])); err != nil {
			t.Fatal(err)
		}
	}
	calls, packed := 0, 0
	for range tasks {
		c := mustClaim(t, r.repo, 1)
		b := c.Batches()[0]
		body := b.Info().Descriptor.Body
		if b.Info().Payload.Type() == batch.CompressedImage && b.Info().Bytes < body {
			packed++
		}
		err := r.RunTask(t.Context(), spillway.Task{Operator: "sort", Inputs: []*repository.Claim{c}},
			func(_ context.Context, g *spillway.Grant, _ []*spillway.Handle) error {
				calls++
				g.Produced(body)
				for range 2 { // the output and a copy, as is assumed of an unknown task
					buf, err := g.Alloc(body)
					if err != nil {
						return err
					}
					defer buf.Release()
				}
				return nil
			})
		if err != nil {
			t.Fatal(err)
		}
	}
	if packed != tasks/2 {
		t.Errorf("%d inputs were compressed, want %d", packed, tasks/2)
	}
	if calls != tasks {
		t.Errorf("%d calls for %d tasks", calls, tasks)
	}
}

// outOfAttempts reports whether a task ran out of memory as often as it may.
func outOfAttempts(err error) bool {
	_, is := errors.AsType[*admission.AttemptsError](err)
	return is
}
