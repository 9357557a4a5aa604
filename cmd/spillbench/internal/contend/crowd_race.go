//go:build race

package contend

// LargestCrowd is the most waiters that are measured. The race detector ends a
// program with more than 8128 goroutines.
const LargestCrowd = 5000
