package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/testseed"
)

// region is a piece of memory of which the model knows what will be in it when all work
// that was put somewhere is done.
type region struct {
	ptr  cuda.Ptr
	host []byte
	want []byte
	last *cuda.Mark // behind the last work with it
}

// player puts random work on its streams. Work with a region waits for the last work with
// it, whichever stream that was on, and so the model can be brought up to date at once.
type player struct {
	rng     *rand.Rand
	streams []cuda.Stream
	device  []*region
	host    []*region
}

const regionSize = 2000

// step puts one piece of work.
func (p *player) step(c *cuda.Calls) error {
	s := p.streams[p.rng.IntN(len(p.streams))]
	a, b := p.device[p.rng.IntN(len(p.device))], p.device[p.rng.IntN(len(p.device))]
	h := p.host[p.rng.IntN(len(p.host))]
	n := 1 + p.rng.Int64N(regionSize/2)
	x, y := p.rng.Int64N(regionSize-n+1), p.rng.Int64N(regionSize-n+1)
	used := []*region{a}
	var put func() error
	switch kind := p.rng.IntN(5); {
	case kind == 0:
		v := byte(p.rng.Uint32())
		put = func() error { return c.Fill(s, a.ptr+cuda.Ptr(x), v, n) }
		copy(a.want[x:x+n], bytes.Repeat([]byte{v}, int(n)))
	case kind == 1:
		used = append(used, h)
		put = func() error { return c.CopyToDevice(s, a.ptr+cuda.Ptr(x), extent.Address(h.host[y:]), n) }
		copy(a.want[x:x+n], h.want[y:])
	case kind == 2:
		used = append(used, h)
		put = func() error { return c.CopyToHost(s, extent.Address(h.host[y:]), a.ptr+cuda.Ptr(x), n) }
		copy(h.want[y:y+n], a.want[x:])
	case kind == 3 && a != b:
		used = append(used, b)
		put = func() error { return c.CopyOnDevice(s, a.ptr+cuda.Ptr(x), b.ptr+cuda.Ptr(y), n) }
		copy(a.want[x:x+n], b.want[y:])
	case kind == 4 && a != b:
		used = append(used, b, h)
		put = func() error {
			return c.CopyBatch(s, []cuda.Copy{
				{Dst: a.ptr + cuda.Ptr(x), HostSrc: extent.Address(h.host[y:]), Size: n},
				{Dst: b.ptr + cuda.Ptr(x), HostSrc: extent.Address(h.host[y:]), Size: n},
			})
		}
		copy(a.want[x:x+n], h.want[y:])
		copy(b.want[x:x+n], h.want[y:])
	default:
		return nil
	}
	return p.place(c, s, used, put)
}

// place puts work on s behind what was last done with the regions.
func (p *player) place(c *cuda.Calls, s cuda.Stream, used []*region, put func() error) (err error) {
	for _, r := range used {
		if r.last != nil {
			err = errors.Join(err, c.WaitMark(s, r.last))
		}
	}
	err = errors.Join(err, put())
	m, merr := c.Mark(s, nil)
	for _, r := range used {
		r.last = m
	}
	return errors.Join(err, merr)
}

// Random work of several goroutines over streams that wait for each other comes out
// as if it had been done one after another.
func TestRandom(t *testing.T) {
	for _, cfg := range []cudatest.Config{{}, {Delay: 20_000, Without: []string{"cuMemcpyBatchAsync_v2"}}} {
		t.Run(fmt.Sprint(cfg.Delay), func(t *testing.T) {
			r := open(t, cfg)
			var all sync.WaitGroup
			for seed := range testseed.Each(t, 4) {
				p := r.player(seed)
				all.Go(func() { p.play(t, r.devices[0]) })
			}
			all.Wait()
		})
	}
}

func (r *rig) player(seed uint64) *player {
	p := &player{rng: rand.New(rand.NewPCG(seed, 5))}
	d := r.devices[0]
	for i := range 3 {
		p.streams = append(p.streams, r.stream(d))
		p.device = append(p.device, &region{ptr: r.alloc(d, regionSize), want: make([]byte, regionSize)})
		h := &region{host: r.host(d, regionSize)}
		pattern(h.host, int(seed)*10+i)
		h.want = bytes.Clone(h.host)
		p.host = append(p.host, h)
	}
	s := p.streams[0]
	for _, a := range p.device {
		r.do(func(c *cuda.Calls) error {
			return p.place(c, s, []*region{a}, func() error { return c.Fill(s, a.ptr, 0, regionSize) })
		})
	}
	return p
}

func (p *player) play(t *testing.T, d *cuda.Device) {
	for range 400 {
		if err := d.Here(p.step); err != nil {
			t.Error(err)
			return
		}
	}
	// The device's regions are looked at by way of the host's.
	for i, a := range p.device {
		h := p.host[i]
		<-h.last.Done()
		if !bytes.Equal(h.host, h.want) {
			t.Errorf("host region %d differs from the model", i)
		}
		err := d.Here(func(c *cuda.Calls) error {
			s := p.streams[i]
			return p.place(c, s, []*region{a, h}, func() error {
				return c.CopyToHost(s, extent.Address(h.host), a.ptr, regionSize)
			})
		})
		if err != nil {
			t.Error(err)
			return
		}
		<-h.last.Done()
		if !bytes.Equal(h.host, a.want) {
			t.Errorf("device region %d differs from the model", i)
		}
	}
}
