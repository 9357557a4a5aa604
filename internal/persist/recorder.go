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

// Recorder makes batches persist that come to disks with Config.Persist. It is called after every
// change of a batch, and writes when the batch's image on such a disk, or its place in the plan, is
// another: on the goroutine that has just written the image, to the page cache. It is safe for
// concurrent use, except for Add.
type Recorder struct {
	logger *slog.Logger
	spaces map[tier.ID]*tier.Space // whose pools are volumes with Config.Persist

	// turn is a token: one writes at a time, so a batch has one file, and a dictionary one in each
	// space. It also guards schemas.
	turn    chan struct{}
	schemas map[*arrow.Schema]encodedSchema

	mu    sync.Mutex // nothing else is called under it
	plans map[uint64]string
	known map[*batch.Batch]*Record // an id may be another batch's, too
}

// encodedSchema is a schema as it is written, which all batches of a stream share.
type encodedSchema struct {
	bytes []byte
	err   error
}

// maxSchemas bounds how many are remembered.
const maxSchemas = 64

// Record is what the files say of a batch.
type Record struct {
	payload         batch.Payload // the image that persists, the batch's or a clean one; nil: none does
	space           *tier.Space   // the payload's
	plan, operator  string
	port, partition int

	volume *volumes.Volume // nil: the payload has no file, because that could not be written
	key    uint64
	missed bool // the image was just being taken: the next change tries again

	// Guarded by Recorder.mu: a call is writing, and when it has written it must look again.
	busy, again bool
}

func (r *Record) samePlace(other *Record) bool {
	return r.plan == other.plan && r.operator == other.operator &&
		r.port == other.port && r.partition == other.partition
}

// samePayload is == for pointers, as all images are. A program's own payload may be of a type that Go
// cannot compare: two of one such type are the same.
func samePayload(a, b batch.Payload) bool {
	t := reflect.TypeOf(a)
	return t == reflect.TypeOf(b) && (t == nil || t.Kind() != reflect.Pointer || a == b)
}

// NewRecorder returns a recorder without spaces, which records nothing.
func NewRecorder(logger *slog.Logger) *Recorder {
	return &Recorder{
		logger: logger, spaces: make(map[tier.ID]*tier.Space), turn: make(chan struct{}, 1),
		schemas: make(map[*arrow.Schema]encodedSchema), plans: make(map[uint64]string),
		known: make(map[*batch.Batch]*Record),
	}
}

// Add makes batches persist that come to a space. It is called before there are batches.
func (r *Recorder) Add(space *tier.Space) { r.spaces[space.ID()] = space }

// Records reports whether batches in a space persist.
func (r *Recorder) Records(space tier.ID) bool { return r.spaces[space] != nil }

// NamePlan sets the name of a plan; empty: it is closed.
func (r *Recorder) NamePlan(plan uint64, name string) {
	if len(r.spaces) == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.plans[plan] = name; name == "" {
		delete(r.plans, plan)
	}
}

// Know sets the record of an adopted batch, which stays as it is until the batch gets a place of its
// own; nil: nothing is known of the batch.
func (r *Recorder) Know(b *batch.Batch, rec *Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known[b] = rec; rec == nil {
		delete(r.known, b)
	}
}

// BatchChanged is called after each change of a batch, and writes what persists of it now. A call that
// finds another one writing leaves the rest to it, because the end of a lease is such a change, too.
func (r *Recorder) BatchChanged(b *batch.Batch) {
	if len(r.spaces) == 0 {
		return
	}
	for again := true; again; {
		now, images := r.images(b)
		old, next, changed := r.begin(b, now, images)
		if !changed {
			return
		}
		err := r.write(b.ID(), &next, &old)
		r.mu.Lock()
		again = r.known[b].again
		if next.payload == nil {
			delete(r.known, b)
		} else {
			r.known[b] = &next
		}
		r.mu.Unlock()
		if err != nil {
			r.logger.Warn("spillway: a batch on disk would be lost with this process", "batch", uint64(b.ID()),
				"space", next.space.ID().String(), "error", err)
		}
		again = again || b.Info().Version != now.Version // this call may have come after one with more recent images
	}
}

// begin compares the record of a batch with its images. If they differ, the caller must write next.
func (r *Recorder) begin(b *batch.Batch, now batch.Info, images []batch.Payload) (old, next Record, changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rec := r.known[b]
	if rec != nil {
		if rec.busy {
			rec.again = true
			return old, next, false
		}
		old = *rec
	}
	has := func(p batch.Payload) bool { return samePayload(p, old.payload) }
	switch {
	case rec != nil && (now.State == batch.InTransit && !r.Records(now.Space) || slices.ContainsFunc(images, has)):
		next = old // a move may have taken the clean image, and its end is one more change
	case len(images) > 0:
		next = old
		next.payload, next.space = images[0], r.spaces[images[0].Space().ID()]
	}
	// A batch without a place keeps that which its file has.
	if p := now.Place; next.payload != nil && (rec == nil || p.Plan != 0) {
		next.plan, next.operator, next.port, next.partition = r.plans[p.Plan], p.Operator, p.Port, p.Partition
	}
	if changed = old.missed || !samePayload(old.payload, next.payload) || !old.samePlace(&next); changed {
		busy := old
		busy.busy = true
		r.known[b] = &busy
	}
	return old, next, changed
}

