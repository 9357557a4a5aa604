package host

import "runtime/debug"

// sink keeps the compiler from leaving a read out.
var sink byte

// faults says whether f reads memory that it must not.
func faults(f func()) (did bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { did = recover() != nil }()
	f()
	return false
}
