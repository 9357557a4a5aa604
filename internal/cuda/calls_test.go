package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/invariants"
)

// everything calls each method of Calls once, and returns what went wrong.
type everything struct {
	r            *rig
	d, peer      *cuda.Device
	in, out, reg []byte
}

const small = 4096

func (e *everything) run(c *cuda.Calls) (err error) {
	check := func(cerr error) bool { err = errors.Join(err, cerr); return cerr == nil }
	s, serr := c.NewStream()
	if !check(serr) {
		return err
	}
	defer func() { check(c.DestroyStream(s)) }()
	a, aerr := c.Alloc(small)
	if !check(aerr) {
		return err
	}
	defer func() { check(c.Free(a)) }()
	base, n, rerr := c.AddressRange(a + small/2)
	if check(rerr) && (base != a || n != small) {
		e.r.t.Errorf("the range of an address inside is %d bytes at %#x, want %d at %#x", n, base, small, a)
	}
	if c.Reserved(a) || c.ProgramMapped(a) {
		check(errors.New("an allocation is taken for addresses that a program has reserved, or memory that it has mapped"))
	}
	if at := extent.Address(e.in); !c.HostRegistered(at, small) || c.HostRegistered(at, small+1) {
		check(errors.New("pinned memory is not known to the driver, or more than that is"))
	}
	check(c.CopyToDevice(s, a, extent.Address(e.in), small/2))
	check(c.CopyOnDevice(s, a+small/2, a, small/2))
	check(c.Fill(s, a, 5, 8))
	check(c.CopyToHost(s, extent.Address(e.out), a, small))
	check(e.events(c, s))
	check(e.pools(c, s))
	check(e.values(c, s))
	check(e.context(c, s, a))
	return err
}

func (e *everything) events(c *cuda.Calls, s cuda.Stream) error {
	ev, err := c.NewEvent()
	if err != nil {
		return err
	}
	err = errors.Join(c.Record(ev, s), c.WaitEvent(s, ev), c.SyncStream(s))
	if done, derr := c.EventDone(ev); !done || derr != nil {
		err = errors.Join(err, derr, errors.New("an event that was waited for is not done"))
	}
	return errors.Join(err, c.DestroyEvent(ev))
}

func (e *everything) pools(c *cuda.Calls, s cuda.Stream) error {
	p, err := c.NewPool()
	if err != nil {
		return err
	}
	err = c.ShowPool(p, 1)
	b, berr := c.AllocAsync(s, p, small)
	before, uerr := c.PoolUnused(p)
	err = errors.Join(err, berr, uerr, c.FreeAsync(s, b), c.SyncStream(s))
	if after, uerr := c.PoolUnused(p); after != before+small {
		err = errors.Join(err, uerr, fmt.Errorf("%d bytes of the pool are unused, want %d", after, before+small))
	}
	return errors.Join(err, c.TrimPool(p), c.DestroyPool(p))
}

func (e *everything) values(c *cuda.Calls, s cuda.Stream) error {
	word, err := c.AllocHost(8)
	if err != nil {
		return err
	}
	at, err := c.HostDevicePtr(word)
	err = errors.Join(err, c.WaitValue(s, at, 7))
	cuda.StoreWord(word, 7)
	return errors.Join(err, c.SyncStream(s), c.FreeHost(word))
}

func (e *everything) context(c *cuda.Calls, s cuda.Stream, a cuda.Ptr) error {
	if i, err := c.Ordinal(); i != e.d.Info().Ordinal || err != nil {
		return errors.Join(err, errors.New("the context is another device's"))
	}
	free, total, err := c.MemInfo()
	if free <= 0 || free >= total {
		err = errors.Join(err, errors.New("the device has no free memory, or all"))
	}
	peer := e.peer.Context()
	err = errors.Join(err, c.EnablePeer(peer))
	err = errors.Join(err, c.CopyPeer(s, a, e.d.Context(), a+512, e.d.Context(), 512))
	if e.r.lib.Batch() != "" {
		err = errors.Join(err, c.CopyBatch(s, []cuda.Copy{
			{Dst: a, HostSrc: extent.Address(e.in), Size: small},
			{HostDst: extent.Address(e.reg), Src: a, Size: 0x10},
		}[:1]))
	}
	return errors.Join(err, c.SyncStream(s))
}

