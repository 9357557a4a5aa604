package tiertest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

func testInfo(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	if i := d.Info(); i.Name == "" || i.Backend == "" || i.Node < -1 {
		t.Errorf("Info is %+v: want a name, a backend, and a node or -1", i)
	}
	if free, total, err := d.MemInfo(); err != nil || free < 0 || free > total || total < memory {
		t.Errorf("MemInfo: %d of %d bytes free, on a device with %d", free, total, memory)
	}
}

func testCharge(t *testing.T, open openFunc) { checkCharge(t, openDevice(t, open, nil).Charge, memory) }

// checkCharge checks that charges cover the sizes, grow with them and are multiples of what is
// allocated, and that the whole capacity can be allocated.
func checkCharge(t *testing.T, charge func(int64) int64, capacity int64) {
	t.Helper()
	for _, whole := range []int64{0, capacity} {
		if c := charge(whole); c != whole {
			t.Errorf("Charge(%d) = %d", whole, c)
		}
	}
	sizes := []int64{
		1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 4095, 4096, 4097, 8191, 8192, 8193, 65535, 65536, 65537,
		1<<20 - 1, 1 << 20, 1<<20 + 1, 1 << 40,
	}
	smaller := int64(0)
	for _, size := range sizes {
		c := charge(size)
		if c < size || c < smaller {
			t.Errorf("Charge(%d) = %d is less than the size, or than %d for a smaller size", size, c, smaller)
		}
		if again := charge(c); again != c {
			t.Errorf("Charge(%d) = %d and Charge(%d) = %d: rounding twice changes it", size, c, c, again)
		}
		smaller = c
	}
}

func testAlloc(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	s := d.stream()
	mustFail(t, nil, map[string]error{"Alloc(0)": second(d.Alloc(s, 0)), "Alloc(-1)": second(d.Alloc(s, -1))})
	r := rand.New(rand.NewPCG(1, 2))
	held := make(map[tier.Addr]int64)
	var charged int64
	for range 300 {
		if r.IntN(3) > 0 {
			size := 1 + r.Int64N(20000)
			a := d.alloc(s, size)
			for b, n := range held {
				if a < b+tier.Addr(n) && b < a+tier.Addr(size) {
					t.Fatalf("Alloc returned [%#x, +%d) while [%#x, +%d) is in use", uint64(a), size, uint64(b), n)
				}
			}
			held[a] = size
			charged += d.Charge(size)
		} else {
			for a, n := range held {
				d.ok(d.Free(s, a))
				charged -= d.Charge(n)
				delete(held, a)
				break
			}
		}
		d.outstanding(s, charged)
	}
	for a := range held {
		d.ok(d.Free(s, a))
	}
	d.outstanding(s, 0)
}

func testOutOfMemory(t *testing.T, open openFunc) {
	const piece = 64 << 10
	d := openDevice(t, open, nil)
	s := d.stream()
	refuse := func(size int64) *tier.NoSpaceError {
		t.Helper()
		before := d.Outstanding()
		_, err := d.Alloc(s, size)
		var full *tier.NoSpaceError
		if !errors.As(err, &full) || !errors.Is(err, tier.ErrNoSpace) {
			t.Fatalf("Alloc(%d): %v; want a NoSpaceError", size, err)
		}
		if full.Space.Valid() {
			t.Errorf("the device's NoSpaceError names the space %v, want none", full.Space)
		}
		if full.Requested != size || full.Available < 0 {
			t.Errorf("NoSpaceError for Alloc(%d): requested %d, available %d", size, full.Requested, full.Available)
		}
		if after := d.Outstanding(); after != before {
			t.Errorf("a refused Alloc changed Outstanding from %d to %d", before, after)
		}
		return full
	}
	refuse(memory + 1)
	refuse(1 << 50)
	for range 2 {
		var held []tier.Addr
		for range memory / piece {
			held = append(held, d.alloc(s, piece))
		}
		refuse(1)
		want := pattern(5000, 7)
		d.write(s, held[0], want)
		d.ok(copyOnDevice(d, s, held[len(held)-1], held[0], 5000))
		equal(t, d.read(s, held[len(held)-1], 5000), want, "after a copy on a full device")
		for i := 0; i < len(held); i += 2 {
			d.ok(d.Free(s, held[i]))
		}
		d.outstanding(s, memory/2)
		if full := refuse(memory/2 + 1); full.Largest > memory/2 {
			t.Errorf("half of the memory is free and NoSpaceError.Largest is %d", full.Largest)
		}
		for i := 1; i < len(held); i += 2 {
			d.ok(d.Free(s, held[i]))
		}
		d.outstanding(s, 0)
	}
	d.works(s)
}

