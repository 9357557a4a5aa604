package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// space is the monitor's record of a space. A goroutine needs its token to evict from it: a waiter
// in Evict, one that Run has started for the trigger (evictToStop), Clear, or evict of a faster space,
// which makes room in it for its batches. If another has the token, a waiter returns from Evict and is
// woken later; the others wait for the token.
//
// A space is dry after a list of moves that moved nothing, until another list moves something or
// fails in a new way. While it is dry, Evict returns at once for a moment after each list (see
// restMax), Run tries again after a few periods, and a need is reported as stuck.
type space struct {
	*tier.Space
	place int
	lower decide.Kinds // the tiers of the slower spaces

	// token holds a value while batches are evicted from the space. Tokens of several spaces are
	// taken from the fastest to the slowest.
	token chan struct{}
	asked atomic.Bool // a waiter found the token taken: it is woken when the token is free

	dry    atomic.Pointer[dryList] // nil if the space is not dry; it is set with the token
	waking atomic.Bool             // a waiter will be woken when it has rested

	aboveTrigger atomic.Bool // Run was woken because the trigger was reached
	high         atomic.Bool // the pressure was at the trigger, and has not been at the stop mark since
	relieving    atomic.Bool // Run's goroutine for the space is at work

	// Guarded by the Monitor's mutex.
	edges   []edge // by the place of the target; those to slower tiers are used
	victims *btree.BTreeG[listed]
	small   *btree.BTreeG[listed] // the victims by their bytes
	sizes   *btree.BTreeG[listed] // all batches by their sizes as images
	summary

	// Run's.
	gone       bool // its loss was reported
	warned     bool // it has no tier below, and was at its trigger
	stuckSince time.Time
	stuck      int      // what was reported
	covered    coverage // when all that is above the stop mark had clean images
}

// dryList is a list of moves that moved nothing and after which the next list would have the same
// moves, while no bytes were coming either.
type dryList struct {
	begun   time.Time
	resting int64 // bytes of batches at rest when it was begun
	took    time.Duration
	outcome reservation.Eviction
}

// restMax bounds the time for which Evict makes no list of moves after one that moved nothing. That
// is ten times as long as the list took, so waiters that are woken by each end of a use take at
// most a tenth of a core for each full space.
const restMax = 25 * time.Millisecond

// below returns the spaces to which batches may be evicted from here: those of the next slower tier
// first, within a tier the nearest first.
func (s *space) below(m *Monitor) (all []*space) {
	var to []*tier.Space
	for k := s.Kind() + 1; k.Valid(); k++ {
		to = reservation.ToDowngrade(s.ID(), k).Candidates(m.cfg.Reservations.Spaces(), to)
	}
	for _, t := range to {
		if t.Lost() == nil {
			all = append(all, m.byID[t.ID()])
		}
	}
	return all
}

