// Package invariants holds the switch for the checks that are too dear for
// normal builds: lock ranks, stacks of buffers and handles, panics on a second
// release, unreadable freed memory. Build with -tags invariants to have them.
package invariants
