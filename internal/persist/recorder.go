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

// Recorder keeps the files of persistent disks in step with the batches. The engine calls it after
// every change of a batch. It writes when the image on such a disk or the batch's place in the plan
// has changed since the last record, and does nothing otherwise.
//
// It writes on the goroutine that made the change, as a rule the one that has just written the
// image, and through the page cache. A failure to write is a warning in the log, not an error of
// the move: the batch is whole, and only a restart would lose it.
//
// Two calls for one batch do not write at the same time. The first marks the record busy. A second
// one returns at once, and the first looks at the batch again before it returns. So the last state
// of a batch is always recorded, and the calls that writing itself causes (the end of a lease is a
// change) do not write within it.
//
// A Recorder is safe for concurrent use, except for Add.
type Recorder struct {
	logger *slog.Logger
	spaces map[tier.ID]*tier.Space // whose pools are volumes with Config.Persist

	// turn is a token, held while a file is written. With it each batch has one file, and each
	// dictionary has one file in each space: looking up the file of a shared dictionary and writing
	// it are one step. turn also guards schemas.
	turn    chan struct{}
	schemas map[*arrow.Schema]encodedSchema

	mu sync.Mutex // nothing else is called under it
	// plans are the names of open plans by their number. The number is this engine's own, so files
	// have the name.
	plans map[uint64]string
	// known has what was last recorded of each batch with an image on a persistent disk, or of
	// which a write is in progress. A record in it is not changed: it is replaced. The key is a
	// pointer because ids need not be unique: programs may make batches outside the engine.
	known map[*batch.Batch]*Record
}

// encodedSchema is a schema as files have it, or why it cannot be written. All batches of a stream
// share one schema, and encoding it includes reading it back, so it is done once.
type encodedSchema struct {
	bytes []byte
	err   error
}

// maxSchemas bounds how many schemas are remembered. The map is cleared when it is full: a query
// has few schemas, and encoding one again is only slower.
const maxSchemas = 64

// Record is what was recorded of one batch: which image persists, where, with which place, and in
// which file. The zero value means that nothing was.
type Record struct {
	// image is the one that persists: the batch's current image, or a clean one. It is nil if there
	// is none on a persistent disk.
	image *batch.Image
	// space is where image is. With image nil it is invalid, or the space of a program's own
	// payload, which cannot persist, because its bytes are not an image. It is recorded so that
	// there is one warning.
	space tier.ID
	place Place

	// volume and key name the file. volume is nil if there is none, because it could not be
	// written.
	volume *volumes.Volume
	key    uint64
	// busy is set while a call is writing the next record.
	busy bool
}

// NewRecorder returns a recorder without spaces, which records nothing.
func NewRecorder(logger *slog.Logger) *Recorder {
	return &Recorder{
		logger: logger, spaces: make(map[tier.ID]*tier.Space), turn: make(chan struct{}, 1),
		schemas: make(map[*arrow.Schema]encodedSchema), plans: make(map[uint64]string),
		known: make(map[*batch.Batch]*Record),
	}
}

// Add makes batches in a space persist. Its pool must be a volume with Config.Persist. Add must be
// called before there are batches, because spaces is read without a lock afterwards.
func (r *Recorder) Add(space *tier.Space) { r.spaces[space.ID()] = space }

// Records reports whether batches in a space persist.
func (r *Recorder) Records(space tier.ID) bool { return r.spaces[space] != nil }

// NamePlan sets the name of a plan; an empty one removes it, when the plan is closed. Later records
// of the plan's batches have the name. Files that exist already are not changed.
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

// Know sets the record of an adopted batch, whose file exists already. The file keeps its old place
// until the batch gets one in a plan of this engine. A nil rec removes what is known of the batch.
func (r *Recorder) Know(b *batch.Batch, rec *Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known[b] = rec; rec == nil {
		delete(r.known, b)
	}
}

