//go:build !linux

package host

// lockRemedy says what allows more memory to be locked.
func lockRemedy() string { return "; the pages may be swapped out" }
