package persist

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// Key names a record of a volume.
type Key struct {
	space tier.ID
	key   uint64
}

// Batch is a recorded batch.
type Batch struct {
	Key   Key
	Entry *Entry // nil if it cannot be read
	Bytes int64  // charged in Space, without dictionaries that it shares
	Space tier.ID
	Err   error // why it cannot be adopted
}

// Images verifies and shares images on disk.
type Images interface {
	// Verify and VerifyDictionary compare all bytes of an image with their checksums.
	Verify(ctx context.Context, p batch.Payload) error
	VerifyDictionary(ctx context.Context, s batch.Shared) error
	// AdoptDictionary makes a dictionary of a buffer, which it takes over, also when it fails.
	AdoptDictionary(ctx context.Context, d *batch.Descriptor, b *tier.Buffer) (batch.Shared, error)
	// Again returns another reference to a dictionary.
	Again(s batch.Shared) (batch.Shared, error)
}

func compareKeys(a, b Key) int {
	return cmp.Or(cmp.Compare(a.space.Kind, b.space.Kind), cmp.Compare(a.space.Ordinal, b.space.Ordinal), cmp.Compare(a.key, b.key))
}

// Found is the recorded batches that were not adopted yet, and what they share. Its bytes are
// promised in the spaces, so that their room is not given to others. It is safe for concurrent use,
// except for Add.
type Found struct {
	// turn is a token: one takes dictionaries at a time. mu is taken inside it.
	turn chan struct{}

	mu      sync.Mutex // nothing else is called under it
	closed  bool
	busy    sync.WaitGroup // calls of Adopt and Forget
	batches map[Key]*foundBatch
	dicts   map[Key]*foundDictionary
	bytes   map[tier.ID]int64 // promised
}

// foundMemory is what one record is of.
type foundMemory struct {
	key    Key
	volume *volumes.Volume
	space  *tier.Space
	bytes  int64 // charged
	// promise has the bytes. While it is open, those of adopted memory return to it.
	promise *books.Promise
}

type foundBatch struct {
	foundMemory
	entry *Entry // nil if it cannot be read
	desc  *batch.Descriptor
	dicts []*foundDictionary // in the order of desc.AllDictionaries
	err   error
}

// foundDictionary is a dictionary that recorded batches need. From the first that is
// adopted until the last is adopted or forgotten it is held here, too.
type foundDictionary struct {
	foundMemory
	entry   *Entry
	desc    *batch.Descriptor
	parts   []*foundDictionary
	waiting int          // batches that need it; guarded by Found.mu
	shared  batch.Shared // nil until it is needed; guarded by Found.turn
}

// NewFound returns a list that is empty.
func NewFound() *Found {
	return &Found{
		turn: make(chan struct{}, 1), batches: make(map[Key]*foundBatch),
		dicts: make(map[Key]*foundDictionary), bytes: make(map[tier.ID]int64),
	}
}

// Add lists what persists on a volume, and promises its bytes. It is called before anything else.
func (f *Found) Add(space *tier.Space, volume *volumes.Volume) error {
	var batches []*foundBatch
	var schemas Schemas
	for _, k := range volume.Persisted() {
		m := foundMemory{key: Key{space.ID(), k.Key}, volume: volume, space: space}
		for _, n := range k.Sizes {
			m.bytes += space.Charge(n)
		}
		var err error
		if m.promise, err = space.Occupy(m.bytes); err != nil {
			return err
		}
		f.count(m, m.bytes)
		entry, err := schemas.Unmarshal(k.Meta, k.Shared)
		if err == nil && !fitMemories(entry.Memories(), k.Sizes) {
			err = errFormat
		}
		if err == nil && entry.ID == 0 {
			f.addDictionary(&foundDictionary{foundMemory: m, entry: entry, desc: entry.Descriptor})
			continue
		}
		b := &foundBatch{foundMemory: m, err: err}
		if err == nil {
			b.entry, b.desc = entry, entry.Descriptor
		}
		f.batches[m.key] = b
		batches = append(batches, b)
	}
	for _, b := range batches {
		f.needs(b)
	}
	for key, d := range f.dicts {
		if key.space == space.ID() && d.waiting == 0 { // its batches are gone
			delete(f.dicts, key)
			f.drop(d.foundMemory)
		}
	}
	return nil
}

// fitMemories reports whether memories are long enough.
func fitMemories(want, have []int64) bool {
	if len(want) != len(have) {
		return false
	}
	for i := range want {
		if have[i] < want[i] {
			return false
		}
	}
	return true
}

