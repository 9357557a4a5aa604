// Package racemark tells the race detector of accesses to much memory at once. It is not told of
// each byte, which takes ten times as long as the copy itself: 64 bytes of each page stand for it.
// What moves batches has whole pages in use, so that two that have the same memory meet in them.
//
// In other builds than those with -race nothing is done.
package racemark

const (
	page = 4096
	mark = 64
)
