//go:build !linux

package host

// lockLimit says how much memory the process may lock.
func lockLimit() string { return "not known" }

// mayNotBind says whether err tells that the process is not allowed to bind memory.
func mayNotBind(error) bool { return false }
