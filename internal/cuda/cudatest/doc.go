// Package cudatest is for tests of what uses CUDA: it compiles the emulator of
// testdata/emulator into a library libcuda.so.1 and loads it beside the code under test, which
// is given its path.
//
//	Config ──New──▶ Emulator   one library with its own state, Path to load it by
//	                  │        Fail, FailWork: what goes wrong, and when
//	                  └──────▶ Calls, Live, Leaks: what was called, what there is
//
// The emulator is written in C because it is to be called as the driver is. It keeps the memory of
// its devices in the host's, at addresses that nobody else can use; a thread for each
// stream does the work; mistakes are found that the driver finds, and some that crash it.
// It is no GPU, and its name says so.
//
// Each New writes a library of its own, with a state of its own, so tests may run side by
// side. The files are in the test's temporary directory. Where there is no C compiler
// New skips the test and says so. It takes no locks of the module's.
//
// With the tag gorgonia the program is linked with a library, which must be the emulator, and
// New makes that as new: tests one after another have it, and what they left in it must have been given up.
package cudatest
