//go:build !amd64 || race

package bitpack

// unpack fills a block, of one vector or more, with what src, of just so many bytes, was
// packed from.
func (p *plan) unpack(block, src []byte) { p.unpackWords(block, src) }

// pack is the way back, and reports whether that is so: not if words have a remainder.
func (p *plan) pack(dst, block []byte) bool { return p.packWords(dst, block) }

// span returns the least and the largest of what a scheme packs of a block.
func span(s scheme, block []byte) (lo, hi int64) { return spanWords(s, block) }
