// Package faultfs puts faults between a disk volume and its file system: for tests of
// programs that spill, which should know what they do when a disk fails.
//
//	spillway.Disk.FS or disk.Config.FS
//	        │
//	disk.Volume ──▶ faultfs.FS ──▶ disk.OS()
//	                  rules: which operations, which of them, what happens
//
// A Rule chooses operations by kind, by path, by index and by chance, and has an
// Effect: an error, a short transfer, a flipped bit, a delay, a limit on the rate,
// or a call of the test's. The first rule that chooses an operation is applied to
// it. An operation that fails is not done at all. tier/faultdev does the same for
// devices.
//
// An FS belongs to its maker, serves any number of volumes, and needs no closing; it
// must be there for as long as the volumes are. Its Open says how many files they have
// left open. It is safe for concurrent use. Its mutexes have the rank Device and are not
// held while anything is done.
package faultfs
