package peer

import "runtime/debug"

// memoryLimit is the limit that the runtime has now.
func memoryLimit() int64 { return debug.SetMemoryLimit(-1) }
