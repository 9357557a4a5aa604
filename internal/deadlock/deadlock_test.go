package deadlock

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/testseed"
)

// randomBooks makes small books: some owners with reservations, shared memory and waits, some waits
// without an owner, and some shut doors.
func randomBooks(r *rand.Rand) *Books {
	b := &Books{Settled: true}
	for range 1 + r.IntN(3) {
		l := b.AddLine()
		l.Ever = 20
		l.Available = r.Int64N(8)
		l.Shut = r.IntN(3) == 0
	}
	line := func() *Line { return b.Lines[r.IntN(len(b.Lines))] }
	var owners []*Owner
	for i := range 1 + r.IntN(4) {
		o := b.AddOwner(i, 1+r.IntN(2))
		owners = append(owners, o)
		for range r.IntN(3) {
			b.Promise(o, line(), 1+r.Int64N(8))
		}
	}
	for range r.IntN(4) {
		l, key, n := line(), r.IntN(3), 1+r.Int64N(5)
		if k := l.memory[key]; k != nil {
			n = k.bytes
		}
		b.Keep(owners[r.IntN(len(owners))], l, key, n)
		if r.IntN(3) == 0 {
			b.Keep(nil, l, key, n)
		}
	}
	for seq := range uint64(r.IntN(7)) {
		var slots []Slot
		for _, l := range b.Lines {
			if r.IntN(2) == 0 {
				slots = append(slots, Slot{l, r.Int64N(20)})
			}
		}
		if len(slots) == 0 {
			continue
		}
		w := b.AddWait(seq, seq+1, slots...)
		if r.IntN(4) == 0 {
			b.Judged(w, nil)
		} else {
			b.Judged(w, owners[r.IntN(len(owners))])
		}
		for _, s := range slots {
			if s.Line.Head == nil { // the oldest
				s.Line.Head = w
			}
		}
	}
	return b
}

// plainStuck is stuck in the plainest way: all is looked at again until nothing changes.
func plainStuck(b *Books, gives bool) []uint64 {
	stuck, ok := make(map[*Owner]bool), make(map[*Wait]bool)
	for _, o := range b.Owners {
		stuck[o] = len(o.Waits) >= o.Goroutines
	}
	most := func(l *Line) int64 {
		if !gives {
			return l.Available
		}
		n := l.Ever
		for _, o := range b.Owners {
			if stuck[o] {
				n -= o.held[l.Index]
			}
		}
		for _, k := range l.memory {
			if len(k.owners) > 1 && slices.ContainsFunc(k.owners, func(o *Owner) bool { return stuck[o] }) {
				n -= k.bytes
			}
		}
		return n
	}
	for changed := true; changed; {
		changed = false
		for _, w := range b.waits {
			for _, s := range w.Slots {
				l := s.Line
				open := !l.Shut || l.Head == w || l.Head != nil && ok[l.Head]
				if open && s.Need <= most(l) && !ok[w] {
					ok[w], changed = true, true
				}
			}
			if ok[w] && w.Owner != nil && stuck[w.Owner] {
				stuck[w.Owner], changed = false, true
			}
		}
	}
	var out []uint64
	for _, o := range b.Owners {
		if stuck[o] {
			out = append(out, seqs(o.Waits)...)
		}
	}
	slices.Sort(out)
	return out
}

// TestStuckIsAsInThePlainestWay: the search, which looks at each line only when something has
// changed there, finds whom looking at everything again and again finds.
func TestStuckIsAsInThePlainestWay(t *testing.T) {
	found := make(map[string]int)
	for seed := range uint64(testseed.Rounds(4000, 2000)) {
		b := randomBooks(rand.New(rand.NewPCG(seed, 7)))
		b.Settle()
		for name, got := range map[string][]*Wait{"certain": b.certain, "still": b.still} {
			want := plainStuck(b, name == "certain")
			if !slices.Equal(seqs(got), want) {
				t.Fatalf("seed %d: %s are stuck %v, want %v", seed, name, seqs(got), want)
			}
			if len(want) > 0 && len(want) < len(b.waits) {
				found[name]++
			}
		}
	}
	if found["certain"] < 50 || found["still"] < 50 {
		t.Errorf("some are stuck and some are not in %v cases: the test shows nothing", found)
	}
}

