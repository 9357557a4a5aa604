package host

import (
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

func TestClassesFitWhatTheyAreFor(t *testing.T) {
	last := int64(0)
	for size := int64(1); size <= maxSmall; size++ {
		class := classOf(size)
		if class < 0 || class >= classCount {
			t.Fatalf("size %d is of class %d", size, class)
		}
		n := classSize(class)
		switch {
		case n < size:
			t.Fatalf("size %d is of class %d, whose places have %d bytes", size, class, n)
		case n%place != 0:
			t.Fatalf("places of %d bytes are not aligned", n)
		case n < last:
			t.Fatalf("size %d has places of %d bytes, a smaller one has %d", size, n, last)
		case n >= size+place && n*4 > size*5+4:
			t.Fatalf("size %d has places of %d bytes: more than a quarter is lost", size, n)
		case classOf(n) != class:
			t.Fatalf("size %d has places of %d bytes, and those have %d", size, n, classSize(classOf(n)))
		}
		last = n
	}
	if classOf(maxSmall) != classCount-1 {
		t.Errorf("the last class is %d of %d", classOf(maxSmall), classCount)
	}
}

func TestSlabsLeaveNothingOver(t *testing.T) {
	for class := range classCount {
		n, size := slabLength(class), classSize(class)
		if n%tier.Page != 0 || n%size != 0 || n/size < 4 || n/size > 64 || n > 32<<10 {
			t.Errorf("a slab of %d bytes for places of %d", n, size)
		}
		if s := newSlab(class, 0, n); int64(bits.OnesCount64(s.all))*size != n || s.free != s.all {
			t.Errorf("a slab of %d bytes has the places %b of %d", n, s.all, size)
		}
	}
}

// TestSlabsAgainstAModel takes and puts places at random and checks that none is
// handed out twice, that those of whole slabs come back, and that the sums are right.
func TestSlabsAgainstAModel(t *testing.T) {
	seed := testseed.One(t)
	type held struct {
		s *slab
		i int
	}
	r := rand.New(rand.NewPCG(seed, 2))
	var l slabs
	taken := make(map[int64]held) // by offset
	var next, length int64
	for step := range 20000 {
		class := r.IntN(classCount)
		switch op := r.IntN(10); {
		case op <= 5 && len(taken) < 600 || len(taken) == 0:
			s, i := l.take(class)
			if s == nil {
				n := slabLength(class)
				l.add(newSlab(class, next, n))
				next += n
				length += n
				s, i = l.take(class)
			}
			at := s.at(i)
			if _, twice := taken[at]; twice {
				t.Fatalf("step %d: the place at %d was handed out twice", step, at)
			}
			if at < s.off || at+classSize(class) > s.off+s.length || s.class != class {
				t.Fatalf("step %d: a place of class %d at %d in [%d, +%d)", step, s.class, at, s.off, s.length)
			}
			taken[at] = held{s, i}
		default:
			for at, h := range taken {
				delete(taken, at)
				if empty := l.put(h.s, h.i); empty != (h.s.free == h.s.all) {
					t.Fatalf("step %d: the slab of %d bytes is empty: %v", step, h.s.length, empty)
				} else if empty {
					length -= h.s.length
				}
				break
			}
		}
		if l.length != length {
			t.Fatalf("step %d: %d bytes; want %d", step, l.length, length)
		}
		for _, list := range l.lists {
			for i, s := range list {
				if s.free == 0 || s.free == s.all || s.listed != i {
					t.Fatalf("step %d: a slab with the free places %b is in its list", step, s.free)
				}
			}
		}
	}
	for _, h := range taken {
		l.put(h.s, h.i)
	}
	if l.length != 0 {
		t.Errorf("in the end: %+v", l)
	}
}

func TestPlacePutTwicePanics(t *testing.T) {
	var l slabs
	l.add(newSlab(0, 0, tier.Page))
	s, i := l.take(0)
	l.take(0)
	l.put(s, i)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	l.put(s, i)
}
