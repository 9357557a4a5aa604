package waitline

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
)

// model is a line as a list, with passes that are counted.
type model struct {
	list   []*Place[int]
	needs  map[*Place[int]]int64
	head   *Place[int]
	passes int
}

func (m *model) changed(bypass int) {
	var head *Place[int]
	if len(m.list) > 0 {
		head = m.list[0]
	}
	if head != m.head {
		m.head, m.passes = head, bypass
	}
}

// TestLineAgainstAList: a line is what a list with a counter of passes is.
func TestLineAgainstAList(t *testing.T) {
	for seed := range testseed.Each(t, 20) {
		rng := rand.New(rand.NewPCG(seed, 7))
		bypass := rng.IntN(4)
		l := Line[int]{Bypass: uint32(bypass)}
		m := model{needs: make(map[*Place[int]]int64)}
		most := 1 + rng.IntN(300)
		var taken []Door
		for n := range 3000 {
			switch roll := rng.IntN(100); {
			case roll < 45 && len(m.list) < most:
				p := &Place[int]{Of: n}
				m.needs[p] = rng.Int64N(1000)
				l.Push(p, m.needs[p])
				m.list = append(m.list, p)
			case roll < 88 && len(m.list) > 0:
				i := rng.IntN(len(m.list))
				if rng.IntN(2) == 0 {
					i = 0
				}
				p := m.list[i]
				if l.Remove(p); p.In() {
					t.Fatal("a place that was removed is in a line still")
				}
				m.list = slices.Delete(m.list, i, i+1)
			case roll < 94:
				d := l.Door()
				if d.Open() || d.Shut() {
					break
				}
				if !l.Pass(d) || l.Pass(d) {
					t.Fatal("a pass was refused, or given twice")
				}
				m.passes--
				taken = append(taken, d)
			case roll < 98 && len(taken) > 0: // one of any head's, also of one that has gone
				i := rng.IntN(len(taken))
				d := taken[i]
				taken = slices.Delete(taken, i, i+1)
				reopened := l.GiveBack(d)
				if d>>32 == l.Door()>>32 {
					m.passes++
					if reopened != (m.passes == 1) {
						t.Fatalf("with %d passes: reopened %v", m.passes, reopened)
					}
				} else if reopened {
					t.Fatal("a pass of another head opens the door")
				}
			case roll < 99: // some do not fit any more
				m.list = slices.DeleteFunc(m.list, func(p *Place[int]) bool { return rng.IntN(4) == 0 })
				l.Refill(func(push func(*Place[int], int64)) {
					for _, p := range m.list {
						if p.In() {
							t.Fatal("a place is in the line while that is filled")
						}
						m.needs[p] = rng.Int64N(1000)
						push(p, m.needs[p])
					}
				})
			}
			m.changed(bypass)
			m.check(t, &l, rng.Int64N(1100)-50)
		}
		if l.size > 4*most+16 {
			t.Errorf("%d places for at most %d", l.size, most)
		}
	}
}

func (m *model) check(t *testing.T, l *Line[int], room int64) {
	t.Helper()
	var oldest *Place[int]
	least, sum := int64(Nothing), int64(0)
	for _, p := range slices.Backward(m.list) {
		need := m.needs[p]
		least, sum = min(least, need), sum+need
		if need <= room {
			oldest = p
		}
		if !p.In() || p.Need() != need {
			t.Fatalf("%+v: want it in the line, with the need %d", p, need)
		}
	}
	var walked []*Place[int]
	for p := l.Head(); p != nil; p = l.Next(p) {
		walked = append(walked, p)
	}
	door := l.Door()
	switch {
	case l.Len() != len(m.list) || !slices.Equal(walked, m.list):
		t.Fatalf("%d are in it, in the order %v; want %v", l.Len(), walked, m.list)
	case l.Head() != m.head:
		t.Fatalf("the head is %v; want %v", l.Head(), m.head)
	case l.Oldest(room) != oldest:
		t.Fatalf("the oldest that fits %d is %v; want %v", room, l.Oldest(room), oldest)
	case l.Least() != least:
		t.Fatalf("the least need is %d; want %d", l.Least(), least)
	case l.Sum() != sum:
		t.Fatalf("the sum is %d; want %d", l.Sum(), sum)
	case door.Open() != (m.head == nil):
		t.Fatalf("the door is %x; the head is %v", door, m.head)
	case m.head != nil && (int(door.Passes()) != m.passes || door.Shut() != (m.passes == 0)):
		t.Fatalf("the door is %x; want %d passes", door, m.passes)
	}
}

// TestHeadNeed: what the head needs is known also when that has become more while it stayed.
func TestHeadNeed(t *testing.T) {
	l := Line[int]{Bypass: 2}
	var a, b Place[int]
	l.Push(&a, 5)
	l.Push(&b, 3)
	if n := l.HeadNeed(); n != 5 {
		t.Errorf("the head needs %d", n)
	}
	l.Pass(l.Door())
	l.Refill(func(push func(*Place[int], int64)) { push(&a, 7); push(&b, 3) })
	if n, passes := l.HeadNeed(), l.Door().Passes(); n != 7 || passes != 1 {
		t.Errorf("the head needs %d, with %d passes", n, passes)
	}
}

// TestLineForgetsACrowd: it leaves no memory behind.
func TestLineForgetsACrowd(t *testing.T) {
	var l Line[int]
	crowd := make([]Place[int], 100_000)
	for i := range crowd {
		l.Push(&crowd[i], 1)
	}
	for i := range crowd {
		if l.Head() != &crowd[i] {
			t.Fatal("not in order")
		}
		l.Remove(&crowd[i])
	}
	if l.size != 0 || l.need != nil {
		t.Errorf("%d places are left", l.size)
	}
}

// TestNoRoomIsLargeEnoughForAnEmptyPlace: however much room there is, a place that nobody has is
// not found.
func TestNoRoomIsLargeEnoughForAnEmptyPlace(t *testing.T) {
	var l Line[int]
	var first, second Place[int]
	l.Push(&first, 1)
	l.Push(&second, 2)
	l.Remove(&first)
	if got := l.Oldest(math.MaxInt64); got != &second {
		t.Errorf("found %+v", got)
	}
}

// TestNumbersOfHeadsComeAgain: after as many heads as there are numbers a waiter's door is not
// taken for an open one, nor for that of the head before.
func TestNumbersOfHeadsComeAgain(t *testing.T) {
	l := Line[int]{Bypass: 1, heads: math.MaxUint32 - 1}
	var last Door
	for i := range 3 {
		var p Place[int]
		l.Push(&p, 1)
		d := l.Door()
		if d.Open() || d == last || d.Passes() != 1 {
			t.Errorf("head %d: the door is %x after %x", i, d, last)
		}
		last = d
		l.Remove(&p)
	}
}

// TestPassOfAnOpenDoor: there is none to give back.
func TestPassOfAnOpenDoor(t *testing.T) {
	var l Line[int]
	if l.GiveBack(0) || !l.Door().Open() {
		t.Errorf("the door is %x", l.Door())
	}
}

func TestTotalDoesNotOverflow(t *testing.T) {
	var sum total
	for range 5 {
		sum.add(math.MaxInt64 - 1)
	}
	for range 4 {
		if sum.amount() != math.MaxInt64 {
			t.Errorf("%d", sum.amount())
		}
		sum.sub(math.MaxInt64 - 1)
	}
	if sum.amount() != math.MaxInt64-1 {
		t.Errorf("%d", sum.amount())
	}
	sum.sub(math.MaxInt64 - 1)
	if sum != (total{}) {
		t.Errorf("%+v", sum)
	}
}
