package cuda_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// Pinned memory that copies went by is given back when none is under way any more, but for a rest,
// and although a stream has its word there. The copies after that are as right as those before.
func TestStagingIsGivenBack(t *testing.T) {
	const n = 12 << 20 // bytes of a copy, which take 16 MiB
	r := load(t, cudatest.Config{Memory: 32 << 20})
	d := r.open(t, cuda.Config{Memory: 16 << 20})
	s, err := d.NewStream()
	must(t, err)
	a, err := d.Alloc(s, n)
	must(t, err)
	for round := range 3 {
		pull := plug(t, d, s) // and the stream's word is from there
		in := bytes.Repeat([]byte{byte(round + 1)}, n)
		out := make([]byte, n)
		must(t, d.CopyToDevice(s, a, in))
		must(t, d.CopyToHost(s, out, a))
		must(t, d.CopyToDevice(s, a, in[:1000]))
		if most := d.Staged(); most < 2*n {
			t.Errorf("with copies under way %d bytes are pinned, want those of %d", most, 2*n)
		}
		pull()
		must(t, s.Sync())
		if rest := d.Staged(); rest > cuda.StagingRest {
			t.Errorf("with no copy under way %d bytes are pinned, want at most %d", rest, int64(cuda.StagingRest))
		}
		if !bytes.Equal(out, in) {
			t.Error("the bytes did not come back as they went")
		}
	}
	must(t, s.Close())
	held := d.Staged()
	must(t, d.Close())
	if blocks := r.Calls("cuMemHostAlloc") - r.Calls("cuMemFreeHost"); held == 0 || blocks != 0 {
		t.Errorf("%d bytes were kept, and %d blocks were not given back", held, blocks)
	}
}

// The rest is kept, so that copies one after another do not pin memory each.
func TestStagingIsUsedAgain(t *testing.T) {
	const n = 3 << 20
	r := load(t, cudatest.Config{})
	d := r.open(t, cuda.Config{Memory: 8 << 20})
	s, err := d.NewStream()
	must(t, err)
	a, err := d.Alloc(s, n)
	must(t, err)
	mem := make([]byte, n)
	for range 20 {
		must(t, d.CopyToDevice(s, a, mem))
		must(t, s.Sync())
		must(t, d.CopyToHost(s, mem, a))
		must(t, s.Sync())
	}
	if calls := r.Calls("cuMemHostAlloc"); calls != 1 {
		t.Errorf("memory was pinned %d times, want once", calls)
	}
	must(t, d.Free(s, a))
}

// While a copy is under way no pinned memory is given back, so that others need not pin it anew.
func TestStagingStaysWhileInUse(t *testing.T) {
	const n = 12 << 20 // bytes of a copy, which take 16 MiB
	r := load(t, cudatest.Config{Memory: 64 << 20})
	d := r.open(t, cuda.Config{Memory: 32 << 20})
	busy, err := d.NewStream()
	must(t, err)
	s, err := d.NewStream()
	must(t, err)
	a, err := d.Alloc(s, n)
	must(t, err)
	b, err := d.Alloc(s, 1000)
	must(t, errors.Join(err, s.Sync()))
	pull := plug(t, d, busy)
	must(t, d.CopyToDevice(busy, b, make([]byte, 1000)))
	mem, calls := make([]byte, n), int64(0)
	for range 3 {
		must(t, errors.Join(d.CopyToDevice(s, a, mem), d.CopyToHost(s, mem, a), s.Sync()))
		if now := r.Calls("cuMemHostAlloc"); calls != 0 && now != calls {
			t.Errorf("memory was pinned %d times for copies like those before", now-calls)
		} else {
			calls = now
		}
	}
	pull()
	must(t, errors.Join(busy.Sync(), s.Sync()))
	if rest := d.Staged(); rest > cuda.StagingRest {
		t.Errorf("with no copy under way %d bytes are pinned, want at most %d", rest, int64(cuda.StagingRest))
	}
}

// Pinned memory that is given back is none in which a stream has its word.
func TestStagingKeepsWords(t *testing.T) {
	const n = 12 << 20 // bytes of a copy, which take 16 MiB
	d := load(t, cudatest.Config{Memory: 32 << 20, Delay: 20 * time.Millisecond}).open(t, cuda.Config{Memory: 16 << 20})
	s, err := d.NewStream()
	must(t, err)
	a, err := d.Alloc(s, n)
	must(t, err)
	mem := make([]byte, n)
	must(t, d.CopyToDevice(s, a, mem))
	pull := plug(t, d, s) // its word is between the memory of both copies
	must(t, d.CopyToHost(s, mem, a))
	pull()
	must(t, s.Sync())
	if d.Staged() > cuda.StagingRest || !d.HasWord(s) {
		t.Errorf("%d bytes are pinned, and the stream has its word: %v", d.Staged(), d.HasWord(s))
	}
	must(t, s.Close())
}

