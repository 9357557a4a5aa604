package timeline

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// Limits of a recording. A machine with eight GPUs has about 20 spaces and 300 edges, of which a plan
// uses a part.
const (
	intervals   = 512 // even, so that neighbours can be merged
	minInterval = 5 * time.Millisecond
	maxSpaces   = 64
	maxEdges    = 256
	maxCauses   = 64
	maxPhases   = 64
	maxNotes    = 192
	maxAlike    = 48  // notes of a kind and a space; further ones add to the count of the last
	maxText     = 300 // bytes of a note
)

// Others is the name of both ends of the edge that counts the moves of all edges beyond the limit.
const Others = "others"

// causeOfCopies is the cause of moves that found a copy.
const causeOfCopies = "copy"

// Recorder makes a Timeline. New makes one.
type Recorder struct {
	began time.Time

	mu struct {
		sync.Mutex
		interval                       time.Duration
		last                           time.Time // of the latest event
		spaces                         []*space
		edges                          map[[2]tier.ID]*series // the zero key is for Others
		causes                         map[string]*cause
		waits, waited, longest         series // waited and longest in nanoseconds
		tasks, tasksEnded, tasksFailed series
		copies                         Copies
		phases                         []phase
		notes                          []Note
		leftOut                        int64
	}
}

type space struct {
	State
	used, reserved, copies, foreign series
}

type cause struct{ moves, bytes series }

// phase is one phase, or several that have been merged: the first is the Name, and last the last. The
// End of the latest phase is not known.
type phase struct {
	Phase
	last string // empty if nothing was merged
}

// New returns a Recorder whose recording begins now.
func New() *Recorder { return newAt(time.Now()) }

func newAt(began time.Time) *Recorder {
	r := &Recorder{began: began}
	r.mu.interval, r.mu.last = minInterval, began
	r.mu.edges, r.mu.causes = make(map[[2]tier.ID]*series), make(map[string]*cause)
	r.mu.longest.kind, r.mu.tasks.kind = peaks, levels
	return r
}

// Event records an event. Pass it to Config.Events.
func (r *Recorder) Event(e events.Event) {
	switch e.Kind {
	case events.MoveBegun, events.WaitBegun, events.AheadUsed, events.AheadWasted,
		events.PressureRose, events.PressureFell,
		events.BatchPut, events.BatchUsed, events.BatchHinted, events.BatchDropped:
		return
	}
	m := &r.mu
	m.Lock()
	defer m.Unlock()
	at := r.indexLocked(e.At)
	switch e.Kind {
	case events.MoveEnded:
		if e.Err == nil {
			r.movedLocked(e, at)
		}
	case events.CopyMade:
		m.copies.Made += e.Bytes
		if e.Ahead {
			m.copies.Ahead += e.Bytes
		}
	case events.CopyUsed:
		m.copies.Used += e.Bytes
	case events.CopyDropped:
		m.copies.Dropped += e.Bytes
	case events.WaitEnded:
		m.waits.add(at, 1)
		m.longest.add(at, int64(e.Took))
		r.spreadLocked(&m.waited, e.At, e.Took, int64(e.Took))
	case events.TaskBegun:
		m.tasks.set(at, m.tasks.now+1)
	case events.TaskEnded:
		m.tasks.set(at, max(0, m.tasks.now-1))
		m.tasksEnded.add(at, 1)
		if e.Err != nil {
			m.tasksFailed.add(at, 1)
			r.noteLocked(e)
		}
	default:
		r.noteLocked(e)
	}
}

