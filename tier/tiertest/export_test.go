package tiertest

import "time"

// SetLeakPatience sets how long NoLeaks waits for goroutines to end.
func SetLeakPatience(d time.Duration) { leakPatience = d }
