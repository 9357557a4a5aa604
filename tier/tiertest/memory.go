package tiertest

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// piece is memory of a pool and the seed of the pattern that it holds once it is stored.
type piece struct {
	tier.Memory
	seed uint64
}

// canSplit reports whether the pool may split the piece. Device pools never do.
func (p piece) canSplit() bool {
	_, device := p.Memory.(tier.DeviceMemory)
	return !device
}

// sharesPage reports whether the piece is host memory so small that it may be on one page with
// another, which then cannot be allocated for anything large.
func (p piece) sharesPage() bool {
	_, host := p.Memory.(tier.HostMemory)
	return host && p.Size() < 2*tier.Page && p.Size()%tier.Page != 0
}

// pages returns the cuts of size bytes at each page.
func pages(size int64) []int64 {
	var cuts []int64
	for c := int64(tier.Page); c < size; c += tier.Page {
		cuts = append(cuts, c)
	}
	return cuts
}

// checkShape checks the promises of Memory and its three forms for memory that Alloc(size, cuts)
// returned.
func (p piece) checkShape(t *testing.T, size int64, cuts []int64) {
	t.Helper()
	if p.Memory == nil {
		t.Fatalf("Alloc(%d) returned no memory and no error", size)
	}
	if p.Size() != size {
		t.Fatalf("Alloc(%d) returned memory of size %d", size, p.Size())
	}
	checkSplit := func(at int64) {
		t.Helper()
		if !slices.Contains(cuts, at) {
			t.Fatalf("memory of %d bytes is split at %d, which is not one of the cuts %v", size, at, cuts)
		}
	}
	switch m := p.Memory.(type) {
	case tier.HostMemory:
		align := int64(tier.Page)
		if p.sharesPage() {
			align = 64
		}
		var at int64
		extents := m.Extents()
		for i, e := range extents {
			if len(e) == 0 {
				t.Fatalf("extent %d of %d is empty", i, len(extents))
			}
			if a := int64(extent.Address(e)); a%align != 0 {
				t.Fatalf("extent %d of %d starts at address %#x, not a multiple of %d", i, len(extents), a, align)
			}
			if i < len(extents)-1 && len(e)%tier.Page != 0 {
				t.Fatalf("extent %d of %d has %d bytes, not a multiple of %d", i, len(extents), len(e), tier.Page)
			}
			if at > 0 {
				checkSplit(at)
			}
			at += int64(len(e))
		}
		if at != size {
			t.Fatalf("the extents of %d bytes add up to %d", size, at)
		}
	case tier.DeviceMemory:
		if a := m.Addr(); a == 0 || a%256 != 0 {
			t.Fatalf("device memory at %#x: want a multiple of 256 above 0", a)
		}
		if m.Device() == nil {
			t.Fatal("device memory without a device")
		}
	case tier.FileMemory:
		volume, file, at := m.Locate(0)
		for off := int64(tier.Page); off < size; off += tier.Page {
			v, f, o := m.Locate(off)
			if v != volume || f != file || o != at+tier.Page {
				checkSplit(off)
			}
			volume, file, at = v, f, o
		}
	default:
		t.Fatalf("memory of type %T is none of host, device and file memory", m)
	}
}

// transfer writes data[i] to pieces[i] at off, or reads it from there. All pieces are of one pool.
// On a device, transfer waits once for all of them.
func transfer(write bool, off int64, pieces []piece, data ...[]byte) (err error) {
	if len(pieces) == 0 {
		return nil
	}
	defer runtime.KeepAlive(data)
	var d tier.Device
	var s tier.Stream
	if first, ok := pieces[0].Memory.(tier.DeviceMemory); ok {
		d = first.Device()
		if s, err = d.NewStream(); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, wait(d, s), s.Close()) }()
	}
	for i, p := range pieces {
		switch m := p.Memory.(type) {
		case tier.HostMemory:
			copyHost(write, off, m, data[i])
		case tier.FileMemory:
			do := m.ReadAt
			if write {
				do = m.WriteAt
			}
			err = do(context.Background(), data[i], off)
		case tier.DeviceMemory:
			if at := m.Addr() + tier.Addr(off); write {
				err = d.CopyRegions(s, []tier.Region{{Dst: at, HostSrc: data[i]}})
			} else {
				err = d.CopyRegions(s, []tier.Region{{HostDst: data[i], Src: at}})
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func copyHost(write bool, off int64, m tier.HostMemory, b []byte) {
	for _, e := range m.Extents() {
		skip := min(off, int64(len(e)))
		off -= skip
		n := 0
		if write {
			n = copy(e[skip:], b)
		} else {
			n = copy(b, e[skip:])
		}
		b = b[n:]
	}
}

// copyOnDevice copies size bytes within a device.
func copyOnDevice(d tier.Device, s tier.Stream, dst, src tier.Addr, size int64) error {
	return d.CopyRegions(s, []tier.Region{{Dst: dst, Src: src, Size: size}})
}

// pattern returns size random bytes, which differ from those of any other seed.
func pattern(size int64, seed uint64) []byte {
	b := make([]byte, size)
	testseed.Fill(b, seed)
	return b
}
