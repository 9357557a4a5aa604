//go:build linux && (amd64 || arm64)

package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// wrapper is what a program puts over a device.
type wrapper struct{ tier.Device }

func (w wrapper) Unwrap() tier.Device { return w.Device }

// TestCheckPeers: of GPUs that are said to reach each other those that do not are found,
// and not used, in either direction; the others are.
func TestCheckPeers(t *testing.T) {
	for _, c := range []struct {
		lying int
		fails string // a function of the driver
		wrong []string
		peers bool // pairs that are right remain
	}{
		{lying: 0, peers: true},
		{lying: 1, wrong: []string{"0-1", "0-2", "1-2"}},
		{lying: 2, wrong: []string{"1-0", "2-0", "2-1"}},
		{lying: 3, wrong: []string{"0-1", "0-2", "1-2"}},
		{fails: "cuCtxEnablePeerAccess", wrong: []string{"0-1"}, peers: true},
		{fails: "cuMemcpyPeerAsync", wrong: []string{"0-1"}, peers: true},
		{fails: "cuMemcpyHtoDAsync_v2", peers: true}, // which says nothing of the pair
	} {
		t.Run(fmt.Sprintf("lying %d %s", c.lying, c.fails), func(t *testing.T) {
			r := load(t, cudatest.Config{Devices: 3, LyingPeer: c.lying})
			var work []*work
			var devices []tier.Device
			for i := range 3 {
				w := newWork(t, r.open(t, cuda.Config{Ordinal: i, Memory: 1 << 20}))
				work, devices = append(work, w), append(devices, wrapper{w.Device})
			}
			if c.fails != "" {
				r.Fail(c.fails, 0, driver.ErrInvalidValue, 1)
			}
			pairs := make(map[string]bool)
			found := 0
			cuda.CheckPeers(devices, func(from, to int, why error) {
				if found >= len(c.wrong) || fmt.Sprintf("%d-%d", from, to) != c.wrong[found] || (c.fails != "") != errors.Is(why, driver.ErrInvalidValue) {
					t.Errorf("found %d-%d: %v", from, to, why)
				}
				found++
				pairs[fmt.Sprintf("%d-%d", from, to)], pairs[fmt.Sprintf("%d-%d", to, from)] = true, true
			})
			if len(pairs) != 2*len(c.wrong) {
				t.Errorf("%d pairs were found, want %q", len(pairs)/2, c.wrong)
			}
			pattern := bytes.Repeat([]byte{1, 2, 3, 4}, 256)
			for i, w := range work {
				if n := w.Outstanding(); n != 0 {
					t.Errorf("%d bytes of device %d are outstanding", n, i)
				}
			}
			for i, from := range work {
				a := from.alloc(1024)
				must(t, from.CopyToDevice(from.s, a, pattern))
				for j, to := range work {
					if i == j {
						continue
					}
					b := to.alloc(1024)
					must(t, to.s.Sync())
					err := from.CopyPeer(from.s, b, devices[j], a, 1024)
					if pairs[fmt.Sprintf("%d-%d", i, j)] {
						if !errors.Is(err, tier.ErrNotSupported) {
							t.Errorf("device %d copies to %d: %v", i, j, err)
						}
					} else {
						got := make([]byte, 1024)
						must(t, errors.Join(err, from.s.Sync(), to.CopyToHost(to.s, got, b), to.s.Sync()))
						if !bytes.Equal(got, pattern) {
							t.Errorf("device %d does not copy to %d", i, j)
						}
					}
				}
			}
			cuda.CheckPeers(devices, func(from, to int, why error) {
				t.Errorf("the second time: %d-%d: %v", from, to, why)
			})
		})
	}
}

// TestCheckPeersLeavesOut: there is nothing to try where nothing is promised, where a GPU is
// full, lost or not a device of the driver's, and between contexts of one GPU.
func TestCheckPeersLeavesOut(t *testing.T) {
	r := load(t, cudatest.Config{Devices: 2, LyingPeer: 3})
	ctx := r.context(t, 0)
	first := newWork(t, r.open(t, cuda.Config{Memory: 1 << 20}))
	second := newWork(t, r.open(t, cuda.Config{Ordinal: 1, Memory: 1 << 20}))
	own := r.open(t, cuda.Config{Memory: 1 << 20, Context: ctx})
	none := func(what string, devices ...tier.Device) {
		t.Helper()
		cuda.CheckPeers(devices, func(from, to int, why error) { t.Errorf("%s: %d-%d: %v", what, from, to, why) })
	}
	none("two contexts of a GPU", first.Device, own)
	none("one GPU twice", first.Device, first.Device)
	none("a device of another kind", first.Device, stranger{})
	r.Set("peer", 0)
	none("no peers", first.Device, second.Device)
	r.Set("peer", 1)
	all, err := second.Alloc(second.s, 1<<20)
	must(t, err)
	none("a GPU that is full", first.Device, second.Device)
	must(t, errors.Join(second.Free(second.s, all), second.s.Sync()))
	found := 0
	cuda.CheckPeers([]tier.Device{first.Device, second.Device}, func(int, int, error) { found++ })
	if found != 1 {
		t.Errorf("%d pairs were found", found)
	}
}

type stranger struct{ tier.Device }
