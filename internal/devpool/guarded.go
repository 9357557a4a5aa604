package devpool

import (
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// Guarded returns a device of a program's, or one that a program has wrapped. Where a method of dev
// that returns an error panics, that is a *guard.PanicError. Streams and events are dev's own. The
// other optional interfaces, such as tier.Borrower, are found by tier.As, which looks through the
// result, and are not guarded.
func Guarded(dev tier.Device) tier.Device { return guarded{dev} }

type guarded struct{ tier.Device }

// Unwrap returns the device of the program.
func (g guarded) Unwrap() tier.Device { return g.Device }

func (g guarded) Alloc(s tier.Stream, size int64) (a tier.Addr, err error) {
	defer guard.Error(&err, "Device.Alloc")
	return g.Device.Alloc(s, size)
}

func (g guarded) Free(s tier.Stream, a tier.Addr) (err error) {
	defer guard.Error(&err, "Device.Free")
	return g.Device.Free(s, a)
}

func (g guarded) CopyPeer(
	s tier.Stream, dst tier.Addr, dstDevice tier.Device, src tier.Addr, size int64,
) (err error) {
	defer guard.Error(&err, "Device.CopyPeer")
	return g.Device.CopyPeer(s, dst, dstDevice, src, size)
}

func (g guarded) CopyRegions(s tier.Stream, regions []tier.Region) (err error) {
	defer guard.Error(&err, "Device.CopyRegions")
	return g.Device.CopyRegions(s, regions)
}

func (g guarded) Fill(s tier.Stream, dst tier.Addr, value byte, size int64) (err error) {
	defer guard.Error(&err, "Device.Fill")
	return g.Device.Fill(s, dst, value, size)
}

func (g guarded) NewStream() (s tier.Stream, err error) {
	defer guard.Error(&err, "Device.NewStream")
	return g.Device.NewStream()
}

func (g guarded) Record(s tier.Stream) (e tier.Event, err error) {
	defer guard.Error(&err, "Device.Record")
	return g.Device.Record(s)
}

func (g guarded) WaitEvent(s tier.Stream, e tier.Event) (err error) {
	defer guard.Error(&err, "Device.WaitEvent")
	return g.Device.WaitEvent(s, e)
}

func (g guarded) Close() (err error) {
	defer guard.Error(&err, "Device.Close")
	return g.Device.Close()
}
