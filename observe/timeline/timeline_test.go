package timeline

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

var (
	gpu  = tier.ID{Kind: tier.GPU}
	host = tier.ID{Kind: tier.Host}
	disk = tier.ID{Kind: tier.Disk}
)

func sum(v []int64) (all int64) {
	for _, n := range v {
		all += n
	}
	return all
}

// However often neighbours are merged, what is counted is the sum and what is a level is the largest,
// and there are never more intervals than are asked for.
func TestNothingIsCut(t *testing.T) {
	for seed := range testseed.Each(t, 3) {
		random := rand.New(rand.NewPCG(seed, 1))
		began := time.Unix(1000, 0)
		r := newAt(began)
		var bytes, moves, copies, waits, most int64
		var waited, longest time.Duration
		at := began
		for range 5000 {
			at = at.Add(time.Duration(random.Int64N(int64(2 * time.Second))))
			took := time.Duration(random.Int64N(int64(20 * time.Second)))
			if took > at.Sub(began) {
				took = at.Sub(began)
			}
			switch random.IntN(4) {
			case 0:
				n := random.Int64N(1 << 30)
				r.Event(events.Event{Kind: events.MoveEnded, At: at, From: gpu, To: disk, Bytes: n, Took: took, Reason: "demand"})
				bytes, moves = bytes+n, moves+1
			case 1:
				r.Event(events.Event{Kind: events.MoveEnded, At: at, From: gpu, To: disk, Copy: true, Reason: "work"})
				copies++
			case 2:
				r.Event(events.Event{Kind: events.WaitEnded, At: at, To: gpu, Took: took})
				waits, waited, longest = waits+1, waited+took, max(longest, took)
			case 3:
				used := random.Int64N(1 << 40)
				r.Sample(at, []State{{ID: "gpu:0", Capacity: 1 << 40, Used: used}})
				most = max(most, used)
			}
		}
		for _, points := range []int{1, 7, 100, intervals} {
			s := r.Snapshot(points, 1<<20)
			n := len(s.Waits.Ended)
			if n < 1 || n > points || float64(n)*s.IntervalSeconds < s.Seconds || values(s) > 1<<20 {
				t.Fatalf("%d intervals of %v s of %d, of %v s", n, s.IntervalSeconds, points, s.Seconds)
			}
			edge := s.Edges[0]
			if len(s.Edges) != 1 || edge.From != "gpu:0" || edge.To != "disk:0" || sum(edge.Bytes) != bytes || slices.Min(edge.Bytes) < 0 {
				t.Errorf("%d points: %+v, want %d bytes", points, edge, bytes)
			}
			if c := s.Causes; len(c) != 2 || c[0].Name != "copy" || sum(c[0].Moves) != copies || sum(c[1].Moves) != moves || sum(c[1].Bytes) != bytes {
				t.Errorf("%d points: %+v", points, c)
			}
			if got := slices.Max(s.Spaces[0].Used); got != most {
				t.Errorf("%d points: at most %d, want %d", points, got, most)
			}
			total := 0.0
			for _, v := range s.Waits.Total {
				total += v
			}
			if sum(s.Waits.Ended) != waits || slices.Max(s.Waits.Longest) != float64(longest/1000)/1e6 || total > waited.Seconds() || total < waited.Seconds()-0.01 {
				t.Errorf("%d points: %d waits of %v s, want %d of %v", points, sum(s.Waits.Ended), total, waits, waited)
			}
		}
	}
}

// The bytes of a move are in the intervals that it took.
func TestMovesAreSpread(t *testing.T) {
	began := time.Unix(1000, 0)
	r := newAt(began)
	r.Event(events.Event{Kind: events.MoveEnded, At: began.Add(4 * minInterval), Took: 2 * minInterval, From: gpu, To: host, Bytes: 1000, Reason: "trigger"})
	if got := r.Snapshot(intervals, 1<<20).Edges[0].Bytes; !slices.Equal(got, []int64{0, 0, 500, 500, 0}) {
		t.Error(got)
	}
}

