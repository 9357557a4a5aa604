package test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/faultdev"
	"github.com/spillway-db/spillway/tier/tiertest"
	"github.com/spillway-db/spillway/topology"
)

// life is an engine's life from opening to closing, with faults on its disk and its
// device. What fails is done again, and must succeed then: faults come once.
type life struct {
	t     *testing.T
	dir   string
	ctx   context.Context // ends when a fault says so; what is done again has the test's
	files *faultfs.FS
	gpus  []*faultdev.Device
	onGPU []faultdev.Rule
	armed func(l *life) // called when the engine is open, if set
	want  []error       // what a failure may be
	seal  bool          // the volume encrypts
	cuda  string        // the driver library of the GPU; empty: it is simulated

	eng     *spillway.Engine
	base    map[tier.ID]int64 // what the engine itself holds
	records []arrow.RecordBatch
	batches []*batch.Batch
	failed  []error
}

// lifeMoves are where each batch goes: every edge between two tiers, both ways.
var lifeMoves = []tier.Kind{tier.Host, tier.Disk, tier.GPU, tier.Disk, tier.Host, tier.GPU}

// live runs it, and checks after every failure that all batches are whole and the books
// exact, and at the end that nothing is left of it.
func (l *life) live(top *topology.Topology, records ...arrow.RecordBatch) {
	t := l.t
	t.Helper()
	defer l.gone()
	if !l.open(top) {
		return
	}
	defer func() {
		l.note(l.eng.Close())
		for _, s := range l.eng.Stats().Spaces {
			if s.Used() != 0 {
				t.Errorf("%s ends with %+v", s.ID, s.Usage)
			}
		}
	}()
	plan, err := l.eng.Plan("life")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, rec := range records {
		l.put(repo, i, rec)
	}
	for _, copies := range []bool{false, true} {
		for _, to := range lifeMoves {
			for _, b := range l.batches {
				if !copies {
					l.eng.Mover().DropCopies()
				}
				l.move(b, to)
			}
		}
	}
	for i, b := range l.batches {
		if l.note(sameRows(l.ctx, l.eng, b, l.records[i])) {
			l.whole()
		}
	}
	l.books()
}

func (l *life) open(top *topology.Topology) bool {
	cfg := spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(2 << 20), Wrap: func(dev tier.Device) (tier.Device, error) {
			gpu := faultdev.New(dev, 1, l.onGPU...)
			l.onGPU, l.gpus = nil, append(l.gpus, gpu) // the next one has no faults
			return gpu, nil
		}}},
		HostMemory: spillway.Bytes(2 << 20), Disks: []spillway.DiskConfig{{Dir: l.dir, Capacity: spillway.Bytes(4 << 20), FS: l.files, Encrypt: l.seal}},
		Topology: top, MonitorPeriod: time.Hour, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	if l.cuda != "" {
		cfg.CUDALibrary, cfg.GPUs[0].Backend = l.cuda, spillway.CUDA
	}
	var err error
	if l.eng, err = spillway.Open(l.ctx, cfg); l.note(err) {
		if l.eng, err = spillway.Open(l.t.Context(), cfg); err != nil {
			l.t.Errorf("opening again: %v", err)
			return false
		}
	}
	l.base = make(map[tier.ID]int64)
	for _, s := range l.eng.Stats().Spaces {
		l.base[s.ID] = s.Used()
	}
	if l.armed != nil {
		l.armed(l)
	}
	return true
}

// note keeps an error, which must be one of those that are wanted, and says whether
// there is one.
func (l *life) note(err error) bool {
	if err == nil {
		return false
	}
	l.failed = append(l.failed, err)
	for _, w := range l.want {
		if errors.Is(err, w) {
			return true
		}
	}
	l.t.Errorf("failed with %v, which is not the fault", err)
	return true
}

func (l *life) put(repo *repository.Repository, i int, rec arrow.RecordBatch) {
	l.t.Helper()
	where := repository.WithPlacement(reservation.AnyInTier([]tier.Kind{tier.GPU, tier.Disk}[i%2]))
	if l.note(repo.Put(l.ctx, i, rec, where)) {
		l.whole()
		if err := repo.Put(l.t.Context(), i, rec, where); err != nil {
			l.t.Fatalf("putting again: %v", err)
		}
	}
	b, ok := repo.Peek(i)
	if !ok {
		l.t.Fatalf("batch %d was put and is not there", i)
	}
	l.records, l.batches = append(l.records, rec), append(l.batches, b)
}

func (l *life) move(b *batch.Batch, to tier.Kind) {
	l.t.Helper()
	from := b.Info().Space
	err := l.eng.Mover().Move(l.ctx, b, reservation.AnyInTier(to))
	if l.note(err) {
		if at := b.Info().Space; at != from {
			l.t.Errorf("a move from %s to %s failed, and the batch is in %s", from, to, at)
		}
		l.whole()
		if err := l.eng.Mover().Move(l.t.Context(), b, reservation.AnyInTier(to)); err != nil {
			l.t.Fatalf("moving from %s to %s again: %v", from, to, err)
		}
	}
	if at := b.Info(); at.Space.Kind != to || at.State != batch.Idle {
		l.t.Errorf("moved to %s, the batch is %+v", to, at)
	}
}

