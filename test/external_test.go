package test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
)

// sampled lets virtual time pass until what others hold has been looked at, and what follows
// from that has happened.
func sampled() {
	time.Sleep(2 * time.Second)
	synctest.Wait()
}

// simulated is a device of package sim.
type simulated interface {
	tier.Device
	SetExternal(n int64)
}

func openSim(t *testing.T, memory int64) simulated {
	t.Helper()
	dev, err := sim.New(sim.Config{Memory: memory})
	if err != nil {
		t.Fatal(err)
	}
	return dev.(simulated)
}

func openOver(t *testing.T, g spillway.GPUConfig) (*spillway.Engine, *tier.Space) {
	t.Helper()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{g}, HostMemory: spillway.Bytes(64 << 20), Disks: []spillway.DiskConfig{}, Logger: slog.New(slog.DiscardHandler),
		GPUMarks: tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6},
		Limits:   spillway.Limits{Admission: admission.Rules{Threads: 2}}, // also on a machine with one processor
	})
	if err != nil {
		t.Fatal(err)
	}
	return eng, eng.Reservations().Spaces().InTier(tier.GPU)[0]
}

// onGPU makes n batches of 1 MiB in the GPU space.
func onGPU(t *testing.T, eng *spillway.Engine, n int) (all []*batch.Batch) {
	t.Helper()
	const size = 1 << 20
	for i := range n {
		r, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), size)
		if err != nil {
			t.Fatal(err)
		}
		buf, err := r.Alloc(size)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
		b, err := eng.NewBatch(batch.NewImage(&batch.Descriptor{Rows: 1, Body: size}, buf, buf.Space()))
		if err != nil {
			t.Fatal(err)
		}
		b.SetPlace(batch.Place{Plan: 1, Seq: uint64(i)})
		all = append(all, b)
	}
	return all
}

// TestForeignBytes: what others take on the GPU raises the pressure of the space there. The
// monitor makes room for it, tasks wait for it, and when it goes all is as before.
func TestForeignBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dev := openSim(t, 64*mib)
		eng, gpu := openOver(t, spillway.GPUConfig{Device: dev, Own: true})
		all := onGPU(t, eng, 40)
		sampled()
		if gpu.State().External != 0 || gpu.State().Used() != 40*mib {
			t.Fatalf("%d external bytes, %d used; nobody else is there", gpu.State().External, gpu.State().Used())
		}
		dev.SetExternal(16 * mib) // with the 40 above 0.8 of 64
		sampled()
		if n := gpu.State().External; n != 16*mib {
			t.Errorf("%d external bytes, want 16 MiB", n)
		}
		if p := gpu.State().Pressure; p < gpu.State().Stop || p >= gpu.State().Trigger {
			t.Errorf("the pressure is %d: want it from %d to below %d", p, gpu.State().Stop, gpu.State().Trigger)
		}
		for _, s := range eng.Stats().Spaces {
			if want := int64(16 * mib); s.ID == gpu.ID() && s.External != want {
				t.Errorf("the statistics have %d external bytes", s.External)
			}
		}

		dropAll(t, all)

		// Another task runs, so that this one waits for room under the threshold.
		running, err := eng.Admit(t.Context(), spillway.Estimate{Output: 10 * mib, Overhead: admission.None})
		if err != nil {
			t.Fatal(err)
		}
		for foreign, output := range map[int64]int64{30 * mib: 24 * mib, 48 * mib: 32 * mib} {
			dev.SetExternal(foreign)
			sampled()
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			admitted := make(chan error, 1)
			go func() {
				g, err := eng.Admit(ctx, spillway.Estimate{Output: output, Overhead: admission.None})
				if err == nil {
					err = g.Done(admission.Measured{})
				}
				admitted <- err
			}()
			sampled()
			if len(admitted) != 0 {
				t.Errorf("a task of %d bytes is admitted where others hold %d of 64 MiB", output, foreign)
			}
			dev.SetExternal(0)
			if err := <-admitted; err != nil {
				t.Errorf("a task of %d bytes when the others are gone: %v", output, err)
			}
			cancel()
		}
		sampled()
		if n := gpu.State().External; n != 0 {
			t.Errorf("%d external bytes when the others are gone", n)
		}
		if err := running.Done(admission.Measured{}); err != nil {
			t.Error(err)
		}
		closeClean(t, eng)
	})
}

