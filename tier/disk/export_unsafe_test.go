package disk

import (
	"reflect"
	"unsafe"
)

// Secrets returns all memory of a volume that its key could be had from, as it is now and
// will be: not copies.
func (v *Volume) Secrets() (all [][]byte) {
	all = append(all, v.sealer.key)
	for _, x := range []any{v.sealer.block, v.sealer.aead} {
		p := reflect.ValueOf(x)
		all = append(all, unsafe.Slice((*byte)(p.UnsafePointer()), p.Type().Elem().Size()))
	}
	return all
}
