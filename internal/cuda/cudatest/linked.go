//go:build !gorgonia || !cgo || !linux || !(amd64 || arm64)

package cudatest

// Linked reports whether the test is linked with the emulator: then all tests of a binary have the
// same library, which New resets, and none can be without a function.
const Linked = false
