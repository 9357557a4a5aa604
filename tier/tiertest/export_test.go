package tiertest

import "time"

// SetLeakPatience sets how long goroutines may take to end after a test, in a process whose tests
// leak them.
func SetLeakPatience(d time.Duration) { leakPatience = d }
