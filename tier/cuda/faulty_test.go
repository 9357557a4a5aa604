package cuda_test

import (
	"errors"
	"fmt"
	"sync/atomic"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// faulty has the emulated driver refuse calls, and GPUs fail, where the suite wants it. It adds the
// suite's error to what the device makes of that, and nothing else: what becomes of streams and
// memory is the device's own doing.
type faulty struct {
	*cuda.Device
	emulator *cudatest.Emulator
	onePiece bool // so that the driver is not asked for memory
	faults   tiertest.FaultFunc
	ops      atomic.Int64
	wanted   error // why work failed
}

type faultyStream struct {
	tier.Stream
	d *faulty
}

type faultyEvent struct {
	tier.Event
	d *faulty
}

// told adds the reason to an error of the driver's.
func (d *faulty) told(err error) error {
	var e *driver.Error
	if errors.As(err, &e) {
		return fmt.Errorf("%w: %w", d.wanted, err)
	}
	return err
}

func (s *faultyStream) Err() error  { return s.d.told(s.Stream.Err()) }
func (s *faultyStream) Sync() error { return s.d.told(s.Stream.Sync()) }
func (e *faultyEvent) Err() error   { return e.d.told(e.Event.Err()) }

func inner(s tier.Stream) tier.Stream {
	if f, ok := s.(*faultyStream); ok {
		return f.Stream
	}
	return s
}

// do makes a call, of which the driver refuses the first part if the suite wants that; or the GPU
// fails at the work that it puts on a stream.
func (d *faulty) do(work bool, call func() error) error {
	index := d.ops.Add(1) - 1
	if refuse := d.faults(index, false); refuse != nil {
		if call == nil {
			return refuse
		}
		d.emulator.Fail("", 0, driver.ErrInvalidValue, 1)
		err := call()
		d.emulator.ClearFailures()
		if err == nil { // the driver was not asked, so there was nothing to refuse
			return refuse
		}
		return fmt.Errorf("%w: %w", refuse, err)
	}
	if call == nil {
		return nil
	}
	if work {
		if fail := d.faults(index, true); fail != nil {
			d.wanted = fail
			d.emulator.Settle()
			d.emulator.FailWork(0, driver.ErrIllegalAddress, false)
		}
	}
	return call()
}

func (d *faulty) Alloc(s tier.Stream, size int64) (a tier.Addr, err error) {
	alloc := func() error { a, err = d.Device.Alloc(inner(s), size); return err }
	if d.onePiece {
		if err = d.do(false, nil); err == nil {
			err = alloc()
		}
		return a, err
	}
	err = d.do(false, alloc)
	return a, err
}

func (d *faulty) Free(s tier.Stream, a tier.Addr) error {
	free := func() error { return d.Device.Free(inner(s), a) }
	if !d.onePiece {
		return d.do(false, free)
	}
	if err := d.do(false, nil); err != nil {
		return err
	}
	return free()
}

func (d *faulty) CopyRegions(s tier.Stream, regions []tier.Region) error {
	return d.do(true, func() error { return d.Device.CopyRegions(inner(s), regions) })
}

func (d *faulty) Fill(s tier.Stream, dst tier.Addr, value byte, size int64) error {
	return d.do(true, func() error { return d.Device.Fill(inner(s), dst, value, size) })
}

func (d *faulty) NewStream() (s tier.Stream, err error) {
	err = d.do(false, func() error { s, err = d.Device.NewStream(); return err })
	if err != nil {
		return nil, err
	}
	return &faultyStream{s, d}, nil
}

func (d *faulty) Record(s tier.Stream) (e tier.Event, err error) {
	err = d.do(false, func() error { e, err = d.Device.Record(inner(s)); return err })
	if err != nil {
		return nil, err
	}
	return &faultyEvent{e, d}, nil
}

func (d *faulty) WaitEvent(s tier.Stream, e tier.Event) error {
	if f, ok := e.(*faultyEvent); ok {
		e = f.Event
	}
	return d.do(false, func() error { return d.Device.WaitEvent(inner(s), e) })
}