// movedLocked counts a move. Its bytes count in all intervals that the move took.
func (r *Recorder) movedLocked(e events.Event, at int) {
	name := e.Reason
	if e.Copy {
		name = causeOfCopies
	}
	c := r.mu.causes[name]
	if c == nil {
		if len(r.mu.causes) >= maxCauses {
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
	if r.mu.edges[key] == nil && len(r.mu.edges) >= maxEdges {
		key = [2]tier.ID{}
	}
	if r.mu.edges[key] == nil {
		r.mu.edges[key] = new(series)
	}
	r.spreadLocked(r.mu.edges[key], e.At, e.Took, e.Bytes)
}

// spreadLocked distributes n over the intervals of the time that ended at end.
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

// Sample records the use of spaces.
func (r *Recorder) Sample(at time.Time, spaces []State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := r.indexLocked(at)
	for _, now := range spaces {
		k := slices.IndexFunc(r.mu.spaces, func(s *space) bool { return s.ID == now.ID })
		if k < 0 {
			if len(r.mu.spaces) >= maxSpaces {
				continue
			}
			level := series{kind: levels}
			k = len(r.mu.spaces)
			r.mu.spaces = append(r.mu.spaces, &space{used: level, reserved: level, copies: level, foreign: level})
		}
		s := r.mu.spaces[k]
		s.State = now
		s.used.set(i, now.Used)
		s.reserved.set(i, now.Reserved)
		s.copies.set(i, now.Copies)
		s.foreign.set(i, now.Foreign)
	}
}

// Watch starts a goroutine that samples spaces, such as Engine.Spaces, with a period. The returned
// function samples once more and ends it.
func (r *Recorder) Watch(spaces func() []*tier.Space, period time.Duration) (stop func()) {
	sample := func() {
		var states []State
		for _, s := range spaces() {
			u := s.State()
			states = append(states, State{
				ID: s.ID().String(), Capacity: s.Capacity, Limit: u.Limit, Trigger: u.Trigger, Stop: u.Stop,
				Used: u.Used(), Reserved: u.Reserved, Copies: u.Cached, Foreign: u.External,
			})
		}
		r.Sample(time.Now(), states)
	}
	sample()
	stopped := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		labels.Report.Set()
		tick := time.NewTicker(period)
		defer tick.Stop()
		for {
			select {
			case <-stopped:
				return
			case <-tick.C:
				sample()
			}
		}
	})
	return sync.OnceFunc(func() {
		close(stopped)
		done.Wait()
		sample()
	})
}

// Phase begins a part of the work and ends the one before it.
func (r *Recorder) Phase(at time.Time, name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.indexLocked(at)
	p, now := r.mu.phases, at.Sub(r.began).Seconds()
	if len(p) > 0 {
		p[len(p)-1].End = now
	}
	if len(p) == maxPhases {
		for i := range maxPhases / 2 {
			a, b := p[2*i], p[2*i+1]
			p[i] = phase{Phase{a.Name, a.Begin, b.End}, cmp.Or(b.last, b.Name)}
		}
		p = p[:maxPhases/2]
	}
	r.mu.phases = append(p, phase{Phase: Phase{Name: name, Begin: now}})
}

// noteLocked keeps an event for people to read.
func (r *Recorder) noteLocked(e events.Event) {
	texts := []string{e.Text, e.Origin.String()}
	if e.Err != nil {
		texts = append(texts, e.Err.Error())
	}
	texts = slices.DeleteFunc(texts, func(s string) bool { return s == "" })
	n := Note{At: max(0, e.At.Sub(r.began).Seconds()), Kind: e.Kind.String(), Text: strings.Join(texts, "; "), Count: 1}
	for _, id := range []tier.ID{e.From, e.To} {
		if id.Valid() {
			n.Space = id.String() // To, if both are
		}
	}
	if len(n.Text) > maxText {
		n.Text = strings.ToValidUTF8(n.Text[:maxText], "") + "…"
	}
	alike := 0
	var last *Note
	for i := range r.mu.notes {
		if o := &r.mu.notes[i]; o.Kind == n.Kind && o.Space == n.Space {
			alike++
			last = o
		}
	}
	switch full := len(r.mu.notes) == maxNotes; {
	case alike == maxAlike || full && alike > 0:
		last.Count++
	case full:
		r.mu.leftOut++
	default:
		r.mu.notes = append(r.mu.notes, n)
	}
}

// indexLocked returns the interval of a moment. It first merges intervals until there is one.
func (r *Recorder) indexLocked(at time.Time) int {
	if at.After(r.mu.last) {
		r.mu.last = at
	}
	since := max(0, at.Sub(r.began))
	for since/r.mu.interval >= intervals {
		r.mu.interval *= 2
		for _, s := range r.allLocked() {
			s.values, s.seen = s.merged(2, (len(s.values)+1)/2), s.seen/2
		}
	}
	return int(since / r.mu.interval)
}

func (r *Recorder) allLocked() []*series {
	m := &r.mu
	all := []*series{&m.waits, &m.waited, &m.longest, &m.tasks, &m.tasksEnded, &m.tasksFailed}
	for _, s := range m.spaces {
		all = append(all, &s.used, &s.reserved, &s.copies, &s.foreign)
	}
	for _, c := range m.causes {
		all = append(all, &c.moves, &c.bytes)
	}
	return slices.AppendSeq(all, maps.Values(m.edges))
}