func testRetire(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	s, other := d.stream(), d.stream()
	a := d.alloc(s, memory)
	d.outstanding(s, memory)
	unblock := d.block(s)
	d.ok(d.Free(s, a))
	if got := d.Outstanding(); got != memory {
		t.Errorf("Outstanding is %d while the work before a free runs, want %d", got, memory)
	}
	if n := d.Reap(); n != 0 {
		t.Errorf("Reap reclaimed %d bytes while the work before the free runs", n)
	}
	_, err := d.Alloc(other, 1)
	mustFail(t, tier.ErrNoSpace, map[string]error{"Alloc on another stream while all memory is retired": err})
	mustFail(t, nil, map[string]error{
		"a second Free of an allocation": d.Free(s, a),
		"Fill of freed memory":           d.Fill(s, a, 1, 1),
	})
	unblock()
	d.outstanding(s, 0)
	d.ok(d.Free(s, d.alloc(s, memory)))
	d.outstanding(s, 0)
}

// testAlignments copies pieces of many lengths between addresses of many alignments and checks the
// bytes around them.
func testAlignments(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	s := d.stream()
	const room, margin = 80 << 10, 64
	a, b := d.alloc(s, room), d.alloc(s, room)
	host := make([]byte, room)
	for _, size := range []int64{
		0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 65536 + 5,
	} {
		for _, hostOff := range []int64{0, 1, 3, 8} {
			for _, devOff := range []int64{margin, margin + 1, margin + 4, margin + 7} {
				name := fmt.Sprintf("%d bytes from host offset %d by device offset %d", size, hostOff, devOff)
				want := pattern(size, uint64(size))
				copy(host[hostOff:], want)
				window := size + devOff + margin
				d.ok(d.Fill(s, a, 0xaa, window))
				d.ok(d.Fill(s, b, 0xbb, window))
				d.ok(d.CopyToDevice(s, a+tier.Addr(devOff), host[hostOff:hostOff+size]))
				d.ok(copyOnDevice(d, s, b+tier.Addr(hostOff), a+tier.Addr(devOff), size))
				inA, inB := make([]byte, window), make([]byte, window)
				back := make([]byte, hostOff+size+1)
				d.ok(d.CopyToHost(s, inA, a))
				d.ok(d.CopyToHost(s, inB, b))
				d.ok(d.CopyToHost(s, back[hostOff:hostOff+size], a+tier.Addr(devOff)))
				d.wait(s)
				equal(t, inA, framed(want, devOff, window, 0xaa), name+": on the device")
				equal(t, inB, framed(want, hostOff, window, 0xbb), name+": after a copy on the device")
				equal(t, back, framed(want, hostOff, int64(len(back)), 0), name+": back on the host")
			}
		}
	}
}

// framed returns window bytes of value with b at off.
func framed(b []byte, off, window int64, value byte) []byte {
	out := bytes.Repeat([]byte{value}, int(window))
	copy(out[off:], b)
	return out
}

