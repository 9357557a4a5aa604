//go:build !race

package racemark

// Enabled reports whether this is a build for the race detector.
const Enabled = false

// Read says that all of b is read.
func Read([]byte) {}

// Write says that all of b is written.
func Write([]byte) {}
