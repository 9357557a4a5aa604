// Package sim is a simulated GPU: a tier.Device whose memory is an arena of this
// process that nothing but copies can reach. It is what Spillway runs on where
// there is no GPU, and what its tests run on everywhere; figures measured with
// it are labelled "sim".
//
//	                       ┌─ stream ── queue ── worker ─┐
//	copy, fill, digest ───▶├─ stream ── queue ── worker ─┼──▶ arena ◀── extent.Allocator
//	                       └─ stream ── queue ── worker ─┘      ▲
//	     ◀── event ◀── Record                                   └── Alloc, Free: 256-byte granule
//
// It behaves like the real thing where programs can tell the difference. Its
// capacity is hard. Work is asynchronous: a call puts it on a stream, whose
// worker does it later, in order; streams know of each other only through
// events. Freed memory stays retired until the work before the free is done. An
// address is a handle; one that is unknown, of another device, freed or out of
// its allocation's bounds is an error. Unlike the real thing it fails on
// purpose (Config.Faults) and can be as slow as one likes (Config.Latency and
// the bandwidths); by default it copies as fast as memory can be moved.
//
// A worker is a goroutine that starts with the first piece of work and ends
// when the stream runs dry, so an idle device has none. Closing the device waits for
// all of them.
//
// Locks: a device, a stream and a modelled link have a mutex each, all of rank
// Device, the last one; none is held while another is taken, nor while bytes
// are copied or the fault hook runs.
package sim