func testRegions(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	s := d.stream()
	const half = 512 << 10
	a := d.alloc(s, 2*half)
	in, out := pattern(half, 1), make([]byte, half)
	d.write(s, a+half, in)

	// Each piece of the first half is written from in, copied from the second half, or skipped
	// while a piece of the second half is read to out.
	r := rand.New(rand.NewPCG(3, 4))
	want, wantOut := make([]byte, half), make([]byte, half)
	var regions []tier.Region
	for off := int64(0); off < half; {
		n := min(1+r.Int64N(3000), half-off)
		src := r.Int64N(half - n + 1)
		switch r.IntN(3) {
		case 0:
			regions = append(regions, tier.Region{Dst: a + tier.Addr(off), HostSrc: in[src : src+n], Size: n})
			copy(want[off:off+n], in[src:])
		case 1:
			regions = append(regions, tier.Region{Dst: a + tier.Addr(off), Src: a + half + tier.Addr(src), Size: n})
			copy(want[off:off+n], in[src:])
		case 2:
			// Size may be left out.
			regions = append(regions, tier.Region{HostDst: out[off : off+n], Src: a + half + tier.Addr(src)})
			copy(wantOut[off:off+n], in[src:])
		}
		off += n
	}
	d.ok(d.Fill(s, a, 0, half))
	d.ok(d.CopyRegions(s, regions))
	clear(regions) // the device must not use the slice after the call
	d.wait(s)
	equal(t, out, wantOut, "regions to the host")
	equal(t, d.read(s, a, half), want, "regions on the device")

	d.ok(d.CopyRegions(s, nil))
	d.ok(d.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: []byte{}}}))
	mustFail(t, nil, map[string]error{"a region that leaves its allocation": d.CopyRegions(s, []tier.Region{
		{Dst: a, HostSrc: pattern(100, 9)},
		{Dst: a + 2*half - 10, HostSrc: pattern(100, 9)},
	})})
	equal(t, d.read(s, a, half), want, "after CopyRegions with one wrong region")
}

// wrapped is a device that wraps another, as tier.Device describes.
type wrapped struct{ tier.Device }

func (w wrapped) Unwrap() tier.Device { return w.Device }

// unknownDevice is a device of no backend.
type unknownDevice struct{ tier.Device }

func testPeer(t *testing.T, open openFunc) {
	d, peer := openDevice(t, open, nil), openDevice(t, open, nil)
	s, ps := d.stream(), peer.stream()
	const n = 100_003
	a, b := d.alloc(s, n), peer.alloc(ps, n)
	peer.wait(ps)
	err := d.CopyPeer(s, b, peer.Device, a, n)
	if errors.Is(err, tier.ErrNotSupported) {
		t.Skipf("needs devices that reach each other: %v", err)
	}
	d.ok(err)
	want := pattern(n, 5)
	d.write(s, a, want)
	peer.ok(peer.Fill(ps, b, 0, n))
	peer.wait(ps)
	d.ok(d.CopyPeer(s, b+1, wrapped{wrapped{peer.Device}}, a, n-1))
	peer.ok(peer.WaitEvent(ps, d.record(s)))
	equal(t, peer.read(ps, b, n), append([]byte{0}, want[:n-1]...), "after a copy to the peer")
	d.ok(d.CopyPeer(s, a, d.Device, a+n-100, 100)) // to itself
	equal(t, d.read(s, a, 100), want[n-100:], "after a copy to itself as a peer")

	err = d.CopyPeer(s, b, unknownDevice{peer.Device}, a, 1)
	mustFail(t, tier.ErrNotSupported, map[string]error{"copy to a device of no backend": err})
	mustFail(t, nil, map[string]error{
		"copy to a peer beyond the source":      d.CopyPeer(s, b, peer.Device, a+1, n),
		"copy to a peer beyond the destination": d.CopyPeer(s, b+1, peer.Device, a, n),
		"copy to a peer to this device's":       d.CopyPeer(s, a, peer.Device, a, 1),
		"copy to a peer from the peer's":        d.CopyPeer(s, b, peer.Device, b, 1),
		"copy to a peer on the peer's stream":   d.CopyPeer(ps, b, peer.Device, a, 1),
		"copy to a peer of a negative size":     d.CopyPeer(s, b, peer.Device, a, -1),
	})
	d.works(s)
	peer.works(ps)
}