// Notes, phases and edges are bounded, and what has no room is counted.
func TestBounds(t *testing.T) {
	began := time.Unix(1000, 0)
	r := newAt(began)
	at := began
	for i := range 10_000 {
		at = at.Add(time.Second)
		r.Event(events.Event{Kind: events.DiskSlow, At: at, To: disk, Text: strings.Repeat("ü", 1000)})
		r.Event(events.Event{Kind: events.Corrupt, At: at, To: disk, Batch: 3, Err: errors.New("bad")})
		r.Event(events.Event{Kind: events.MoveEnded, At: at, From: tier.ID{Kind: tier.GPU, Ordinal: i % 1000}, To: host, Bytes: 1, Reason: "demand"})
		r.Phase(at, fmt.Sprintf("pass-%d", i+1))
	}
	s := r.Snapshot(intervals, 1<<20)
	count, kinds := int64(0), map[string]bool{}
	for _, n := range s.Notes {
		count += n.Count
		kinds[n.Kind] = true
		if len(n.Text) > maxText+len("…") {
			t.Fatalf("%d bytes of text", len(n.Text))
		}
	}
	if len(s.Notes) > maxNotes || count != 20_000 || len(kinds) != 2 || s.NotesLeftOut != 0 {
		t.Errorf("%d notes of %d, %v, %d left out", len(s.Notes), count, kinds, s.NotesLeftOut)
	}
	bytes := int64(0)
	for _, e := range s.Edges {
		bytes += sum(e.Bytes)
	}
	if len(s.Edges) != maxEdges+1 || bytes != 10_000 || s.Edges[0].From != Others {
		t.Errorf("%d edges, %d bytes", len(s.Edges), bytes)
	}
	if len(s.Phases) > maxPhases || !strings.HasPrefix(s.Phases[0].Name, "pass-1 to pass-") || strings.Count(s.Phases[0].Name, " to ") != 1 || s.Phases[len(s.Phases)-1].Name != "pass-10000" {
		t.Errorf("%+v", s.Phases)
	}
	for i := 1; i < len(s.Phases); i++ {
		if s.Phases[i].Begin != s.Phases[i-1].End {
			t.Errorf("between %+v and %+v is a gap", s.Phases[i-1], s.Phases[i])
		}
	}
	if s := r.Snapshot(intervals, 10_000); values(s) > 10_000 {
		t.Errorf("%d numbers", values(s))
	}
	text, err := json.Marshal(s)
	if err != nil || len(text) > 1<<20 {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}

// A rare event has a note of its own, however many others came before.
func TestRareNote(t *testing.T) {
	r := New()
	for range 10 * maxNotes {
		r.Event(events.Event{Kind: events.DiskSlow, At: time.Now(), To: disk})
	}
	r.Event(events.Event{Kind: events.Corrupt, At: time.Now(), To: disk, Err: errors.New("bad")})
	notes := r.Snapshot(1, 1000).Notes
	if last := notes[len(notes)-1]; len(notes) > maxAlike+1 || last.Kind != events.Corrupt.String() || last.Count != 1 {
		t.Errorf("%d notes, the last is %+v", len(notes), last)
	}
}

// Tasks are counted, and one that fails is noted.
func TestTasks(t *testing.T) {
	r := New()
	for range 3 {
		r.Event(events.Event{Kind: events.TaskBegun, At: time.Now()})
	}
	r.Event(events.Event{Kind: events.TaskEnded, At: time.Now(), Origin: events.Origin{Task: "probe"}, Err: errors.New("full")})
	s := r.Snapshot(1, 1000)
	if s.Tasks.Running[0] != 3 || s.Tasks.Ended[0] != 1 || s.Tasks.Failed[0] != 1 || len(s.Notes) != 1 || s.Notes[0].Text != `task "probe"; full` {
		t.Errorf("%+v", s)
	}
}

// Where nobody looked, a space is as full as it was seen last, also after intervals have been merged.
func TestLevelsStay(t *testing.T) {
	began := time.Unix(1000, 0)
	r := newAt(began)
	r.Sample(began, []State{{ID: "gpu:0", Used: 5}})
	r.Sample(began.Add(4*minInterval), []State{{ID: "gpu:0", Used: 7}})
	r.Event(events.Event{Kind: events.TaskBegun, At: began.Add(6 * minInterval)})
	if got := r.Snapshot(intervals, 1<<20).Spaces[0].Used; !slices.Equal(got, []int64{5, 5, 5, 5, 7, 7, 7}) {
		t.Error(got)
	}
	r.Sample(began.Add(2*intervals*minInterval), []State{{ID: "gpu:0", Used: 1}})
	s := r.Snapshot(intervals, 1<<20)
	if got := s.Spaces[0].Used; slices.Min(got[:len(got)-1]) != 5 || got[2] != 7 || got[len(got)-2] != 7 || got[len(got)-1] != 7 && got[len(got)-1] != 1 {
		t.Error(got)
	}
	if got := s.Tasks.Running; got[len(got)-1] != 1 {
		t.Error(got)
	}
}

// All calls may be made at once.
func TestTogether(t *testing.T) {
	r := New()
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for n := range 500 {
				at := time.Now().Add(time.Duration(n) * time.Second)
				r.Event(events.Event{Kind: events.MoveEnded, At: at, From: gpu, To: host, Bytes: 1, Took: time.Millisecond, Reason: "work"})
				r.Sample(at, []State{{ID: "gpu:0", Used: int64(n)}})
				r.Phase(at, fmt.Sprint(i))
				_ = r.Snapshot(10, 1000)
			}
		})
	}
	all.Wait()
	if got := sum(r.Snapshot(intervals, 1<<20).Edges[0].Bytes); got != 2000 {
		t.Errorf("%d bytes", got)
	}
}

// BenchmarkEvent is what a move costs that is recorded.
func BenchmarkEvent(b *testing.B) {
	r := New()
	e := events.Event{Kind: events.MoveEnded, From: gpu, To: host, Bytes: 4096, Took: 30 * time.Microsecond, Reason: "demand"}
	b.ReportAllocs()
	for b.Loop() {
		e.At = time.Now()
		r.Event(e)
	}
}

// values returns how many numbers the series have together.
func values(t *Timeline) (n int) {
	for _, s := range t.Spaces {
		n += len(s.Used) + len(s.Reserved) + len(s.Copies) + len(s.Foreign)
	}
	for _, e := range t.Edges {
		n += len(e.Bytes)
	}
	for _, c := range t.Causes {
		n += len(c.Moves) + len(c.Bytes)
	}
	return n + 3*len(t.Waits.Ended) + 3*len(t.Tasks.Running)
}