// take waits for the space's token. It returns false if ctx has ended.
func (s *space) take(ctx context.Context) bool {
	select {
	case s.token <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// give returns the token of a space, and wakes a waiter that found it taken.
func (m *Monitor) give(s *space) {
	<-s.token
	if s.asked.Swap(false) {
		m.cfg.Reservations.Wake(s.ID())
	}
}

// Evict moves batches at rest out of a space, for a request that lacks bytes there. It works on the
// caller's goroutine, returns after one list of moves, and waits for no release. It returns at once
// while another goroutine evicts from the space, and for a moment after a list that moved nothing;
// the waiter is woken when that is over. If ctx ends, the moves in progress are aborted and their
// batches are whole where they were. A reservation.Config needs it. It must be called with no lock
// held.
func (m *Monitor) Evict(ctx context.Context, id tier.ID, bytes int64) (e reservation.Eviction) {
	s := m.byID[id]
	if s == nil || s.Lost() != nil || ctx.Err() != nil {
		return e
	}
	select {
	case s.token <- struct{}{}:
	default:
		s.asked.Store(true)
		select {
		case s.token <- struct{}{}: // it was given back just now
		default:
			return reservation.Eviction{Coming: true}
		}
	}
	defer m.give(s)
	list, is := dryList{begun: time.Now(), resting: m.sums(s).idle}, s.State()
	coming := is.Retired - is.Unsure // is free without a move when the device has done its work
	if coming < bytes {
		if dry := s.dry.Load(); dry != nil {
			rest := dry.begun.Add(dry.took + min(10*dry.took, restMax)).Sub(list.begun)
			if rest > 0 && !s.waking.Swap(true) {
				time.AfterFunc(rest, func() {
					labels.Monitor.Set()
					s.waking.Store(false)
					m.cfg.Reservations.Wake(id)
				})
			}
			if rest > 0 {
				return dry.outcome
			}
		}
		// The moves are not the waiter's: they have neither its owner nor its origin.
		moving, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		defer context.AfterFunc(ctx, func() {
			labels.Cancel.Set()
			cancel(context.Cause(ctx))
		})()
		e.Moved, e.Again = m.evict(moving, s, bytes-coming, decide.Demand)
	}
	switch {
	case ctx.Err() != nil: // a list that was broken off does not show that nothing can leave
		return reservation.Eviction{Moved: e.Moved}
	case e.Moved > 0 || e.Again:
		s.dry.Store(nil)
		return e
	case coming > 0:
		e.Coming = true
		return e
	}
	return m.noteDry(s, list)
}

// noteDry notes that the list of moves has moved nothing, and returns the outcome for waiters. The
// caller has the space's token.
func (m *Monitor) noteDry(s *space, list dryList) (e reservation.Eviction) {
	// The last error of moves out of the space, or out of slower ones, where what cannot leave is in
	// the way; or else why a target refuses batches: of several, the one of the slowest tier, which comes
	// last. If moves fail to all disks, consumers cannot repair that.
	var why error
	hasFailed, disks := false, 0
	m.mu.Lock()
	for _, from := range append([]*space{s}, s.below(m)...) {
		e.Busy = e.Busy || from.moving > 0
		for i, way := range from.edges {
			if m.spaces[i].Lost() != nil {
				continue
			}
			fails := way.failures > 0 && way.refuses == everything
			if fails || !hasFailed && way.why != nil && list.begun.Before(way.until) {
				why, hasFailed = way.why, fails
			}
			if from == s && m.spaces[i].Kind().IsStorage() && (way.failures < giveUp || !fails) {
				disks++
			}
		}
	}
	m.mu.Unlock()
	e.Broken = why != nil && disks == 0
	e.Why = func() string { return m.whyDry(s, why) }
	list.took, list.outcome = time.Since(list.begun), e
	s.dry.Store(&list)
	return e
}

// evictToStop evicts batches from a space until its pressure is low enough, or nothing can be moved.
// Between two lists of moves others may have the token.
func (m *Monitor) evictToStop(ctx context.Context, s *space) {
	defer func() {
		s.relieving.Store(false)
		if s.dry.Load() == nil { // else it would be found dry again: the next step comes in a period
			poke(m.wake)
		}
	}()
	for again := true; again && s.take(ctx); {
		list := dryList{begun: time.Now(), resting: m.sums(s).idle}
		need, moved := m.excess(s), int64(0)
		if again = need > 0; again {
			moved, again = m.evict(ctx, s, need, decide.Trigger)
			again = again || moved > 0
		}
		if need > 0 && !again {
			_ = m.noteDry(s, list)
		} else {
			s.dry.Store(nil)
		}
		m.give(s)
	}
}

// Clear moves batches at rest out of a space, one after the other in the policy's order, until
// enough returns true or none is left that can be moved. It is for callers that have room in a
// space, but not in one piece: each batch that has left may have made the piece. enough is called
// at the beginning, too, and never by two calls for one space at the same time.
//
// Clear waits for the moves, and for others that evict from the space, but for no release.
func (m *Monitor) Clear(ctx context.Context, id tier.ID, enough func() bool) {
	s := m.byID[id]
	if s == nil || s.lower == 0 || !s.take(ctx) {
		return
	}
	defer m.give(s)
	// Batches may come as fast as others leave. Each that stays may have failed once for each tier.
	rounds := m.sums(s).count * (tier.KindCount - 1)
	for moves := true; moves && !enough() && rounds > 0 && ctx.Err() == nil; rounds-- {
		moved, retry := m.evict(ctx, s, 1, decide.Demand)
		moves = moved > 0 || retry
	}
}

// excess returns how many bytes should leave a space because of its pressure, or because a limit was
// lowered.
func (m *Monitor) excess(s *space) int64 {
	if s.lower == 0 || s.Lost() != nil {
		return 0
	}
	now := s.State()
	over := max(decide.Excess(now.Pressure, now.Trigger, now.Stop), now.Used()-now.Ceiling)
	return over - (now.Retired - now.Unsure)
}

// evict moves one list of batches out of a space, of about need bytes. It returns how many bytes
// were freed, and if none were, whether another list may do better because what failed will not be
// chosen again at once. The caller has the space's token.
func (m *Monitor) evict(ctx context.Context, s *space, need int64, reason string) (freed int64, retry bool) {
	used := s.State().Used()
	if s.State().Cached > 0 {
		s.DropSharing(need)
		if freed = used - s.State().Used(); freed >= need {
			return freed, false
		}
	}
	below := s.below(m)
	if len(below) == 0 || s.Lost() != nil {
		return max(0, freed), false
	}
	m.steps.Add(1)
	m.putBack(time.Now())
	victims, moves := m.choose(s, below, need)
	if len(moves) == 0 && len(victims) > 0 { // clean images that keep dictionaries in use may have the room
		for _, t := range below {
			if before := t.State().Used(); t.State().Cached > 0 {
				t.DropSharing(t.Charge(victims[0].Bytes) - t.State().Available)
				retry = retry || t.State().Used() < before
			}
		}
		return max(0, freed), retry
	}
	jobs := make([]*job, len(below))
	for _, move := range moves {
		i := move.To - 1
		if jobs[i] == nil {
			jobs[i] = &job{
				m: m, from: s, to: below[i], reason: reason, goal: used - need,
				left: make([]Victim, 0, len(moves)),
			}
		}
		jobs[i].left = append(jobs[i].left, victims[move.Victim.N])
		jobs[i].make += move.Make
	}
	// Jobs whose targets have room begin first, and go on while room is made for the others.
	jobs = slices.DeleteFunc(jobs, func(j *job) bool { return j == nil })
	slices.SortStableFunc(jobs, func(a, b *job) int { return cmp.Compare(a.make, b.make) })
	var moving sync.WaitGroup
	for _, j := range jobs {
		if j.make > 0 {
			before := j.to.State().Available
			if s.Books.Now().Used() <= j.goal || !j.to.take(ctx) { // enough has left meanwhile
				break
			}
			if need := j.make - (j.to.State().Available - before); need > 0 { // else room was made meanwhile
				n, again := m.evict(ctx, j.to, need, reason)
				retry = retry || again || n > 0
			}
			m.give(j.to)
			if j.to.Charge(j.left[0].Bytes) > j.to.State().Available {
				continue
			}
		}
		j.until = time.Now().Add(listTime)
		// After a failure one move shows whether the others would fail, too.
		atOnce := min(m.cfg.MovesPerEdge, len(j.left))
		m.mu.Lock()
		if way := s.edges[j.to.place]; way.failures > 0 && way.refuses == everything {
			atOnce = 1
		} else {
			j.joins = j.to.Kind().IsStorage()
		}
		m.mu.Unlock()
		for n := range atOnce {
			if n == atOnce-1 && j == jobs[len(jobs)-1] {
				j.work(ctx) // the caller works, too
				break
			}
			moving.Go(func() {
				labels.Move.Set()
				j.work(ctx)
			})
		}
	}
	moving.Wait()
	for _, j := range jobs {
		freed += j.freed
		retry = retry || j.retry
	}
	// If others have freed enough meanwhile, no move was needed.
	return max(0, freed), retry || freed <= 0 && s.State().Used() <= used-need
}

const (
	// A list of moves is short, because waiters and changes are seen only between two lists: at
	// most listBytes for each of the moves at once, and no move begins later than listTime, except one
	// after a write of several batches that failed.
	listBytes = 4 << 20
	listTime  = 2 * time.Millisecond
	// fewVictims is how many victims of a space are looked at first, besides as many as seem to be needed.
	fewVictims = 32
)

// choose returns victims of a space, and the moves of them that decide.Decide chooses. The numbers
// of the moves' victims are indexes of the victims.
//
// It takes the snapshot of the space and those below without a common lock. A change meanwhile
// makes a move fail without harm: the mover reserves the room, and takes the batch in transit, or
// reports that it cannot.
func (m *Monitor) choose(s *space, below []*space, need int64) (victims []Victim, moves []decide.Move) {
	demand, now := m.cfg.Reservations.Demand(nil), time.Now()
	all, room := append([]*space{s}, below...), byKind{}
	state := make(decide.Snapshot, len(all))
	for i, t := range all {
		is := t.State()
		used := is.Used()
		sp := decide.Space{
			ID: t.ID(), Place: t.place, Room: is.Ceiling - used, BelowTrigger: math.MaxInt64,
			Pace: t.Pace(), Charge: t.Charge,
		}
		sp.Headroom, sp.Spare = m.Headroom(t.ID())
		if t.lower != 0 {
			sp.BelowTrigger = is.Trigger - 1 - is.Pressure + is.Retired - is.Unsure
		}
		for _, d := range demand {
			if d.Space == t.ID() {
				sp.Room -= min(d.Bytes, is.Limit)
			}
		}
		m.mu.Lock()
		sp.Refused = s.edges[t.place].refused(now, used)
		for _, from := range below { // what t has no piece for is the same wherever it comes from
			if n := from.edges[t.place].refused(now, used); n > everything && (sp.Refused == 0 || n < sp.Refused) {
				sp.Refused = n
			}
		}
		m.mu.Unlock()
		room[t.Kind()] = max(room[t.Kind()], sp.Room-sp.Headroom)
		state[i] = sp
	}
	// Few victims are enough, unless Decide reports otherwise. A policy of the program's orders many.
	_, long := m.cfg.Policy.(guarded)
	sum := m.sums(s)
	expected := min(shortlistMax, need/max(1, sum.bytes/int64(max(1, sum.count)))) // victims of average size
	for short := true; short; {
		for i, t := range all {
			limit := fewVictims
			switch {
			case long:
				limit = shortlistMax
			case i == 0:
				limit = min(shortlistMax, fewVictims+int(expected))
			}
			var list []Victim
			list, state[i].More = m.victims(t, below, room, limit, now)
			state[i].Victims = make([]decide.Victim, len(list))
			for n, v := range list {
				state[i].Victims[n] = decide.Victim{N: n, Bytes: v.Bytes, Key: v.Key, Not: v.not, Copied: v.copied}
			}
			if i == 0 {
				victims = list
			}
			if len(victims) == 0 {
				return nil, nil
			}
		}
		most := int64(len(below)*m.cfg.MovesPerEdge) * max(listBytes, victims[0].Bytes)
		moves, short = decide.Decide(state, min(need, most))
		short, long = short && !long, true
	}
	return victims, moves
}

// Assumed costs of moves on an edge that has no measured move yet: memorySpeed between memories,
// storageSpeed with a disk.
const (
	eachMove     = 20 * time.Microsecond
	memorySpeed  = 8 << 30 // bytes a second
	storageSpeed = 1 << 30
)

// victims returns limit victims of a space, those with the smallest keys first, in the policy's order,
// and reports whether there are more. There are none if all moves to the spaces of below fail.
//
// With CostAware, some that are stale are among them. With a limit of shortlistMax, if none of the first
// ones is at most as large as room has for a tier, some that are, the policy's first of the largest, are
// among them: a tier below that is nearly full must not be the end while there is a batch that it could
// take.
//
// victims adds what the trees do not have: clean images, and about what it costs to move each victim
// down and back: to the next tier, or onto a clean image, which costs nothing on the way down.
func (m *Monitor) victims(
	s *space, below []*space, room byKind, limit int, now time.Time,
) (list []Victim, more bool) {
	if more = limit < shortlistMax; !more { // it ends there all the same
		limit = shortlistMax - smallMax - staleMax
	}
	var open []*space
	m.mu.Lock()
	for _, t := range below {
		if s.lower.Has(t.Kind()) && s.edges[t.place].refused(now, t.Books.Now().Used()) != everything {
			open = append(open, t)
		}
	}
	if len(open) == 0 || s.victims.Len() == 0 {
		m.mu.Unlock()
		return nil, false
	}
	list = make([]Victim, 0, min(limit, s.victims.Len()))
	s.victims.Ascend(func(l listed) bool {
		list = append(list, l.e.asVictim())
		return len(list) < limit
	})
	fits := func(v Victim) bool {
		for k, n := range room {
			if s.lower.Has(tier.Kind(k)) && !v.not.Has(tier.Kind(k)) && v.Bytes <= n {
				return true
			}
		}
		return false
	}
	end := listed{key: list[len(list)-1].Key, id: list[len(list)-1].ID}
	if _, aware := m.cfg.Policy.(costAware); aware {
		// Stale ones are among the last that were used more than once.
		looked := 0
		s.victims.DescendLessOrEqual(listed{key: Key{used + 1, math.MinInt64}}, func(l listed) bool {
			if looked++; looked > staleMax || !isLess(end, l) {
				return false
			}
			if l.key.stale(now.UnixNano()) {
				list = append(list, l.e.asVictim())
			}
			return true
		})
	}
	if more = more && s.victims.Len() > len(list); !more && !slices.ContainsFunc(list, fits) {
		var small []Victim
		var most int64
		for k, n := range room {
			if s.lower.Has(tier.Kind(k)) {
				most = max(most, n)
			}
		}
		looked := 0 // it ends soon also if many are excluded from the tier that has the room
		s.small.DescendLessOrEqual(listed{key: Key{most, 1}}, func(l listed) bool {
			if v := l.e.asVictim(); fits(v) {
				small = append(small, v)
			}
			looked++
			return len(small) < shortlistMax && looked < 8*shortlistMax
		})
		slices.SortFunc(small, func(a, b Victim) int { return slices.Compare(a.Key[:], b.Key[:]) })
		list = append(list, small[:min(smallMax, len(small))]...)
	}
	m.mu.Unlock()

	speed := func(from, to *space) float64 {
		switch known := m.cfg.Speed(from.ID(), to.ID()); {
		case known > 0:
			return float64(known)
		case to.Kind().IsStorage() || from.Kind().IsStorage():
			return storageSpeed
		}
		return memorySpeed
	}
	type cost struct{ down, up float64 } // seconds for each byte
	costs := make([]cost, len(open))     // computed once, not for each victim
	for i, t := range open {
		costs[i] = cost{1 / speed(s, t), 1 / speed(t, s)}
	}
	for k := range list {
		v := &list[k]
		for _, in := range v.Batch.Copies() {
			if t := m.byID[in]; t != nil {
				v.copied = v.copied.With(t.place)
			}
		}
		bytes := float64(v.Bytes) * float64(time.Second)
		for i, t := range open {
			isClean := v.copied.Has(t.place)
			if !isClean && (v.Up > 0 || v.not.Has(t.Kind())) {
				continue
			}
			v.Down = eachMove + time.Duration(bytes*costs[i].down)
			v.Up = eachMove + time.Duration(bytes*costs[i].up)
			if isClean {
				v.Down = 0
				break
			}
		}
	}
	m.cfg.Policy.Order(now.UnixNano(), list)
	return list, more
}

// job is the part of a list of moves that goes from one space to one other. Several goroutines work
// on it, Config.MovesPerEdge at most. Each takes the next batches of left, in the policy's order,
// until there are none, the source has few enough bytes, or a move has failed in a way that concerns
// the others. The mutex is a leaf except for the Monitor's, and is not held during moves.
type job struct {
	m        *Monitor
	from, to *space
	reason   string
	make     int64 // bytes that must leave the target first
	goal     int64 // how many used bytes of the source are few enough to end
	until    time.Time

	mu    sync.Mutex
	joins bool     // small batches are moved several at once
	left  []Victim // not begun yet
	freed int64
	over  bool // a move failed in a way that concerns the others
	retry bool // a failure was recorded, so that another list will have other moves
}

// small is below what size batches are moved together: a copy to a pinned chunk takes less than a
// request to the disk. On two cores and a virtual NVMe disk that is so to 128 KiB at least. It is less
// than the size from which batches are compressed (payload.FrameSize).
const small = 192 << 10

// work moves batches of the job until there are none left, one has failed, or enough has left the
// space. It takes small batches for a disk as a list, and moves as many of them together as the mover can.
// If that fails, each that was not moved is moved alone, so that each error concerns its batch.
func (j *job) work(ctx context.Context) {
	var list []Victim // taken and not moved yet; those that failed together come first
	var all []*batch.Batch
	for {
		var room int64
		if len(list) == 0 && j.to.Kind().IsStorage() {
			room = j.to.Together()
		}
		j.mu.Lock()
		if j.over || ctx.Err() != nil || j.from.Books.Now().Used() <= j.goal {
			j.mu.Unlock()
			return
		}
		// The next list: one batch, or as many small ones as the disk best takes at once. It is made in
		// place, of the first part of left. A batch may have been taken into use since it was chosen.
		for isSmall := len(list) == 0; isSmall && len(j.left) > 0; {
			v := j.left[0]
			isSmall = j.joins && v.Bytes < small && v.Bytes <= room && !v.copied.Has(j.to.place)
			if !isSmall && len(list) > 0 {
				break
			}
			if len(list) == 0 {
				list = j.left[:0]
			}
			j.left = j.left[1:]
			if now := v.Batch.Info(); movable(&now) && now.Space == j.from.ID() {
				list, room = append(list, v), room-v.Bytes
			} else {
				isSmall, j.retry = true, true
				j.m.BatchChanged(v.Batch, now)
			}
		}
		j.mu.Unlock()
		if len(list) == 0 {
			return
		}
		all = append(all[:0], list[0].Batch)
		for i := 1; i < len(list) && !list[0].alone; i++ {
			all = append(all, list[i].Batch)
		}
		start := time.Now()
		errs := j.m.cfg.Mover.Evict(ctx, all, j.to.ID(), j.reason)
		took := time.Since(start)

		// The ends of the moves.
		var again []Victim // alone
		var freed int64
		isOver, isRetry, isLogged := false, false, false
		for i, err := range errs {
			v := list[i]
			// The error itself is not looked at, because a file system may return context.Canceled for
			// reasons of its own.
			if err != nil && ctx.Err() != nil {
				err = fmt.Errorf("%w: %w", errEnding, err)
			}
			kind, isTogether := kindOf(err, j.to.ID()), err != nil && len(errs) > 1
			// The error of a list is the error of all, and logged once. With tier.ErrNotSupported nothing
			// has failed. The mover emits the events.
			if !isTogether || !isLogged && !errors.Is(err, tier.ErrNotSupported) {
				isLogged = isLogged || isTogether
				level, text := slog.LevelDebug, "a move failed; the batch stays where it is"
				switch {
				case kind == moved:
					text = "a move has ended"
				case kind == cancelled:
					text = "a move was broken off; the batch stays where it is"
				case kind == failed && !errors.Is(err, tier.ErrLost):
					level = slog.LevelWarn
				}
				j.m.report(level, text, events.Event{
					Batch: uint64(v.ID), From: j.from.ID(), To: j.to.ID(), Bytes: v.Bytes,
					Reason: j.reason, Took: took, Err: err,
				})
			}
			if isTogether {
				v.alone = true
				again = append(again, v)
				continue
			}
			isRetry = j.m.noteMove(v, j.from, j.to, kind, err) || isRetry
			if kind == moved {
				freed += v.Bytes
			}
			isOver = isOver || kind != moved && kind != busy && kind != unmovable
		}
		if list = list[len(errs):]; len(again) > 0 {
			list = append(again, list...) // also when time is up: the next job would begin with the same write
		} else {
			isOver = isOver || time.Now().After(j.until)
		}
		j.mu.Lock()
		if len(all) > 1 && len(errs) == 1 { // they cannot be moved together: all goroutines move them one by one
			j.joins, j.left, list = false, slices.Concat(list, j.left), nil
		}
		j.freed += freed
		j.over, j.retry = j.over || isOver, j.retry || isRetry
		j.mu.Unlock()
	}
}

// errEnding is matched by the error of a move that was broken off because the context of Run, Evict
// or Clear ended: nothing has failed.
var errEnding = errors.New("monitor: the move is not needed any more")