// TestForeignBytesAreOthers: neither a budget's limit is foreign, nor what the device has
// beside the space; what another engine holds on the same device is, once.
func TestForeignBytesAreOthers(t *testing.T) {
	t.Run("a budget", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			dev := openSim(t, 64*mib)
			b := newBudget(t, 64*mib)
			other, err := wrapIn(b)(openSim(t, 64*mib)) // another device, with 32 MiB of the budget
			if err != nil {
				t.Fatal(err)
			}
			stream, err := other.NewStream()
			if err != nil {
				t.Fatal(err)
			}
			addr, err := other.Alloc(stream, 32*mib)
			if err != nil {
				t.Fatal(err)
			}
			eng, gpu := openOver(t, spillway.GPUConfig{Device: dev, Own: true, Memory: spillway.Bytes(64 * mib), Wrap: wrapIn(b)})
			sampled()
			if n := gpu.State().External; n != 0 {
				t.Errorf("%d external bytes", n)
			}
			closeClean(t, eng)
			if err := errors.Join(other.Free(stream, addr), stream.Close(), other.Close()); err != nil {
				t.Error(err)
			}
		})
	})
	t.Run("a device larger than the space", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			dev := openSim(t, 64*mib)
			eng, gpu := openOver(t, spillway.GPUConfig{Device: dev, Own: true, Memory: spillway.Bytes(40 * mib)})
			all := onGPU(t, eng, 8)
			for held, want := range map[int64]int64{0: 0, 24 * mib: 0, 30 * mib: 6 * mib} {
				dev.SetExternal(held)
				sampled()
				if n := gpu.State().External; n != want {
					t.Errorf("%d external bytes of %d, want %d", n, held, want)
				}
			}
			dropAll(t, all)
			closeClean(t, eng)
		})
	})
	t.Run("two engines", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			dev := openSim(t, 64*mib)
			a, gpuA := openOver(t, spillway.GPUConfig{Device: dev})
			b, gpuB := openOver(t, spillway.GPUConfig{Device: dev})
			ofA, ofB := onGPU(t, a, 10), onGPU(t, b, 20)
			sampled()
			if gpuA.State().External != 20*mib || gpuB.State().External != 10*mib {
				t.Errorf("%d and %d external bytes, want what the other has",
					gpuA.State().External, gpuB.State().External)
			}
			dev.SetExternal(4 * mib)
			sampled()
			if gpuA.State().External != 24*mib || gpuB.State().External != 14*mib {
				t.Errorf("%d and %d external bytes, want those of a third, too",
					gpuA.State().External, gpuB.State().External)
			}
			dropAll(t, append(ofA, ofB...))
			closeClean(t, a)
			closeClean(t, b)
			if err := dev.Close(); err != nil {
				t.Error(err)
			}
		})
	})
}

// panicking is a device that panics in Memory while it is set to.
type panicking struct {
	tier.Device
	on *atomic.Bool
}

func (d panicking) MemInfo() (free, total int64, err error) {
	if d.on.Load() {
		panic("MemInfo of the program's")
	}
	return d.Device.MemInfo()
}

// TestForeignBytesOfAPanickingDevice: the panic is in the log, what was known stays, and the device
// is queried again.
func TestForeignBytesOfAPanickingDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dev := openSim(t, 64*mib)
		var on atomic.Bool
		var log syncBuffer
		eng, err := spillway.Open(t.Context(), spillway.Config{
			GPUs: []spillway.GPUConfig{{Device: dev, Own: true, Memory: spillway.Bytes(64 * mib), Wrap: func(d tier.Device) (tier.Device, error) {
				return panicking{d, &on}, nil
			}}},
			HostMemory: spillway.Bytes(64 << 20), Disks: []spillway.DiskConfig{}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		gpu := eng.Reservations().Spaces().InTier(tier.GPU)[0]
		dev.SetExternal(8 * mib)
		sampled()
		on.Store(true)
		dev.SetExternal(16 * mib)
		sampled()
		if n := gpu.State().External; n != 8*mib {
			t.Errorf("%d external bytes while the device panics, want the 8 MiB of before", n)
		}
		if n := strings.Count(log.String(), "Device.MemInfo"); n == 0 {
			t.Errorf("the panic is not in the log: %s", log.String())
		}
		on.Store(false)
		sampled()
		if n := gpu.State().External; n != 16*mib {
			t.Errorf("%d external bytes when the device answers again, want 16 MiB", n)
		}
		closeClean(t, eng)
	})
}
