package transfer

import (
	"errors"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/tier"
)

// secondFails is a device, its memory and a stream of it. The second copy to a peer fails.
type secondFails struct {
	tier.Device
	tier.Stream
	copies, waits int
}

func (d *secondFails) CopyPeer(tier.Stream, tier.Addr, tier.Device, tier.Addr, int64) error {
	if d.copies++; d.copies == 2 {
		return errFails
	}
	return nil
}

func (d *secondFails) Record(tier.Stream) (tier.Event, error) { return nil, nil }

func (d *secondFails) Sync() error {
	d.waits++
	return nil
}

func (d *secondFails) Close() error { return nil }

type addresses struct{ tier.DeviceMemory }

func (addresses) Size() int64     { return 3 * tier.Page }
func (addresses) Addr() tier.Addr { return 1 << 20 }

// TestFailedCopyBetweenDevicesIsWaitedFor: copies that are on the stream already do not go on in
// memory that the caller takes back.
func TestFailedCopyBetweenDevicesIsWaitedFor(t *testing.T) {
	from, to := new(secondFails), new(secondFails)
	src := &deviceMemory{stream: &stream{Stream: from, dev: from}}
	for i := range int64(3) {
		src.parts = append(src.parts, image.Part{Off: i * tier.Page, N: tier.Page, Addr: tier.Addr(1+2*i) << 20})
	}
	dst := &deviceMemory{
		parts: image.Parts{{N: 3 * tier.Page, Addr: 1 << 20}}, whole: addresses{}, stream: &stream{Stream: to, dev: to},
	}
	err := new(Builtin).copyOnDevices(t.Context(), dst, src)
	if !errors.Is(err, errFails) || from.copies != 2 || from.waits != 1 {
		t.Errorf("%d copies, and %d waits for the stream: %v", from.copies, from.waits, err)
	}
}

// TestStreamsAreBorrowedInOrder: moves in opposite directions between two devices borrow their
// streams in the same order, so that neither holds the one that the other needs.
func TestStreamsAreBorrowedInOrder(t *testing.T) {
	var devices []*deviceMemory
	for i := range 2 {
		s, err := tier.NewSpace(tier.SpaceConfig{
			ID: tier.ID{Kind: tier.GPU, Ordinal: i}, Capacity: 1 << 20, Node: -1, Backend: "none", Pool: noPool{},
		})
		if err != nil {
			t.Fatal(err)
		}
		devices = append(devices, &deviceMemory{space: s})
	}
	for range 2 {
		var asked []int
		b := &Builtin{Streams: func(id tier.ID) (*devpool.Streams, error) {
			asked = append(asked, id.Ordinal)
			return nil, errFails
		}}
		err := b.onStreams(t.Context(), slices.Clone(devices), func() error { return nil })
		if err != errFails || len(asked) != 1 || asked[0] != 0 {
			t.Errorf("streams of the devices %v were asked for first: %v", asked, err)
		}
		slices.Reverse(devices)
	}
}
