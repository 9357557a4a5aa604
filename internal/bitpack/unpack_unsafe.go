package bitpack

import (
	"encoding/binary"
	"unsafe"
)

// unpackFast is unpack for the first n groups, of 1 to 57 bits, each of which begins eight bytes
// or more before the end of src: group i in the byte that its first bit, i×width, is in. The
// loads are not checked one by one, which is half of the time.
func unpackFast(block, src []byte, width uint, n int) {
	if n == 0 {
		return
	}
	if uint(n-1)*width/8+8 > uint(len(src)) || 8*n > len(block) {
		panic("bitpack: groups outside of what they are unpacked from or to")
	}
	mask := uint64(1)<<width - 1
	from, to := unsafe.Pointer(unsafe.SliceData(src)), unsafe.Pointer(unsafe.SliceData(block))
	bit := uint(0)
	for i := range n {
		v := binary.LittleEndian.Uint64((*[8]byte)(unsafe.Add(from, bit/8))[:])
		binary.LittleEndian.PutUint64((*[8]byte)(unsafe.Add(to, 8*i))[:], v>>(bit&7)&mask)
		bit += width
	}
}
