//go:build !gonvml || !cgo

package topology_test

// bindings has one more with the tag gonvml.
var bindings = map[string]binding{"run-time binding": direct}
