package trace

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/goid"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

const (
	chunkBytes = 32 << 10
	// chunksWaiting is how many chunks wait for a slow writer at most.
	chunksWaiting = 32
	// chunkAge is how old a chunk gets that is not full: what a killed process loses.
	chunkAge = time.Second
)

// Recorder writes events. A goroutine of its own calls the writer, so events never wait: those that
// a slow writer has no room for are lost, and counted in the trace. After an error of the writer
// nothing is recorded. A nil Recorder records nothing. It is safe for concurrent use.
type Recorder struct {
	now    func() time.Duration // since the beginning
	chunks chan []byte
	free   chan []byte // to be used again
	done   chan error  // has the writer's outcome

	// mu is a leaf: it is held while a few bytes are appended.
	mu        sync.Mutex
	chunk     []byte
	began     time.Duration      // of the chunk
	last      time.Duration      // of its last event
	events    int64              // in it
	lost      int64              // events that no chunk tells of
	told      int64              // lost events that the chunk tells of
	streams   map[uintptr]uint64 // numbers of goroutines; those that have ended give theirs to new ones
	goroutine uintptr            // of the last event
	stream    uint64             // and its number
	lately    [1 << 10]recorded  // batches that were, by id
	closed    bool
}

// recorded is what was recorded of a batch last.
type recorded struct {
	id      batch.ID
	version uint64
	placed
}

// placed is the place of a batch, less what is only for messages.
type placed struct {
	plan uint64
	rank int
	last bool
	seq  uint64
}

// NewRecorder begins a trace. The caller must Close it, and keep w until then.
func NewRecorder(w io.Writer, h Header) *Recorder {
	begin := time.Now()
	return newRecorder(w, h, func() time.Duration { return time.Since(begin) })
}

func newRecorder(w io.Writer, h Header, now func() time.Duration) *Recorder {
	r := &Recorder{
		now: now, chunks: make(chan []byte, chunksWaiting), free: make(chan []byte, chunksWaiting), done: make(chan error, 1),
		streams: make(map[uintptr]uint64),
	}
	go func() {
		labels.Trace.Set()
		r.done <- r.write(w, h)
	}()
	return r
}

// write is the goroutine that calls w, until the chunks end.
func (r *Recorder) write(w io.Writer, h Header) (err error) {
	put := func(parts ...[]byte) {
		for _, p := range parts {
			if err == nil {
				err = func() (err error) {
					defer guard.Error(&err, "the writer of a trace")
					_, err = w.Write(p)
					return err
				}()
			}
		}
	}
	head, _ := json.Marshal(h) // plain values
	put([]byte(magic), binary.AppendUvarint(nil, uint64(len(head))), head)
	for c := range r.chunks {
		var frame [binary.MaxVarintLen64 + 4]byte
		f := binary.AppendUvarint(frame[:0], uint64(len(c)))
		put(binary.LittleEndian.AppendUint32(f, crc32.ChecksumIEEE(c)), c)
		select {
		case r.free <- c[:0]:
		default:
		}
	}
	if err != nil {
		return fmt.Errorf("writing the trace: %w", err)
	}
	return nil
}

// Close writes what is left, and returns the error of the writer.
func (r *Recorder) Close() error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	closed := r.closed
	last := r.chunk
	r.closed, r.chunk = true, nil
	r.mu.Unlock()
	if closed {
		return tier.ErrClosed
	}
	if len(last) > 0 {
		r.chunks <- last
	}
	close(r.chunks)
	return <-r.done
}

// append records an event of the goroutine that calls it.
func (r *Recorder) append(e Event) {
	g := goid.Living()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.appendLocked(g, &e)
	}
}

func (r *Recorder) appendLocked(g uintptr, e *Event) {
	at := r.now()
	if len(r.chunk) > chunkBytes-512 || len(r.chunk) > 0 && at-r.began > chunkAge {
		r.handOverLocked()
	}
	if len(r.chunk) == 0 {
		r.beginLocked(at)
	}
	if g != r.goroutine { // most events follow one of the same
		n, known := r.streams[g]
		if !known {
			n = uint64(len(r.streams))
			r.streams[g] = n
		}
		r.goroutine, r.stream = g, n
	}
	e.Stream = r.stream
	r.chunk = append(r.chunk, byte(e.Kind))
	r.chunk = binary.AppendVarint(r.chunk, int64(at-r.last))
	r.chunk = e.appendTo(r.chunk)
	r.last = at
	r.events++
}

