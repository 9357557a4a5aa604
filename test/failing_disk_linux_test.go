package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// spill is an engine that spills, on a disk on which anything may go wrong.
type spill struct {
	t       *testing.T
	eng     *spillway.Engine
	repo    *repository.Repository
	records []arrow.RecordBatch
	failed  []error
}

func openSpill(t *testing.T, cfg spillway.Config) *spill {
	t.Helper()
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := eng.Plan("spill")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	return &spill{t: t, eng: eng, repo: repo}
}

// spillBatches are four times as large as GPU and host memory together.
const spillBatches = 24

// putAndMove puts batches into the GPU, from where most must move down, until that fails;
// and moves all that are there to disk and back, until that fails. A wait that does not
// end is an error.
func (s *spill) putAndMove(ctx context.Context) {
	s.t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errors.New("it takes for ever"))
	defer cancel()
	for i := range spillBatches {
		rec := numberedRecord(int64(i)<<20, 1000+97*i, wordList(1, 20))
		if err := s.repo.Put(ctx, i, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
			s.failed = append(s.failed, err)
			break
		}
		s.records = append(s.records, rec)
	}
	for i, rec := range s.records {
		if err := thereAndBack(ctx, s.eng, s.batch(i), rec); err != nil {
			s.failed = append(s.failed, err)
			return
		}
	}
}

func (s *spill) batch(i int) *batch.Batch {
	b, ok := s.repo.Peek(i)
	if !ok {
		s.t.Fatalf("batch %d is lost", i)
	}
	return b
}

// whole checks that every batch is what was put.
func (s *spill) whole() {
	s.t.Helper()
	for i, want := range s.records {
		err := s.wellAgain(func(ctx context.Context) error { return sameRows(ctx, s.eng, s.batch(i), want) })
		if err != nil {
			s.t.Errorf("batch %d in %s: %v", i, s.batch(i).Info().Space, err)
		}
	}
}

// wellAgain does something until it finds room: a disk that was broken or full is tried
// again only now and then.
func (s *spill) wellAgain(do func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(s.t.Context(), patience, errors.New("it takes for ever"))
	defer cancel()
	for {
		err := do(ctx)
		if !errors.Is(err, tier.ErrNoSpace) || ctx.Err() != nil {
			return err
		}
	}
}

// close closes the engine, after which nothing is in use.
func (s *spill) close() {
	s.t.Helper()
	if err := s.eng.Close(); err != nil {
		s.t.Errorf("closing: %v", err)
	}
	for _, sp := range s.eng.Stats().Spaces {
		if sp.Used() != 0 {
			s.t.Errorf("%s ends with %+v", sp.ID, sp.Usage)
		}
	}
}

// fullFS says that n bytes are free.
type fullFS struct {
	disk.FS
	free *int64
}

func (f fullFS) Usage(string) (disk.Usage, error) {
	return disk.Usage{FileSystem: "testfs", Free: *f.free, Total: 1 << 40}, nil
}

// TestDiskFailsWhileRunning: if the disk fails while the engine is open, waiters for room and
// movers get an error with the directory and the remedy. All batches are whole. When the disk is
// well again, so is the engine.
func TestDiskFailsWhileRunning(t *testing.T) {
	top := discover(t)
	leavesNothing(t, t.TempDir()) // of all; in its directory each looks itself
	another := "another directory"
	for name, c := range map[string]struct {
		err     error
		ops     []string
		named   bool
		persist bool // each batch is in a file of its own, which is created while the engine runs
		says    []string
	}{
		"writes fail":           {err: syscall.EIO, ops: []string{"write"}, says: []string{"input/output error"}},
		"full when taken":       {err: syscall.ENOSPC, ops: []string{"allocate"}, says: []string{"no space left", "make room", another}},
		"full when created":     {err: syscall.ENOSPC, ops: []string{"create"}, persist: true, says: []string{"no space left", "make room", another}},
		"full when written":     {err: syscall.ENOSPC, ops: []string{"write"}, says: []string{"no space left"}},
		"quota when written":    {err: syscall.EDQUOT, ops: []string{"write"}, says: []string{"quota"}},
		"gone":                  {err: syscall.ENOENT, ops: []string{"create", "usage"}, persist: true, says: []string{"no such file", another}},
		"read-only":             {err: syscall.EROFS, ops: []string{"create"}, persist: true, says: []string{"read-only file system", another}},
		"too many files":        {err: syscall.EMFILE, ops: []string{"create"}, persist: true, says: []string{"too many open files", "limit"}},
		"all fails":             {err: syscall.EIO, says: []string{"input/output error"}},
		"all fails, named":      {err: syscall.EIO, named: true, says: []string{"input/output error"}},
		"all fails, persistent": {err: syscall.EIO, persist: true, says: []string{"input/output error"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it waits for disks that are to be tried again
			dir := t.TempDir()
			var rules []faultfs.Rule
			if c.named {
				rules = append(rules, noAnonymous)
			}
			inner := faultfs.New(disk.OS(), 1, rules...)
			files := faultfs.New(inner, 1)
			cfg := spillConfig(dir, files, top)
			cfg.Disks[0].Persist = c.persist
			cfg.MonitorPeriod = 250 * time.Microsecond // it waits for 64 of them before it tries again
			s := openSpill(t, cfg)
			well := files.Add(faultfs.Rule{Ops: c.ops, Effect: faultfs.Fail(c.err)})
			s.putAndMove(t.Context())
			if len(s.failed) != 2 {
				t.Errorf("failed with %q", s.failed)
			}
			for _, err := range s.failed {
				isClear(t, err, append(c.says, dir)...)
			}
			well()
			s.whole()
			s.drop()
			if s.putAndMove(t.Context()); len(s.failed) > 0 {
				t.Errorf("when all is well again: %v", s.failed)
			}
			s.close()
			if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
				t.Errorf("%v is left, %v", left, err)
			}
		})
	}
}

