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

// HasValues reports whether streams can wait for a word of memory.
func (l *Library) HasValues() bool { return l.cuStreamWaitValue32_v2.fn != 0 }
