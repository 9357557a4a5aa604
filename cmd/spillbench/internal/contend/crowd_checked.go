//go:build race || invariants

package contend

// What a build with checks takes is no measurement, and the race detector ends a
// program with more than 8128 goroutines: there is less of all.
const (
	LargestCrowd = 1000
	ManyReleases = 50
)
