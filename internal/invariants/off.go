//go:build !invariants

// Package invariants holds the switch for the checks that are too dear for
// normal builds: lock ranks, stacks of buffers and handles, panics on a second
// release, unreadable freed memory. Build with -tags invariants to have them.
package invariants

// Enabled reports whether the program was built with -tags invariants.
const Enabled = false

// Trace is where something was taken: nothing in this build.
type Trace struct{}

// Stack returns the caller's place in an invariants build, and nothing otherwise.
func Stack() Trace { return Trace{} }

// String returns "".
func (Trace) String() string { return "" }
