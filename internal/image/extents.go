package image

import "fmt"

// Stretch returns n bytes at off of extents, if they lie in one; else nil.
func Stretch(extents [][]byte, off, n int64) []byte {
	for _, e := range extents {
		if off < int64(len(e)) {
			if off+n > int64(len(e)) {
				return nil
			}
			return e[off : off+n : off+n]
		}
		off -= int64(len(e))
	}
	return nil
}

// Gather copies the bytes at off of extents.
func Gather(dst []byte, extents [][]byte, off int64) error {
	return Across(extents, off, int64(len(dst)), func(p []byte) error { dst = dst[copy(dst, p):]; return nil })
}

// Scatter copies src to off of extents.
func Scatter(extents [][]byte, off int64, src []byte) error {
	return Across(extents, off, int64(len(src)), func(p []byte) error { src = src[copy(p, src):]; return nil })
}

// Across calls f for each part of the n bytes at off of extents, until it fails.
func Across(extents [][]byte, off, n int64, f func([]byte) error) error {
	for _, e := range extents {
		if off >= int64(len(e)) {
			off -= int64(len(e))
			continue
		}
		p := e[off:min(int64(len(e)), off+n)]
		if err := f(p); err != nil {
			return err
		}
		off, n = 0, n-int64(len(p))
		if n == 0 {
			return nil
		}
	}
	if n > 0 {
		return fmt.Errorf("convert: memory ends %d bytes before what it should hold", n)
	}
	return nil
}
