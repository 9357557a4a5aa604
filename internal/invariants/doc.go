// Package invariants holds the switch for the checks that are too dear for
// normal builds: lock ranks, stacks of buffers and handles, panics on a second
// release, unreadable freed memory. Build with -tags invariants to have them.
package invariants

import "runtime/debug"

// Stack returns the caller's stack in an invariants build, and "" otherwise.
// It is kept with a resource, so that a leak report can say who took it.
func Stack() string {
	if !Enabled {
		return ""
	}
	return string(debug.Stack())
}
