package budget

import (
	"math"

	"github.com/spillway-db/spillway/tier"
)

// books are what a budget knows of one device. Budget.mu guards them.
//
//	         admit            done              Free              finished
//	free ───────────▶ pending ────▶ live ────────────────▶ marked ────────▶ free
//	     ◀───────────        found when wrapped: older └──▶ unmarked ──────▶ free
//	       rolled back                         └──────────────────────────▶ free
//
// A free is marked if an event was recorded behind it: when the event is done, the free is. For the
// rest the device's Outstanding returns how much is finished, but not which frees; see settle.
type books struct {
	pending  int64
	live     int64 // known allocations, also those whose Free is under way
	freeing  int64 // of live, those
	marked   int64
	unmarked int64
	ahead    int64 // of marked, what was credited before it is known which frees that were
	older    int64 // outstanding when the device was wrapped: sizes are not known
	promised int64 // by spaces, before they allocate

	freed int64 // of calls of Free that have begun; a total that never falls

	allocs map[tier.Addr]*allocation
	marks  map[tier.Stream][]markedFree // of each stream, in the order of its work
	number int64                        // of the last markedFree
	closed bool
}

// allocation is one whose size is known.
type allocation struct {
	charge  int64
	freeing bool
}

// markedFree is a free with an event behind it. Each has a number of its own, which
// rises.
type markedFree struct {
	number int64
	event  tier.Event
	charge int64
}

func (b *books) retired() int64 { return b.marked + b.unmarked - b.ahead }

// charged is what the device takes out of the budget. What a space has promised to
// its reservations is not charged again when they allocate.
func (b *books) charged() int64 {
	return b.older + max(b.promised, b.pending+b.live+b.retired())
}

// unused reports whether nothing is charged but what is older than the budget.
func (b *books) unused() bool {
	return !b.closed && b.promised == 0 && b.pending+b.live+b.retired() == 0
}

// more is how much charged would rise; false if no number says that.
func (b *books) more(r request) (int64, bool) {
	used := b.pending + b.live + b.retired()
	if r.promise > math.MaxInt64-b.promised || r.alloc > math.MaxInt64-used {
		return 0, false
	}
	return max(b.promised+r.promise, used+r.alloc) - max(b.promised, used), true
}

// reapable is how much charged could fall by reaping.
func (b *books) reapable() int64 {
	used := b.pending + b.live
	return b.older + max(b.promised, used+b.retired()) - max(b.promised, used)
}

// sight is a snapshot of the books, taken before the device is queried.
type sight struct {
	live  int64 // allocations that are not being freed
	freed int64
	open  bool // there is something to settle
	views []view
}

// view is the marks of one stream as they were; they are never written to again.
type view struct {
	stream tier.Stream
	marks  []markedFree
	done   int64          // number of the last that is finished with; 0 for none
	failed map[int64]bool // those with an error: whether the free took place is not known
}

func (b *books) look() sight {
	s := sight{live: b.live - b.freeing, freed: b.freed, open: b.older+b.marked+b.unmarked > 0}
	for stream, marks := range b.marks {
		s.views = append(s.views, view{stream: stream, marks: marks})
	}
	return s
}

// ask asks the events, in order: a free is done after those before it on its stream.
// That is the device's code, for which no lock may be held.
func (s *sight) ask() {
	for i := range s.views {
		v := &s.views[i]
		for _, f := range v.marks {
			if !isDone(f.event) {
				break
			}
			v.done = f.number
			if f.event.Err() != nil {
				if v.failed == nil {
					v.failed = make(map[int64]bool)
				}
				v.failed[f.number] = true
			}
		}
	}
}

func isDone(e tier.Event) bool {
	select {
	case <-e.Done():
		return true
	default:
		return false
	}
}

// settle credits what is finished with and returns how many bytes that were.
// outstanding is what the device said after s.ask, if s is open.
func (b *books) settle(s sight, outstanding int64) (credit int64) {
	for i := range s.views {
		credit += b.settleMarks(&s.views[i])
	}
	if s.open {
		credit += b.settleOutstanding(s, outstanding)
	}
	// What is credited beyond all that is marked cannot have been that.
	if n := b.ahead - b.marked; n > 0 {
		b.ahead -= n
		b.older -= n - min(n, b.unmarked)
		b.unmarked -= min(n, b.unmarked)
	}
	return credit
}

// settleMarks credits the frees whose event is done: exactly those, and whatever
// else goes on. One that has failed loses its mark.
func (b *books) settleMarks(v *view) (credit int64) {
	for marks := b.marks[v.stream]; len(marks) > 0 && marks[0].number <= v.done; {
		f := marks[0]
		b.marked -= f.charge
		if v.failed[f.number] {
			b.unmarked += f.charge
		} else {
			n := min(f.charge, b.ahead) // it may be what that was
			b.ahead -= n
			credit += f.charge - n
		}
		if marks = marks[1:]; len(marks) > 0 {
			b.marks[v.stream] = marks
		} else {
			delete(b.marks, v.stream)
		}
	}
	return credit
}

// settleOutstanding credits what the device does not count any more, where it is unknown which
// frees those were. They are frees of a synchronous device while its streams work on, frees without
// a mark, and frees of older allocations.
//
// outstanding is the device's count. Live in it are the allocations that were live before the query
// and have not been freed since. Only the rest can be older or retired. An allocation made and
// freed since is counted in the rest, even if the query came before it. So live may come out below
// 0. Allocations in progress at the query make the rest look larger. So the credit may be too small
// for a moment, but is never too large.
func (b *books) settleOutstanding(s sight, outstanding int64) int64 {
	live := s.live - (b.freed - s.freed)
	over := max(0, b.older+b.retired()-max(0, outstanding-live))
	b.ahead += over
	return over
}
