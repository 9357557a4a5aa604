package convert

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

var theDisk = tier.ID{Kind: tier.Disk}

// small puts batches of one to five pages.
func (m *machine) small(t *testing.T, n int, k tier.Kind) (all []*batch.Batch) {
	t.Helper()
	for i := range n {
		all = append(all, m.put(t, numbered(int64(i+1), 50+100*(i%5)), k))
	}
	return all
}

// evictOne moves one batch as the monitor does.
func evictOne(ctx context.Context, m *Mover, b *batch.Batch, to tier.ID, reason string) error {
	return m.Evict(ctx, []*batch.Batch{b}, to, reason)[0]
}

// together moves batches, which must be suited, as the monitor does.
func (m *machine) together(t *testing.T, ctx context.Context, all []*batch.Batch) []error {
	t.Helper()
	errs := m.mover.Evict(ctx, all, theDisk, ReasonDemand)
	if len(errs) != len(all) {
		t.Fatalf("%d of %d batches go together", len(errs), len(all))
	}
	return errs
}

// TestTogether: batches are written side by side with few requests. From then on each is by itself.
func TestTogether(t *testing.T) {
	t.Parallel()
	for _, from := range []tier.Kind{tier.GPU, tier.Host} {
		m, told := copyMachine(t, machineConfig{chunk: 64 << 10})
		all := m.small(t, 20, from)
		for _, b := range all {
			b.Info().Payload.(*batch.Image).Parts.Program = inMind
		}
		bytes, writes := int64(0), m.files.Count("write")
		for i, err := range m.together(t, t.Context(), all) {
			if err != nil {
				t.Fatalf("batch %d: %v", i, err)
			}
			now := all[i].Info()
			if now.Space != theDisk || now.State != batch.Idle || now.Form != batch.PlainImage {
				t.Fatalf("batch %d is %+v", i, now)
			}
			if of := now.Payload.(*batch.Image).Parts.Program; of != inMind {
				t.Errorf("batch %d was made of the program's %q, and now of %q", i, inMind, of)
			}
			bytes += now.Bytes
			if ev := (*told)[i]; batch.ID(ev.Batch) != all[i].ID() || ev.Bytes != now.Bytes || ev.From.Kind != from || ev.To != theDisk || ev.Reason != ReasonDemand || ev.Err != nil {
				t.Errorf("batch %d is told as %+v", i, ev)
			}
		}
		if n, most := int64(m.files.Count("write")-writes), bytes/(64<<10)+1; n > most {
			t.Errorf("%d bytes took %d writes, want %d at most", bytes, n, most)
		}
		if s := m.mover.Stats(); len(s) != 1 || s[0].Batches != 20 || s[0].Bytes != bytes || s[0].ByReason[ReasonDemand] != bytes {
			t.Errorf("%+v", s)
		}
		m.copyBooks(t, all...)
		for i, b := range all { // each goes its own way
			switch i % 4 {
			case 0:
				m.move(t, b, tier.Host)
			case 1:
				m.move(t, b, tier.GPU)
			}
			if err := m.same(t.Context(), b); err != nil {
				t.Error(err)
			}
		}
		m.copyBooks(t, all...)
		for _, b := range all[:10] {
			if err := b.Drop(); err != nil {
				t.Error(err)
			}
		}
		for _, b := range all[10:] {
			if err := m.same(t.Context(), b); err != nil {
				t.Error(err)
			}
		}
		if errs := m.mover.evictTogether(t.Context(), all[10:], theDisk, ReasonDemand); errs != nil {
			t.Errorf("batches that are on the disk are moved there: %v", errs)
		}
		m.copyBooks(t, all[10:]...)
	}
}