// handOverLocked gives the chunk to the writer, or drops it if that is behind.
func (r *Recorder) handOverLocked() {
	select {
	case r.chunks <- r.chunk:
		r.chunk = nil
	default:
		r.lost += r.events + r.told
		r.chunk = r.chunk[:0]
	}
	r.events = 0
}

// beginLocked begins a chunk. Times in it are differences, the first from 0.
func (r *Recorder) beginLocked(at time.Duration) {
	if r.chunk == nil {
		select {
		case r.chunk = <-r.free:
		default:
			r.chunk = make([]byte, 0, chunkBytes)
		}
	}
	r.began, r.last, r.told = at, 0, r.lost
	if r.lost > 0 {
		e := Event{Kind: Lost, Bytes: r.lost}
		r.lost = 0
		r.chunk = append(r.chunk, byte(Lost))
		r.chunk = binary.AppendVarint(r.chunk, int64(at))
		r.chunk = e.appendTo(r.chunk)
		r.last = at
	}
}

// Begin records that the goroutine begins a call. It must call End then.
func (r *Recorder) Begin(k Kind, id batch.ID, bytes int64, to []*tier.Space) {
	if r == nil {
		return
	}
	var room [8]tier.ID
	ids := room[:0]
	for _, s := range to {
		if s != nil { // what a program's strategy names may be wrong
			ids = append(ids, s.ID())
		}
	}
	r.append(Event{Kind: k, Batch: id, Bytes: bytes, To: ids})
}

// End records that the call that the goroutine began last has ended.
func (r *Recorder) End(err error) {
	if r != nil {
		r.append(Event{Kind: End, OK: err == nil})
	}
}

// Moved records the end of a transfer.
func (r *Recorder) Moved(e Event) {
	if r != nil {
		e.Kind = Moved
		r.append(e)
	}
}

// Laid records that data from outside was laid out in a space.
func (r *Recorder) Laid(at tier.ID, bytes int64, begun time.Time) {
	if r != nil {
		r.append(Event{Kind: Moved, Space: at, Bytes: bytes, Took: time.Since(begun)})
	}
}

// State records what a batch is like after a change, except while it is in transit. Changes come
// out of order; one that is older than what was recorded is left out.
func (r *Recorder) State(now batch.Info) {
	if r == nil || now.State == batch.InTransit {
		return
	}
	e := Event{Kind: State, Batch: now.ID, State: now.State, Pending: now.Pending, Active: now.Active, Subscribers: now.Subscribers, Space: now.Space, Bytes: now.Bytes}
	if now.Descriptor != nil && now.Version <= 1 {
		e.Body = now.Descriptor.Body
	}
	p := placed{now.Place.Plan, now.Place.Rank, now.Place.Last, now.Place.Seq}
	g := goid.Living()
	r.mu.Lock()
	defer r.mu.Unlock()
	at := &r.lately[now.ID%batch.ID(len(r.lately))]
	known := at.id == now.ID
	if r.closed || known && now.Version < at.version {
		return
	}
	r.appendLocked(g, &e)
	if !known || at.placed != p {
		r.appendLocked(g, &Event{Kind: Place, Batch: now.ID, Place: now.Place})
	}
	*at = recorded{now.ID, now.Version, p}
}

// Late records how long after its cause the monitor Looked, or moves Began before others that were
// chosen with them.
func (r *Recorder) Late(k Kind, by time.Duration, others int) {
	if r != nil {
		r.append(Event{Kind: k, Took: by, Others: others})
	}
}

// Gone records that the data of a batch which had been dropped has gone with its last handle.
func (r *Recorder) Gone(id batch.ID) {
	if r != nil {
		r.append(Event{Kind: Gone, Batch: id})
	}
}
