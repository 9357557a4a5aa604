//go:build !race

package reservation_test

// mostGoroutines is how many a test may start.
const mostGoroutines = 30_000
