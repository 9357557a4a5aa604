// Package differential checks that a new version of the engine does what an old one did. It has no
// code beside its tests.
//
// A program is a seeded sequence of operations: puts of every Arrow type, moves, reads of batches,
// columns and rows, drops, claims, tasks, changes of limits and marks, faults of disks and GPUs,
// cancelled calls, and kill -9 of engines whose batches persist. The driver runs one operation
// after the other, waits after each until the engine is quiet, and prints one line for it: a digest
// of the rows, or the class of the error. At the end it prints the bytes that moved between tiers
// and the final books.
//
// testdata holds what programs printed on an earlier version. Digests, error classes and books must
// be the same; the bytes moved may grow by a tenth.
//
//	program_test.go   which operations a seed has, and how they are run
//	record_test.go    the records that programs put, and their digests
//	adapter_test.go   all that the driver uses of the engine's API
//	driver_test.go    runs programs in processes of their own and compares what they print
//
// Programs release things twice, which a build with the tag invariants answers with a panic. So they
// are not part of it.
//
// scripts/differential.sh runs the programs on another commit, to make golden files or to compare
// more seeds.
package differential
