package test

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
)

// TestStatsOfAllParts: the engine's numbers hold those of each part: a batch that waiting demand
// moves to the disk, a permit, a task that runs and one that waits.
func TestStatsOfAllParts(t *testing.T) {
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
		HostMemory: spillway.Bytes(1 << 20),
		Disks:      []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(16 << 20)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer closeEngine(t, eng)
	if err := eng.Admitter().SetThreads(1); err != nil {
		t.Fatal(err)
	}
	fresh := eng.Stats()
	if fresh.Monitor.Moves != 0 || fresh.Admission.Admitted != 0 || fresh.Permits.HeldSlots != 0 || fresh.Waits.Count != 0 {
		t.Errorf("a new engine has done %+v", fresh)
	}
	repo := scanOf(t, eng)
	if err := repo.Put(t.Context(), 0, numberedRecord(1, 10_000, wordList(1, 10)), repository.WithPlacement(reservation.AnyInTier(tier.Host))); err != nil {
		t.Fatal(err)
	}
	b, _ := repo.Peek(0)
	size := b.Info().Bytes
	room, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.Host), 700_000) // the batch must leave
	if err != nil {
		t.Fatal(err)
	}
	defer release(t, room)
	for b.Info().Space.Kind != tier.Disk || eng.Stats().Monitor.Bytes == 0 {
		runtime.Gosched()
	}
	held, err := eng.Permits().TryAcquire(permit.Request{Bytes: map[string]int64{permit.Host: 1000}, Spill: true})
	if err != nil {
		t.Fatal(err)
	}
	grant, err := eng.Admit(t.Context(), spillway.Estimate{Output: 1000})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	second := make(chan error)
	go func() { _, err := eng.Admit(ctx, spillway.Estimate{Output: 1000}); second <- err }()
	for eng.Stats().Admission.Waiting == 0 {
		runtime.Gosched()
	}

	s := eng.Stats()
	if m := s.Monitor; m.Moves != 1 || m.Bytes != size || m.Steps == 0 {
		t.Errorf("the monitor has done %+v, want a move of %d bytes", m, size)
	}
	if s.Waits.Count != 1 || s.Waits.Total != s.Waits.Max {
		t.Errorf("%d waits have ended, want 1", s.Waits.Count)
	}
	if a := s.Admission; a.Running != 1 || a.Waiting != 1 || a.Admitted != 1 {
		t.Errorf("of the tasks it says %+v", a)
	}
	host := permit.BudgetStats{Name: permit.Host, Total: 512 << 20, Held: 1000}
	if p := s.Permits; p.HeldSlots != 1 || len(p.Budgets) != 2 || p.Budgets[1] != host {
		t.Errorf("of the permits it says %+v", p)
	}
	for i, space := range s.Spaces {
		of := eng.Spaces()[i].State()
		if space.Limit != of.Limit || space.Trigger != of.Trigger || space.Stop != of.Stop || space.Stop == 0 {
			t.Errorf("%s: its marks are %d, %d and %d", space.ID, space.Limit, space.Trigger, space.Stop)
		}
		if is := space.ID.Kind == tier.Host; is != (space.Host != nil) || is && space.Host.Used != space.Used()-space.Reserved {
			t.Errorf("%s: %+v, %+v", space.ID, space.Usage, space.Host)
		}
		if is := space.ID.Kind == tier.Disk; is != (space.Disk != nil) || is && (space.Disk.Used != space.Used() || space.Disk.Written < b.Info().Bytes) {
			t.Errorf("%s: %+v, %+v", space.ID, space.Usage, space.Disk)
		}
	}

	cancel()
	<-second
	if err := grant.Release(); err != nil {
		t.Error(err)
	}
	if err := held.Release(); err != nil {
		t.Error(err)
	}
	if s := eng.Stats(); s.Permits.HeldSlots != 0 || s.Admission.Running != 0 || s.Admission.Waiting != 0 {
		t.Errorf("in the end it says %+v and %+v", s.Permits, s.Admission)
	}
}

