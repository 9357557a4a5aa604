package timeline

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/tier"
)

// Bounds of a recording. A machine with eight GPUs has some 20 spaces and 300 edges, of which a plan
// uses a part.
const (
	intervals  = 512 // even, so that neighbours can be merged
	shortest   = 5 * time.Millisecond
	mostSpaces = 64
	mostEdges  = 256
	mostPhases = 64
	mostNotes  = 192
	mostText   = 300 // bytes of a note
)

// Others is what the moves are counted under of edges that are too many.
const Others = "others"

// causeOfCopies is the cause that moves onto copies are counted under.
const causeOfCopies = "copy"

// Recorder makes a Timeline. New makes one.
type Recorder struct {
	began time.Time

	mu struct {
		sync.Mutex
		interval time.Duration
		last     time.Time
		spaces   []*space
		edges    map[[2]tier.ID]*series
		causes   map[string]*cause
		waits    struct{ ended, total, longest series } // times in nanoseconds
		tasks    struct {
			running       level
			ended, failed series
		}
		copies  Copies
		phases  []phase
		notes   []Note
		leftOut int64
	}
}

// series has a value for each interval, up to the last one with any.
type series struct{ v []int64 }

// level is a series of what is there at a time. Intervals in which nobody looked have what was seen
// last.
type level struct {
	series
	now int64
	at  int // the interval in which was looked last
}

// see records what is there now.
func (l *level) see(i int, n int64) {
	l.until(i)
	l.now, l.at = n, max(l.at, i)
	l.atLeast(i, n)
}

// until fills the intervals up to i.
func (l *level) until(i int) {
	for k := l.at + 1; k <= i && len(l.v) > 0; k++ {
		l.atLeast(k, l.now)
	}
}

type space struct {
	State
	used, reserved, copies, foreign level
}

type cause struct{ moves, bytes series }

type phase struct {
	name       string
	begin, end time.Time // zero: not over
}

// New returns a Recorder whose recording begins now.
func New() *Recorder { return newAt(time.Now()) }

func newAt(began time.Time) *Recorder {
	r := &Recorder{began: began}
	r.mu.interval, r.mu.last = shortest, began
	r.mu.edges, r.mu.causes = make(map[[2]tier.ID]*series), make(map[string]*cause)
	return r
}

