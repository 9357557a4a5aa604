package disk

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
	if v.sealer.users != nil {
		all = append(all, v.sealer.users)
	}
	keys := []*volumeKey{v.sealer.own}
	for _, k := range v.sealer.old {
		keys = append(keys, k)
	}
	for _, k := range keys {
		all = append(all, k.key)
		for _, x := range []any{k.block, k.aead} {
			p := reflect.ValueOf(x)
			all = append(all, unsafe.Slice((*byte)(p.UnsafePointer()), p.Type().Elem().Size()))
		}
	}
	return all
}

// Mapped returns how many bytes of memory a volume has mapped for what it seals.
func (v *Volume) Mapped() (n int64) {
	b := &v.sealer.buffers
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.mu.slabs {
		n += int64(len(s))
	}
	return n
}
