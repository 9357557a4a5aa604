package volumes

import (
	"reflect"
	"unsafe"
)

// wipe overwrites what x points to with zeros, if there is no pointer in that. A cipher of the
// standard library contains the key, and has no way to erase it. A value with pointers, as another
// library's cipher might have, is left to the collector. x must not be used any more.
func wipe(x any) {
	v := reflect.ValueOf(x)
	if v.Kind() != reflect.Pointer || v.IsNil() || !plain(v.Type().Elem()) {
		return
	}
	clear(unsafe.Slice((*byte)(v.UnsafePointer()), v.Type().Elem().Size()))
}

// plain reports whether values of a type have no pointers.
func plain(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Array:
		return plain(t.Elem())
	case reflect.Struct:
		for i := range t.NumField() {
			if !plain(t.Field(i).Type) {
				return false
			}
		}
		return true
	}
	return t.Kind() >= reflect.Bool && t.Kind() <= reflect.Complex128
}
