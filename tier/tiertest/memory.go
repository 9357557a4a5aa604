package tiertest

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"testing"

	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// split reports whether the pool may split memory such as m: device pools never
// do.
func split(m tier.Memory) bool {
	_, device := m.(tier.DeviceMemory)
	return !device
}

// shares reports whether m is host memory so small that it may lie on one page with
// other, which then cannot be had for anything large.
func shares(m tier.Memory) bool {
	_, host := m.(tier.HostMemory)
	return host && m.Size() < 2*tier.Page && m.Size()%tier.Page != 0
}

// pages returns the cuts of size bytes at each page.
func pages(size int64) []int64 {
	var cuts []int64
	for c := int64(tier.Page); c < size; c += tier.Page {
		cuts = append(cuts, c)
	}
	return cuts
}

// checkShape checks what Memory and its three forms promise.
func checkShape(t *testing.T, m tier.Memory, size int64, cuts []int64) {
	t.Helper()
	if m == nil {
		t.Fatalf("Alloc(%d) gave no memory and no error", size)
	}
	if m.Size() != size {
		t.Fatalf("Alloc(%d) gave memory of size %d", size, m.Size())
	}
	allowed := make(map[int64]bool, len(cuts))
	for _, c := range cuts {
		allowed[c] = true
	}
	switch m := m.(type) {
	case tier.HostMemory:
		var at int64
		extents := m.Extents()
		for i, e := range extents {
			if len(e) == 0 {
				t.Fatalf("extent %d of %d is empty", i, len(extents))
			}
			align := int64(tier.Page)
			if shares(m) {
				align = 64
			}
			if a := int64(address.Of(e)); a%align != 0 {
				t.Fatalf("extent %d of %d starts at address %#x, not a multiple of %d", i, len(extents), a, align)
			}
			if i < len(extents)-1 && len(e)%tier.Page != 0 {
				t.Fatalf("extent %d of %d is %d bytes long, not a multiple of %d", i, len(extents), len(e), tier.Page)
			}
			if at > 0 && !allowed[at] {
				t.Fatalf("memory of %d bytes is split at %d, which is not one of the cuts %v", size, at, cuts)
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
			if (v != volume || f != file || o != at+tier.Page) && !allowed[off] {
				t.Fatalf("memory of %d bytes is split at %d, which is not one of the cuts %v", size, off, cuts)
			}
			volume, file, at = v, f, o
		}
	default:
		t.Fatalf("memory of type %T is none of host, device and file memory", m)
	}
}

// store writes p at off and waits until it is there.
func store(m tier.Memory, p []byte, off int64) error {
	return transfer(true, []tier.Memory{m}, [][]byte{p}, off)
}

// load reads len(p) bytes from off.
func load(m tier.Memory, p []byte, off int64) error {
	return transfer(false, []tier.Memory{m}, [][]byte{p}, off)
}

// transfer copies between the bytes of the host and memories of one pool, from off on. On a device it
// waits once for all of them.
func transfer(write bool, ms []tier.Memory, data [][]byte, off int64) error {
	if len(ms) == 0 {
		return nil
	}
	if first, ok := ms[0].(tier.DeviceMemory); ok {
		d := first.Device()
		return onDevice(d, func(s tier.Stream) (err error) {
			for i, m := range ms {
				at := m.(tier.DeviceMemory).Addr() + tier.Addr(off)
				if write {
					err = errors.Join(err, d.CopyToDevice(s, at, data[i]))
				} else {
					err = errors.Join(err, d.CopyToHost(s, data[i], at))
				}
			}
			return err
		})
	}
	for i, m := range ms {
		var err error
		switch m := m.(type) {
		case tier.HostMemory:
			eachPiece(m, data[i], off, func(mem, p []byte) {
				if write {
					copy(mem, p)
				} else {
					copy(p, mem)
				}
			})
		case tier.FileMemory:
			if write {
				err = m.WriteAt(context.Background(), data[i], off)
			} else {
				err = m.ReadAt(context.Background(), data[i], off)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func eachPiece(m tier.HostMemory, p []byte, off int64, f func(mem, p []byte)) {
	for _, e := range m.Extents() {
		if off >= int64(len(e)) {
			off -= int64(len(e))
			continue
		}
		n := min(len(e)-int(off), len(p))
		f(e[off:int(off)+n], p[:n])
		p, off = p[n:], 0
		if len(p) == 0 {
			return
		}
	}
}

func onDevice(d tier.Device, f func(s tier.Stream) error) error {
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	if err := f(s); err != nil {
		return errors.Join(err, s.Close())
	}
	e, err := d.Record(s)
	if err != nil {
		return errors.Join(err, s.Close())
	}
	return errors.Join(tier.Wait(context.Background(), e), s.Close())
}

// copyOnDevice copies between ranges of a device.
func copyOnDevice(d tier.Device, s tier.Stream, dst, src tier.Addr, size int64) error {
	return d.CopyRegions(s, []tier.Region{{Dst: dst, Src: src, Size: size}})
}

// pattern returns size random bytes, which are others for each seed.
func pattern(size int64, seed uint64) []byte {
	b := make([]byte, size)
	testseed.Fill(b, seed)
	return b
}

func mustStore(t *testing.T, m tier.Memory, seed uint64) {
	t.Helper()
	mustStoreAll(t, []tier.Memory{m}, []uint64{seed})
}

// mustStoreAll fills memories of one pool with the patterns of seeds. On a device it waits once for
// all of them.
func mustStoreAll(t *testing.T, ms []tier.Memory, seeds []uint64) {
	t.Helper()
	patterns := make([][]byte, len(ms))
	for i, m := range ms {
		patterns[i] = pattern(m.Size(), seeds[i])
	}
	if err := transfer(true, ms, patterns, 0); err != nil {
		t.Fatalf("writing memories such as of %d bytes: %v", ms[0].Size(), err)
	}
	runtime.KeepAlive(patterns)
}

func mustHold(t *testing.T, m tier.Memory, seed uint64) {
	t.Helper()
	mustHoldAll(t, []tier.Memory{m}, []uint64{seed})
}

// mustHoldAll checks that memories of one pool hold the patterns of seeds.
func mustHoldAll(t *testing.T, ms []tier.Memory, seeds []uint64) {
	t.Helper()
	got := make([][]byte, len(ms))
	for i, m := range ms {
		got[i] = make([]byte, m.Size())
	}
	if err := transfer(false, ms, got, 0); err != nil {
		t.Fatalf("reading memories such as of %d bytes: %v", ms[0].Size(), err)
	}
	for i, m := range ms {
		if want := pattern(m.Size(), seeds[i]); !bytes.Equal(got[i], want) {
			at := firstDifference(got[i], want)
			t.Fatalf("memory of %d bytes: byte %d is %#x, want %#x", m.Size(), at, got[i][at], want[at])
		}
	}
}

func firstDifference(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}
