// Package events describes what happens in an engine, to programs that watch it.
//
//	reservation ─ waits ──┐
//	convert ───── moves ──┤
//	monitor ── pressure ──┼──▶ func(Event) ──▶ Tee ──▶ Log, a recorder, a program's own
//	volumes ───── disks ──┤
//	batch ──────── uses ──┤
//	engine ────── tasks ──┘
//
// One function gets all events; the Kind of an event is what happened. Without a function the engine
// measures and makes nothing. The engine calls the function with no lock held, on the goroutine that
// does the work, and from many goroutines at once.
//
// The function must be quick, and must not wait for the engine. For the events of a move, the batch
// and the batches that are written together with it are in transit until the function returns. So
// calls that wait for one of them, such as dropping it, hang. The function must not call the engine's
// Close either. It may call Stats, Holders and Explain.
//
// # Moves
//
// Each move has one MoveBegun and one MoveEnded, whether it succeeds, fails or is cancelled; and both
// have been delivered when Engine.Close returns. The engine emits them while the batch is in transit.
// So the events of one batch alternate, and a move begins in the space where the last one that
// succeeded ended. An attempt in a space that then refuses the memory is a move that failed, and the
// attempt in the next space is another move. Calls that move nothing emit neither event: the batch is
// in the right space already, is in use or was dropped, or there is no room (see WaitBegun). The
// transits that a program commits itself have no events.
package events

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/tier"
)

// Kind is the kind of an Event.
type Kind uint8

// The kinds, with the fields that each has besides Kind, At and Origin. Unless stated otherwise, To
// is the space that the event is about.
const (
	// MoveBegun: a move of Batch begins, up or down. From, To, Bytes, Reason.
	MoveBegun Kind = iota + 1
	// MoveEnded: the move of Batch is over, and its transit ends when the function has returned. From,
	// To, Bytes, Took, Reason; Copy if the move used a copy in To and so moved no bytes; Err if the
	// batch stays in From, and then Bytes is 0.
	MoveEnded
	// WaitBegun: a request for room waits. To, the first space where it may be, and Bytes.
	WaitBegun
	// WaitEnded: its wait is over. Took; Err if it was not served.
	WaitEnded
	// CopyMade: Batch has left a clean image in To, a copy, when it was fetched, or was pre-cleaned
	// there. From is where the batch is, and Bytes is the size of the copy. Ahead if it was
	// pre-cleaned.
	CopyMade
	// CopyUsed: a move used the copy. CopyDropped: the copy was dropped, for its room or with its
	// batch. Either is emitted after the call with the copy's CopyMade has returned. If others use
	// or free the copy before that, the goroutine that emits CopyMade emits it.
	CopyUsed
	CopyDropped
	// AheadUsed: a prefetched batch, or a pre-cleaned image, was used. From, To, Bytes.
	AheadUsed
	// AheadWasted: it was evicted or dropped before it was used.
	AheadWasted
	// CodecChosen: another codec is used for a disk from now on. Text has its name and the expected
	// gain.
	CodecChosen
	// Corrupt: Batch has bytes on a disk that differ from the written ones. Err is a
	// *convert.CorruptError.
	Corrupt
	// DiskSlow: a request has been in progress for Took. Text describes it. A second event follows
	// when it has ended, with the whole time.
	DiskSlow
	// DiskNearlyFull: the file system has less room than the volume may still take, and Bytes is
	// the rest; or it has refused a write or an allocation for lack of room, as a quota does too.
	// Err.
	DiskNearlyFull
	// DiskFailing: reads, writes or allocations begin to fail, and other disks are preferred for a
	// while. Err.
	DiskFailing
	// DiskWell: the requests that failed succeed again, or the file system has room again. Text
	// describes which.
	DiskWell
	// PressureRose: a space has reached its trigger. Bytes is the pressure. Text is set if there is
	// no slower tier.
	PressureRose
	// PressureFell: it fell to its stop mark. Bytes. If the space is lost meanwhile, Lost is
	// emitted instead.
	PressureFell
	// Stuck: a space needs Bytes, and nothing there can be moved. Reason, Text.
	Stuck
	// Refused: waiters were refused, because all tiers are full of batches that cannot be evicted.
	// Text.
	Refused
	// Unmovable: Batch, in From, cannot be converted for To. Bytes, Err. Text is its form.
	Unmovable
	// Lost: a space's device is lost. Err.
	Lost
	// QuotaExceeded: more GPU memory is in use than a quota allows, because its limit was lowered.
	// The monitor moves batches down until use is within the limit; the next event comes after
	// that. Bytes is in use, of Limit. Text is the quota's name. To is the GPU, if the quota limits
	// a single one.
	QuotaExceeded
	// Oversized: a batch of Bytes went to a slower tier, because it never fits where it was to go. Text.
	Oversized
	// TaskBegun: a task has been admitted. Took is how long it waited for that.
	TaskBegun
	// TaskEnded: it is over. Took; Err.
	TaskEnded
	// BatchPut: a batch was made, of Bytes in To. The monitor may move it, and others may use it, before
	// this event is delivered: their events may come first, with a later At.
	BatchPut
	// BatchUsed: a handle was opened on Batch, of Bytes in To. If Batch was moved for that, the event
	// follows MoveEnded.
	BatchUsed
	// BatchHinted: the program gave a hint about the next use of Batch, of Bytes in To. Hint.
	BatchHinted
	// BatchDropped: Batch, of Bytes in To, was dropped, or consumed by the last BatchUsed. Its
	// memory is freed with its last handle.
	BatchDropped
	kinds
)

