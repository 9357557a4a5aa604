//go:build race

package reservation_test

// mostGoroutines is how many a test may start: the race detector ends a program
// with more than 8128 at once.
const mostGoroutines = 5000
