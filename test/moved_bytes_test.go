package test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// mib is a MiB in bytes.
const mib = 1 << 20

// openMarked opens an engine of so much GPU memory, which is evicted from at 0.8 of it on, as much
// host memory and a disk.
func openMarked(t *testing.T, memory int64, change ...func(*spillway.Config)) *spillway.Engine {
	t.Helper()
	marks := tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6}
	cfg := spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(memory)}},
		HostMemory: spillway.Bytes(memory),
		Disks:      []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 * mib)}},
		GPUMarks:   marks, HostMarks: marks, Codec: convert.CodecNone, Topology: thisMachine(),
	}
	for _, f := range change {
		f(&cfg)
	}
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return eng
}

// TestLoadingMovesNothing: what is put goes where nothing must leave for it.
func TestLoadingMovesNothing(t *testing.T) {
	t.Parallel()
	eng := openMarked(t, 8*mib)
	repo := scanOf(t, eng)
	words := wordList(1, 100)
	for i := range int64(80) {
		if err := repo.Put(t.Context(), 0, numberedRecord(i, 10_000, words)); err != nil {
			t.Fatal(err)
		}
	}
	put := repo.Bytes(tier.GPU) + repo.Bytes(tier.Host) + repo.Bytes(tier.Disk)
	if put < 20*mib {
		t.Fatalf("%d bytes were put: too few to fill both memories", put)
	}
	if s := eng.Stats().Monitor; s.Bytes*10 > put {
		t.Errorf("%d bytes were moved for %d that were put", s.Bytes, put)
	}
	for _, s := range eng.Spaces() {
		now := s.State()
		if s.Kind() != tier.Disk && (now.Pressure >= now.Trigger || now.Used() < now.Trigger-mib) {
			t.Errorf("%s has %d bytes: want just below the trigger, %d", s.ID(), s.State().Used(), s.State().Trigger)
		}
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestNothingMovesAfterASpike: when the pressure has been at the trigger for a moment, work at a
// pressure between the marks moves nothing any more.
func TestNothingMovesAfterASpike(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		eng := openMarked(t, 64*mib)
		gpu := eng.Spaces()[0]
		all := onGPU(t, eng, 45) // above the stop mark, 38.4
		r, err := eng.Reserve(t.Context(), spillway.Specific(gpu.ID()), 8*mib)
		if err != nil {
			t.Fatal(err)
		}
		sampled()
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
		sampled()
		was := eng.Stats().Monitor.Bytes
		if was == 0 || was > 2*(45+8-51)*mib+2*mib {
			t.Errorf("the spike moved %d bytes", was)
		}
		for range 50 {
			h, err := eng.Mover().Acquire(t.Context(), all[0], spillway.Specific(gpu.ID()))
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond)
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if n := eng.Stats().Monitor.Bytes - was; n != 0 {
			t.Errorf("50 uses of one batch of 1 MiB moved %d bytes", n)
		}
		dropAll(t, all)
		closeClean(t, eng)
	})
}

// TestNoCliff: below the trigger nothing moves, and above it not much more than what is too much.
func TestNoCliff(t *testing.T) {
	t.Parallel()
	const trigger = 51.2
	first, step := testseed.Share(t, 1)
	for i, times := range []float64{0.5, 0.98, 1.01, 1.1, 1.2} {
		if i%step != first {
			continue
		}
		t.Run(fmt.Sprint(times), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				eng := openMarked(t, 64*mib)
				n := int(times*trigger + 0.5)
				all := onGPU(t, eng, n)
				sampled()
				excess := max(0, int64(n)*mib-eng.Spaces()[0].State().Trigger+1)
				moved := eng.Stats().Monitor.Bytes
				if excess == 0 && moved != 0 || moved > 2*excess+mib {
					t.Errorf("%d bytes were moved for %d above the trigger", moved, excess)
				}
				dropAll(t, all)
				closeClean(t, eng)
			})
		})
	}
}

// TestTaskOnOneOfFourGPUs: for a task that may run on any of four GPUs, no more moves than with
// one.
func TestTaskOnOneOfFourGPUs(t *testing.T) {
	t.Parallel()
	var ofOne int64
	for _, n := range []int{1, 4} {
		synctest.Test(t, func(t *testing.T) {
			eng := openMarked(t, 64*mib, func(c *spillway.Config) {
				c.GPUMarks.Trigger, c.HostMemory = 1, spillway.Bytes(512*mib)
				c.GPUs = slices.Repeat(c.GPUs, n)
			})
			all := onGPU(t, eng, 57*n)
			// The GPU is not full with the task, else it is at its trigger until the task ends.
			task := spillway.Task{Output: 16*mib - mib/2, Overhead: admission.None}
			if err := eng.RunTask(t.Context(), task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil }); err != nil {
				t.Error(err)
			}
			sampled()
			moved := eng.Stats().Monitor.Bytes
			if n == 1 {
				ofOne = moved
			}
			if moved == 0 || moved > ofOne {
				t.Errorf("%d bytes were moved for a task of 15.5 MiB with %d GPUs, %d with one", moved, n, ofOne)
			}
			dropAll(t, all)
			closeClean(t, eng)
		})
	}
}
