package volumes

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// slowRequest is after how long a request counts as slow. The window lets no more in than takes a
// quarter of a second together, so this is four times what a disk takes that is as fast as ever.
const slowRequest = time.Second

// A file system is nearly full when a volume could not take what it may still take, and less than
// 1/nearlyFull of its capacity is left. It is well again with half as much more.
const nearlyFull = 10

// asking is what a volume asks of its file system.
type asking int

const (
	toRead asking = iota
	toWrite
	toTakeRoom
	askings
)

// told is what was said of a volume last, so that nothing is said twice. Room is refused to writes
// and to the taking of room one by one: a write of room that was taken before succeeds on a disk
// that has no more. Such a refusal ends when the same succeeds. One to take room ends also with what the
// file system says of itself, except for a quota: that is in no statfs.
type told struct {
	lockrank.Mutex[lockrank.Device]
	failing [askings]bool
	refused [askings]bool // for want of room
	taking  *refusal      // the last one to take room; nil: it was not refused
	full    bool          // by what the file system says of itself
}

// refusal is why room could not be taken.
type refusal struct {
	short int64 // the file system said that it has less than these bytes; 0: it was asked for them, and refused
	quota bool  // because of a quota
}

// refusalOf returns why err, which is want of room, was returned.
func refusalOf(err error) *refusal {
	var short *shortError
	if errors.As(err, &short) {
		return &refusal{short: short.need}
	}
	return &refusal{quota: errors.Is(err, syscall.EDQUOT)}
}

// noRoomLocked reports whether anything says that there is no room.
func (t *told) noRoomLocked() bool { return t.full || t.refused[toWrite] || t.refused[toTakeRoom] }

// say calls Config.Events, which is not nil.
func (v *Volume) say(e events.Event) {
	e.At, e.To = time.Now(), v.cfg.Space
	lockrank.AssertNone("an event is said")
	v.cfg.Events(e)
}

// watch says when the request takes too long, while it does and, by the function that it returns,
// when it is over. That is also told how it ended.
func (e *extents) watch(ctx context.Context, r request, write bool) (end func(error)) {
	v := e.v
	if v.cfg.Events == nil {
		return func(error) {}
	}
	begun := time.Now()
	say := func(how string) {
		what := "reading"
		if write {
			what = "writing"
		}
		v.say(events.Event{Kind: events.DiskSlow, Context: ctx, Origin: events.From(ctx), Bytes: int64(len(r.p)),
			Took: time.Since(begun), Text: fmt.Sprintf("%s %s at %d %s", what, e.fileName(r.at), r.off, how)})
	}
	said := make(chan struct{})
	timer := time.AfterFunc(slowRequest, func() {
		labels.SlowDisk.Set()
		defer close(said)
		say("is not over yet")
	})
	return func(err error) {
		if !timer.Stop() {
			<-said // so that nothing is said when the volume is closed
			say("is over")
		}
		what := toRead
		if write {
			what = toWrite
		}
		v.ended(ctx, what, err)
	}
}

// asked is told what became of asking for room. The change token is not held.
func (v *Volume) asked(g growth) {
	if v.cfg.Events != nil && (g.had || g.cause != nil) {
		v.ended(context.Background(), toTakeRoom, g.cause)
	}
}

// ended says when requests begin to fail, and when one succeeds again. A request that gives up
// waiting, and bytes that were changed, say nothing of the disk.
func (v *Volume) ended(ctx context.Context, what asking, err error) {
	var altered *tier.AlteredError
	if err != nil && (errors.Is(err, context.Cause(ctx)) || errors.As(err, &altered)) {
		return
	}
	noRoom := err != nil && (errors.Is(err, tier.ErrNoSpace) || outOfRoom(err)) // the device is well
	v.told.Lock()
	failed, wasFull := v.told.failing[what], v.told.noRoomLocked()
	if !noRoom {
		v.told.failing[what] = err != nil
	}
	if noRoom || err == nil {
		v.told.refused[what] = noRoom
		if what == toTakeRoom {
			if v.told.taking = nil; noRoom {
				v.told.taking = refusalOf(err)
			}
		}
	}
	fails, isFull := v.told.failing[what], v.told.noRoomLocked()
	v.told.Unlock()
	switch {
	case fails && !failed:
		v.say(events.Event{Kind: events.DiskFailing, Context: ctx, Err: err})
	case failed && !fails:
		v.say(events.Event{Kind: events.DiskWell, Context: ctx, Text: [askings]string{"reads succeed again", "writes succeed again", "room can be taken again"}[what]})
	}
	switch {
	case isFull && !wasFull:
		v.say(events.Event{Kind: events.DiskNearlyFull, Context: ctx, Text: [askings]string{toWrite: "a write found no room", toTakeRoom: "no room could be taken"}[what], Err: err})
	case wasFull && !isFull:
		v.say(events.Event{Kind: events.DiskWell, Context: ctx, Text: "it has room again"})
	}
}

// LookAtRoom says when the file system has become nearly full, and when it has room again. It asks
// the file system, and does nothing without Config.Events.
func (v *Volume) LookAtRoom() {
	if v.cfg.Events == nil {
		return
	}
	v.told.Lock()
	refused := v.told.taking
	v.told.Unlock()
	u, err := v.cfg.FS.Usage(v.dir)
	if err != nil {
		return // transfers will say
	}
	left, s := max(0, u.Free-v.cfg.Reserve), v.Stats()
	v.told.Lock()
	was, wasFull := v.told.noRoomLocked(), v.told.full
	v.told.full = isNearlyFull(left, s, wasFull)
	// A refusal since the file system was asked is younger than its answer.
	if refused != nil && refused == v.told.taking && refused.isOver(left, s, wasFull && !v.told.full) {
		v.told.taking, v.told.refused[toTakeRoom] = nil, false
	}
	is := v.told.noRoomLocked()
	v.told.Unlock()
	switch {
	case is && !was:
		v.say(events.Event{Kind: events.DiskNearlyFull, Bytes: left,
			Text: fmt.Sprintf("%s may take %d bytes more than it has (free room there, or lower DiskConfig.Capacity)", v.cfg.Dir, s.Capacity-s.Backed)})
	case was && !is:
		v.say(events.Event{Kind: events.DiskWell, Bytes: left, Text: "the file system has room again"})
	}
}

// isOver reports whether a file system that has left bytes would no longer refuse; again is whether it
// has just ceased to be nearly full. A refusal that its free space does not explain is not over as long
// as that stays the same: else each look would end it, and the next refusal begin it.
func (r *refusal) isOver(left int64, s disk.Stats, again bool) bool {
	if r.short > 0 {
		return left >= r.short && !isNearlyFull(left, s, true)
	}
	return again && !r.quota
}

// isNearlyFull reports whether left bytes of a file system are too few; was is what it reported last.
func isNearlyFull(left int64, s disk.Stats, was bool) bool {
	enough := s.Capacity / nearlyFull
	if was {
		enough += enough / 2
	}
	return left < s.Capacity-s.Backed && left < enough
}