// Every function that is bound is called, and does what it should.
func TestEverySymbol(t *testing.T) {
	called := make(map[string]bool)
	for _, without := range []string{"", "cuMemcpyBatchAsync_v2", "cuDeviceGetUuid_v2"} {
		t.Run(without, func(t *testing.T) {
			cfg := cudatest.Config{Devices: 2}
			if without != "" {
				cfg.Without = []string{without}
			}
			r := open(t, cfg)
			r.everything()
			for name := range cuda.SymbolNames() {
				called[name] = called[name] || r.Calls(name) > 0
			}
		})
	}
	for name, was := range called {
		if !was {
			t.Errorf("%s was never called", name)
		}
	}
}

func (r *rig) everything() {
	t := r.t
	e := &everything{r: r, d: r.devices[0], peer: r.devices[1], in: r.host(r.devices[0], small), out: r.host(r.devices[0], small)}
	e.reg = mapped(t, small)
	ok(t, e.d.Here(func(c *cuda.Calls) error { return c.RegisterHost(extent.Address(e.reg), small) }))
	pattern(e.in, 3)
	can, err := r.lib.CanAccessPeer(0, 1)
	if !can || err != nil {
		t.Errorf("CanAccessPeer: %v, %v", can, err)
	}
	ok(t, e.d.Here(e.run))
	r.program()
	second, err := r.lib.Open(0, 0) // the context is shared, and still there afterwards
	ok(t, err)
	ok(t, second.Close())
	want := slices.Concat(e.in[:small/2], e.in[:small/2])
	copy(want, bytes.Repeat([]byte{5}, 8))
	if !bytes.Equal(e.out, want) {
		t.Error("what came back is not what was sent")
	}
	ok(t, e.d.Here(func(c *cuda.Calls) error { return c.UnregisterHost(extent.Address(e.reg)) }))
}

func TestDevices(t *testing.T) {
	r := open(t, cudatest.Config{Devices: 3, Memory: 1 << 20})
	infos, err := r.lib.Devices()
	ok(t, err)
	want := cuda.DeviceInfo{Ordinal: 2, Name: "Spillway CUDA emulator 2", UUID: "GPU-e0e1e2e3-e4e5-e6e7-e8e9-eaebecedee02",
		PCI: "0000:e2:00.0", Memory: 1 << 20, Pools: true}
	if len(infos) != 3 || infos[2] != want || r.devices[2].Info() != want {
		t.Errorf("the devices are %+v", infos)
	}
	if v := r.lib.Version(); v != "12.8" {
		t.Errorf("the version is %s", v)
	}
	if _, err := r.lib.Open(3, 0); !errors.Is(err, cuda.ErrInvalidDevice) {
		t.Errorf("opening a device that is not there: %v", err)
	}
}