// pair are books of two owners that hold half of a line each and want all of it.
func pair(available int64) (*Books, *Line) {
	b := &Books{Settled: true}
	l := b.AddLine()
	l.Ever, l.Available, l.Used = 100, available, 100-available
	for i := range 2 {
		b.Promise(b.AddOwner(i, 1), l, (100-available)/2)
	}
	for i, o := range b.Owners {
		b.Judged(b.AddWait(i, uint64(i+1), Slot{l, 60}), o)
	}
	l.Head = b.waits[0]
	return b, l
}

func TestJudgeOwners(t *testing.T) {
	const grace, strangers = 100 * time.Millisecond, time.Second
	for name, c := range map[string]struct {
		make    func() *Books
		movable bool
		after   time.Duration // that they are told; 0: never
	}{
		"certain: the second look": {func() *Books { b, _ := pair(10); return b }, true, 25 * time.Millisecond},
		"no owner holds anything": {func() *Books {
			b := &Books{Settled: true}
			l := b.AddLine()
			l.Ever = 100
			b.Judged(b.AddWait(0, 1, Slot{l, 60}), b.AddOwner(0, 1))
			return b
		}, false, strangers},
		"held elsewhere: four graces": {func() *Books {
			b := &Books{Settled: true}
			l, below := b.AddLine(), b.AddLine()
			l.Ever, below.Ever = 100, 100
			o := b.AddOwner(0, 1)
			b.Promise(o, below, 10)
			b.Judged(b.AddWait(0, 1, Slot{l, 60}), o)
			return b
		}, false, 4 * grace},
		"held beside it: a grace": {func() *Books {
			b := &Books{Settled: true}
			l := b.AddLine()
			l.Ever, l.Available, l.Used = 100, 20, 80
			o := b.AddOwner(0, 1)
			b.Promise(o, l, 10)
			b.Judged(b.AddWait(0, 1, Slot{l, 60}), o)
			return b
		}, false, grace},
		"something can be moved": {func() *Books {
			b := &Books{Settled: true}
			l := b.AddLine()
			l.Ever = 100
			b.Judged(b.AddWait(0, 1, Slot{l, 60}), b.AddOwner(0, 1))
			return b
		}, true, 0},
		"a stranger keeps some": {func() *Books {
			b := &Books{Settled: true}
			l := b.AddLine()
			l.Ever = 100
			o := b.AddOwner(0, 1)
			b.Keep(nil, l, 1, 50)
			b.Judged(b.AddWait(0, 1, Slot{l, 60}), o)
			return b
		}, false, strangers},
		"a goroutine of one runs": {func() *Books {
			b, _ := pair(10)
			for _, o := range b.Owners {
				o.Goroutines = 2
			}
			return b
		}, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			j := Judge{Grace: grace, Strangers: strangers, Movable: func(int) bool { return c.movable }}
			start := time.Now()
			for at := time.Duration(0); at < 5*time.Second; at += grace / 4 {
				b := c.make()
				b.Settle()
				stuck, _ := j.Owners(b, start.Add(at))
				if told := len(stuck) > 0; told != (c.after > 0 && at >= c.after) {
					t.Fatalf("after %v they are told: %v, want it after %v", at, told, c.after)
				} else if told {
					return
				}
			}
		})
	}
}

