package convert

import (
	"github.com/apache/arrow-go/v18/arrow/bitutil"

	"github.com/spillway-db/spillway/batch"
)

// count returns what c counts, or false if it has to be counted first.
func (p *tablePlanner) count(c census) (tally, bool) {
	if got, ok := p.counted[c]; ok {
		return *got, true
	}
	p.missing.counts[c] = new(tally)
	return tally{}, false
}

// census is a question about bytes of the device's that may be too many to be kept. Without a width it is how many of
// the n bits from bit from on are set; else how many of the signed values are at most from, and how many below from + n.
type census struct {
	of             batch.DeviceRange
	width, from, n int64
}

// tally is the answer to a census: one number, or two.
type tally [2]int64

// add counts the bytes p, from off on.
func (c census) add(t *tally, p []byte, off int64) {
	if c.width == 0 {
		begin, end := max(0, c.from-8*off), min(8*int64(len(p)), c.from+c.n-8*off)
		if begin < end {
			t[0] += int64(bitutil.CountSetBits(p, int(begin), int(end-begin)))
		}
		return
	}
	for i := range int64(len(p)) / c.width {
		switch v := signed(p, c.width, i); {
		case v <= c.from:
			t[0]++
			t[1]++
		case v < c.from+c.n:
			t[1]++
		}
	}
}
