//go:build !linux

package codec

import "time"

// stopwatch measures how long the goroutine that starts it takes.
type stopwatch struct{ begin time.Time }

func start() stopwatch { return stopwatch{time.Now()} }

func (s stopwatch) stop() time.Duration { return max(time.Since(s.begin), 1) }

// processTime returns for how long processors worked for this process. Here that is not known.
func processTime() (time.Duration, bool) { return 0, false }