// TestNotTogether: what must not be written side by side, or need not be.
func TestNotTogether(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cfg  machineConfig
		want int
		with func(t *testing.T, m *machine, all []*batch.Batch) []*batch.Batch
	}{
		"encrypted":  {machineConfig{encrypt: true}, 0, nil},
		"compressed": {machineConfig{codec: CodecS2}, 0, nil},
		"wrapped": {machineConfig{}, 0, func(t *testing.T, m *machine, all []*batch.Batch) []*batch.Batch {
			if err := m.registry.Wrap(ImageIn(tier.Host), ImageIn(tier.Disk), func(inner Func) Func { return inner }); err != nil {
				t.Fatal(err)
			}
			return all
		}},
		"persists": {machineConfig{}, 0, func(_ *testing.T, m *machine, all []*batch.Batch) []*batch.Batch {
			m.mover.cfg.Persists = func(tier.ID) bool { return true }
			return all
		}},
		"a copy": {machineConfig{copies: true}, 5, func(t *testing.T, m *machine, all []*batch.Batch) []*batch.Batch {
			m.move(t, all[2], tier.Disk)
			m.move(t, all[2], tier.Host)
			return all
		}},
		"another space": {machineConfig{}, 5, func(t *testing.T, m *machine, all []*batch.Batch) []*batch.Batch {
			m.move(t, all[3], tier.GPU)
			return all
		}},
		"dictionaries": {
			machineConfig{outside: true}, 6,
			func(t *testing.T, m *machine, all []*batch.Batch) []*batch.Batch {
				return append([]*batch.Batch{all[0], m.put(t, coded(1, 50), tier.Host)}, all[1:]...)
			},
		},
		"dictionaries first": {
			machineConfig{outside: true}, 6,
			func(t *testing.T, m *machine, all []*batch.Batch) []*batch.Batch {
				return append([]*batch.Batch{m.put(t, coded(1, 50), tier.Host)}, all...)
			},
		},
		"compressed in memory": {machineConfig{}, 5, func(t *testing.T, m *machine, all []*batch.Batch) []*batch.Batch {
			if err := m.mover.MoveAs(t.Context(), all[1], reservation.AnyInTier(tier.Host), batch.CompressedImage); err != nil {
				t.Fatal(err)
			}
			return all
		}},
		"dropped": {machineConfig{}, 5, func(t *testing.T, m *machine, all []*batch.Batch) []*batch.Batch {
			b := m.make(t, numbered(9, 50), tier.Host)
			if err := b.Drop(); err != nil {
				t.Fatal(err)
			}
			return append(all[:4:4], b, all[4])
		}},
		"a full disk": {machineConfig{disk: 32 << 10}, 4, nil},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, c.cfg)
			all := m.small(t, 6, tier.Host)
			if c.with != nil {
				all = c.with(t, m, all)
			}
			n := 0
			for i, err := range m.mover.evictTogether(t.Context(), all, theDisk, ReasonDemand) {
				at := all[i].Info().Space
				switch {
				case err == nil && at == theDisk:
					n++
				case err == nil || at == theDisk || !errors.Is(err, errLone) && !errors.Is(err, batch.ErrState):
					t.Errorf("batch %d is in %s after %v", i, at, err)
				}
			}
			if n != c.want {
				t.Errorf("%d of %d go together, want %d", n, len(all), c.want)
			}
		})
	}
}

