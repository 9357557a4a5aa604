package compact

import (
	"cmp"
	"iter"
	"math/bits"
	"slices"
)

// Key places a number in an Order. Keys are compared word by word.
type Key [4]uint64

func (k *Key) compare(other *Key) int {
	for i, w := range k {
		if o := other[i]; w != o {
			if w < o {
				return -1
			}
			return 1
		}
	}
	return 0
}

// blockLen is how many numbers are in a block at most. A change moves half of them, and of a
// million it finds the block among a few thousand: both are quick, however many there are.
const blockLen = 256

// Order is numbers above 0, ascending by key, and those of equal keys by Tie. It is a list of
// blocks. A block has once what is the same in the keys of all its numbers, so that a number costs
// 12 bytes as a rule. The zero value is ready once Block is set.
type Order struct {
	// Block returns where the owner keeps, for the Order, which block a number is in: 0, unless the
	// Order changes it, for none. It must be there for as long as the number is.
	Block func(number uint32) *uint32
	// Tie orders numbers with equal keys; they may be equal here, too. With nil, and else, the first
	// comes first.
	Tie func(number uint32) uint64

	heads  []spot   // of each block one at which it may begin, ascending
	blocks []*block // in the same order
	names  []*block // by name less 1; nil if there is none of that name
	unused []uint32 // names
	n      int
}

// spot is a place in an Order.
type spot struct {
	key Key
	tie uint64
}

func (s *spot) compare(other *spot) int {
	if c := s.key.compare(&other.key); c != 0 {
		return c
	}
	return cmp.Compare(s.tie, other.tie)
}

func (o *Order) spot(number uint32, key Key) spot {
	if o.Tie == nil {
		return spot{key: key}
	}
	return spot{key, o.Tie(number)}
}

// block is numbers that follow each other.
type block struct {
	name    uint32
	head    spot
	same    Key   // the words that are the same in all keys
	differ  uint8 // which words are not: a bit each
	words   []uint64
	numbers []uint32
}

// width is how many words of a key are kept for each number.
func (b *block) width() int { return bits.OnesCount8(b.differ) }

func (b *block) key(i int) Key {
	k, at := b.same, i*b.width()
	for d := b.differ; d != 0; d &= d - 1 {
		k[bits.TrailingZeros8(d)] = b.words[at]
		at++
	}
	return k
}

// after returns how many numbers of a block are not behind a spot.
func (o *Order) after(b *block, s *spot) int {
	low, high := 0, len(b.numbers)
	for low < high {
		mid := int(uint(low+high) / 2)
		k := b.key(mid)
		c := k.compare(&s.key)
		if c == 0 && o.Tie != nil {
			c = cmp.Compare(o.Tie(b.numbers[mid]), s.tie)
		}
		if c <= 0 {
			low = mid + 1
		} else {
			high = mid
		}
	}
	return low
}

// admit makes room for the words in which key differs from what is the same so far.
func (b *block) admit(key *Key) {
	if len(b.numbers) == 0 {
		b.same, b.differ, b.words = *key, 0, b.words[:0]
		return
	}
	differ := b.differ
	for i, w := range key {
		if w != b.same[i] {
			differ |= 1 << i
		}
	}
	if differ == b.differ {
		return
	}
	words := make([]uint64, 0, bits.OnesCount8(differ)*cap(b.numbers))
	for i := range b.numbers {
		k := b.key(i)
		words = appendWords(words, differ, &k)
	}
	b.differ, b.words = differ, words
}

func appendWords(words []uint64, differ uint8, k *Key) []uint64 {
	for d := differ; d != 0; d &= d - 1 {
		words = append(words, k[bits.TrailingZeros8(d)])
	}
	return words
}

func (b *block) insert(i int, key *Key, number uint32) {
	b.admit(key)
	var room Key
	b.words = slices.Insert(b.words, i*b.width(), appendWords(room[:0], b.differ, key)...)
	b.numbers = slices.Insert(b.numbers, i, number)
}

// Len returns how many numbers there are.
func (o *Order) Len() int { return o.n }

// Insert adds a number that is not there.
func (o *Order) Insert(number uint32, key Key) {
	o.n++
	at, s := 0, o.spot(number, key)
	for low, high := 0, len(o.heads); low < high; { // the last block that may begin there
		mid := int(uint(low+high) / 2)
		if o.heads[mid].compare(&s) <= 0 {
			low = mid + 1
			at = mid
		} else {
			high = mid
		}
	}
	if len(o.blocks) == 0 {
		o.begin(0, s)
	}
	b := o.blocks[at]
	i := o.after(b, &s)
	if len(b.numbers) == blockLen {
		switch {
		case i == blockLen:
			at++
			b, i = o.begin(at, s), 0
		case i == 0 && at == 0:
			b.head = o.spot(b.numbers[0], b.key(0)) // it may have been before s
			o.heads[0] = b.head
			b = o.begin(0, s)
		default:
			o.split(at, b)
			if half := len(b.numbers); i > half {
				at++
				b, i = o.blocks[at], i-half
			}
		}
	}
	if s.compare(&b.head) < 0 {
		b.head, o.heads[at] = s, s
	}
	b.insert(i, &key, number)
	*o.Block(number) = b.name
}

// begin adds an empty block at a place in the list.
func (o *Order) begin(at int, head spot) *block {
	b := &block{head: head}
	if last := len(o.unused) - 1; last >= 0 {
		b.name, o.unused = o.unused[last], o.unused[:last]
		o.names[b.name-1] = b
	} else {
		o.names = append(o.names, b)
		b.name = uint32(len(o.names))
	}
	o.heads = slices.Insert(o.heads, at, head)
	o.blocks = slices.Insert(o.blocks, at, b)
	return b
}

