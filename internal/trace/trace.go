// Package trace records what an engine is asked to do and what it moves, so that package replay can
// do it again on a virtual clock.
//
//	Mover, Observer ──▶ Recorder ──chunks──▶ io.Writer      … Read ──▶ Trace ──▶ package replay
//
// A file is a line with the version, a Header as JSON, and chunks. Each chunk has a length, a
// checksum, and events that can be read without those before it. So a file that was cut off is good
// up to its last whole chunk.
package trace

import (
	"encoding/binary"
	"errors"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// magic begins every file; its number is the version.
const magic = "spillway trace 1\n"

// ErrFormat is matched by errors about bytes that are no trace of this version.
var ErrFormat = errors.New("trace: not a trace that this version can read")

// Header says where a trace was recorded.
type Header struct {
	Policy       string
	Period       time.Duration // of the monitor
	MovesPerEdge int
	Spaces       []Space // the fastest tier first
}

// Space is one space of the engine that was recorded. All sizes are bytes.
type Space struct {
	ID                   tier.ID
	Node                 int
	Capacity             int64
	Limit, Trigger, Stop int64
	Held                 int64 // the engine's own, for as long as it is open
}

// Kind says what an Event is.
type Kind uint8

// The kinds. Put, Bring, Open and Consume begin a call, which ends with the next End of the stream.
const (
	Put     Kind = iota + 1 // data from outside is to be put: To, Bytes
	Bring                   // a batch is to be brought: Batch, To
	Open                    // and a handle to be opened
	Consume                 // and the batch to be dropped with it
	End                     // of a call; OK says whether it succeeded
	Moved                   // a move has ended: Batch, From, Space, Bytes, Took, Reason; Copy, if no bytes were moved
	State                   // of a batch: State, Pending, Active, Subscribers, Space, Bytes; Body at first
	Place                   // of a batch in its plan
	Looked                  // the monitor, Took after it was woken
	Began                   // moves that the monitor has chosen, Took after that: of one edge, with Others after them
	Gone                    // the last handle of a batch was closed that had been dropped
	Lost                    // Bytes is how many events are missing here
	kinds
)

// Event is one line of a trace. Kind says which fields it has.
type Event struct {
	Kind   Kind
	At     time.Duration // since the recording began
	Stream uint64        // the goroutine
	Batch  batch.ID
	Bytes  int64
	Body   int64 // the batch as an image
	Took   time.Duration
	From   tier.ID // zero: outside
	Space  tier.ID
	To     []tier.ID // where a call may bring the batch, best first
	Reason string
	Copy   bool // no bytes were moved
	OK     bool

	State       batch.State
	Pending     int
	Active      int
	Subscribers int
	Others      int
	Place       batch.Place // Plan, Rank, Last, Seq
}

// reasons are numbered by their places.
var reasons = []string{"", "trigger", "demand", "work", "ahead"}

// appendTo appends what an event is in a chunk, except for its time.
func (e *Event) appendTo(b []byte) []byte {
	b = binary.AppendUvarint(b, e.Stream)
	b = binary.AppendUvarint(b, uint64(e.Batch))
	switch e.Kind {
	case Put, Bring, Open, Consume:
		b = binary.AppendUvarint(b, uint64(e.Bytes))
		b = binary.AppendUvarint(b, uint64(len(e.To)))
		for _, id := range e.To {
			b = appendID(b, id)
		}
	case End:
		b = append(b, flag(e.OK))
	case Moved:
		b = appendID(appendID(b, e.From), e.Space)
		b = binary.AppendUvarint(b, uint64(e.Bytes))
		b = binary.AppendUvarint(b, uint64(e.Took))
		b = append(b, reasonOf(e.Reason), flag(e.Copy))
	case State:
		b = append(b, byte(e.State))
		for _, n := range [...]int64{int64(e.Pending), int64(e.Active), int64(e.Subscribers), e.Bytes, e.Body} {
			b = binary.AppendUvarint(b, uint64(n))
		}
		b = appendID(b, e.Space)
	case Place:
		b = binary.AppendUvarint(b, e.Place.Plan)
		b = binary.AppendVarint(b, int64(e.Place.Rank))
		b = append(b, flag(e.Place.Last))
		b = binary.AppendUvarint(b, e.Place.Seq)
	case Looked, Began:
		b = binary.AppendUvarint(b, uint64(e.Took))
		b = binary.AppendUvarint(b, uint64(e.Others))
	case Lost:
		b = binary.AppendUvarint(b, uint64(e.Bytes))
	}
	return b
}

func appendID(b []byte, id tier.ID) []byte {
	return binary.AppendUvarint(b, uint64(id.Ordinal)<<2|uint64(id.Kind))
}

func flag(is bool) byte {
	if is {
		return 1
	}
	return 0
}

func reasonOf(name string) byte {
	for i, r := range reasons {
		if r == name {
			return byte(i)
		}
	}
	return 0
}

// decoder takes values from the front of a chunk. Once one is missing all are zero.
type decoder struct {
	left []byte
	bad  bool
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.left)
	if n <= 0 {
		d.bad, d.left = true, nil
		return 0
	}
	d.left = d.left[n:]
	return v
}

// size is a number of bytes, of things, or of nanoseconds.
func (d *decoder) size() int64 {
	v := d.uvarint()
	if int64(v) < 0 {
		d.bad, v = true, 0
	}
	return int64(v)
}

func (d *decoder) varint() int64 {
	u := d.uvarint()
	return int64(u>>1) ^ -int64(u&1)
}

func (d *decoder) byte() byte {
	if len(d.left) == 0 {
		d.bad = true
		return 0
	}
	b := d.left[0]
	d.left = d.left[1:]
	return b
}

func (d *decoder) id() tier.ID {
	v := d.uvarint()
	return tier.ID{Kind: tier.Kind(v & 3), Ordinal: int(v >> 2)}
}

// mostCandidates bounds what is read of one event.
const mostCandidates = 1 << 10

// event reads what appendTo wrote.
func (d *decoder) event() (e Event) {
	e.Kind = Kind(d.byte())
	if e.Kind == 0 || e.Kind >= kinds {
		d.bad = true
	}
	e.At = time.Duration(d.varint())
	e.Stream, e.Batch = d.uvarint(), batch.ID(d.uvarint())
	switch e.Kind {
	case Put, Bring, Open, Consume:
		e.Bytes = d.size()
		n := d.uvarint()
		d.bad = d.bad || n > mostCandidates
		for range n {
			if d.bad {
				break
			}
			e.To = append(e.To, d.id())
		}
	case End:
		e.OK = d.byte() == 1
	case Moved:
		e.From, e.Space = d.id(), d.id()
		e.Bytes, e.Took = d.size(), time.Duration(d.size())
		if r := int(d.byte()); r < len(reasons) {
			e.Reason = reasons[r]
		}
		e.Copy = d.byte() == 1
	case State:
		e.State = batch.State(d.byte())
		e.Pending, e.Active, e.Subscribers = int(d.size()), int(d.size()), int(d.size())
		e.Bytes, e.Body = d.size(), d.size()
		e.Space = d.id()
	case Place:
		e.Place.Plan, e.Place.Rank = d.uvarint(), int(d.varint())
		e.Place.Last, e.Place.Seq = d.byte() == 1, d.uvarint()
	case Looked, Began:
		e.Took, e.Others = time.Duration(d.size()), int(d.size())
	case Lost:
		e.Bytes = d.size()
	}
	return e
}
