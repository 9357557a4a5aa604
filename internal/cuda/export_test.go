package cuda

import "reflect"

// SymbolNames returns the names of all functions, and which are needed.
func SymbolNames() map[string]bool {
	names := make(map[string]bool)
	for _, group := range []reflect.Type{reflect.TypeFor[required](), reflect.TypeFor[optional]()} {
		for i := range group.NumField() {
			names[group.Field(i).Name] = group == reflect.TypeFor[required]()
		}
	}
	return names
}

// DigestPTX is the kernel's text.
func DigestPTX() string { return digestText }

// DigestGrid is the shape in which it is launched.
func DigestGrid(size int64, multiprocessors int) Grid { return digestGrid(size, multiprocessors) }

// HasValues reports whether streams can wait for a word of memory.
func (l *Library) HasValues() bool { return l.cuStreamWaitValue32_v2.fn != 0 }
