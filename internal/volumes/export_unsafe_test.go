package volumes

import (
	"reflect"
	"unsafe"
)

// Secrets returns all memory of a volume that its key could be had from, as it is now and
// will be: not copies.
func (v *Volume) Secrets() (all [][]byte) {
	if v.cfg.Key != nil {
		all = append(all, v.cfg.Key)
	}
	bytes := func(s reflect.Value) []byte { return unsafe.Slice((*byte)(s.UnsafePointer()), s.Len()) }
	sealer := reflect.ValueOf(v.sealer).Elem()
	if users := sealer.FieldByName("users"); !users.IsNil() {
		all = append(all, bytes(users))
	}
	keys := []reflect.Value{sealer.FieldByName("own")}
	for old := sealer.FieldByName("old").MapRange(); old.Next(); {
		keys = append(keys, old.Value())
	}
	for _, k := range keys {
		all = append(all, bytes(k.Elem().FieldByName("key")))
		for _, cipher := range []string{"block", "aead"} {
			p := k.Elem().FieldByName(cipher).Elem()
			all = append(all, unsafe.Slice((*byte)(p.UnsafePointer()), p.Type().Elem().Size()))
		}
	}
	return all
}