var names = [kinds]string{
	MoveBegun:      "move begun",
	MoveEnded:      "move ended",
	WaitBegun:      "wait begun",
	WaitEnded:      "wait ended",
	CopyMade:       "copy made",
	CopyUsed:       "copy used",
	CopyDropped:    "copy dropped",
	AheadUsed:      "ahead used",
	AheadWasted:    "ahead wasted",
	CodecChosen:    "codec chosen",
	Corrupt:        "corruption found",
	DiskSlow:       "disk slow",
	DiskNearlyFull: "disk nearly full",
	DiskFailing:    "disk failing",
	DiskWell:       "disk well",
	PressureRose:   "pressure rose",
	PressureFell:   "pressure fell",
	Stuck:          "stuck",
	Refused:        "waiters refused",
	Unmovable:      "batch unmovable",
	Lost:           "space lost",
	QuotaExceeded:  "quota exceeded",
	Oversized:      "batch oversized",
	TaskBegun:      "task begun",
	TaskEnded:      "task ended",
	BatchPut:       "batch put",
	BatchUsed:      "batch used",
	BatchHinted:    "batch hinted",
	BatchDropped:   "batch dropped",
}

// Kinds returns all kinds, in their order.
func Kinds() []Kind {
	all := make([]Kind, 0, kinds-1)
	for k := Kind(1); k < kinds; k++ {
		all = append(all, k)
	}
	return all
}

// String returns the kind in words, as "move begun".
func (k Kind) String() string {
	if k == 0 || k >= kinds {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return names[k]
}

// Origin is the plan, the operator and the task that an event is about. Fields that are unknown are
// empty.
type Origin struct {
	Plan      string
	Operator  string
	Port      int
	Partition int
	Task      string
	// TaskID distinguishes tasks of one engine with the same name, and the attempts of one task. 0:
	// no task, or one that RunTask does not run.
	TaskID uint64
}

// Event is one thing that happened. Its Kind determines which of the other fields are set. The
// receiver may keep it, except for its Context.
type Event struct {
	Kind Kind
	At   time.Time // if it took time, when it ended
	// Context is that of the call that the event is about, with the values that the program gave it,
	// such as a trace's span. It is there for moves, waits, tasks, requests to disks, corruption and
	// Oversized. The engine's own work, such as the monitor's moves, has one without values of
	// the program's. In an event of an engine it is never nil. It must not be kept when the function
	// has returned, because it holds what the program has put there. It may have ended.
	Context context.Context
	Origin
	Batch    uint64 // a batch.ID; 0: none
	From, To tier.ID
	Bytes    int64
	Limit    int64 // of QuotaExceeded
	// Hint is the argument of Batch.Hint, of BatchHinted: a time, batch.Never, batch.Stay, or 0 if the
	// hint was taken back.
	Hint   int64
	Took   time.Duration
	Reason string // of a move: as convert.ReasonTrigger
	Copy   bool
	Ahead  bool
	Text   string // for people
	Err    error
}

// String returns the event as one line: its kind and its other fields, with the names that Log uses.
func (e Event) String() string {
	var b strings.Builder
	b.WriteString(e.Kind.String())
	for _, a := range e.Attrs() {
		b.WriteString(" " + a.String())
	}
	return named.Inert(b.String())
}

// String returns, for example, `plan "q", operator join:0, task "probe"`.
func (o Origin) String() string {
	var parts []string
	if o.Plan != "" {
		parts = append(parts, "plan "+named.Quoted(o.Plan))
	}
	if o.Operator != "" {
		parts = append(parts, fmt.Sprintf("operator %s:%d", named.Plain(o.Operator), o.Port))
	}
	if o.Task != "" {
		parts = append(parts, "task "+named.Quoted(o.Task))
	}
	return strings.Join(parts, ", ")
}

// Tee returns a function that calls all that are not nil, in their order; nil if none is left. Those
// after one that panics are called, too, and then the panic goes on.
func Tee(to ...func(Event)) func(Event) {
	var all []func(Event)
	for _, f := range to {
		if f != nil {
			all = append(all, f)
		}
	}
	switch len(all) {
	case 0:
		return nil
	case 1:
		return all[0]
	}
	return func(e Event) {
		for _, f := range slices.Backward(all) {
			defer f(e) // runs also when one before it panics
		}
	}
}

// originKey is what a context has an Origin under.
type originKey struct{}

// With returns a context whose work, such as waiting for room, is for o.
func With(ctx context.Context, o Origin) context.Context { return &originContext{ctx, o} }

// originContext is context.WithValue in one piece of memory: each move has one.
type originContext struct {
	context.Context
	origin Origin
}

func (c *originContext) Value(key any) any {
	if key == (originKey{}) {
		return &c.origin
	}
	return c.Context.Value(key)
}

// From returns what the work of a context is for.
func From(ctx context.Context) Origin {
	if o, ok := ctx.Value(originKey{}).(*Origin); ok {
		return *o
	}
	return Origin{}
}