// The word of a stream is not freed with it while other streams have work: the driver waits for that
// work, which may wait for the goroutine that closes the stream.
func TestWordsAreFreedWithTheDevice(t *testing.T) {
	r := load(t, cudatest.Config{})
	d := r.open(t, cuda.Config{Memory: 1 << 20})
	var pulls []func()
	var streams []tier.Stream
	for range 2 {
		s, err := d.NewStream()
		must(t, err)
		streams, pulls = append(streams, s), append(pulls, plug(t, d, s))
	}
	pulls[0]()
	before := r.Calls("cuMemFreeHost")
	must(t, streams[0].Close())
	if n := r.Calls("cuMemFreeHost") - before; n != 0 {
		t.Errorf("closing a stream freed %d pieces of pinned memory while another one waits", n)
	}
	pulls[1]()
	must(t, errors.Join(streams[1].Close(), d.Close()))
	if n := r.Calls("cuMemHostAlloc") - r.Calls("cuMemFreeHost"); n != 0 {
		t.Errorf("%d pieces of pinned memory were not given back", n)
	}
}

// Regions one of which is wrong are not copied, and leave no pinned memory in use.
func TestStagingOfRefusedRegions(t *testing.T) {
	const n = 12 << 20
	d := load(t, cudatest.Config{Memory: 32 << 20}).open(t, cuda.Config{Memory: 16 << 20})
	s, err := d.NewStream()
	must(t, err)
	a, err := d.Alloc(s, n)
	must(t, err)
	mem := make([]byte, n)
	if err := d.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: mem}, {Dst: a + n, HostSrc: mem[:1]}}); err == nil {
		t.Error("a region outside of the memory was copied")
	}
	must(t, d.CopyToDevice(s, a, mem))
	must(t, d.CopyToHost(s, mem, a))
	must(t, s.Sync())
	if rest := d.Staged(); rest > cuda.StagingRest {
		t.Errorf("with no copy under way %d bytes are pinned, want at most %d", rest, int64(cuda.StagingRest))
	}
}

// Of a region with host memory, the address on that side means nothing.
func TestRegionsWithStrayAddresses(t *testing.T) {
	for _, without := range [][]string{nil, {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"}} {
		d := load(t, cudatest.Config{Without: without}).open(t, cuda.Config{Memory: 1 << 20})
		s, err := d.NewStream()
		must(t, err)
		a, err := d.Alloc(s, 2000)
		must(t, err)
		in, out := bytes.Repeat([]byte{7}, 2000), make([]byte, 2000)
		must(t, d.CopyRegions(s, []tier.Region{
			{Dst: a, Src: 1 << 40, HostSrc: in[:1000]}, {Dst: a + 1000, Src: a, HostSrc: in[1000:]},
		}))
		must(t, d.CopyRegions(s, []tier.Region{
			{Src: a, Dst: 1 << 40, HostDst: out[:1000]}, {Src: a + 1000, Dst: a, HostDst: out[1000:]},
		}))
		must(t, s.Sync())
		if !bytes.Equal(in, out) {
			t.Error("the bytes did not come back as they went")
		}
	}
}

// A device is closed whose last events are refused, or whose context is lost: its work is over
// before the memory goes that was staged for it.
func TestClosedBeforeItsEventsAreSeen(t *testing.T) {
	for _, lose := range []bool{false, true} {
		for range 2 {
			e := cudatest.New(t, cudatest.Config{Memory: 64 << 20})
			lib, err := cuda.Load(e.Path)
			must(t, err)
			d, err := lib.OpenDevice(cuda.Config{Memory: 16 << 20})
			must(t, err)
			s, err := d.NewStream()
			must(t, err)
			a, err := d.Alloc(s, 4<<20)
			must(t, err)
			must(t, s.Sync())
			e.Set("delay_ns", 20_000_000) // after which the device looks at its events now and then only
			for range 3 {
				must(t, d.CopyToDevice(s, a, make([]byte, 4<<20)))
			}
			if lose {
				e.FailWork(0, driver.ErrIllegalAddress, true)
				e.Settle()
			} else {
				e.Fail("cuEventRecord", 0, driver.ErrInvalidValue, -1)
			}
			if err := d.Close(); !lose {
				must(t, err)
			}
			if n := e.Live("contexts") + e.Live("host allocations"); n != 0 {
				t.Errorf("%d contexts and host allocations are left", n)
			}
		}
	}
}

// After a wait for a stream whose last event is refused, the bytes are there that are due at those
// before.
func TestBytesAreThereWhenEventsAreRefused(t *testing.T) {
	r := load(t, cudatest.Config{})
	w := newWork(t, r.open(t, cuda.Config{Memory: 8 << 20}))
	in := make([]byte, 1<<20)
	fillRandom(in, 3)
	a := w.alloc(int64(len(in)))
	w.ok(w.CopyToDevice(w.s, a, in))
	w.wait()
	for range 5 {
		got := make([]byte, len(in))
		r.Set("delay_ns", 20_000_000)
		w.ok(w.CopyToHost(w.s, got, a))
		if _, err := w.Record(w.s); err != nil {
			t.Fatal(err)
		}
		r.Set("delay_ns", 0)
		r.Fail("cuEventRecord", 0, driver.ErrInvalidValue, -1)
		w.ok(w.s.Sync())
		r.ClearFailures()
		if !bytes.Equal(got, in) {
			t.Error("other bytes came back")
		}
	}
}