// TestJudgeBeginsAnew: whatever changes, the grace begins anew; so it does for waits without an
// owner.
func TestJudgeBeginsAnew(t *testing.T) {
	for name, change := range map[string]func(*Books){
		"nothing": func(*Books) {}, "room": func(b *Books) { b.Lines[0].Used++ }, "holds": func(b *Books) { b.Lines[0].Holds++ },
		"a reservation": func(b *Books) { b.Changes++ }, "unsettled": func(b *Books) { b.Settled = false },
	} {
		t.Run(fmt.Sprint(name), func(t *testing.T) {
			j := Judge{Grace: time.Second, Strangers: time.Second}
			start := time.Now()
			look := func(at time.Duration, changed bool) (owners, plain int) {
				b := &Books{Settled: true}
				l := b.AddLine()
				l.Ever, l.Available, l.Used = 100, 20, 80
				o := b.AddOwner(0, 1)
				b.Promise(o, l, 10)
				b.Keep(nil, b.AddLine(), 1, 90)
				b.Lines[1].Ever = 100
				b.Judged(b.AddWait(0, 1, Slot{l, 60}), o)
				b.Judged(b.AddWait(1, 2, Slot{b.Lines[1], 60}), nil)
				if changed {
					change(b)
					b.Lines[1].Holds += b.Lines[0].Holds + b.Changes
					b.Lines[1].Used += b.Lines[0].Used - 80
				}
				b.Settle()
				s, _ := j.Owners(b, start.Add(at))
				p, still := j.Plain(b, start.Add(at), func(*Wait) time.Duration { return at })
				if len(p) > 0 && (p[0].Seq != 2 || still < time.Second) {
					t.Errorf("%v is told after %v", p[0].Of, still)
				}
				return len(s), len(p)
			}
			look(0, false)
			look(900*time.Millisecond, name == "unsettled") // of which the next look must know
			owners, plain := look(time.Second, name != "unsettled")
			if want := name == "nothing"; (owners > 0) != want || (plain > 0) != (want || name == "unsettled") {
				t.Errorf("after a second with a change %d and %d are told", owners, plain)
			}
		})
	}
}

// TestVictim: the youngest wait is to fail whose owner holds some of what is waited for and was not
// told before. If all were, it is the youngest that holds some, or else the youngest.
func TestVictim(t *testing.T) {
	for name, c := range map[string]struct {
		holds, told []int
		want        int
		again       bool
	}{
		"the youngest":                   {[]int{0, 1, 2}, nil, 2, false},
		"the youngest that holds":        {[]int{0, 1}, nil, 1, false},
		"nobody holds":                   {nil, nil, 2, false},
		"not one that was told":          {[]int{0, 1, 2}, []int{2}, 1, false},
		"not one that was told, holds":   {[]int{0, 1}, []int{1}, 0, false},
		"all were told":                  {[]int{0, 1, 2}, []int{0, 1, 2}, 2, true},
		"all that hold were told":        {[]int{0, 1}, []int{0, 1}, 1, true},
		"nobody holds and all were told": {nil, []int{0, 1, 2}, 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			b := &Books{Settled: true}
			l := b.AddLine()
			l.Ever = 100
			for i := range 3 {
				o := b.AddOwner(i, 1)
				if slices.Contains(c.holds, i) {
					b.Promise(o, l, 10)
				}
				b.Judged(b.AddWait(i, uint64(i+1), Slot{l, 60}), o)
			}
			b.Settle()
			w, again := b.Victim(b.still, func(o *Owner) bool { return slices.Contains(c.told, o.Of.(int)) })
			if w.Of != c.want || again != c.again {
				t.Errorf("%v, again %v; want %d, %v", w.Of, again, c.want, c.again)
			}
		})
	}
}

// TestAddedOnce: an owner is the same each time, and what was not added is nil.
func TestAddedOnce(t *testing.T) {
	var b Books
	if b.Owner(1) != nil || b.Wait(1) != nil {
		t.Error("empty books have something")
	}
	l := b.AddLine()
	if o := b.AddOwner(1, 1); b.AddOwner(1, 1) != o || b.Owner(1) != o || len(b.Owners) != 1 {
		t.Error("an owner is there twice")
	}
	if w := b.AddWait(1, 1, Slot{l, 1}); b.Wait(1) != w || b.Wait(2) != nil {
		t.Error("a wait is not found")
	}
}
