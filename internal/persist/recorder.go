package persist

import (
	"errors"
	"log/slog"
	"reflect"
	"slices"
	"sync"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// Recorder records batches that come to disks with Config.Persist, so that the next engine finds
// them if this one's process ends. It sees every change of a batch, and writes when the form or
// the place is another: a kilobyte or so, to the page cache, on the goroutine that has just written
// the batch to disk. It is safe for concurrent use, except for Add.
type Recorder struct {
	logger  *slog.Logger
	volumes map[tier.ID]*volumes.Volume

	// turn is a token: one records at a time, so that a dictionary has one record. It also
	// guards schemas.
	turn    chan struct{}
	schemas map[*arrow.Schema]writtenSchema

	mu    sync.Mutex // nothing else is called under it
	plans map[uint64]string
	known map[*batch.Batch]*Record // an id may be another batch's, too
}

// writtenSchema is a schema as it is written, which all batches of a stream share.
type writtenSchema struct {
	bytes []byte
	err   error
}

// maxSchemas bounds how many are remembered.
const maxSchemas = 64

// standing is what a record says that may change.
type standing struct {
	payload         batch.Payload // the batch's or a copy; nil: on no disk where batches persist
	space           tier.ID       // the payload's
	plan, operator  string
	port, partition int
}

// sameForm reports whether two are of one payload.
func (s standing) sameForm(other standing) bool { return samePayload(s.payload, other.payload) }

// same is ==, but for the payloads.
func (s standing) same(other standing) bool {
	if !s.sameForm(other) {
		return false
	}
	s.payload, other.payload = nil, nil
	return s == other
}

// samePayload is == of pointers, as all forms are that have records. Those of programs may be of a
// type that Go cannot compare: two of one such type are the same.
func samePayload(a, b batch.Payload) bool {
	t := reflect.TypeOf(a)
	return t == reflect.TypeOf(b) && (t == nil || t.Kind() != reflect.Pointer || a == b)
}

// Record is what is known of a batch on a disk where batches persist.
type Record struct {
	standing
	volume  *volumes.Volume // nil: there is no record
	key     uint64
	version uint64 // the batch's that it was compared with
	busy    bool   // it is being written
	again   bool   // and must look again
	missed  bool   // it is not what standing says: the memory was just being taken
}

// NewRecorder returns a recorder without volumes, which records nothing.
func NewRecorder(logger *slog.Logger) *Recorder {
	return &Recorder{
		logger: logger, volumes: make(map[tier.ID]*volumes.Volume), turn: make(chan struct{}, 1), schemas: make(map[*arrow.Schema]writtenSchema),
		plans: make(map[uint64]string), known: make(map[*batch.Batch]*Record),
	}
}

// Add has what comes to a space recorded by its volume. It is called before there are batches.
func (r *Recorder) Add(space tier.ID, volume *volumes.Volume) { r.volumes[space] = volume }

// Records reports whether batches in a space are recorded.
func (r *Recorder) Records(space tier.ID) bool { return r.volumes[space] != nil }

func (r *Recorder) idle() bool { return len(r.volumes) == 0 }

// NamePlan notes the name of a plan; empty: it is closed.
func (r *Recorder) NamePlan(plan uint64, name string) {
	if r.idle() {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if name == "" {
		delete(r.plans, plan)
		return
	}
	r.plans[plan] = name
}

// Know notes the record of an adopted batch, which stays as it is until the batch gets a place of
// its own; nil: nothing is known of the batch.
func (r *Recorder) Know(b *batch.Batch, rec *Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rec == nil {
		delete(r.known, b)
		return
	}
	r.known[b] = rec
}

// BatchChanged implements batch.Observer: it brings the record of a batch up to date. A call that
// finds another at it leaves that to the other.
func (r *Recorder) BatchChanged(b *batch.Batch, _ batch.Info) {
	if r.idle() {
		return
	}
	for {
		now, forms := r.forms(b) // what was passed in may be outdated
		r.mu.Lock()
		rec := r.known[b]
		want := r.standingLocked(rec, now, forms)
		switch {
		case rec == nil && want.payload == nil:
			r.mu.Unlock()
			return
		case rec == nil:
			rec = new(Record)
			r.known[b] = rec
		case rec.busy:
			rec.again = true
			r.mu.Unlock()
			return
		case now.Version < rec.version: // another call has looked since
			r.mu.Unlock()
			return
		case rec.same(want) && !rec.missed:
			rec.version = now.Version
			r.mu.Unlock()
			return
		}
		rec.busy, rec.again, rec.version = true, false, now.Version
		old := *rec
		r.mu.Unlock()
		volume, key, missed := r.write(b.ID(), want, old)
		r.mu.Lock()
		rec.standing, rec.volume, rec.key, rec.missed, rec.busy = want, volume, key, missed, false
		again := rec.again
		if want.payload == nil { // also if it must be looked at again: there may be nothing new then
			delete(r.known, b)
		}
		r.mu.Unlock()
		// The batch may have changed before this call made its record, which had no version then.
		if !again && b.Info().Version == now.Version {
			return
		}
	}
}

// forms returns a batch, and the forms that a record can be of: the one that it has, or else the
// copies that it has left on disk.
func (r *Recorder) forms(b *batch.Batch) (now batch.Info, forms []standing) {
	for {
		now = b.Info()
		switch {
		case now.State == batch.Released:
			return now, nil
		case r.Records(now.Space):
			return now, []standing{{payload: now.Payload, space: now.Space}}
		}
		forms = nil
		b.Inside().EachCopy(func(c batch.Payload) {
			if at := c.Space().ID(); r.Records(at) {
				forms = append(forms, standing{payload: c, space: at})
			}
		})
		if b.Info().Version == now.Version { // else a transit that has begun since may have taken a copy
			return now, forms
		}
	}
}

// standingLocked is what the record of a batch with these forms should say. It stays with the form
// that it is of. In transit that may be a copy that is about to be the batch's form. The end of the
// transit is one more change. A batch without a place keeps that which its record had.
func (r *Recorder) standingLocked(rec *Record, now batch.Info, forms []standing) standing {
	recorded := rec != nil && rec.payload != nil
	var s standing
	switch {
	case recorded && (now.State == batch.InTransit && !r.Records(now.Space) || slices.ContainsFunc(forms, rec.sameForm)):
		s = rec.standing
	case len(forms) == 0:
		return standing{}
	case recorded:
		s = rec.standing
		s.payload, s.space = forms[0].payload, forms[0].space
	default:
		s = forms[0]
	}
	if place := now.Place; !recorded || place.Plan != 0 {
		s.plan, s.operator, s.port, s.partition = r.plans[place.Plan], place.Operator, place.Port, place.Partition
	}
	return s
}

// write records a batch, or ends its record, and returns the new one. Where another has just taken
// the memory it has missed the batch: the next change, the end of a transit at the latest, writes.
func (r *Recorder) write(id batch.ID, want standing, old Record) (_ *volumes.Volume, _ uint64, missed bool) {
	if want.payload == nil {
		if old.volume != nil {
			old.volume.Forget(old.key)
		}
		return nil, 0, false
	}
	volume := r.volumes[want.space]
	key, err := r.record(volume, id, want)
	missed = errors.Is(err, tier.ErrReleased)
	if err != nil && !missed && !errors.Is(err, tier.ErrClosed) && !errors.Is(err, errToldBefore) {
		r.logger.Warn("spillway: a batch on disk would be lost with this process", "batch", uint64(id),
			"space", want.space.String(), "error", err)
	}
	if err != nil && samePayload(old.payload, want.payload) {
		return old.volume, old.key, missed // the bytes are where they were; only their place is another
	}
	if old.volume != nil && (err != nil || old.volume != volume || old.key != key) {
		old.volume.Forget(old.key) // as a rule it is over already
	}
	if err != nil {
		return nil, 0, missed
	}
	return volume, key, false
}

// leased is memory that stays while it is recorded.
type leased struct {
	memories []tier.Memory
	ends     []func()
}

func (l *leased) add(buf *tier.Buffer) bool {
	if buf == nil {
		return true
	}
	end, ok := buf.TryLease()
	if ok {
		l.ends = append(l.ends, end)
		l.memories = append(l.memories, buf.Memory())
	}
	return ok
}

// addBody adds the memory of a payload's own, which may be a copy.
func (l *leased) addBody(p interface {
	Hold() (end func(), ok bool)
	Buffers() []*tier.Buffer
}) bool {
	end, ok := p.Hold()
	if ok {
		l.ends = append(l.ends, end)
		for _, buf := range p.Buffers() {
			l.memories = append(l.memories, buf.Memory())
		}
	}
	return ok
}

func (l *leased) end() {
	for _, end := range slices.Backward(l.ends) {
		end()
	}
}

// record writes the record of a payload, after those of its dictionaries, which may be a program's.
func (r *Recorder) record(volume *volumes.Volume, id batch.ID, want standing) (_ uint64, err error) {
	defer guard.Error(&err, "a batch's Shared")
	var body, dicts leased
	defer body.end()
	defer dicts.end()
	var shared []batch.Shared
	var desc *batch.Descriptor
	whole := true
	switch p := want.payload.(type) {
	case *batch.Image:
		whole, shared, desc = body.addBody(p), p.Shared(), p.Descriptor()
	case *payload.Packed:
		whole, shared, desc = body.addBody(p), p.Shared(), p.Descriptor()
	default:
		return 0, tier.ErrNotSupported
	}
	for _, s := range shared {
		whole = whole && dicts.add(s.Buffer())
	}
	if !whole {
		return 0, tier.ErrReleased // it has left meanwhile
	}
	r.turn <- struct{}{}
	defer func() { <-r.turn }()
	var keys map[*batch.Descriptor]uint64
	if len(shared) > 0 {
		keys = make(map[*batch.Descriptor]uint64, len(shared))
	}
	for i, s := range shared {
		key, ok := volume.KeyOf(dicts.memories[i])
		if !ok {
			schema, meta, err := r.encode(entryOf(s.Descriptor(), keys))
			if err == nil {
				key, err = volume.Persist(schema, meta, dicts.memories[i])
			}
			if err != nil {
				return 0, err
			}
		}
		keys[s.Descriptor()] = key
	}
	e := entryOf(desc, keys)
	if packed, ok := want.payload.(*payload.Packed); ok {
		e.Packed, e.Runs = true, packed.Runs()
	}
	e.ID, e.Plan, e.Operator, e.Port, e.Partition = id, want.plan, want.operator, want.port, want.partition
	schema, meta, err := r.encode(e)
	if err != nil {
		return 0, err
	}
	return volume.Persist(schema, meta, body.memories...)
}

// entryOf describes an image whose dictionaries were recorded under keys.
func entryOf(d *batch.Descriptor, keys map[*batch.Descriptor]uint64) *Entry {
	e := &Entry{Descriptor: d}
	for _, dict := range d.Dictionaries {
		e.Dictionaries = append(e.Dictionaries, keys[dict])
	}
	return e
}

// errToldBefore: the schema cannot be written, and there was a warning.
var errToldBefore = errors.New("spillway: a schema that cannot be written")

// encode returns what is written of a batch or a dictionary, and what it shares with others:
// its schema. The turn is held.
func (r *Recorder) encode(e *Entry) (shared, meta []byte, err error) {
	schema := e.Descriptor.Schema
	s, ok := r.schemas[schema]
	if !ok {
		if len(r.schemas) >= maxSchemas {
			clear(r.schemas)
		}
		s.bytes, s.err = EncodeSchema(schema)
		r.schemas[schema] = s
	} else if s.err != nil {
		return nil, nil, errToldBefore
	}
	if s.err != nil {
		return nil, nil, s.err
	}
	return s.bytes, e.Marshal(s.bytes), nil
}