// TestPeakOfAPhase: after ResetPeak, Stats shows the peak since then.
func TestPeakOfAPhase(t *testing.T) {
	eng, err := callbackEngine(t, func(*spillway.Config) {})
	if err != nil {
		t.Fatal(err)
	}
	gpu := gpuOf(t, eng)
	reserve := func(n int64) {
		t.Helper()
		r, err := eng.Reserve(t.Context(), reservation.Specific(gpu.ID()), n)
		if err == nil {
			err = r.Release()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range []int64{256 << 10, 64 << 10, 128 << 10} {
		gpu.ResetPeak()
		reserve(n)
		reserve(4096)
		if got := eng.Stats().Spaces[0].Peak; got != n {
			t.Errorf("the peak is %d, want %d", got, n)
		}
	}
	closeClean(t, eng)
}

// TestStatsOfAWait: a request that waits is in the figures while it waits, with its task.
func TestStatsOfAWait(t *testing.T) {
	t.Parallel()
	eng, _ := telling(t, nil)
	free := full(t, gpuOf(t, eng), eng)
	done := make(chan error)
	go func() {
		r, err := eng.Reserve(reservation.NewOwner("sort").Context(t.Context()), reservation.AnyInTier(tier.GPU), 600_000)
		done <- errors.Join(err, r.Release())
	}()
	for eng.Stats().Waits.Waiting == 0 {
		runtime.Gosched()
	}
	s := eng.Stats()
	if w := s.Waits; w.Waiting != 1 || w.Oldest <= 0 || w.Count != 0 {
		t.Errorf("of the waits it says %+v", w)
	}
	if b := s.Blocked; len(b) != 1 || b[0].Owner != "sort" || b[0].Waiting != 1 || b[0].SoFar < s.Waits.Oldest || b[0].Waits != 0 {
		t.Errorf("of the tasks it says %+v", b)
	}
	if text := s.String(); !strings.Contains(text, "\nwaiting for room now: 1, the oldest for ") || !strings.Contains(text, "sort") {
		t.Errorf("the figures as text lack the wait:\n%s", text)
	}
	free()
	if err := <-done; err != nil {
		t.Error(err)
	}
	closeEngine(t, eng)
	if s := eng.Stats(); s.Waits.Waiting != 0 || s.Waits.Oldest != 0 || strings.Contains(s.String(), "waiting for room now") {
		t.Errorf("nothing waits at the end:\n%s", s)
	}
}

// TestStatsOfOddNames: names that break lines or reach a terminal, and very long ones, break no table,
// and no other text. Numbers end at the same place.
func TestStatsOfOddNames(t *testing.T) {
	t.Parallel()
	eng, _ := telling(t, nil)
	odd := "SELECT a,\n\tb\x1b[31m FROM t"
	_, repo := putMany(t, eng, odd, "op\tx", 40)
	putMany(t, eng, strings.Repeat("long ", 1000), "op", 1)
	b, _ := repo.Peek(0)
	held, _ := eng.Holders(b.Info().Space)
	quoted := `"SELECT a,\n\tb\x1b[31m FROM t"`
	for _, text := range []string{eng.Stats().String(), held.String(), eng.Explain(b).String(), events.Origin{Plan: odd, Operator: "op\tx", Task: odd}.String()} {
		if strings.ContainsAny(text, "\t\x1b") || !strings.Contains(text, quoted) || !strings.Contains(text, `"op\tx":0`) {
			t.Errorf("%s", text)
		}
	}
	lines := strings.Split(eng.Stats().String(), "\n")
	i := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "plan ") })
	end := strings.Index(lines[i], "moved down") + len("moved down")
	if row := lines[i+1]; !strings.HasPrefix(row, quoted) || len(row) < end+2 || !strings.HasSuffix(row[:end], "iB") || row[end:end+2] != "  " {
		t.Errorf("the column ends elsewhere than at %d:\n%s\n%s", end, lines[i], row)
	}
	for _, l := range lines {
		if len(l) > 400 {
			t.Errorf("a line of %d bytes", len(l))
		}
	}
	closeEngine(t, eng)
}