// drop consumes all batches, and forgets what failed.
func (s *spill) drop() {
	s.records, s.failed = nil, nil
	for i := range spillBatches {
		b, err := s.repo.Take(s.t.Context(), i, batch.Idle, repository.NoWait())
		if err == nil && b != nil {
			err = b.Discard(s.t.Context())
		}
		if err != nil {
			s.t.Error(err)
		}
	}
}

// TestDiskThatDies: from any operation on all of the file system's operations fail, for good; or
// all that take room. Nothing hangs, is wrong, or is left, and the errors name the place.
func TestDiskThatDies(t *testing.T) {
	top := discover(t)
	leavesNothing(t, t.TempDir()) // of all; in its directory each looks after each disk
	step, first := testseed.Rounds(7, 41), int(testseed.One(t)%7)
	takesRoom := []string{"open-anonymous", "create", "mkdir", "lock", "allocate", "write"}
	for name, c := range map[string]struct {
		err   error
		ops   []string
		named bool
	}{
		"EIO":           {syscall.EIO, nil, false},
		"EIO, named":    {syscall.EIO, nil, true},
		"ENOSPC":        {syscall.ENOSPC, takesRoom, false},
		"ENOSPC, named": {syscall.ENOSPC, takesRoom, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it waits for disks that are to be tried again
			dir := testfs.MemoryDir(t)
			tried, told := 0, 0
			for n := first; ; n += step {
				var inner []faultfs.Rule
				if c.named {
					inner = append(inner, noAnonymous)
				}
				files := faultfs.New(faultfs.New(testfs.DiskFS(dir, disk.OS()), 1, inner...), 1)
				alive := files.Add(faultfs.Rule{Ops: c.ops, Skip: n, Effect: faultfs.Fail(c.err)})
				cfg := spillConfig(dir, files, top)
				cfg.MonitorPeriod = 250 * time.Microsecond // it waits for 64 of them before it tries again
				cfg.StallTimeout = 50 * time.Millisecond
				failed, died := dies(t, cfg, c.err, files.Hits, alive)
				if !died {
					break
				}
				tried++
				if len(failed) > 0 {
					told++
				}
				for _, err := range failed {
					isClear(t, err, dir)
				}
				if n := files.Open(); n != 0 {
					t.Errorf("%d files are open", n)
				}
				if c.named {
					openAndClose(t, dir, top)
				}
				if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
					t.Errorf("%v is left, %v", left, err)
				}
				if t.Failed() {
					t.Fatalf("from operation %d on", n)
				}
			}
			t.Logf("%d disks died, %d were told of", tried, told)
			if tried == 0 || told < tried/2 {
				t.Errorf("of %d disks that died %d were told of", tried, told)
			}
		})
	}
}

// dies runs an engine whose disk dies at some time, and returns what failed and whether it
// did; when it is alive again, all batches are there.
func dies(t *testing.T, cfg spillway.Config, why error, hits func() int, alive func()) (failed []error, died bool) {
	t.Helper()
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		if !errors.Is(err, why) {
			t.Errorf("opening: %v", err)
		}
		return []error{err}, true
	}
	plan, err := eng.Plan("spill")
	must(t, err)
	repo, err := plan.Repository("scan", 0)
	must(t, err)
	s := &spill{t: t, eng: eng, repo: repo}
	s.putAndMove(t.Context())
	if died = hits() > 0; died {
		alive()
		s.whole()
		s.close()
		return s.failed, true
	}
	// It dies now, if it does at all.
	err = s.eng.Close()
	if died = hits() > 0; err != nil && !errors.Is(err, why) {
		t.Errorf("closing: %v", err)
	}
	if err != nil {
		s.failed = append(s.failed, err)
	}
	return s.failed, died
}

