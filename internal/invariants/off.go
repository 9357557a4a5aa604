//go:build !invariants

// Package invariants holds the switches for the checks that are too dear for normal builds.
//
// A build with -tags invariants (Enabled) checks lock ranks, keeps stacks of buffers and handles,
// panics on a second release, and makes freed memory unreadable. A build with -race (Race) reports
// accesses to much memory at once to the race detector.
package invariants

// Enabled reports whether the program was built with -tags invariants.
const Enabled = false

// Trace is where something was taken: nothing in this build.
type Trace struct{}

// Stack returns the caller's place in an invariants build, and nothing otherwise.
func Stack() Trace { return Trace{} }

// String returns "".
func (Trace) String() string { return "" }
