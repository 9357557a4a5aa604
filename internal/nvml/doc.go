// Package nvml asks NVIDIA's management library (NVML, libnvidia-ml.so.1) what GPUs there are and
// how they are linked. It is bound at run time, without cgo, so that one binary serves machines
// with NVIDIA's driver and without.
//
//	Open(path) ──▶ Library ── Count, Device(i) ──▶ Device ── Name, UUID, PCI, Memory, … of a GPU
//	                  │                              │ Instance(k)
//	                  │                              └─────▶ Device, a MIG instance of it
//	                  └─ Close
//
// A function is looked up when it is called. One that the library does not have (it is older, or
// the name has another version) is an *Error of that call with ErrFunctionNotFound, and nothing
// else is the worse for it. Which version of a name is called fits the structs of this package:
// later versions of the same name take others.
//
// The library counts who has it initialized, keeps no state of a thread, and may be called by
// several goroutines at a time. So may a Library, until it is closed. Devices are good until
// then. The package takes no locks.
//
// Package nvmltest has a library in C for tests. With the tag gonvml the tests compare layouts,
// numbers and answers with those of github.com/NVIDIA/go-nvml, which is made from NVIDIA's header.
package nvml