// What the driver would find, or crash at.
func TestMistakes(t *testing.T) {
	r := open(t, cudatest.Config{Devices: 2})
	d := r.devices[0]
	s, foreign, a, theirs := r.stream(d), r.stream(r.devices[1]), r.alloc(d, small), r.alloc(r.devices[1], small)
	h := extent.Address(r.host(d, small))
	heap := make([]byte, small)
	freed := of(t, d, func(c *cuda.Calls) (cuda.Ptr, error) { return c.Alloc(small) })
	r.do(func(c *cuda.Calls) error { return c.Free(freed) })
	for name, c := range map[string]struct {
		want error
		call func(c *cuda.Calls) error
	}{
		"another context's stream":  {cuda.ErrInvalidHandle, func(c *cuda.Calls) error { return c.Fill(foreign, a, 1, 1) }},
		"no stream":                 {cuda.ErrInvalidHandle, func(c *cuda.Calls) error { return c.Fill(0, a, 1, 1) }},
		"beyond the allocation":     {cuda.ErrInvalidValue, func(c *cuda.Calls) error { return c.CopyToDevice(s, a+1, h, small) }},
		"freed memory":              {cuda.ErrInvalidValue, func(c *cuda.Calls) error { return c.CopyToHost(s, h, freed, 1) }},
		"the range of freed memory": {cuda.ErrNotFound, func(c *cuda.Calls) error { _, _, err := c.AddressRange(freed); return err }},
		"the range of nothing":      {cuda.ErrNotFound, func(c *cuda.Calls) error { _, _, err := c.AddressRange(12345); return err }},
		"freed twice":               {cuda.ErrInvalidValue, func(c *cuda.Calls) error { return c.Free(freed) }},
		"freed inside":              {cuda.ErrInvalidValue, func(c *cuda.Calls) error { return c.Free(a + 512) }},
		"no memory":                 {cuda.ErrInvalidValue, func(c *cuda.Calls) error { _, err := c.Alloc(0); return err }},
		"too much memory":           {cuda.ErrOutOfMemory, func(c *cuda.Calls) error { _, err := c.Alloc(1 << 40); return err }},
		"another device's memory":   {cuda.ErrInvalidValue, func(c *cuda.Calls) error { return c.Fill(s, theirs, 1, 1) }},
		"Go's memory, in": {cuda.ErrNotPinned, func(c *cuda.Calls) error {
			return c.CopyToDevice(s, a, extent.Address(heap), 1)
		}},
		"Go's memory, out": {cuda.ErrNotPinned, func(c *cuda.Calls) error {
			return c.CopyToHost(s, extent.Address(heap), a, 1)
		}},
		"Go's memory, in a batch": {cuda.ErrNotPinned, func(c *cuda.Calls) error {
			return c.CopyBatch(s, []cuda.Copy{{Dst: a, HostSrc: extent.Address(heap), Size: 1}})
		}},
		"more than is pinned": {cuda.ErrNotPinned, func(c *cuda.Calls) error { return c.CopyToDevice(s, a, h+1, small) }},
		"pinned twice":        {cuda.ErrHostMemoryAlreadyRegistered, func(c *cuda.Calls) error { return c.RegisterHost(h+1, 1) }},
		"not pinned":          {cuda.ErrHostMemoryNotRegistered, func(c *cuda.Calls) error { return c.UnregisterHost(12345) }},
		"a wrong copy among others": {cuda.ErrInvalidValue, func(c *cuda.Calls) error {
			return c.CopyBatch(s, []cuda.Copy{{Dst: a, HostSrc: h, Size: 1}, {Dst: a + small, HostSrc: h, Size: 1}})
		}},
		"a peer that is itself": {cuda.ErrInvalidContext, func(c *cuda.Calls) error { return c.EnablePeer(d.Context()) }},
	} {
		if err := d.Here(c.call); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	ok(t, r.wait(d, s))
}

// TestQueriesAllocateNothing: the thread of a device looks at events without a pause.
func TestQueriesAllocateNothing(t *testing.T) {
	if invariants.Race {
		t.Skip("needs a build without -race, which drops what is pooled")
	}
	open(t, cudatest.Config{}).do(func(c *cuda.Calls) error {
		s, err := c.NewStream()
		if err != nil {
			return err
		}
		ev, err := c.NewEvent()
		if err != nil {
			return err
		}
		if n := testing.AllocsPerRun(1000, func() { _, err = c.EventDone(ev) }); n >= 1 {
			t.Errorf("a query allocates %v times", n)
		}
		return errors.Join(err, c.DestroyEvent(ev), c.DestroyStream(s))
	})
}