// split moves the second half of the block at that place to one behind it.
func (o *Order) split(at int, b *block) {
	half := len(b.numbers) / 2
	o.move(o.begin(at+1, o.spot(b.numbers[half], b.key(half))), b, half)
}

// move appends to a block what another has from a place on, which is not before it.
func (o *Order) move(to, from *block, begin int) {
	for i, number := range from.numbers[begin:] {
		k := from.key(begin + i)
		to.insert(len(to.numbers), &k, number)
		*o.Block(number) = to.name
	}
	from.numbers = from.numbers[:begin]
	from.words = from.words[:begin*from.width()]
}

// find returns where a number is that is there.
func (o *Order) find(number uint32) (b *block, i int) {
	b = o.names[*o.Block(number)-1]
	return b, slices.Index(b.numbers, number)
}

// Key returns the key of a number that is there.
func (o *Order) Key(number uint32) Key {
	b, i := o.find(number)
	return b.key(i)
}

// First returns the first number and its key; 0 if there is none.
func (o *Order) First() (number uint32, key Key) {
	for _, b := range o.blocks {
		if len(b.numbers) > 0 {
			return b.numbers[0], b.key(0)
		}
	}
	return 0, Key{}
}

// Find returns a number of that key; 0 if there is none. It is for Orders without Tie.
func (o *Order) Find(key Key) (number uint32) {
	s := spot{key: key}
	at, exact := slices.BinarySearchFunc(o.heads, s, func(h, s spot) int { return h.compare(&s) })
	if !exact {
		at--
	}
	if at < 0 {
		return 0
	}
	b := o.blocks[at]
	if i := o.after(b, &s); i > 0 && b.key(i-1) == key {
		return b.numbers[i-1]
	}
	return 0
}

// Renumber gives a number that is there another one. Block, which is asked for the latter, says what
// it said for the former, and so does Tie.
func (o *Order) Renumber(from, to uint32) {
	b := o.names[*o.Block(to)-1]
	b.numbers[slices.Index(b.numbers, from)] = to
}

// mergeEach is after how many removals a block looks at its neighbours, which takes a search.
const mergeEach = 16

// Remove removes a number that is there.
func (o *Order) Remove(number uint32) {
	b, i := o.find(number)
	*o.Block(number) = 0
	o.n--
	w := b.width()
	b.numbers = slices.Delete(b.numbers, i, i+1)
	b.words = slices.Delete(b.words, i*w, (i+1)*w)
	switch {
	case len(b.numbers) > blockLen/4:
		return
	case len(o.blocks) == 1:
		if cap(b.numbers) > blockLen/4 {
			b.numbers, b.words = slices.Clone(b.numbers), slices.Clone(b.words)
		}
		return
	case len(b.numbers)%mergeEach > 0:
		return
	}
	at := o.place(b)
	switch next := at + 1; {
	case len(b.numbers) == 0:
		o.end(at)
	case next < len(o.blocks) && len(b.numbers)+len(o.blocks[next].numbers) <= blockLen/2:
		o.move(b, o.blocks[next], 0)
		o.end(next)
	case at > 0 && len(b.numbers)+len(o.blocks[at-1].numbers) <= blockLen/2:
		o.move(o.blocks[at-1], b, 0)
		o.end(at)
	}
}

// place returns where a block is in the list.
func (o *Order) place(b *block) int {
	at, _ := slices.BinarySearchFunc(o.heads, b.head, func(h, s spot) int { return h.compare(&s) })
	for o.blocks[at] != b { // others may begin at the same
		at++
	}
	return at
}

// end takes an empty block off the list.
func (o *Order) end(at int) {
	b := o.blocks[at]
	o.names[b.name-1] = nil
	o.unused = append(o.unused, b.name)
	o.heads = slices.Delete(o.heads, at, at+1)
	o.blocks = slices.Delete(o.blocks, at, at+1)
	if len(o.blocks) == 1 { // what was needed for many is given back
		b = o.blocks[0]
		o.heads, o.blocks = slices.Clone(o.heads), slices.Clone(o.blocks)
		o.names, o.unused = slices.Clone(o.names[:b.name]), nil
		for name := uint32(1); name < b.name; name++ {
			o.unused = append(o.unused, name)
		}
	}
}

// All yields the numbers and their keys, ascending. The Order must not be changed meanwhile.
func (o *Order) All() iter.Seq2[uint32, Key] {
	return func(yield func(uint32, Key) bool) {
		for _, b := range o.blocks {
			for i, number := range b.numbers {
				if !yield(number, b.key(i)) {
					return
				}
			}
		}
	}
}

// After is All of those that come after a key and a tie.
func (o *Order) After(key Key, tie uint64) iter.Seq2[uint32, Key] {
	return func(yield func(uint32, Key) bool) {
		from := spot{key, tie}
		at, _ := slices.BinarySearchFunc(o.heads, from, func(h, s spot) int { return h.compare(&s) })
		for at = max(0, at-1); at < len(o.blocks); at++ {
			b := o.blocks[at]
			for i := o.after(b, &from); i < len(b.numbers); i++ {
				if !yield(b.numbers[i], b.key(i)) {
					return
				}
			}
		}
	}
}

// Before is All of those whose keys are below key, descending.
func (o *Order) Before(key Key) iter.Seq2[uint32, Key] {
	return func(yield func(uint32, Key) bool) {
		end, _ := slices.BinarySearchFunc(o.heads, key, func(h spot, key Key) int { return h.key.compare(&key) })
		for _, b := range slices.Backward(o.blocks[:end]) {
			for i, number := range slices.Backward(b.numbers) {
				if k := b.key(i); k.compare(&key) < 0 && !yield(number, k) {
					return
				}
			}
		}
	}
}
