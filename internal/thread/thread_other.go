//go:build !linux

// Package thread is what a system does for the thread that asks: it measures the processor's time
// and lets the thread sleep. Systems other than Linux do it less exactly.
package thread

import "time"

// Stopwatch measures how long the goroutine that starts it takes.
type Stopwatch struct{ begin time.Time }

// Start starts a stopwatch.
func Start() Stopwatch { return Stopwatch{time.Now()} }

// Stop returns how long it took, at least a nanosecond.
func (s Stopwatch) Stop() time.Duration { return max(time.Since(s.begin), 1) }

// ProcessTime returns 0: it is not known for how long processors worked for this process.
func ProcessTime() time.Duration { return 0 }

// Sleep has the goroutine sleep.
func Sleep(d time.Duration) { time.Sleep(d) }

// WakePromptly sets whether naps of this thread end on time. It does nothing here.
func WakePromptly(bool) {}
