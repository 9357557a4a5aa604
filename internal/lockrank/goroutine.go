package lockrank

import (
	"bytes"
	"runtime"
	"strconv"
)

// GoroutineID returns the number of the goroutine that calls it, which the runtime gives to no
// other. It reads the first line of the goroutine's stack, "goroutine 12 [running]:". That takes
// microseconds on a deep stack, so it is for places where that does not matter, such as out of
// memory.
func GoroutineID() int64 {
	var buf [64]byte
	b := buf[:runtime.Stack(buf[:], false)]
	b = bytes.TrimPrefix(b, []byte("goroutine "))
	if i := bytes.IndexByte(b, ' '); i > 0 {
		b = b[:i]
	}
	id, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil {
		panic("lockrank: the runtime prints stacks in another way: " + strconv.Quote(string(b)))
	}
	return id
}
