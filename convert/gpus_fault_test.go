package convert

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// hop is one move of a walk.
type hop struct {
	form batch.PayloadType
	at   tier.Kind
}

// walk takes a batch that is an image on the GPU along every edge that a GPU has a part in.
var walk = []hop{
	{batch.PlainImage, tier.Host}, {batch.PlainImage, tier.GPU}, {batch.PlainImage, tier.Disk}, {batch.PlainImage, tier.GPU},
	{batch.ScatteredImage, tier.GPU}, {batch.PlainImage, tier.Host}, {batch.ScatteredImage, tier.GPU}, {batch.PlainImage, tier.Disk},
	{batch.ScatteredImage, tier.GPU}, {batch.PlainImage, tier.GPU},
}

// walked takes b along the walk. Before each move arm makes a failure; afterwards the function that
// it returns takes it back, and says whether it was met by the move, which has failed or has not. A
// move that fails must do so with one of want: then b is whole where and what it was, and the move
// is made again. It returns for each move whether its failure was met, and how many moves failed.
func (m *machine) walked(t *testing.T, b *batch.Batch, arm func() (disarm func(failed bool) bool), want ...error) (met []bool, failed int) {
	t.Helper()
	for _, h := range walk {
		from, form := b.Info().Space.Kind, b.Info().Payload.Type()
		disarm := arm()
		err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(h.at), h.form)
		if err != nil {
			if !isOneOf(err, want) {
				t.Fatalf("%s to %s: %v, want one of %v", form, h.form, err, want)
			}
			failed++
			if b.Info().Payload.Type() != form {
				t.Fatalf("the batch is %s after a move from %s to %s that failed", b.Info().Payload.Type(), form, h.form)
			}
			m.whole(t, b, from)
			if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(h.at), h.form); err != nil {
				t.Fatalf("%s to %s again: %v", form, h.form, err)
			}
		}
		m.rests(t, b, h.at)
		met = append(met, disarm(err != nil))
	}
	return met, failed
}

