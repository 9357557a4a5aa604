package cuda_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/tier/sim"
)

const pieceBytes = 2000

// storm is what several goroutines do with several devices at the same time.
type storm struct {
	devices []tier.Device
	events  chan tier.Event // of all devices, for any goroutine to wait for
	stop    chan struct{}
}

// user is one of them.
type user struct {
	*storm
	dev    tier.Device
	rng    *rand.Rand
	stream tier.Stream
	memory []tier.Addr
	events []tier.Event // its own, which it waits for
}

// run goes on until it is stopped, whatever fails.
func (u *user) run() {
	for {
		select {
		case <-u.stop:
			u.waitAll()
			return
		default:
		}
		if err := u.step(); errors.Is(err, tier.ErrClosed) {
			u.stream = nil
			runtime.Gosched()
		}
	}
}

func (u *user) waitAll() {
	for _, e := range u.events {
		<-e.Done()
	}
	u.events = nil
}

func (u *user) step() (err error) {
	if u.stream == nil {
		u.stream, err = u.dev.NewStream()
		if err != nil {
			u.stream = nil
		}
		return err
	}
	switch u.rng.IntN(7) {
	case 0:
		a, err := u.dev.Alloc(u.stream, pieceBytes)
		if err == nil {
			u.memory = append(u.memory, a)
		}
		return err
	case 1:
		e, err := u.dev.Record(u.stream)
		if err != nil {
			return err
		}
		u.events = append(u.events, e)
		select {
		case u.storm.events <- e:
		default:
		}
	case 2:
		select {
		case e := <-u.storm.events:
			return u.dev.WaitEvent(u.stream, e)
		default:
		}
	case 3:
		for _, d := range u.devices {
			d.Reap()
			d.MemInfo()
		}
	case 4:
		_ = u.stream.Sync()
		if u.stream.Err() != nil || u.rng.IntN(4) == 0 {
			_ = u.stream.Close()
			u.stream = nil
		}
		u.waitAll()
	default:
		return u.work()
	}
	return nil
}

// work uses memory.
func (u *user) work() error {
	if len(u.memory) == 0 {
		return nil
	}
	a := u.memory[0]
	switch u.rng.IntN(5) {
	case 0:
		err := u.dev.Free(u.stream, a)
		if err == nil {
			u.memory = u.memory[1:]
		}
		return err
	case 1:
		return u.dev.CopyRegions(u.stream, []tier.Region{{Dst: a, HostSrc: make([]byte, pieceBytes)}})
	case 2:
		return u.dev.CopyRegions(u.stream, []tier.Region{{HostDst: make([]byte, pieceBytes), Src: a}})
	case 3:
		return u.dev.Fill(u.stream, a, 1, pieceBytes)
	}
	return u.dev.CopyRegions(u.stream, []tier.Region{
		{Dst: a, HostSrc: make([]byte, 100)}, {HostDst: make([]byte, 50), Src: a + 512}, {Dst: a + 1024, HostSrc: make([]byte, 300)},
	})
}

// Devices of two kinds, one of them another backend's, have many users that wait for each other's
// work. They fail in all ways, and are closed in the middle of it: all waits end, and nothing is
// left.
func TestManyUseDevicesThatFailAndAreClosed(t *testing.T) {
	for seed := range testseed.Each(t, 3) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := load(t, cudatest.Config{Devices: 2, Delay: time.Duration(seed%3) * 10 * time.Microsecond})
			s := &storm{events: make(chan tier.Event, 64), stop: make(chan struct{})}
			for i := range 2 {
				d, err := r.driver.OpenDevice(cuda.Config{Ordinal: i, Memory: 1 << 20, OnePiece: i == 1})
				if err != nil {
					t.Fatal(err)
				}
				s.devices = append(s.devices, d)
			}
			other, err := sim.New(sim.Config{Memory: 1 << 20})
			if err != nil {
				t.Fatal(err)
			}
			s.devices = append(s.devices, other)
			var users sync.WaitGroup
			for i := range 9 {
				u := &user{storm: s, dev: s.devices[i%3], rng: rand.New(rand.NewPCG(seed, uint64(i)))}
				users.Go(u.run)
			}
			r.refuseByTurns()
			var closing sync.WaitGroup
			for _, d := range s.devices {
				closing.Go(func() { _ = d.Close() }) // it may return what was refused meanwhile
			}
			closing.Wait()
			close(s.stop)
			users.Wait()
		})
	}
}

// refuseByTurns has calls refused and work fail, some time after each other.
func (r *rig) refuseByTurns() {
	for i := range int64(20) {
		for next := r.Calls("") + 150; r.Calls("") < next; {
			runtime.Gosched()
		}
		r.ClearFailures()
		switch i % 5 {
		case 0:
			r.FailWork(i, driver.ErrIllegalAddress, false)
		case 1:
			r.Fail("", i, driver.ErrInvalidValue, i%3+1)
		case 2:
			r.Fail("cuEventRecord", 3, driver.ErrInvalidValue, 3)
		case 3:
			r.Fail("cuMemHostAlloc", 0, driver.ErrOutOfMemory, 3)
		case 4:
			r.Fail("cuCtxPopCurrent_v2", 0, driver.ErrInvalidValue, 2)
		}
	}
	r.ClearFailures()
}