// whole checks that every batch has its rows, once the fault is over, and that every
// space holds them and no more.
func (l *life) whole() {
	l.t.Helper()
	l.books()
	for i, b := range l.batches {
		if err := sameRows(l.t.Context(), l.eng, b, l.records[i]); err != nil {
			l.t.Errorf("batch %d: %v", i, err)
		}
	}
}

// books checks that every space holds the batches in it, and copies of others, and no more.
func (l *life) books() {
	l.t.Helper()
	held, copied := make(map[tier.ID]int64), make(map[tier.ID]int64)
	for id, n := range l.base {
		held[id] = n
	}
	for _, b := range l.batches {
		held[b.Info().Space] += b.Info().Bytes
		b.EachClean(func(p batch.Payload) { copied[p.Space().ID()] += p.Bytes() })
	}
	for id, want := range held {
		s, _ := l.eng.Reservations().Spaces().ByID(id)
		settled(s)
		if u := s.State().Usage; u.Live != want || u.Used() != want || u.Cached != copied[id] {
			l.t.Errorf("%s holds %+v, want %d live, %d in copies, and no more", id, u, want, copied[id])
		}
	}
}

// sameRows compares the rows of a batch, where it is, with those that it was made of.
func sameRows(ctx context.Context, eng *spillway.Engine, b *batch.Batch, want arrow.RecordBatch) (err error) {
	h, err := eng.Mover().Acquire(ctx, b, reservation.Specific(b.Info().Space))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	got, err := eng.Mover().Record(ctx, h)
	if err != nil {
		return err
	}
	defer got.Release()
	return convert.Equal(want, got)
}

// gone checks that nothing is left on the disk, and no file open.
func (l *life) gone() {
	l.t.Helper()
	if n := l.files.Open(); n != 0 {
		l.t.Errorf("%d files are open at the end", n)
	}
	if left, err := os.ReadDir(l.dir); err != nil || len(left) != 0 {
		l.t.Errorf("the spill directory holds %v, %v", left, err)
	}
}

// settled waits until a device is done with what was freed in its space. A free that it
// refused is tried again with the next allocation.
func settled(s *tier.Space) {
	if s.State().Retired == 0 {
		return
	}
	if mem, err := s.Pool.Alloc(1, nil); err == nil {
		s.Pool.Free(mem, func() {})
	}
	untilUsage(s, func(u tier.Usage) bool { return u.Retired == 0 })
}

// untilUsage waits until a space's usage is as is says.
func untilUsage(s *tier.Space, is func(tier.Usage) bool) {
	changed := make(chan struct{}, 1)
	defer s.Subscribe(func(bool) {
		select {
		case changed <- struct{}{}:
		default:
		}
	})()
	for !is(s.State().Usage) {
		<-changed
	}
}

// faultLives runs a life for each index of its operations, until none is hit any more,
// and returns how many there were, and how many of those failed in some way.
func faultLives(t *testing.T, index func(l *life, n int, cancel func()) (hits func() int), want ...error) (tried, told int) {
	t.Helper()
	tiertest.NoLeaks(t)
	top, err := topology.Discover(t.Context(), topology.Options{})
	if err != nil {
		t.Fatal(err)
	}
	step := testseed.Rounds(1, 7)
	records := []arrow.RecordBatch{numberedRecord(1, 5000, wordList(1, 20)), numberedRecord(2, 700, wordList(1, 20))}
	dir := testfs.MemoryDir(t)
	for n := 0; ; n += step {
		ctx, cancel := context.WithCancel(t.Context())
		l := &life{t: t, dir: dir, ctx: ctx, files: faultfs.New(testfs.DiskFS(dir, disk.OS()), 1), want: want}
		hits := index(l, n, cancel)
		l.live(top, records...)
		cancel()
		if t.Failed() {
			t.Fatalf("at operation %d", n)
		}
		if hits() == 0 {
			t.Logf("%d operations, %d told", tried, told)
			return tried, told
		}
		tried++
		if len(l.failed) > 0 {
			told++
		}
	}
}

// TestEveryFileOperationOfAnEngineFailsOnce, from opening to closing.
func TestEveryFileOperationOfAnEngineFailsOnce(t *testing.T) {
	transfers := []string{"read", "write"}
	for name, c := range map[string]struct {
		ops    []string
		effect func(cancel func()) faultfs.Effect
		want   []error
		told   bool // most are reported; else none is
	}{
		"EIO":    {nil, func(func()) faultfs.Effect { return faultfs.Fail(syscall.EIO) }, []error{syscall.EIO}, true},
		"ENOSPC": {nil, func(func()) faultfs.Effect { return faultfs.Fail(syscall.ENOSPC) }, []error{syscall.ENOSPC, tier.ErrNoSpace}, true},
		"short":  {transfers, func(func()) faultfs.Effect { return faultfs.Short() }, nil, false},
		"cancel": {nil, func(cancel func()) faultfs.Effect {
			return faultfs.Do(func(string, string) { cancel() })
		}, []error{context.Canceled}, true},
	} {
		for _, seal := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/encrypted=%t", name, seal), func(t *testing.T) {
				tried, told := faultLives(t, func(l *life, n int, cancel func()) func() int {
					l.seal = seal
					l.files.Add(faultfs.Rule{Ops: c.ops, Skip: n, Times: 1, Effect: c.effect(cancel)})
					return l.files.Hits
				}, c.want...)
				enough(t, tried, told, 12, c.told)
			})
		}
	}
}