// images returns a batch, and its images that can persist: the current one, or else clean ones.
func (r *Recorder) images(b *batch.Batch) (now batch.Info, images []batch.Payload) {
	for {
		now = b.Info()
		switch {
		case now.State == batch.Released:
			return now, nil
		case r.Records(now.Space):
			return now, []batch.Payload{now.Payload}
		}
		images = nil
		b.Inside().EachClean(func(c batch.Payload) {
			if r.Records(c.Space().ID()) {
				images = append(images, c)
			}
		})
		if b.Info().Version == now.Version { // else a transit that has begun since may have taken one
			return now, images
		}
	}
}

// write makes what next describes persist, and ends what old describes if that is another image. It
// returns an error to be logged.
func (r *Recorder) write(id batch.ID, next, old *Record) (err error) {
	next.volume, next.key, next.missed = nil, 0, false
	if next.payload != nil {
		next.volume = next.space.Pool().(*volumes.Volume)
		next.key, err = r.record(id, next, old)
		next.missed = errors.Is(err, tier.ErrReleased)
		switch {
		case err == nil:
		case samePayload(old.payload, next.payload): // only the place is another
			next.volume, next.key = old.volume, old.key
		default:
			next.volume = nil
		}
	}
	if old.volume != nil && (old.volume != next.volume || old.key != next.key) {
		old.volume.Forget(old.key) // as a rule it has ended
	}
	if next.missed || errors.Is(err, tier.ErrClosed) || errors.Is(err, errKnownSchema) {
		return nil
	}
	return err
}

// record makes an image persist, after its dictionaries, which may be a program's.
func (r *Recorder) record(id batch.ID, rec, old *Record) (_ uint64, err error) {
	defer guard.Error(&err, "a batch's Shared")
	image, ok := rec.payload.(*batch.Image)
	if !ok {
		return 0, tier.ErrNotSupported
	}
	e := &Entry{
		ID: id, Plan: rec.plan, Operator: rec.operator, Port: rec.port, Partition: rec.partition,
		Packed: image.Encoding() == payload.Compressed, Runs: image.Runs(),
	}
	end, ok := image.Hold()
	if !ok {
		return 0, tier.ErrReleased
	}
	defer end() // without the turn: it is a change of the batch
	r.turn <- struct{}{}
	defer func() { <-r.turn }()
	keys := make(map[*batch.Descriptor]uint64)
	for _, s := range image.Shared() {
		if keys[s.Descriptor()], err = r.recordDictionary(rec, s, keys); err != nil {
			return 0, err
		}
	}
	memory := image.Buffer().Memory()
	key, ok := old.key, old.volume == rec.volume && samePayload(old.payload, rec.payload)
	if memory != nil { // a clean image that became the current one is another payload of the same memory
		key, ok = rec.volume.KeyOf(memory)
	}
	switch {
	case !ok:
		return r.persist(rec, e, image.Descriptor(), keys, memory)
	case key == old.key && rec.samePlace(old) && !old.missed:
		return key, nil
	}
	return key, rec.volume.SetPlace(key, e.place())
}

// recordDictionary makes a dictionary persist, if it does not yet. The dictionaries that it refers to
// are in keys. The turn is held.
func (r *Recorder) recordDictionary(rec *Record, s batch.Shared, keys map[*batch.Descriptor]uint64) (uint64, error) {
	buf := s.Buffer()
	if buf == nil {
		return 0, tier.ErrReleased
	}
	end, ok := buf.TryLease()
	if !ok {
		return 0, tier.ErrReleased
	}
	defer end()
	if key, ok := rec.volume.KeyOf(buf.Memory()); ok {
		return key, nil
	}
	return r.persist(rec, &Entry{}, s.Descriptor(), keys, buf.Memory())
}

// persist writes the file of an entry, where rec's image is. The turn is held.
func (r *Recorder) persist(
	rec *Record, e *Entry, d *batch.Descriptor, keys map[*batch.Descriptor]uint64, memory tier.Memory,
) (uint64, error) {
	e.Descriptor = d
	for _, dict := range d.Dictionaries {
		e.Dictionaries = append(e.Dictionaries, keys[dict])
	}
	schema, ok := r.schemas[d.Schema]
	if !ok {
		if len(r.schemas) >= maxSchemas {
			clear(r.schemas)
		}
		schema.bytes, schema.err = EncodeSchema(d.Schema)
		r.schemas[d.Schema] = schema
	} else if schema.err != nil {
		return 0, errKnownSchema
	}
	if schema.err != nil {
		return 0, schema.err
	}
	return rec.volume.Persist(e.meta(schema.bytes), e.place(), func(n int64) (func(), error) {
		p, err := rec.space.Occupy(n)
		return func() { _ = rec.space.Release(p) }, err
	}, memory)
}

// errKnownSchema: the schema cannot be written, and the log says so already.
var errKnownSchema = errors.New("spillway: a schema that cannot be written")
