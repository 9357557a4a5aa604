//go:build !linux

package host

// lockLimit says how much memory the process may lock.
func lockLimit() string { return "not known" }

// mayNotBind reports whether err means that the process is not allowed to bind memory.
func mayNotBind(error) bool { return false }
