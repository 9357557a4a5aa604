//go:build invariants

package invariants

import (
	"fmt"
	"runtime"
	"strings"
)

// Enabled reports whether the program was built with -tags invariants.
const Enabled = true

// Trace is where something was taken: the calls that led there. It is kept with a resource, so that
// a leak report can show the stack.
type Trace struct{ calls *[]uintptr }

// Stack returns where its caller was called from. The names are looked up when they are printed,
// because most traces are never read.
func Stack() Trace {
	var calls [48]uintptr
	pcs := append([]uintptr(nil), calls[:runtime.Callers(2, calls[:])]...)
	return Trace{&pcs}
}

// String returns a line for each function and one for its place, as a panic prints them.
func (t Trace) String() string {
	if t.calls == nil {
		return ""
	}
	var b strings.Builder
	frames := runtime.CallersFrames(*t.calls)
	for {
		f, more := frames.Next()
		fmt.Fprintf(&b, "%s\n\t%s:%d\n", f.Function, f.File, f.Line)
		if !more {
			return b.String()
		}
	}
}
