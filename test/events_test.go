package test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// heard is all that an engine told.
type heard struct {
	mu  sync.Mutex
	all []spillway.Event
}

func (r *heard) add(e spillway.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, e)
}

// of returns the events of the kinds.
func (r *heard) of(kinds ...events.Kind) (some []spillway.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.all {
		if slices.Contains(kinds, e.Kind) {
			some = append(some, e)
		}
	}
	return some
}

// telling opens an engine of 1 MiB of GPU memory, 2 MiB of host memory, and a disk, whose events are
// heard.
func telling(t *testing.T, change func(*spillway.Config)) (*spillway.Engine, *heard) {
	t.Helper()
	r := new(heard)
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.Events = r.add
		if change != nil {
			change(c)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return eng, r
}

// putMany puts n batches of 80 kB for an operator.
func putMany(t *testing.T, eng *spillway.Engine, plan, operator string, n int) (*spillway.Plan, *spillway.Repository) {
	t.Helper()
	p, err := eng.Plan(plan)
	if err != nil {
		t.Fatal(err)
	}
	repo, err := p.Repository(operator, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		rec := arrowgen.Ints(1, 10_000, 1)
		if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
			t.Fatal(err)
		}
		rec.Release()
	}
	return p, repo
}

// What an engine says of its moves, copies and waits is what its figures count, to the byte; and each
// move says which plan and operator it was for.
func TestEventsAgreeWithStats(t *testing.T) {
	t.Parallel()
	eng, r := telling(t, nil)
	_, build := putMany(t, eng, "query", "build", 40)
	_, probe := putMany(t, eng, "query-2", "probe", 20)
	for h, err := range build.Drain(t.Context(), 0, tier.GPU) {
		if err != nil {
			t.Fatal(err)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := probe.Close(t.Context()); err != nil { // never used again
		t.Error(err)
	}
	closeEngine(t, eng)

	type key struct {
		from, to tier.ID
		plan     string
	}
	bytes, work, batches := map[key]int64{}, map[string]int64{}, int64(0)
	begun := map[uint64]int{}
	for _, e := range r.of(events.MoveBegun, events.MoveEnded) {
		if e.At.IsZero() || e.Plan == "" || e.Operator == "" || e.Batch == 0 || !e.From.Valid() {
			t.Fatalf("it is not said what a move is for: %+v", e)
		}
		if e.Kind == events.MoveBegun {
			begun[e.Batch]++
			continue
		}
		if e.Err == nil {
			if begun[e.Batch] == 0 {
				t.Fatalf("a move has ended that never began: %s", e)
			}
			begun[e.Batch]--
			batches++
			bytes[key{e.From, e.To, ""}] += e.Bytes
			work[e.Plan+"/"+e.Operator] += e.Bytes
		}
	}
	stats := eng.Stats()
	for _, e := range stats.Edges {
		if got := bytes[key{e.From, e.To, ""}]; got != e.Bytes {
			t.Errorf("from %s to %s: %d bytes were told, %d counted", e.From, e.To, got, e.Bytes)
		}
		batches -= e.Batches
		if e.Moving > e.Busy || e.Batches > e.Copies && e.Moving < e.Longest || e.Batches == e.Copies && e.Moving != 0 {
			t.Errorf("from %s to %s: %v of %v moved bytes", e.From, e.To, e.Moving, e.Busy)
		}
		if e.Bytes > 0 && (e.P50 <= 0 || e.P99 < e.P50 || e.Longest < e.P50) {
			t.Errorf("from %s to %s: half within %v, 99 %% within %v, the longest %v", e.From, e.To, e.P50, e.P99, e.Longest)
		}
	}
	if batches != 0 {
		t.Errorf("%d moves are not counted", batches)
	}
	var unread int64
	for _, w := range stats.Work {
		if got := work[w.Plan+"/"+w.Operator]; got != w.Down.Bytes+w.Up.Bytes {
			t.Errorf("%s, %s: %d bytes were told, %d and %d counted", w.Plan, w.Operator, got, w.Down.Bytes, w.Up.Bytes)
		}
		switch {
		case w.Operator == "build" && w.Unread != 0:
			t.Errorf("%d bytes of batches that were drained were never used", w.Unread)
		case w.Operator == "probe":
			unread = w.Unread
		}
		var reasons int64
		for _, n := range w.ByReason {
			reasons += n
		}
		if reasons != w.Down.Bytes+w.Up.Bytes {
			t.Errorf("%+v", w)
		}
	}
	if unread == 0 {
		t.Error("batches that were spilled and closed unread are not counted")
	}
	waits := r.of(events.WaitEnded)
	if int64(len(waits)) != stats.Waits.Count || len(r.of(events.WaitBegun)) != len(waits) || len(waits) == 0 {
		t.Errorf("%d waits began, %d ended, %d are counted", len(r.of(events.WaitBegun)), len(waits), stats.Waits.Count)
	}
	for _, w := range waits { // those of Put
		if w.Operator == "" || w.Bytes == 0 || w.Took <= 0 || !w.To.Valid() {
			t.Errorf("it is not said what a wait was for: %+v", w)
		}
	}
	for _, text := range []string{"gpu:0", "disk:0", "query-2", "probe:0", "down and never used", "half within", "waits for room: "} {
		if !strings.Contains(stats.String(), text) {
			t.Errorf("the figures as text lack %q:\n%s", text, stats)
		}
	}
}

// Copies are told when they are made, used, and dropped.
func TestCopyEvents(t *testing.T) {
	t.Parallel()
	eng, r := telling(t, func(c *spillway.Config) { c.WriteAhead = -1 })
	b := putOn(t, eng, tier.Disk, 5000)
	up := func(to tier.Kind) {
		t.Helper()
		if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(to)); err != nil {
			t.Fatal(err)
		}
	}
	up(tier.GPU)  // leaves a copy on the disk
	up(tier.Disk) // onto it
	up(tier.GPU)  // leaves another
	x := eng.Explain(b)
	if x.Space.Kind != tier.GPU || x.Why != convert.ReasonWork || !slices.Contains(x.Copies, tier.ID{Kind: tier.Disk}) || time.Since(time.Unix(0, x.Since)).Abs() > time.Minute {
		t.Errorf("%+v", x)
	}
	if !strings.Contains(x.String(), "a copy is in disk:0") || !strings.Contains(x.String(), "came for work at") {
		t.Error(x)
	}
	if err := b.Drop(); err != nil {
		t.Error(err)
	}
	closeEngine(t, eng)
	var kinds []events.Kind
	for _, e := range r.of(events.CopyMade, events.CopyUsed, events.CopyDropped) {
		if e.To.Kind != tier.Disk || e.Batch != uint64(x.ID) || e.Bytes == 0 {
			t.Errorf("%+v", e)
		}
		kinds = append(kinds, e.Kind)
	}
	if !slices.Equal(kinds, []events.Kind{events.CopyMade, events.CopyUsed, events.CopyMade, events.CopyDropped}) {
		t.Errorf("%v", kinds)
	}
}

// Corrupt bytes are told with the batch, and a disk that fails, and is well again, too.
func TestDiskEvents(t *testing.T) {
	t.Parallel()
	var files *faultfs.FS
	eng, r := telling(t, func(c *spillway.Config) {
		files = faultfs.New(disk.OS(), 1)
		c.Disks[0].FS = files
		c.WriteAhead = -1
	})
	b := putOn(t, eng, tier.Disk, 5000)
	gpu := reservation.AnyInTier(tier.GPU)
	remove := files.Add(faultfs.Rule{Ops: []string{"read"}, Effect: faultfs.BitFlip()})
	if err := eng.Mover().Move(t.Context(), b, gpu); !errors.Is(err, convert.ErrCorrupt) {
		t.Fatal(err)
	}
	remove()
	remove = files.Add(faultfs.Rule{Ops: []string{"read"}, Effect: faultfs.Fail(syscall.EIO)})
	if err := eng.Mover().Move(t.Context(), b, gpu); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	remove()
	if err := eng.Mover().Move(t.Context(), b, gpu); err != nil {
		t.Fatal(err)
	}
	if err := b.Drop(); err != nil {
		t.Error(err)
	}
	closeEngine(t, eng)
	if n := eng.Stats().Corrupt; n != 1 {
		t.Errorf("corruption is counted %d times", n)
	}
	var kinds []events.Kind
	for _, e := range r.of(events.Corrupt, events.DiskFailing, events.DiskWell) {
		if e.To != (tier.ID{Kind: tier.Disk}) {
			t.Errorf("%+v", e)
		}
		if e.Kind == events.Corrupt {
			var c *convert.CorruptError
			if !errors.As(e.Err, &c) || c.Batch != b.ID() || c.Volume == "" {
				t.Errorf("the error is %v", e.Err)
			}
			of := events.Origin{Plan: "settings", Operator: "scan"}
			noted(t, e, spillway.Event{Kind: e.Kind, Origin: of, Batch: uint64(b.ID()), To: e.To, Err: convert.ErrCorrupt})
		}
		kinds = append(kinds, e.Kind)
	}
	if !slices.Equal(kinds, []events.Kind{events.Corrupt, events.DiskFailing, events.DiskWell}) {
		t.Errorf("%v", kinds)
	}
}

// Tasks are told with how long they waited and took; their waits for room are theirs, in the figures,
// too. One that runs out of memory for good says who holds the space.
func TestTaskEvents(t *testing.T) {
	t.Parallel()
	eng, r := telling(t, func(c *spillway.Config) { c.Limits.Admission.MaxAttempts = 2 })
	_, repo := putMany(t, eng, "query", "build", 30)
	claim, err := repo.Claim(t.Context(), 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := eng.RunTask(t.Context(), spillway.Task{Operator: "sort", Inputs: []*spillway.Claim{claim}, Output: 300_000},
		func(ctx context.Context, _ *spillway.Grant, _ []*spillway.Handle) error {
			return waitingPut(ctx, t, eng, r, repo)
		}); err != nil {
		t.Fatal(err)
	}
	gpu := gpuOf(t, eng)
	held, err := eng.Reservations().Reserve(t.Context(), reservation.Specific(gpu.ID()), 200_000, &reservation.Options{Owner: reservation.NewOwner("hoarder")})
	if err != nil {
		t.Fatal(err)
	}
	fails := fmt.Errorf("the task's own: %w", &tier.NoSpaceError{Space: gpu.ID(), Requested: 8192})
	err = eng.RunTask(t.Context(), spillway.Task{Operator: "hash", Output: 4096}, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return fails })
	for _, part := range []string{"gpu:0", "hoarder", "batches of plan \"query\", operator build:0", "give the task less input, or the space more memory"} {
		if err == nil || !errors.Is(err, tier.ErrNoSpace) || !strings.Contains(err.Error(), part) || strings.Contains(err.Error(), "\n") {
			t.Fatalf("the error lacks %q: %v", part, err)
		}
	}
	all, ok := eng.Holders(gpu.ID())
	var batches, reserved int64
	for _, h := range all.Batches {
		if h.Plan == "query" && h.Operator == "build" && h.What == "batch" {
			batches += h.Bytes
		}
	}
	for _, h := range all.Holders {
		if h.Owner == "hoarder" {
			reserved += h.Bytes
		}
	}
	if !ok || batches+reserved+all.Engine != all.Used || reserved == 0 {
		t.Errorf("of %d used bytes batches have %d and the reservation %d: %s", all.Used, batches, reserved, all)
	}
	if err := held.Release(); err != nil {
		t.Error(err)
	}
	closeEngine(t, eng)
	var tasks []string
	ids := map[uint64]int{}
	waits := 0
	for _, e := range r.of(events.Kinds()...) {
		if (e.Task != "") != (e.TaskID != 0) {
			t.Errorf("of task %q, with the id %d: %s", e.Task, e.TaskID, e)
		}
		if e.Kind == events.WaitEnded && e.Task == "sort" {
			waits++
		}
	}
	if waits != 1 {
		t.Errorf("the task put once, and %d waits are its", waits)
	}
	for _, e := range r.of(events.TaskBegun, events.TaskEnded) {
		ids[e.TaskID]++
		tasks = append(tasks, fmt.Sprint(e.Task, " ", e.Kind, " ", e.Err != nil))
	}
	want := []string{"sort task begun false", "sort task ended false", "hash task begun false", "hash task ended true", "hash task begun false", "hash task ended true"}
	if !slices.Equal(tasks, want) || !maps.Equal(ids, map[uint64]int{1: 2, 2: 2, 3: 2}) {
		t.Errorf("%q, of the attempts %v", tasks, ids)
	}
}

// Events of what a program calls have the context of its call; what the engine does by itself has one
// without the program's values. None is nil.
func TestEventsHaveTheCallsContext(t *testing.T) {
	t.Parallel()
	eng, r := telling(t, nil)
	type key struct{}
	_, repo := putMany(t, eng, "query", "build", 30)
	ctx := context.WithValue(t.Context(), key{}, "the program's")
	if err := eng.RunTask(ctx, spillway.Task{Operator: "sort"}, func(ctx context.Context, _ *spillway.Grant, _ []*spillway.Handle) error {
		for range 30 {
			rec := arrowgen.Ints(1, 10_000, 1)
			err := repo.Put(ctx, 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU)))
			rec.Release()
			if err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	b, _ := repo.Peek(0)
	for _, to := range []tier.Kind{tier.Disk, tier.Host} {
		if err := eng.Mover().Move(ctx, b, reservation.AnyInTier(to)); err != nil {
			t.Fatal(err)
		}
	}
	closeEngine(t, eng)
	called, own := map[events.Kind]int{}, map[events.Kind]int{}
	for _, e := range r.of(events.Kinds()...) {
		if e.Context == nil {
			t.Fatalf("%s has no context", e)
		}
		of := own
		if e.Context.Value(key{}) != nil {
			of = called
		}
		of[e.Kind]++
		if (e.Kind == events.WaitBegun || e.Kind == events.WaitEnded) && (e.Task != "") != (e.TaskID != 0) {
			t.Errorf("%s has the id %d", e, e.TaskID)
		}
	}
	if called[events.MoveBegun] < 2 || called[events.MoveEnded] < 2 || called[events.WaitEnded] == 0 || called[events.WaitBegun] != called[events.WaitEnded] ||
		called[events.TaskBegun] != 1 || called[events.TaskEnded] != 1 || own[events.MoveBegun] == 0 || own[events.MoveEnded] == 0 {
		t.Errorf("with the call's context are %v, without %v", called, own)
	}
}

// TestExplanationOfWays: what a move would cost is not said as if it had been one.
func TestExplanationOfWays(t *testing.T) {
	gpu := tier.ID{Kind: tier.GPU}
	for want, way := range map[string]spillway.Way{
		"a move to gpu:0 would have to wait for room; its speed is not known yet": {To: gpu},
		"a move to gpu:0 would not have to wait; its speed is not known yet":      {To: gpu, Room: true},
		"a move to gpu:0 would have to wait for room, and then take about 2ms":    {To: gpu, Took: 2 * time.Millisecond},
		"a move to gpu:0 would take about 2ms":                                    {To: gpu, Took: 2 * time.Millisecond, Room: true},
		"a move to gpu:0 would have to wait for room, and then move no bytes":     {To: gpu, Copy: true},
		"a move to gpu:0 would move no bytes":                                     {To: gpu, Copy: true, Room: true},
	} {
		x := spillway.Explanation{Info: batch.Info{Space: tier.ID{Kind: tier.Host}, Why: "put"}, Ways: []spillway.Way{way}}
		if got := x.String(); !strings.HasSuffix(got, "; "+want) {
			t.Errorf("%q does not end with %q", got, want)
		}
	}
}

// waitingPut puts a batch on a disk that is full until the wait has begun.
func waitingPut(ctx context.Context, t *testing.T, eng *spillway.Engine, r *heard, repo *spillway.Repository) error {
	disk, _ := eng.Reservations().Spaces().ByID(tier.ID{Kind: tier.Disk})
	free := full(t, disk, eng)
	before := len(r.of(events.WaitBegun))
	go func() {
		for len(r.of(events.WaitBegun)) == before && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		free()
	}()
	rec := arrowgen.Ints(1, 40_000, 1)
	defer rec.Release()
	return repo.Put(ctx, 0, rec, in(tier.Disk))
}

// A batch that was never moved, one of another engine, and one that is gone, can be explained, too.
func TestExplain(t *testing.T) {
	t.Parallel()
	eng, _ := telling(t, nil)
	b := putOn(t, eng, tier.Host, 5000)
	x := eng.Explain(b)
	if x.Why != "put" || x.Space.Kind != tier.Host || x.State != batch.Idle || len(x.Ways) != 1 || x.Ways[0].To.Kind != tier.GPU || !x.Ways[0].Room || x.Ways[0].Took != 0 {
		t.Errorf("%+v", x)
	}
	for range 2 {
		for _, k := range []tier.Kind{tier.GPU, tier.Host} {
			if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if x = eng.Explain(b); !x.Ways[0].Copy && x.Ways[0].Took <= 0 || !strings.Contains(x.String(), "; a move to gpu:0 would ") {
		t.Errorf("%+v: %s", x, x)
	}
	other, _ := telling(t, nil)
	if x = other.Explain(b); !x.Foreign || x.Ways != nil || !strings.Contains(x.String(), "is another engine's: there it is") {
		t.Errorf("of another engine: %+v: %s", x, x)
	}
	closeEngine(t, other)
	if x = eng.Explain(nil); x.State != batch.Released || !strings.Contains(x.String(), "is gone") {
		t.Errorf("of nil: %+v: %s", x, x)
	}
	if err := b.Drop(); err != nil {
		t.Error(err)
	}
	if x = eng.Explain(b); x.Space.Valid() || !strings.Contains(x.String(), "is gone") {
		t.Errorf("%+v: %s", x, x)
	}
	closeEngine(t, eng)
}