// TestEveryOperationFailsOnceTogether: every batch is whole where it is, and so are the books. What
// failed is moved one by one then.
func TestEveryOperationFailsOnceTogether(t *testing.T) {
	t.Parallel()
	fail := func(err error) func(func()) faultfs.Effect {
		return func(func()) faultfs.Effect { return faultfs.Fail(err) }
	}
	for name, c := range map[string]struct {
		effect func(cancel func()) faultfs.Effect
		want   error // nil: it does no harm
	}{
		"EIO":    {fail(syscall.EIO), syscall.EIO},
		"ENOSPC": {fail(syscall.ENOSPC), tier.ErrNoSpace},
		"short":  {func(func()) faultfs.Effect { return faultfs.Short() }, nil},
		"cancel": {func(cancel func()) faultfs.Effect { return faultfs.Do(func(string, string) { cancel() }) }, context.Canceled},
	} {
		for _, from := range []tier.Kind{tier.GPU, tier.Host} {
			hits := 0
			for n, hit := 0, true; hit; n += testseed.Rounds(1, 3) {
				m, _ := copyMachine(t, machineConfig{disk: 1 << 20})
				all := m.small(t, 20, from)
				ctx, cancel := context.WithCancel(t.Context())
				before := m.files.Hits()
				ops := []string{"read", "write", "allocate"}
				if c.want == nil {
					ops = ops[:2]
				}
				remove := m.files.Add(faultfs.Rule{Ops: ops, Skip: n, Times: 1, Effect: c.effect(cancel)})
				failed := m.wholeAfter(t, all, from, m.together(t, ctx, all), c.want)
				if hit = m.files.Hits() != before; hit {
					hits++
				}
				if hit && c.want != nil && failed == 0 && name != "cancel" && name != "ENOSPC" { // less room may do
					t.Errorf("%s: operation %d failed, and nothing is told", name, n)
				}
				remove()
				cancel()
				m.alone(t, all)
			}
			if hits < 2 {
				t.Errorf("%s from %s: there are only %d operations", name, from, hits)
			}
		}
	}
}

// TestEveryDeviceOperationFailsOnceTogether is the same for those of the GPU.
func TestEveryDeviceOperationFailsOnceTogether(t *testing.T) {
	t.Parallel()
	injected := errors.New("injected")
	hits := 0
	for n, hit := int64(0), true; hit; n += int64(testseed.Rounds(1, 3)) {
		var armed atomic.Bool
		var left atomic.Int64
		left.Store(n)
		m, _ := copyMachine(t, machineConfig{faults: func(op sim.Op) error {
			if armed.Load() && left.Add(-1) == -1 {
				return injected
			}
			return nil
		}})
		all := m.small(t, 20, tier.GPU)
		armed.Store(true)
		errs := m.together(t, t.Context(), all)
		armed.Store(false)
		m.wholeAfter(t, all, tier.GPU, errs, injected)
		if hit = left.Load() < 0; hit {
			hits++
		}
		m.alone(t, all)
	}
	if hits < 4 {
		t.Errorf("there are only %d operations", hits)
	}
}

// wholeAfter checks batches that were moved together from a tier, and returns how many were not.
func (m *machine) wholeAfter(t *testing.T, all []*batch.Batch, from tier.Kind, errs []error, want error) (failed int) {
	t.Helper()
	for i, b := range all {
		now := b.Info()
		if at := map[bool]tier.Kind{true: tier.Disk, false: from}[errs[i] == nil]; now.Space.Kind != at || now.State != batch.Idle {
			t.Fatalf("batch %d is %+v after %v", i, now, errs[i])
		}
		if errs[i] != nil {
			if failed++; want == nil || !errors.Is(errs[i], want) {
				t.Fatalf("batch %d: %v, want %v", i, errs[i], want)
			}
		}
	}
	m.copyBooks(t, all...)
	return failed
}

// alone moves to the disk what is not there, and compares all batches.
func (m *machine) alone(t *testing.T, all []*batch.Batch) {
	t.Helper()
	for _, b := range all {
		if err := evictOne(t.Context(), m.mover, b, theDisk, ReasonDemand); err != nil {
			t.Fatal(err)
		}
		if err := m.same(t.Context(), b); err != nil {
			t.Fatal(err)
		}
	}
	m.copyBooks(t, all...)
}

