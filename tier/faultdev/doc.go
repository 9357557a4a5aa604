// Package faultdev puts faults between a device's user and the device: for tests of
// programs that spill, which should know what they do when a GPU fails.
//
//	spillway.GPU.Wrap, or anything that takes a tier.Device
//	        │
//	pools, streams, moves ──▶ faultdev.Device ──▶ tier.Device, of any backend
//	                            rules: which operations, which of them, what happens
//
// A Rule chooses operations by kind, by index and by chance, and has an Effect: an error
// of the call, a failure of the work, no memory, a flipped bit, a delay, or a call of the
// test's. The first rule that chooses an operation is applied to it. The rules are those
// of tier/disk/faultfs, but for paths. Device.Lose makes it a GPU that is lost for good.
//
// A Device owns the device that it wraps no more than its caller does: Close closes that.
// It is safe for concurrent use, as far as that is. Its mutex has the rank Device and is
// not held while anything is done.
package faultdev