// addDictionary adds a dictionary whose parts, which were recorded before it, are there.
func (f *Found) addDictionary(d *foundDictionary) {
	var err error
	if d.parts, err = f.named(d.foundMemory, d.entry.Dictionaries); err == nil {
		d.desc.Dictionaries = descriptorsOf(d.parts)
		f.dicts[d.key] = d
		return
	}
	f.batches[d.key] = &foundBatch{foundMemory: d.foundMemory, err: err} // so that it can be forgotten
}

// named finds dictionaries by their keys.
func (f *Found) named(m foundMemory, keys []uint64) ([]*foundDictionary, error) {
	out := make([]*foundDictionary, len(keys))
	for i, key := range keys {
		d := f.dicts[Key{m.key.space, key}]
		if d == nil || key >= m.key.key {
			return nil, &image.CorruptError{Volume: m.volume.Dir(), Cause: fmt.Errorf("the dictionary that was kept as %d is lost", key)}
		}
		out[i] = d
	}
	return out, nil
}

func descriptorsOf(dicts []*foundDictionary) (out []*batch.Descriptor) {
	for _, d := range dicts {
		out = append(out, d.desc)
	}
	return out
}

// needs notes which dictionaries a batch needs.
func (f *Found) needs(b *foundBatch) {
	if b.err != nil {
		return
	}
	var direct []*foundDictionary
	if direct, b.err = f.named(b.foundMemory, b.entry.Dictionaries); b.err != nil {
		return
	}
	b.desc.Dictionaries = descriptorsOf(direct)
	var seen lookup.Table[*foundDictionary]
	var add func([]*foundDictionary)
	add = func(dicts []*foundDictionary) {
		for _, d := range dicts {
			if seen.Of(b.dicts, d) < 0 {
				add(d.parts)
				b.dicts = append(b.dicts, d)
				d.waiting++
			}
		}
	}
	add(direct)
}

// count changes what is promised for what was found.
func (f *Found) count(m foundMemory, n int64) {
	m.space.Hold(n)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.bytes[m.space.ID()] += n
}

// Held returns how many bytes are promised in a space.
func (f *Found) Held(id tier.ID) int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bytes[id]
}

// drop frees what is not needed any more.
func (f *Found) drop(m foundMemory) {
	m.volume.Forget(m.key.key)
	f.unhold(m)
}

// unhold frees the bytes of a record.
func (f *Found) unhold(m foundMemory) {
	f.count(m, -m.bytes)
	_ = m.space.Release(m.promise)
}

// begin takes a batch; it must be given back to list, or end. done must be called.
func (f *Found) begin(key Key) (b *foundBatch, done func(), err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, nil, tier.ErrClosed
	}
	b = f.batches[key]
	if b == nil {
		return nil, nil, fmt.Errorf("it is not there, or another caller has it: %w", tier.ErrReleased)
	}
	delete(f.batches, key)
	f.busy.Add(1)
	return b, f.busy.Done, nil
}

// list gives a batch back that could not be adopted.
func (f *Found) list(b *foundBatch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.batches[b.key] = b
}

// end is called for a batch that was adopted or forgotten: dictionaries that it was the last
// to need here go.
func (f *Found) end(b *foundBatch) error {
	f.turn <- struct{}{}
	defer func() { <-f.turn }()
	var over []*foundDictionary
	f.mu.Lock()
	for _, d := range b.dicts {
		if d.waiting--; d.waiting == 0 {
			delete(f.dicts, d.key)
			over = append(over, d)
		}
	}
	f.mu.Unlock()
	var err error
	for _, d := range over {
		if d.shared == nil {
			f.drop(d.foundMemory)
			continue
		}
		err = errors.Join(err, d.shared.Release())
		d.shared = nil
	}
	return err
}

// take hands the memories of a record out as buffers. The caller must then either release the
// record's promise, or call putBack before it releases the buffers, which undoes take.
func (f *Found) take(m foundMemory) (buffers []*tier.Buffer, putBack func() error, err error) {
	memories, err := m.volume.Take(m.key.key)
	if err != nil {
		return nil, nil, err
	}
	f.count(m, -m.bytes)
	for _, mem := range memories {
		buffers = append(buffers, m.space.Adopt(m.promise, mem))
	}
	return buffers, func() error {
		f.count(m, m.bytes)
		return m.volume.PutBack(m.key.key)
	}, nil
}

