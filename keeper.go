package spillway

import (
	"errors"
	"sync"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// keeper records batches that come to rest on disks with Disk.Keep, so that the next
// engine finds them if this one's process ends. It is told of every change of a batch and
// writes when the form or the place is another: a kilobyte or so, to the page cache, on the
// goroutine that has just written the batch to disk.
type keeper struct {
	e       *Engine
	volumes map[tier.ID]*disk.Volume

	// turn is a token: one records at a time, so that a dictionary has one record. It also
	// guards schemas.
	turn    chan struct{}
	schemas map[*arrow.Schema]writtenSchema

	mu    sync.Mutex // nothing else is called under it
	plans map[uint64]string
	known map[*batch.Batch]*recorded // an id may be another batch's, too
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
	payload         batch.Payload // nil: on no disk that keeps
	plan, operator  string
	port, partition int
}

// recorded is what is known of a batch on a disk that keeps.
type recorded struct {
	standing
	volume *disk.Volume // nil: there is no record
	key    uint64
	busy   bool // somebody writes
	again  bool // and must look again
}

func newKeeper(e *Engine) *keeper {
	return &keeper{
		e: e, volumes: make(map[tier.ID]*disk.Volume), turn: make(chan struct{}, 1), schemas: make(map[*arrow.Schema]writtenSchema),
		plans: make(map[uint64]string), known: make(map[*batch.Batch]*recorded),
	}
}

// idle says that no disk keeps.
func (k *keeper) idle() bool { return len(k.volumes) == 0 }

// named notes the name of a plan; empty: it is closed.
func (k *keeper) named(plan uint64, name string) {
	if k.idle() {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if name == "" {
		delete(k.plans, plan)
		return
	}
	k.plans[plan] = name
}

// recordOf returns what is recorded of a payload that was found.
func recordOf(p batch.Payload, f *foundBatch) *recorded {
	return &recorded{
		standing: standing{p, f.kept.Plan, f.kept.Operator, f.kept.Port, f.kept.Partition}, volume: f.volume, key: f.key.key,
	}
}

// knows notes the record of an adopted batch, which stays as it is until the batch gets a
// place of its own; nil: nothing is known of the batch.
func (k *keeper) knows(b *batch.Batch, r *recorded) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r == nil {
		delete(k.known, b)
		return
	}
	k.known[b] = r
}

// changed brings the record of a batch up to date. Who comes while another is at it
// leaves it to that one.
func (k *keeper) changed(b *batch.Batch) {
	for {
		payload, place, state := b.Payload(), b.Place(), b.State()
		k.mu.Lock()
		r := k.known[b]
		want := k.standingLocked(r, payload, place, state)
		switch {
		case r == nil && want.payload == nil:
			k.mu.Unlock()
			return
		case r == nil:
			r = new(recorded)
			k.known[b] = r
		case r.busy:
			r.again = true
			k.mu.Unlock()
			return
		case r.standing == want:
			k.mu.Unlock()
			return
		}
		r.busy, r.again = true, false
		old := *r
		k.mu.Unlock()
		volume, key := k.write(b.ID(), want, old)
		k.mu.Lock()
		r.standing, r.volume, r.key, r.busy = want, volume, key, false
		again := r.again
		if want.payload == nil { // also if it must be looked at again: there may be nothing new then
			delete(k.known, b)
		}
		k.mu.Unlock()
		if !again {
			return
		}
	}
}

// standingLocked is what the record of a batch should say. A batch without a place keeps
// that which its record had.
func (k *keeper) standingLocked(r *recorded, p batch.Payload, place batch.Place, state batch.State) standing {
	if p == nil || state == batch.Released || k.volumes[p.Space().ID()] == nil {
		return standing{}
	}
	if place.Plan == 0 && r != nil && r.payload != nil {
		s := r.standing
		s.payload = p
		return s
	}
	return standing{p, k.plans[place.Plan], place.Operator, place.Port, place.Partition}
}

// write records a batch, or ends its record, and returns the new one.
func (k *keeper) write(id batch.ID, want standing, old recorded) (*disk.Volume, uint64) {
	if want.payload == nil {
		if old.volume != nil {
			old.volume.Forget(old.key)
		}
		return nil, 0
	}
	volume := k.volumes[want.payload.Space().ID()]
	key, err := k.record(volume, id, want)
	if err != nil && !errors.Is(err, tier.ErrReleased) && !errors.Is(err, tier.ErrClosed) && !errors.Is(err, errToldBefore) {
		k.e.cfg.Logger.Warn("spillway: a batch on disk would be lost with this process", "batch", uint64(id),
			"space", want.payload.Space().ID().String(), "error", err)
	}
	if err != nil && old.payload == want.payload {
		return old.volume, old.key // the bytes are where they were; only their place is another
	}
	if old.volume != nil && (err != nil || old.volume != volume || old.key != key) {
		old.volume.Forget(old.key) // as a rule it is over already
	}
	if err != nil {
		return nil, 0
	}
	return volume, key
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

func (l *leased) end() {
	for _, end := range l.ends {
		end()
	}
}

// record writes the record of a payload, after those of its dictionaries.
func (k *keeper) record(volume *disk.Volume, id batch.ID, want standing) (uint64, error) {
	var body, dicts leased
	defer body.end()
	defer dicts.end()
	var shared []batch.Shared
	whole := true
	switch p := want.payload.(type) {
	case *batch.Image:
		whole, shared = body.add(p.Buffer()), p.Shared()
	case *batch.Packed:
		for _, run := range p.Runs() {
			whole = whole && body.add(run.Buffer)
		}
		shared = p.Shared()
	default:
		return 0, tier.ErrNotSupported
	}
	for _, s := range shared {
		whole = whole && dicts.add(s.Buffer())
	}
	if !whole {
		return 0, tier.ErrReleased // it has left meanwhile
	}
	k.turn <- struct{}{}
	defer func() { <-k.turn }()
	var keys map[*batch.Descriptor]uint64
	if len(shared) > 0 {
		keys = make(map[*batch.Descriptor]uint64, len(shared))
	}
	for i, s := range shared {
		key, ok := volume.KeyOf(dicts.memories[i])
		if !ok {
			schema, meta, err := k.encode(convert.DictionaryKept(s.Descriptor(), keys))
			if err == nil {
				key, err = volume.KeepWith(schema, meta, dicts.memories[i])
			}
			if err != nil {
				return 0, err
			}
		}
		keys[s.Descriptor()] = key
	}
	kept, err := convert.KeptOf(want.payload, keys)
	if err != nil {
		return 0, err
	}
	kept.ID, kept.Plan, kept.Operator, kept.Port, kept.Partition = id, want.plan, want.operator, want.port, want.partition
	schema, meta, err := k.encode(kept)
	if err != nil {
		return 0, err
	}
	return volume.KeepWith(schema, meta, body.memories...)
}

// errToldBefore: the schema cannot be written, and there was a warning.
var errToldBefore = errors.New("spillway: a schema that cannot be written")

// encode returns what is written of a batch or a dictionary, and what it shares with others:
// its schema. The turn is held.
func (k *keeper) encode(kept *convert.Kept) (shared, meta []byte, err error) {
	schema := kept.Descriptor.Schema
	s, ok := k.schemas[schema]
	if !ok {
		if len(k.schemas) >= maxSchemas {
			clear(k.schemas)
		}
		s.bytes, s.err = convert.EncodeSchema(schema)
		k.schemas[schema] = s
	} else if s.err != nil {
		return nil, nil, errToldBefore
	}
	if s.err != nil {
		return nil, nil, s.err
	}
	return s.bytes, kept.Marshal(s.bytes), nil
}
