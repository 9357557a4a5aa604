//go:build !race

package contend

// LargestCrowd is the most waiters that are measured.
const LargestCrowd = 100_000