func isOneOf(err error, list []error) bool {
	for _, e := range list {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

const newest = "CUDA 12.8"

// drivers are the emulated drivers for the fault tests: the engine calls them differently.
var drivers = map[string]struct {
	emulator cudatest.Config
	unpinned bool
	codes    []cuda.Code // that calls are refused with, each of them at two drivers
}{
	newest:       {codes: []cuda.Code{cuda.ErrInvalidValue, cuda.ErrOutOfMemory}},
	"not pinned": {unpinned: true, codes: []cuda.Code{cuda.ErrInvalidValue}},
	"without pools": {
		emulator: cudatest.Config{Version: 11010, Without: []string{"cuMemAllocAsync", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"}},
		codes:    []cuda.Code{cuda.ErrOutOfMemory},
	},
}

// TestEveryCallOfTheDriverFailsOnce walks a batch with a dictionary along all edges of an emulated
// GPU, with each call of the driver on the way refused once. The batch is whole in its source and
// the books are right; nothing is left in the driver.
func TestEveryCallOfTheDriverFailsOnce(t *testing.T) {
	t.Parallel()
	for name, d := range drivers {
		if testseed.Hurried() && name != newest {
			continue // in which the walks take long
		}
		for _, code := range d.codes {
			if testseed.Hurried() && code != cuda.ErrInvalidValue {
				continue
			}
			t.Run(fmt.Sprintf("%s/%d", name, code), func(t *testing.T) {
				t.Parallel()
				g := emulatedBy(t, d.emulator)
				g.unpinned = d.unpinned
				tried, told := g.eachFails(t, true, func(n int64) (hit func(bool) bool) {
					before := g.emulator.Calls("")
					g.emulator.Fail("", n, code, 1)
					return func(bool) bool { return g.emulator.Calls("")-before > n }
				}, code, tier.ErrNoSpace)
				if !g.brief() && (tried < 60 || told < tried/4) || tried < 2 { // a quarter of few is chance
					t.Errorf("%d calls, of which %d were told of: too few", tried, told)
				}
			})
		}
	}
}

// TestEveryWorkOfTheGPUFailsOnce is the same with work that is accepted and fails: each failure is
// reported.
func TestEveryWorkOfTheGPUFailsOnce(t *testing.T) {
	t.Parallel()
	for name, d := range drivers {
		if testseed.Hurried() && name != newest {
			continue // in which the walks take long
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := emulatedBy(t, d.emulator)
			g.unpinned = d.unpinned
			tried, told := g.eachFails(t, false, func(n int64) (hit func(bool) bool) {
				g.emulator.FailWork(n, cuda.ErrIllegalAddress, false)
				return func(failed bool) bool { return failed }
			}, cuda.ErrIllegalAddress)
			if tried < 8 || told != tried {
				t.Errorf("%d pieces of work, of which %d were told of: want all, and more than a few", tried, told)
			}
		})
	}
}

// eachFails walks a batch again and again; in the n-th walk the n-th call or work of each move
// fails. arm makes such a failure, and returns a function that reports whether a move, which has
// failed or has not, met it. The walks are over when some in a row meet none. It returns how many
// there were up to the last that was met of each move, and how many moves failed. Of many, a brief
// test makes a part.
func (g gpus) eachFails(t *testing.T, many bool, arm func(n int64) (hit func(failed bool) bool), want ...error) (tried, told int) {
	t.Helper()
	step, row := int64(1), 5
	if g.brief() && many {
		step, row = 13, 2
	}
	last := make([]int, len(walk))
	for i, unmet := 1, 0; unmet < row; i++ {
		n := int64(i-1) * step
		unmet++
		ok := t.Run(fmt.Sprint(n), func(t *testing.T) {
			m := newMachine(t, machineConfig{gpus: g})
			b := m.put(t, codedBriefly(), tier.GPU)
			met, failed := m.walked(t, b, func() func(bool) bool {
				hit := arm(n)
				return func(failed bool) bool {
					defer g.emulator.ClearFailures()
					return hit(failed)
				}
			}, want...)
			told += failed
			for move, met := range met {
				if met {
					last[move], unmet = i, 0
				}
			}
			m.whole(t, b, tier.GPU)
		})
		for _, leak := range g.emulator.Leaks() {
			t.Errorf("with failure %d: %s", n, leak)
		}
		if !ok || t.Failed() {
			break
		}
	}
	for _, n := range last {
		tried += n
	}
	return tried, told
}

// TestLostGPU: a GPU that fails for good, as real ones do, takes with it what it holds and nothing
// else. All that needs it fails with the driver's error; what is on the host and on the disk is
// whole, and everything can be closed.
func TestLostGPU(t *testing.T) {
	for name, d := range drivers {
		t.Run(name, func(t *testing.T) {
			g := withDriver(t, d.emulator) // which has what the GPU holds until the end: calls to give it back fail, too
			g.unpinned = d.unpinned
			var closing error
			t.Run("lost", func(t *testing.T) {
				m := newMachine(t, machineConfig{gpus: g, closing: func(err error) { closing = err }})
				there := map[tier.Kind]*batch.Batch{}
				for _, k := range tier.Kinds() {
					there[k] = m.put(t, codedBriefly(), k)
				}
				g.emulator.FailWork(0, cuda.ErrIllegalAddress, true)
				for _, k := range []tier.Kind{tier.Host, tier.Disk, tier.Host} {
					m.lost(t, there[tier.GPU], k)
				}
				for _, k := range []tier.Kind{tier.Host, tier.Disk} {
					m.lost(t, there[k], tier.GPU)
					if err := m.same(t.Context(), there[k]); err != nil {
						t.Errorf("the batch in %s: %v", k, err)
					}
				}
				if err := m.mover.Move(t.Context(), there[tier.Host], toDisk); err != nil {
					t.Error(err)
				}
				if err := m.mover.Move(t.Context(), there[tier.Disk], toHost); err != nil {
					t.Error(err)
				}
				for _, k := range []tier.Kind{tier.Host, tier.Disk} {
					if err := m.same(t.Context(), there[k]); err != nil {
						t.Errorf("the batch that was in %s: %v", k, err)
					}
				}
				if _, err := m.mover.Ingest(context.Background(), numbered(1, 100), toGPU); !errors.Is(err, cuda.ErrIllegalAddress) {
					t.Errorf("a batch for the GPU that is lost: %v", err)
				}
			})
			if !errors.Is(closing, cuda.ErrIllegalAddress) {
				t.Errorf("closing a GPU that is lost tells %v", closing)
			}
			if n := g.emulator.Live("contexts"); n != 0 {
				t.Errorf("%d contexts are left", n)
			}
		})
	}
}

// lost checks that a move fails because the GPU has, and that the batch stays.
func (m *machine) lost(t *testing.T, b *batch.Batch, to tier.Kind) {
	t.Helper()
	from := b.Info()
	err := m.mover.Move(t.Context(), b, reservation.AnyInTier(to))
	if !errors.Is(err, cuda.ErrIllegalAddress) {
		t.Fatalf("%s to %s: %v, want that the GPU is lost", from.Space, to, err)
	}
	if now := b.Info(); now.Space != from.Space || now.State != batch.Idle || now.Bytes != from.Bytes {
		t.Fatalf("the batch is %+v, was %+v", now, from)
	}
}