// testMistakes makes every mistake that a call can detect. Each call returns an error and has no
// effect.
func testMistakes(t *testing.T, open openFunc) {
	d, other := openDevice(t, open, nil), openDevice(t, open, nil)
	s, os := d.stream(), other.stream()
	const n = 1000
	a, gone, foreign := d.alloc(s, n), d.alloc(s, n), other.alloc(os, n)
	want := pattern(n, 1)
	d.write(s, a, want)
	d.ok(d.Free(s, gone))
	d.wait(s)
	before := d.Outstanding()
	one, more := []byte{1}, make([]byte, n+1)
	mustFail(t, nil, map[string]error{
		"alloc on no stream":                  second(d.Alloc(nil, 1)),
		"alloc on another device's stream":    second(d.Alloc(os, 1)),
		"free of address 0":                   d.Free(s, 0),
		"free inside an allocation":           d.Free(s, a+256),
		"free of what is freed":               d.Free(s, gone),
		"free of another device's":            d.Free(s, foreign),
		"free on no stream":                   d.Free(nil, a),
		"free on another device's stream":     d.Free(os, a),
		"copy to address 0":                   d.CopyToDevice(s, 0, one),
		"copy to what is freed":               d.CopyToDevice(s, gone, one),
		"copy to another device's":            d.CopyToDevice(s, foreign, one),
		"copy to the device, too long":        d.CopyToDevice(s, a, more),
		"copy to the device, over the end":    d.CopyToDevice(s, a+n-1, more[:2]),
		"copy to the device, at the end":      d.CopyToDevice(s, a+n, one),
		"copy to the device, before":          d.CopyToDevice(s, a-1, one),
		"copy to the far end of addresses":    d.CopyToDevice(s, ^tier.Addr(0), one),
		"copy to the device, no stream":       d.CopyToDevice(nil, a, one),
		"copy to the device, another's":       d.CopyToDevice(os, a, one),
		"copy from address 0":                 d.CopyToHost(s, one, 0),
		"copy from what is freed":             d.CopyToHost(s, one, gone),
		"copy to the host, too long":          d.CopyToHost(s, more, a),
		"copy to the host, another's stream":  d.CopyToHost(os, one, a),
		"copy on the device from 0":           copyOnDevice(d, s, a, 0, 1),
		"copy on the device to 0":             copyOnDevice(d, s, 0, a, 1),
		"copy on the device over the end":     copyOnDevice(d, s, a+n-4, a, 5),
		"copy on the device from over it":     copyOnDevice(d, s, a, a+n-4, 5),
		"copy on the device of negative size": copyOnDevice(d, s, a, a+8, -1),
		"fill of address 0":                   d.Fill(s, 0, 1, 1),
		"fill over the end":                   d.Fill(s, a+1, 1, n),
		"fill of negative size":               d.Fill(s, a, 1, -1),
		"fill of a huge size":                 d.Fill(s, a, 1, 1<<62),
		"fill of what is freed":               d.Fill(s, gone, 1, 1),
		"regions, two hosts":                  d.CopyRegions(s, []tier.Region{{HostDst: more, HostSrc: one}}),
		"regions, two sizes":                  d.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: one, Size: 2}}),
		"regions, address 0":                  d.CopyRegions(s, []tier.Region{{HostSrc: one}}),
		"regions, negative":                   d.CopyRegions(s, []tier.Region{{Dst: a, Src: a + 8, Size: -1}}),
		"record on no stream":                 second(d.Record(nil)),
		"record on another's stream":          second(d.Record(os)),
		"wait for no event":                   d.WaitEvent(s, nil),
		"wait on another's stream":            d.WaitEvent(os, d.record(s)),
	})
	equal(t, d.read(s, a, n), want, "after calls that failed")
	d.outstanding(s, before)
	d.works(s)
	other.works(os)
}