// TestDirectoryVanishes: the disk's file, with a name or without, works on and grows when the
// directory is removed. The engine does not make the directory again.
func TestDirectoryVanishes(t *testing.T) {
	top := discover(t)
	for _, named := range []bool{false, true} {
		for _, written := range []bool{false, true} { // when it vanishes
			t.Run(fmt.Sprintf("named=%v,written=%v", named, written), func(t *testing.T) {
				base := t.TempDir()
				leavesNothing(t, base)
				dir := filepath.Join(base, "spill")
				must(t, os.Mkdir(dir, 0o700))
				files := disk.OS()
				if named {
					files = faultfs.New(files, 1, noAnonymous)
				}
				cfg := spillConfig(dir, files, top)
				cfg.Disks[0].Capacity = spillway.Bytes(80 << 20) // more than is taken of a file system in one step
				s := openSpill(t, cfg)
				if written {
					s.putAndMove(t.Context())
				}
				must(t, os.RemoveAll(dir))
				if !written {
					s.putAndMove(t.Context())
				}
				if len(s.failed) > 0 {
					t.Errorf("failed with %q", s.failed)
				}
				s.growsOn()
				s.close()
				if err := os.Remove(dir); err == nil {
					t.Error("the directory is there again")
				}
			})
		}
	}
}

// growsOn checks that what is on disk is there, and that the disk still takes more than
// it has taken.
func (s *spill) growsOn() {
	s.t.Helper()
	s.whole()
	const most = 70 << 20 // of a file of which 64 MiB are taken
	hold, err := s.eng.Reserve(s.t.Context(), reservation.AnyInTier(tier.Disk), most)
	must(s.t, err)
	buf, err := hold.Alloc(most)
	if err := errors.Join(err, hold.Release()); err != nil {
		s.t.Error(err)
	}
	s.whole()
	s.drop()
	if s.putAndMove(s.t.Context()); len(s.failed) > 0 {
		s.t.Errorf("failed with %q", s.failed)
	}
	s.whole()
	must(s.t, buf.Release())
}

// TestCapacityOfADisk: none is half of what is free; less than a batch means that the
// batch is refused at once, and no other.
func TestCapacityOfADisk(t *testing.T) {
	top := discover(t)
	free := int64(10 << 20)
	dir := t.TempDir()
	leavesNothing(t, dir)
	cfg := spillConfig(dir, fullFS{disk.OS(), &free}, top)
	cfg.Disks[0].Capacity = spillway.Amount{}
	s := openSpill(t, cfg)
	if sp, _ := s.eng.Reservations().Spaces().ByID(tier.ID{Kind: tier.Disk}); sp.Capacity != 5<<20 {
		t.Errorf("without a capacity the disk has %d bytes of %d that are free", sp.Capacity, free)
	}
	s.putAndMove(t.Context())
	if len(s.failed) > 0 {
		t.Error(s.failed)
	}
	s.close()

	cfg.Disks[0].Capacity = spillway.Bytes(8 << 10)
	s = openSpill(t, cfg)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	onDisk := repository.WithPlacement(reservation.AnyInTier(tier.Disk))
	large := numberedRecord(1, 2000, wordList(1, 20))
	err := s.repo.Put(ctx, 0, large, onDisk)
	var exceeded *reservation.ExceededError
	if !errors.As(err, &exceeded) || exceeded.Space != (tier.ID{Kind: tier.Disk}) || exceeded.Limit != 8<<10 {
		t.Errorf("a batch larger than the disk: %v", err)
	}
	isClear(t, err, "disk:0", dir, "capacity")
	s.records = append(s.records, numberedRecord(2, 20, wordList(1, 20)))
	must(t, s.repo.Put(ctx, 0, s.records[0], onDisk))
	if at := s.batch(0).Info().Space; at.Kind != tier.Disk {
		t.Errorf("a batch that fits lies in %s", at)
	}
	s.whole()
	s.close()
}

// TestClosingFails: an engine whose files cannot be closed, or not be removed, says so
// with the directory, and has closed them.
func TestClosingFails(t *testing.T) {
	top := discover(t)
	for name, c := range map[string]struct {
		ops   []string
		named bool
		told  bool
	}{
		"close":         {[]string{"close"}, false, true},
		"close, named":  {[]string{"close"}, true, true},
		"remove, named": {[]string{"remove"}, true, true},
		"unlock, named": {[]string{"unlock"}, true, true},
		"punch":         {[]string{"punch"}, false, false}, // what is closed needs no holes
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			leavesNothing(t, dir)
			var rules []faultfs.Rule
			if c.named {
				rules = append(rules, noAnonymous)
			}
			files := faultfs.New(disk.OS(), 1, rules...)
			s := openSpill(t, spillConfig(dir, files, top))
			s.putAndMove(t.Context())
			if len(s.failed) > 0 {
				t.Error(s.failed)
			}
			files.Add(faultfs.Rule{Ops: c.ops, Effect: faultfs.Fail(syscall.EIO)})
			err := s.eng.Close()
			if c.told {
				if !errors.Is(err, syscall.EIO) {
					t.Errorf("closed with %v", err)
				}
				isClear(t, err, dir, "input/output error")
			} else if err != nil {
				t.Error(err)
			}
			if n := files.Open(); n != 0 {
				t.Errorf("%d files are open", n)
			}
			openAndClose(t, dir, top)
		})
	}
}