// Event records an event. It is for Config.Events.
func (r *Recorder) Event(e events.Event) {
	switch e.Kind {
	case events.MoveBegun, events.WaitBegun, events.AheadUsed, events.AheadWasted, events.PressureRose, events.PressureFell,
		events.BatchPut, events.BatchUsed, events.BatchHinted, events.BatchDropped:
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at := r.indexLocked(e.At)
	switch e.Kind {
	case events.MoveEnded:
		if e.Err == nil {
			r.movedLocked(e, at)
		}
		return
	case events.CopyMade:
		r.mu.copies.Made += e.Bytes
		if e.Ahead {
			r.mu.copies.Ahead += e.Bytes
		}
		return
	case events.CopyUsed:
		r.mu.copies.Used += e.Bytes
		return
	case events.CopyDropped:
		r.mu.copies.Dropped += e.Bytes
		return
	case events.WaitEnded:
		w := &r.mu.waits
		w.ended.add(at, 1)
		w.longest.atLeast(at, int64(e.Took))
		r.spreadLocked(&w.total, e.At, e.Took, int64(e.Took))
		return
	case events.TaskBegun:
		t := &r.mu.tasks
		t.running.see(at, t.running.now+1)
		return
	case events.TaskEnded:
		t := &r.mu.tasks
		t.running.see(at, max(0, t.running.now-1))
		t.ended.add(at, 1)
		if e.Err == nil {
			return
		}
		t.failed.add(at, 1)
	}
	r.noteLocked(e)
}

// movedLocked counts a move. Its bytes are those of the time that it took.
func (r *Recorder) movedLocked(e events.Event, at int) {
	name := e.Reason
	if e.Copy {
		name = causeOfCopies
	}
	c := r.mu.causes[name]
	if c == nil {
		if len(r.mu.causes) >= mostPhases {
			return
		}
		c = new(cause)
		r.mu.causes[name] = c
	}
	c.moves.add(at, 1)
	if e.Copy {
		return
	}
	r.spreadLocked(&c.bytes, e.At, e.Took, e.Bytes)
	key := [2]tier.ID{e.From, e.To}
	s := r.mu.edges[key]
	if s == nil {
		if len(r.mu.edges) >= mostEdges {
			key = [2]tier.ID{}
		}
		if s = r.mu.edges[key]; s == nil {
			s = new(series)
			r.mu.edges[key] = s
		}
	}
	r.spreadLocked(s, e.At, e.Took, e.Bytes)
}

// spreadLocked adds n to the intervals of the time that ended at a moment, each by its part.
func (r *Recorder) spreadLocked(s *series, end time.Time, took time.Duration, n int64) {
	last, first := r.indexLocked(end), r.indexLocked(end.Add(-took))
	if first == last || n == 0 {
		s.add(last, n)
		return
	}
	begin := max(0, end.Add(-took).Sub(r.began))
	whole, done := float64(end.Sub(r.began)-begin), int64(0)
	for i := first; i < last; i++ {
		until := time.Duration(i+1)*r.mu.interval - begin
		upTo := int64(float64(n) * float64(until) / whole)
		s.add(i, upTo-done)
		done = upTo
	}
	s.add(last, n-done)
}

// Sample records how full the spaces are.
func (r *Recorder) Sample(at time.Time, spaces []State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := r.indexLocked(at)
	for _, now := range spaces {
		k := slices.IndexFunc(r.mu.spaces, func(s *space) bool { return s.ID == now.ID })
		if k < 0 {
			if len(r.mu.spaces) >= mostSpaces {
				continue
			}
			k = len(r.mu.spaces)
			r.mu.spaces = append(r.mu.spaces, &space{})
		}
		s := r.mu.spaces[k]
		s.State = now
		s.used.see(i, now.Used)
		s.reserved.see(i, now.Reserved)
		s.copies.see(i, now.Copies)
		s.foreign.see(i, now.Foreign)
	}
}

// Phase says that a part of the work begins, and the one before it is over.
func (r *Recorder) Phase(at time.Time, name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.indexLocked(at)
	p := r.mu.phases
	if len(p) > 0 && p[len(p)-1].end.IsZero() {
		p[len(p)-1].end = at
	}
	if len(p) == mostPhases { // then two neighbours have one name
		merged := p[:0]
		for i := 0; i < len(p); i += 2 {
			merged = append(merged, phase{p[i].name + " to " + lastOf(p[i+1].name), p[i].begin, p[i+1].end})
		}
		clear(p[len(merged):])
		for i := range merged {
			merged[i].name = firstOf(merged[i].name) + " to " + lastOf(merged[i].name)
		}
		p = merged
	}
	r.mu.phases = append(p, phase{name: name, begin: at})
}

// firstOf and lastOf are the ends of a name that stands for several phases.
func firstOf(name string) string {
	first, _, _ := strings.Cut(name, " to ")
	return first
}

func lastOf(name string) string { return name[strings.LastIndex(" to "+name, " to "):] }

// noteLocked keeps an event for people.
func (r *Recorder) noteLocked(e events.Event) {
	n := Note{At: max(0, e.At.Sub(r.began).Seconds()), Kind: e.Kind.String(), Text: e.Text, Count: 1}
	for _, id := range []tier.ID{e.To, e.From} {
		if n.Space == "" && id.Valid() {
			n.Space = id.String()
		}
	}
	for _, more := range []string{e.Origin.String(), errorText(e.Err)} {
		if more != "" {
			n.Text = strings.TrimPrefix(n.Text+"; "+more, "; ")
		}
	}
	if len(n.Text) > mostText {
		n.Text = strings.ToValidUTF8(n.Text[:mostText], "") + "…"
	}
	if len(r.mu.notes) == mostNotes {
		r.mergeNotesLocked()
	}
	if len(r.mu.notes) == mostNotes {
		r.mu.leftOut++
		return
	}
	r.mu.notes = append(r.mu.notes, n)
}

// mergeNotesLocked makes room: of notes of one kind and space, each second one is counted with the
// one before it.
func (r *Recorder) mergeNotesLocked() {
	type about struct{ kind, space string }
	open, kept := make(map[about]int), r.mu.notes[:0]
	for _, n := range r.mu.notes {
		key := about{n.Kind, n.Space}
		if i, ok := open[key]; ok {
			kept[i].Count += n.Count
			delete(open, key)
			continue
		}
		open[key] = len(kept)
		kept = append(kept, n)
	}
	clear(r.mu.notes[len(kept):])
	r.mu.notes = kept
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// indexLocked returns the interval of a moment, for which there is room then.
func (r *Recorder) indexLocked(at time.Time) int {
	if at.After(r.mu.last) {
		r.mu.last = at
	}
	since := max(0, at.Sub(r.began))
	for since/r.mu.interval >= intervals {
		r.mu.interval *= 2
		r.eachLocked((*series).merge)
		for _, l := range r.levelsLocked() {
			l.at /= 2
		}
	}
	return int(since / r.mu.interval)
}

func (r *Recorder) levelsLocked() []*level {
	all := []*level{&r.mu.tasks.running}
	for _, s := range r.mu.spaces {
		all = append(all, &s.used, &s.reserved, &s.copies, &s.foreign)
	}
	return all
}

// eachLocked calls f for all series; level says that the largest value of several counts, and not
// their sum.
func (r *Recorder) eachLocked(f func(s *series, level bool)) {
	for _, l := range r.levelsLocked() {
		f(&l.series, true)
	}
	for _, e := range r.mu.edges {
		f(e, false)
	}
	for _, c := range r.mu.causes {
		f(&c.moves, false)
		f(&c.bytes, false)
	}
	f(&r.mu.waits.ended, false)
	f(&r.mu.waits.total, false)
	f(&r.mu.waits.longest, true)
	f(&r.mu.tasks.ended, false)
	f(&r.mu.tasks.failed, false)
}

func (s *series) reach(i int) {
	if i < len(s.v) {
		return
	}
	if i >= cap(s.v) { // in few steps, and never more than there are intervals
		grown := make([]int64, len(s.v), max(intervals/8, min(intervals, 2*(i+1))))
		copy(grown, s.v)
		s.v = grown
	}
	s.v = s.v[:i+1]
}

func (s *series) add(i int, n int64) {
	s.reach(i)
	s.v[i] += n
}

func (s *series) atLeast(i int, n int64) {
	s.reach(i)
	s.v[i] = max(s.v[i], n)
}

// merge makes one value of each two.
func (s *series) merge(level bool) {
	half := (len(s.v) + 1) / 2
	for i := range half {
		v := s.v[2*i]
		if 2*i+1 < len(s.v) {
			if other := s.v[2*i+1]; level {
				v = max(v, other)
			} else {
				v += other
			}
		}
		s.v[i] = v
	}
	clear(s.v[half:])
	s.v = s.v[:half]
}

// Snapshot returns what was recorded up to now, with at most so many intervals, and at most most
// numbers in all. The recording goes on.
func (r *Recorder) Snapshot(points, most int) *Timeline {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := &Timeline{
		Began: r.began.UTC(), Seconds: r.mu.last.Sub(r.began).Seconds(),
		Spaces: []Space{}, Edges: []Edge{}, Causes: []Cause{}, Phases: []Phase{}, Notes: slices.Clone(r.mu.notes), NotesLeftOut: r.mu.leftOut,
	}
	if t.Notes == nil {
		t.Notes = []Note{}
	}
	last := r.indexLocked(r.mu.last)
	for _, l := range r.levelsLocked() {
		l.until(last)
		l.at = max(l.at, last)
	}
	all := 0
	r.eachLocked(func(*series, bool) { all++ })
	times := 1 // intervals that become one
	for n := last + 1; n > 1 && (n > points || n*all > most); n = (n + 1) / 2 {
		times *= 2
	}
	interval := time.Duration(times) * r.mu.interval
	t.IntervalSeconds = interval.Seconds()
	count := last/times + 1
	top := func(s *series) []int64 { return s.in(count, times, true) }
	sum := func(s *series) []int64 { return s.in(count, times, false) }
	for _, s := range r.mu.spaces {
		t.Spaces = append(t.Spaces, Space{
			ID: s.ID, Capacity: s.Capacity, Limit: s.Limit, Trigger: s.Trigger, Stop: s.Stop,
			Used: top(&s.used.series), Reserved: top(&s.reserved.series), Copies: top(&s.copies.series), Foreign: top(&s.foreign.series),
		})
	}
	byID := func(a, b tier.ID) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Ordinal, b.Ordinal)) }
	keys := make([][2]tier.ID, 0, len(r.mu.edges))
	for k := range r.mu.edges {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b [2]tier.ID) int { return cmp.Or(byID(a[0], b[0]), byID(a[1], b[1])) })
	for _, k := range keys {
		e := Edge{From: Others, To: Others, Bytes: sum(r.mu.edges[k])}
		if k[0].Valid() && k[1].Valid() {
			e.From, e.To = k[0].String(), k[1].String()
		}
		t.Edges = append(t.Edges, e)
	}
	for name, c := range r.mu.causes {
		t.Causes = append(t.Causes, Cause{Name: name, Moves: sum(&c.moves), Bytes: sum(&c.bytes)})
	}
	slices.SortFunc(t.Causes, func(a, b Cause) int { return cmp.Compare(a.Name, b.Name) })
	t.Waits = Waits{Ended: sum(&r.mu.waits.ended), Total: seconds(sum(&r.mu.waits.total)), Longest: seconds(top(&r.mu.waits.longest))}
	t.Tasks = Tasks{Running: top(&r.mu.tasks.running.series), Ended: sum(&r.mu.tasks.ended), Failed: sum(&r.mu.tasks.failed)}
	t.Copies = r.mu.copies
	for _, p := range r.mu.phases {
		end := r.mu.last
		if !p.end.IsZero() {
			end = p.end
		}
		t.Phases = append(t.Phases, Phase{p.name, p.begin.Sub(r.began).Seconds(), end.Sub(r.began).Seconds()})
	}
	return t
}

// in returns count values, each made of so many intervals.
func (s *series) in(count, times int, level bool) []int64 {
	out := make([]int64, count)
	for i, v := range s.v {
		if k := i / times; k >= count {
			break
		} else if level {
			out[k] = max(out[k], v)
		} else {
			out[k] += v
		}
	}
	return out
}

// seconds are nanoseconds as seconds, to a microsecond.
func seconds(ns []int64) []float64 {
	out := make([]float64, len(ns))
	for i, v := range ns {
		out[i] = float64(v/1000) / 1e6
	}
	return out
}
