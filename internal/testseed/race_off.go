//go:build !race

package testseed

// Raced says that the race detector is on, under which all takes ten times as long, and
// host memory cannot be pinned.
const Raced = false