// payload makes a payload of a batch, verified.
func (f *Found) payload(ctx context.Context, b *foundBatch, im Images) (_ batch.Payload, err error) {
	if b.err != nil {
		return nil, b.err
	}
	shared, err := f.dictionaries(ctx, b, im)
	if err != nil {
		return nil, err
	}
	buffers, putBack, err := f.take(b.foundMemory)
	if err != nil {
		return nil, errors.Join(err, releaseShared(shared))
	}
	var p batch.Payload
	switch {
	case b.entry.Packed:
		runs := slices.Clone(b.entry.Runs)
		for i := range runs {
			runs[i].Buffer = buffers[i]
		}
		p = payload.NewPacked(b.desc, runs, b.space, shared...)
	case len(buffers) == 0:
		p = batch.NewImage(b.desc, nil, b.space, shared...)
	default:
		p = batch.NewImage(b.desc, buffers[0], b.space, shared...)
	}
	if err := im.Verify(ctx, p); err != nil {
		return nil, errors.Join(err, putBack(), p.Release())
	}
	return p, b.space.Release(b.promise)
}

// dictionaries returns a reference to each dictionary of a batch.
func (f *Found) dictionaries(ctx context.Context, b *foundBatch, im Images) (shared []batch.Shared, err error) {
	if len(b.dicts) == 0 {
		return nil, nil
	}
	select {
	case f.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	defer func() { <-f.turn }()
	for _, d := range b.dicts {
		if d.shared == nil {
			if err := f.adoptDictionary(ctx, d, im); err != nil {
				return nil, errors.Join(err, releaseShared(shared))
			}
		}
		s, err := im.Again(d.shared)
		if err != nil {
			return nil, errors.Join(err, releaseShared(shared))
		}
		shared = append(shared, s)
	}
	return shared, nil
}

// adoptDictionary brings a dictionary, verified. The turn is held.
func (f *Found) adoptDictionary(ctx context.Context, d *foundDictionary, im Images) error {
	buffers, putBack, err := f.take(d.foundMemory)
	if err != nil {
		return err
	}
	var buf *tier.Buffer
	if len(buffers) > 0 {
		buf = buffers[0]
	}
	s, err := im.AdoptDictionary(ctx, d.desc, buf)
	if err != nil {
		return errors.Join(err, d.space.Release(d.promise))
	}
	if err := im.VerifyDictionary(ctx, s); err != nil {
		return errors.Join(err, putBack(), s.Release())
	}
	d.shared = s
	return d.space.Release(d.promise)
}

func releaseShared(shared []batch.Shared) error {
	var err error
	for _, s := range shared {
		err = errors.Join(err, s.Release())
	}
	return err
}

// Close leaves what was neither adopted nor forgotten to the next engine.
func (f *Found) Close() error {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.busy.Wait()
	var err error
	for _, d := range f.dicts {
		if d.shared == nil {
			f.unhold(d.foundMemory)
			continue
		}
		err = errors.Join(err, d.volume.PutBack(d.key.key), d.shared.Release())
	}
	for _, b := range f.batches {
		f.unhold(b.foundMemory)
	}
	return err
}

// List returns the batches that were neither adopted nor forgotten, by space, and the oldest first.
func (f *Found) List() []Batch {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]Batch, 0, len(f.batches))
	for _, b := range f.batches {
		out = append(out, Batch{Key: b.key, Entry: b.entry, Bytes: b.bytes, Space: b.space.ID(), Err: b.err})
	}
	slices.SortFunc(out, func(a, b Batch) int { return compareKeys(a.Key, b.Key) })
	return out
}

// Adopt makes a batch of what is recorded under a key, by newBatch, which is given the record that
// the batch has. On an error it is listed still. tier.ErrReleased: it was adopted or forgotten.
func (f *Found) Adopt(ctx context.Context, key Key, im Images, newBatch func(batch.Payload, *Record) (*batch.Batch, error)) (*batch.Batch, error) {
	found, done, err := f.begin(key)
	if err != nil {
		return nil, err
	}
	defer done()
	p, err := f.payload(ctx, found, im)
	if err != nil {
		f.list(found)
		return nil, err
	}
	e := found.entry
	b, err := newBatch(p, &Record{
		standing: standing{p, found.key.space, e.Plan, e.Operator, e.Port, e.Partition}, volume: found.volume, key: found.key.key,
	})
	if err != nil {
		return nil, errors.Join(err, p.Release(), f.end(found))
	}
	return b, f.end(found)
}

// Forget drops a batch: its room is free again. tier.ErrReleased: it was adopted or forgotten.
func (f *Found) Forget(key Key) error {
	b, done, err := f.begin(key)
	if err != nil {
		return err
	}
	defer done()
	f.drop(b.foundMemory)
	return f.end(b)
}
