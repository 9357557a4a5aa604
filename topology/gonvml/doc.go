// Package gonvml lets package topology read GPUs through github.com/NVIDIA/go-nvml, NVIDIA's own
// bindings of its management library (NVML), or through any other implementation of go-nvml's
// Interface, such as a mock in a test:
//
//	top, err := topology.Discover(ctx, topology.Options{GPUs: gonvml.GPUs(nvml.New())})
//
// topology reports the same as with its own run-time binding, which is the default. The adapter is for
// programs that use go-nvml anyway, and for tests that have its mocks.
//
// go-nvml needs cgo: without cgo this package is empty. A program that links go-nvml has undefined
// symbols, which the dynamic linker looks up at the first call. So it does not start if it is linked
// with -z now, as some distributions do by default, or with LD_BIND_NOW set. Build it with
// -ldflags '-extldflags=-Wl,-z,lazy'. A process has one NVML: go-nvml calls the first library that was
// loaded, whatever path a second one is opened by.
package gonvml
