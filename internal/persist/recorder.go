package persist

import (
	"errors"
	"log/slog"
	"sync"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// Recorder makes batches persist that are moved to disks with Config.Persist. It is called after
// every change of a batch, and writes when the batch's image on such a disk, or its place in the
// plan, has changed: on the goroutine that has just written the image, to the page cache. It is
// safe for concurrent use, except for Add.
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

// Record is what the files contain of a batch.
type Record struct {
	image *batch.Image // the one that persists, the batch's or a clean one; nil: none does
	space tier.ID      // where it is; a program's own payload there, without an image, cannot persist
	place Place

	volume *volumes.Volume // nil: the image has no file, because that could not be written
	key    uint64
	busy   bool // a call is writing the next record, and looks again afterwards
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
	for len(r.spaces) > 0 {
		old, next, version, changed := r.begin(b)
		if !changed {
			return
		}
		end, err := func() {}, error(nil)
		switch {
		case next.image != nil:
			next.volume = volumeOf(next.image)
			end, next.key, err = r.record(b.ID(), &next, &old)
		case next.space.Valid():
			err = tier.ErrNotSupported
		}
		taken := errors.Is(err, tier.ErrReleased) // end does nothing then
		switch {
		case taken:
			next = old
		case err != nil && next.image == old.image: // only the place has changed
			next.volume, next.key = old.volume, old.key
		case err != nil || next.image == nil:
			next.volume, next.key = nil, 0
		}
		if old.volume != nil && (old.volume != next.volume || old.key != next.key) {
			old.volume.Forget(old.key) // as a rule it has ended
		}
		r.mu.Lock()
		if !next.space.Valid() {
			delete(r.known, b)
		} else {
			r.known[b] = &next
		}
		r.mu.Unlock()
		end()
		if taken && b.Info().Version == version { // else what took it is over
			return
		}
		if err != nil && !taken && !errors.Is(err, tier.ErrClosed) && !errors.Is(err, errKnownSchema) {
			r.logger.Warn("spillway: a batch on disk would be lost with this process", "batch", uint64(b.ID()),
				"space", next.space.String(), "error", err)
		}
	}
}

// begin compares the record of a batch with its image that can persist: the current one, or else a clean
// one. If they differ, the caller must write next.
func (r *Recorder) begin(b *batch.Batch) (old, next Record, version uint64, changed bool) {
	var now batch.Info
	var image *batch.Image
	var space tier.ID
	for {
		now, image, space = b.Info(), nil, tier.ID{}
		if now.State == batch.Released {
			break
		}
		if r.Records(now.Space) {
			image, _ = now.Payload.(*batch.Image)
			space = now.Space
			break
		}
		b.EachClean(func(p batch.Payload) {
			if i, ok := p.(*batch.Image); ok && r.Records(i.Space().ID()) {
				image, space = i, i.Space().ID()
			}
		})
		if b.Info().Version == now.Version { // else a transit that has begun since may have taken a clean one
			break
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	rec := r.known[b]
	if rec != nil && rec.busy {
		return old, next, now.Version, false
	}
	if rec != nil {
		old = *rec
	}
	next = old
	// A move may have taken the clean image, and its end is one more change.
	if rec == nil || image != nil || now.State != batch.InTransit {
		next.image, next.space = image, space
	}
	// A batch without a place keeps that which its file has.
	if p := now.Place; next.image != nil && (rec == nil || p.Plan != 0) {
		next.place = Place{r.plans[p.Plan], p.Operator, p.Port, p.Partition}
	}
	if changed = next.image != old.image || next.space != old.space || next.place != old.place; changed {
		busy := old
		busy.busy = true
		r.known[b] = &busy
	}
	return old, next, now.Version, changed
}

func volumeOf(image *batch.Image) *volumes.Volume { return image.Space().Pool.(*volumes.Volume) }

// record makes the image of next persist, after its dictionaries, which may be a program's. It returns
// the key of its file. The caller must call end afterwards, without the turn: it is a change of the
// batch. tier.ErrReleased: the image is just being taken.
func (r *Recorder) record(id batch.ID, next, old *Record) (end func(), _ uint64, err error) {
	end = func() {}
	defer guard.Error(&err, "a batch's Shared")
	held, ok := next.image.Hold()
	if !ok {
		return end, 0, tier.ErrReleased
	}
	end = held
	r.turn <- struct{}{}
	defer func() { <-r.turn }()
	image := next.image
	e := &Entry{
		ID: id, Place: next.place, Descriptor: image.Descriptor(),
		Packed: image.Parts.Type == payload.CompressedImage, Runs: image.Parts.Runs,
	}
	keys := make(map[*batch.Descriptor]uint64)
	for _, s := range image.Parts.Shared {
		memory := s.Buffer().Memory()
		if memory == nil {
			return end, 0, errors.New("its dictionary was released")
		}
		key, ok := next.volume.KeyOf(memory)
		if !ok {
			key, err = r.persist(image, &Entry{Descriptor: s.Descriptor()}, keys, memory)
		}
		if err != nil {
			return end, 0, err
		}
		keys[s.Descriptor()] = key
	}
	memory := image.Buffer().Memory()
	key, ok := old.key, old.volume != nil && old.image == image
	if memory != nil { // a clean image that became the current one is another payload of the same memory
		key, ok = next.volume.KeyOf(memory)
	}
	if !ok {
		key, err = r.persist(image, e, keys, memory)
	} else if key != old.key || next.place != old.place {
		err = next.volume.SetPlace(key, e.place())
	}
	return end, key, err
}

// persist writes the file of an entry, where an image is. The dictionaries that the entry refers to are
// in keys. The turn is held.
func (r *Recorder) persist(
	image *batch.Image, e *Entry, keys map[*batch.Descriptor]uint64, memory tier.Memory,
) (uint64, error) {
	for _, dict := range e.Descriptor.Dictionaries {
		e.Dictionaries = append(e.Dictionaries, keys[dict])
	}
	schema, ok := r.schemas[e.Descriptor.Schema]
	if !ok {
		if len(r.schemas) >= maxSchemas {
			clear(r.schemas)
		}
		schema.bytes, schema.err = EncodeSchema(e.Descriptor.Schema)
		r.schemas[e.Descriptor.Schema] = schema
	} else if schema.err != nil {
		return 0, errKnownSchema
	}
	if schema.err != nil {
		return 0, schema.err
	}
	space := image.Space()
	return volumeOf(image).Persist(e.meta(schema.bytes), e.place(), func(n int64) (func(), error) {
		p, err := space.Occupy(n)
		return func() { _ = space.Release(p) }, err
	}, memory)
}

// errKnownSchema: the schema cannot be written, and the log has a warning of it already.
var errKnownSchema = errors.New("spillway: a schema that cannot be written")