// TestTogetherWhileUsed: batches that are opened or dropped before they are in transit stay, and
// have errors of their own. While all are written none can be dropped, and who waits for that gets
// his batch dropped then.
func TestTogetherWhileUsed(t *testing.T) {
	t.Parallel()
	m, told := copyMachine(t, machineConfig{})
	all := m.small(t, 12, tier.Host)
	gone := m.make(t, numbered(99, 50), tier.Host)
	all = append(all, gone)
	h, err := m.mover.Acquire(t.Context(), all[3], reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	moved := all[7]
	m.move(t, moved, tier.GPU)
	if err := gone.Drop(); err != nil {
		t.Fatal(err)
	}
	dropped := make(chan error, 1)
	m.files.Add(faultfs.Rule{Ops: []string{"write"}, Times: 1, Effect: faultfs.Do(func(string, string) {
		if err := all[5].Drop(); !errors.Is(err, batch.ErrState) {
			t.Errorf("a batch is dropped while it is written: %v", err)
		}
		go func() { dropped <- all[5].Discard(context.Background()) }()
	})})
	*told = nil
	for i, err := range m.mover.Evict(t.Context(), all, theDisk, ReasonTrigger) {
		switch at := all[i].Info(); {
		case i == 3 || all[i] == gone:
			if !errors.Is(err, batch.ErrState) {
				t.Errorf("batch %d: %v", i, err)
			}
		case all[i] == moved:
			if (err == nil) != (at.Space.Kind == tier.Disk) {
				t.Errorf("batch %d: %v, and it is %+v", i, err, at)
			}
		case err != nil:
			t.Errorf("batch %d: %v, and it is %+v", i, err, at)
		}
	}
	if err := errors.Join(<-dropped, h.Close()); err != nil {
		t.Error(err)
	}
	for i, b := range all[:12] {
		if i != 5 {
			if err := m.same(t.Context(), b); err != nil {
				t.Errorf("batch %d: %v", i, err)
			}
		}
	}
	m.copyBooks(t, slices.Concat(all[:5], all[6:12])...)
}

// TestDamagedTogether: one bit that the disk changes is of one batch.
func TestDamagedTogether(t *testing.T) {
	t.Parallel()
	m, _ := copyMachine(t, machineConfig{chunk: 256 << 10})
	all := m.small(t, 20, tier.Host)
	m.files.Add(faultfs.Rule{Ops: []string{"write"}, Times: 1, Effect: faultfs.BitFlip()})
	for i, err := range m.together(t, t.Context(), all) {
		if err != nil {
			t.Fatalf("batch %d: %v", i, err)
		}
	}
	damaged := 0
	for i, b := range all {
		err := m.same(t.Context(), b)
		var c *image.CorruptError
		switch {
		case err == nil:
		case !errors.As(err, &c):
			t.Errorf("batch %d: %v", i, err)
		default:
			damaged++
			_, _, at := b.Info().Payload.(*batch.Image).Buffer().Memory().(tier.FileMemory).Locate(0)
			if c.Batch != b.ID() || c.Offset != at {
				t.Errorf("%+v, want batch %d at %d", c, b.ID(), at)
			}
		}
	}
	if damaged != 1 {
		t.Errorf("%d batches are damaged", damaged)
	}
	m.copyBooks(t, all...)
}

// TestCopiedBeforeItIsMovedTogether: a batch that has a clean image on the disk is not written again.
func TestCopiedBeforeItIsMovedTogether(t *testing.T) {
	t.Parallel()
	m, told := copyMachine(t, machineConfig{})
	all := m.small(t, 6, tier.Host)
	if n, err := m.ahead(t.Context(), all[2]); n == 0 || err != nil {
		t.Fatalf("%d bytes were written ahead, %v", n, err)
	}
	*told = nil
	for i, err := range m.mover.Evict(t.Context(), all, theDisk, ReasonTrigger) {
		if (err != nil) != (i == 2) || i == 2 && !errors.Is(err, errLone) {
			t.Errorf("batch %d: %v", i, err)
		}
	}
	m.alone(t, all)
	if last := (*told)[len(*told)-1]; len(*told) != 6 || batch.ID(last.Batch) != all[2].ID() || !last.Copy {
		t.Errorf("moves: %+v", *told)
	}
}
