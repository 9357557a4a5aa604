//go:build !race && !invariants

package contend

const (
	// LargestCrowd is the most waiters that spillbench measures.
	LargestCrowd = 100_000
	// ManyReleases are those of a round of a crowd: long against a clock's step, and
	// short beside the coming of the largest crowd.
	ManyReleases = 1000
)