// BatchChanged is called after each change of a batch, with no lock held. It returns when what was
// recorded is what the batch had at some moment during the call, or when another call that writes
// for this batch will see to that. It may write to a disk, and waits for other batches' writes.
func (r *Recorder) BatchChanged(b *batch.Batch) {
	// The loop ends when nothing has changed since the last turn of it.
	for len(r.spaces) > 0 {
		old, next, version, changed := r.begin(b)
		if !changed {
			return
		}
		// First write what is new. end releases the leases that kept the image while it was
		// written.
		end, err := func() {}, error(nil)
		switch {
		case next.image != nil:
			next.volume = volumeOf(next.image)
			end, next.key, err = r.record(b.ID(), &next, &old)
		case next.space.Valid():
			err = tier.ErrNotSupported
		}
		// taken means that a transit or Drop has begun to free the image, so there is nothing to
		// write, and end does nothing.
		taken := errors.Is(err, tier.ErrReleased)
		// Then decide what holds from now on: if the image was taken, the old record; if only the
		// place could not be written, the old file with the new place, so that the write is not
		// repeated at every change; if the image could not be written, no file.
		switch {
		case taken:
			next = old
		case err != nil && next.image == old.image: // only the place has changed
			next.volume, next.key = old.volume, old.key
		case err != nil || next.image == nil:
			next.volume, next.key = nil, 0
		}
		// Then end the old file. As a rule it has ended with its memory already. It has not if the
		// volume holds no memory for it (a batch without rows), or if the image is still there but
		// no longer the one that persists.
		if old.volume != nil && (old.volume != next.volume || old.key != next.key) {
			old.volume.Forget(old.key)
		}
		// Only now is the record no longer busy, so a concurrent call writes from here on.
		r.mu.Lock()
		if !next.space.Valid() {
			delete(r.known, b)
		} else {
			r.known[b] = &next
		}
		r.mu.Unlock()
		// Ending the leases may free the image, which is a change that calls BatchChanged again on
		// this goroutine: no lock and no token is held here.
		end()
		// If nothing has happened since, the transit that took the image is still going on. Its end
		// is a change too, and will record. Looping here would spin until then.
		if taken && b.Info().Version == version {
			return
		}
		// A warning once for each failure: ErrClosed is the end of the engine, and the second batch
		// of a schema that cannot be written would only repeat the first warning.
		if err != nil && !taken && !errors.Is(err, tier.ErrClosed) && !errors.Is(err, errKnownSchema) {
			r.logger.Warn("spillway: a batch on disk would be lost with this process", "batch", uint64(b.ID()),
				"space", next.space.String(), "error", err)
		}
	}
}

// begin compares what is recorded of a batch with the image that can persist now. If they differ it
// returns changed, marks the record busy, and the caller must write next and then replace the
// record. version is that of the batch's Info that was compared.
func (r *Recorder) begin(b *batch.Batch) (old, next Record, version uint64, changed bool) {
	var now batch.Info
	var image *batch.Image
	var space tier.ID
	// First find the image: the current one if it is on a persistent disk, or else a clean image on
	// one. Info and EachClean lock the batch one after the other, so the pair may be of different
	// moments. The loop repeats until the version shows that they belong together.
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
		// Else a transit that began in between may have taken a clean image to make it current
		// again.
		if b.Info().Version == now.Version {
			break
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	// Then compare it with the record.
	rec := r.known[b]
	if rec != nil && rec.busy {
		return old, next, now.Version, false
	}
	if rec != nil {
		old = *rec
	}
	next = old
	// A batch in transit without an image on the disk may just be on its way from its clean image
	// to making it current. Forgetting the file here would lose it. The end of the transit is one
	// more change.
	if rec == nil || image != nil || now.State != batch.InTransit {
		next.image, next.space = image, space
	}
	// A batch outside of plans keeps the place that its file has, so that an adopted one still
	// shows where it stood.
	if p := now.Place; next.image != nil && (rec == nil || p.Plan != 0) {
		next.place = Place{r.plans[p.Plan], p.Operator, p.Port, p.Partition}
	}
	if changed = next.image != old.image || next.space != old.space || next.place != old.place; changed {
		// The copy keeps old for the case that writing fails.
		busy := old
		busy.busy = true
		r.known[b] = &busy
	}
	return old, next, now.Version, changed
}

func volumeOf(image *batch.Image) *volumes.Volume { return image.Space().Pool.(*volumes.Volume) }

// record makes the image of next persist, after its dictionaries, and returns the key of its file.
// It holds leases on all memory meanwhile: the caller must call end afterwards, also on an error.
// The caller must not hold turn then, because the end of a lease may be a change of the batch.
// tier.ErrReleased means that the image is being freed. Dictionaries may be a program's
// implementation of Shared, so panics become errors.
func (r *Recorder) record(id batch.ID, next, old *Record) (end func(), _ uint64, err error) {
	end = func() {}
	defer guard.Error(&err, "a batch's Shared")
	// Without the leases the volume could free the memory while it is written.
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
	// Shared has dictionaries in an order in which each comes after those that it needs, so their
	// keys are known when it is written. A dictionary that another batch or an earlier engine wrote
	// already has a key.
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
	// A clean image that became current again is another Image of the same memory. The volume finds
	// its file by the memory. The file of a batch without memory is only in the record.
	if memory != nil { // a clean image that became the current one is another payload of the same memory
		key, ok = next.volume.KeyOf(memory)
	}
	// A new image gets a file. A known one is only rewritten where its place has changed, or if it
	// is another file than the one recorded, whose place may be old.
	if !ok {
		key, err = r.persist(image, e, keys, memory)
	} else if key != old.key || next.place != old.place {
		err = next.volume.SetPlace(key, e.place())
	}
	return end, key, err
}

// persist writes the file of an entry and returns its key. keys has the keys of the dictionaries
// that the entry refers to. memory is nil for a batch without bytes; the volume then makes a file
// with a header only. The caller must hold turn.
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
	// The header takes room in the space too. Occupy does not wait and is not bound by the space's
	// limit: a move must not wait here for room that only another move could make.
	return volumeOf(image).Persist(e.meta(schema.bytes), e.place(), func(n int64) (func(), error) {
		p, err := space.Occupy(n)
		return func() { _ = space.Release(p) }, err
	}, memory)
}

// errKnownSchema means that the schema cannot be written, and that the log has the reason already.
var errKnownSchema = errors.New("spillway: a schema that cannot be written")