// TestEveryDeviceOperationOfAnEngineFailsOnce, from opening to closing: refused, failing
// when it is done, without memory, and with its context ending.
func TestEveryDeviceOperationOfAnEngineFailsOnce(t *testing.T) {
	injected := errors.New("injected")
	for name, c := range map[string]struct {
		ops    []string
		effect func(cancel func()) faultdev.Effect
		times  int // 0: once
		want   []error
		least  int // so many operations there must be
	}{
		"refused": {nil, func(func()) faultdev.Effect { return faultdev.Fail(injected) }, 0, []error{injected}, 12},
		"failed":  {[]string{"copy-*", "fill"}, func(func()) faultdev.Effect { return faultdev.FailWork(injected) }, 0, []error{injected}, 12},
		// A space that is refused once reaps and tries again.
		"out of memory":       {[]string{"alloc"}, func(func()) faultdev.Effect { return faultdev.OutOfMemory() }, 0, nil, 4},
		"out of memory twice": {[]string{"alloc"}, func(func()) faultdev.Effect { return faultdev.OutOfMemory() }, 2, []error{tier.ErrNoSpace}, 4},
		"cancel": {nil, func(cancel func()) faultdev.Effect {
			return faultdev.Do(func(string, int64) { cancel() })
		}, 0, []error{context.Canceled}, 12},
	} {
		t.Run(name, func(t *testing.T) {
			tried, told := faultLives(t, func(l *life, n int, cancel func()) func() int {
				l.onGPU = []faultdev.Rule{{Ops: c.ops, Skip: n, Times: max(1, c.times), Effect: c.effect(cancel)}}
				return func() (hits int) {
					for _, gpu := range l.gpus {
						hits += gpu.Hits()
					}
					return hits
				}
			}, c.want...)
			enough(t, tried, told, c.least, len(c.want) > 0)
		})
	}
}

// enough checks that faults were tried, and most of them reported, or none.
func enough(t *testing.T, tried, told, least int, want bool) {
	t.Helper()
	least = testseed.Rounds(least, 1)
	if tried < least || want && told < tried/3 || !want && told > 0 {
		t.Errorf("%d operations were tried, and %d told that they failed", tried, told)
	}
}

// TestEveryBitThatFlipsIsFound: a read that gives one wrong bit is ErrCorrupt, whichever
// it is, and never wrong rows.
func TestEveryBitThatFlipsIsFound(t *testing.T) {
	for seed := range uint64(8) { // of which bit it is
		tried, told := faultLives(t, func(l *life, n int, _ func()) func() int {
			l.files, l.seal = faultfs.New(testfs.DiskFS(l.dir, disk.OS()), seed), seed%2 == 1
			l.armed = func(l *life) { // opening a volume also reads what the test did not store
				l.files.Add(faultfs.Rule{Ops: []string{"read"}, Skip: n, Times: 1, Effect: faultfs.BitFlip()})
			}
			return l.files.Hits
		}, convert.ErrCorrupt)
		if tried < 1 || told != tried {
			t.Errorf("seed %d: of %d reads with a wrong bit %d were found", seed, tried, told)
		}
	}
}

// eightMiB is a file system that says it has 8 MiB free, whatever the machine has.
type eightMiB struct{ disk.FS }

func (eightMiB) Usage(string) (disk.Usage, error) {
	return disk.Usage{FileSystem: "test", Free: 8 << 20, Total: 8 << 20}, nil
}

// TestDiskFS: a volume is on the file system that it is given, and is sized by what is
// free there.
func TestDiskFS(t *testing.T) {
	files := faultfs.New(eightMiB{disk.OS()}, 1)
	cfg := spillway.Config{
		GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(1 << 20), Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Reserve: 2 << 20, FS: files}},
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range eng.Stats().Spaces {
		if s.ID.Kind == tier.Disk && s.Capacity != 3<<20 { // half of what Reserve leaves
			t.Errorf("the volume has %d bytes", s.Capacity)
		}
	}
	if err := eng.Close(); err != nil || files.Count("open-anonymous", "create") == 0 || files.Open() != 0 {
		t.Errorf("closed with %v; %d files made, %d open", err, files.Count("open-anonymous", "create"), files.Open())
	}
	files.Add(faultfs.Rule{Ops: []string{"usage"}, Effect: faultfs.Fail(syscall.EIO)})
	if eng, err := spillway.Open(t.Context(), cfg); !errors.Is(err, syscall.EIO) {
		t.Errorf("opened %v with %v", eng, err)
	}
}