// series has a value for each interval, up to the last one with any.
type series struct {
	kind   kind
	values []int64
	now    int64 // of levels: the latest value
	seen   int   // of levels: the interval in which it was set
}

// kind is how a series combines the values of one interval, and of intervals that become one.
type kind uint8

const (
	sums   kind = iota // adds them up
	peaks              // keeps the largest
	levels             // keeps the largest; a value lasts until the next one, also through whole intervals
)

func (s *series) add(i int, n int64) {
	if missing := i + 1 - len(s.values); missing > 0 {
		s.values = append(s.values, make([]int64, missing)...)
	}
	if s.kind == sums {
		s.values[i] += n
	} else {
		s.values[i] = max(s.values[i], n)
	}
}

// set gives a level a new value.
func (s *series) set(i int, n int64) {
	s.fill(i)
	s.now = n
	s.add(i, n)
}

// fill repeats the latest value of a level up to interval i.
func (s *series) fill(i int) {
	for ; s.seen < i; s.seen++ {
		if len(s.values) > 0 {
			s.add(s.seen+1, s.now)
		}
	}
}

// merged returns count values, each of which combines times values of s.
func (s *series) merged(times, count int) []int64 {
	to := series{kind: s.kind, values: make([]int64, count)}
	for i, v := range s.values {
		to.add(i/times, v)
	}
	return to.values
}

// Snapshot returns the recording up to now with at most points intervals, and at most numbers values
// in all. The recording continues.
func (r *Recorder) Snapshot(points, numbers int) *Timeline {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := &r.mu
	last := r.indexLocked(m.last)
	all := r.allLocked()
	times := 1 // how many intervals become one
	for n := last + 1; n > 1 && (n > points || n*len(all) > numbers); n = (n + 1) / 2 {
		times *= 2
	}
	values := func(s *series) []int64 {
		if s.kind == levels {
			s.fill(last)
		}
		return s.merged(times, last/times+1)
	}
	seconds := func(s *series) []float64 {
		out := make([]float64, 0, last/times+1)
		for _, ns := range values(s) {
			out = append(out, float64(ns/1000)/1e6) // to a microsecond
		}
		return out
	}
	t := &Timeline{
		Began:           r.began.UTC(),
		Seconds:         m.last.Sub(r.began).Seconds(),
		IntervalSeconds: (time.Duration(times) * m.interval).Seconds(),

		Spaces: []Space{}, Edges: []Edge{}, Causes: []Cause{}, Phases: []Phase{}, // [] in JSON, not null

		Notes: append([]Note{}, m.notes...), NotesLeftOut: m.leftOut,
		Waits:  Waits{Ended: values(&m.waits), Total: seconds(&m.waited), Longest: seconds(&m.longest)},
		Tasks:  Tasks{Running: values(&m.tasks), Ended: values(&m.tasksEnded), Failed: values(&m.tasksFailed)},
		Copies: m.copies,
	}
	for _, s := range m.spaces {
		t.Spaces = append(t.Spaces, Space{
			ID: s.ID, Capacity: s.Capacity, Limit: s.Limit, Trigger: s.Trigger, Stop: s.Stop,
			Used: values(&s.used), Reserved: values(&s.reserved), Copies: values(&s.copies),
			Foreign: values(&s.foreign),
		})
	}
	byID := func(a, b tier.ID) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Ordinal, b.Ordinal)) }
	byEnds := func(a, b [2]tier.ID) int { return cmp.Or(byID(a[0], b[0]), byID(a[1], b[1])) }
	for _, k := range slices.SortedFunc(maps.Keys(m.edges), byEnds) {
		e := Edge{From: Others, To: Others, Bytes: values(m.edges[k])}
		if k[0].Valid() && k[1].Valid() {
			e.From, e.To = k[0].String(), k[1].String()
		}
		t.Edges = append(t.Edges, e)
	}
	for _, name := range slices.Sorted(maps.Keys(m.causes)) {
		c := m.causes[name]
		t.Causes = append(t.Causes, Cause{Name: name, Moves: values(&c.moves), Bytes: values(&c.bytes)})
	}
	for i, p := range m.phases {
		if p.last != "" {
			p.Name += " to " + p.last
		}
		if i == len(m.phases)-1 {
			p.End = t.Seconds
		}
		t.Phases = append(t.Phases, p.Phase)
	}
	return t
}
