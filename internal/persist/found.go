package persist

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// Key names a batch on a volume.
type Key struct {
	space tier.ID
	key   uint64
}

// Batch is a batch that an earlier engine left.
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

// Found is the batches that earlier engines left and that were neither adopted nor forgotten yet, and
// their dictionaries. A promise of the space has the bytes of each, so that their room is not given
// to others. It is safe for concurrent use, except for Add.
type Found struct {
	// turn is a token: one takes dictionaries at a time. mu is taken inside it.
	turn chan struct{}

	mu     sync.Mutex // nothing else is called under it
	closed bool
	busy   sync.WaitGroup // calls of Adopt and Forget
	files  map[Key]*found
	order  []*found
	bytes  map[tier.ID]int64 // promised
}

// found is a batch or a dictionary.
type found struct {
	key     Key
	space   *tier.Space
	bytes   int64          // charged
	promise *books.Promise // of the bytes in the memory
	header  *books.Promise // of the rest
	entry   *Entry         // nil if it cannot be read
	err     error
	// dicts are all dictionaries that it needs, each once and after those that it needs itself.
	dicts []*found
	taken bool // a batch: a caller is adopting or forgetting it; guarded by Found.mu
	gone  bool // it was adopted or forgotten, or is not needed any more; guarded by Found.mu

	// Of a dictionary. From the first batch that is adopted until the last is adopted or forgotten,
	// Found has a reference to it, and its file is lent.
	waiting int          // batches that need it; guarded by Found.mu
	shared  batch.Shared // nil until it is needed; guarded by Found.turn
}

func (b *found) isDictionary() bool { return b.entry != nil && b.entry.ID == 0 && b.err == nil }

func (b *found) volume() *volumes.Volume { return b.space.Pool().(*volumes.Volume) }

// NewFound returns a list that is empty.
func NewFound() *Found {
	return &Found{turn: make(chan struct{}, 1), files: make(map[Key]*found), bytes: make(map[tier.ID]int64)}
}

// Add lists what persists in a space, and promises its bytes. It is called before anything else.
func (f *Found) Add(space *tier.Space) error {
	var schemas Schemas
	files := make(map[uint64]*found)
	var all []*found
	for _, k := range space.Pool().(*volumes.Volume).Persisted() {
		b := &found{key: Key{space.ID(), k.Key}, space: space, bytes: k.Room, err: k.Err}
		var err error
		header := k.Room - space.Charge(k.Size)
		if b.header, err = space.Occupy(header); err != nil {
			return err
		}
		if b.promise, err = space.Occupy(b.bytes - header); err != nil {
			return err
		}
		f.count(b, b.bytes)
		if b.err == nil {
			b.entry, b.err = schemas.Read(k.Meta, k.Place)
		}
		if b.err == nil && !b.entry.fitsIn(k.Size) {
			b.entry, b.err = nil, errFormat
		}
		if b.err == nil {
			b.err = b.findDictionaries(files)
		}
		if b.err != nil {
			b.err = &image.CorruptError{Volume: k.File, Cause: b.err}
		}
		files[k.Key] = b
		f.files[b.key] = b
		all = append(all, b)
	}
	for _, b := range all {
		if b.isDictionary() && b.waiting == 0 { // its batches are gone
			delete(f.files, b.key)
			f.drop(b)
		} else {
			f.order = append(f.order, b)
		}
	}
	return nil
}

// fitsIn reports whether a memory of some size, 0 for none, is what an entry needs.
func (e *Entry) fitsIn(size int64) bool {
	n := e.Stored()
	return size >= n && (n > 0 || size == 0)
}

// findDictionaries finds the dictionaries of b, which were written before it, among files.
func (b *found) findDictionaries(files map[uint64]*found) error {
	d := b.entry.Descriptor
	seen := make(map[*found]bool)
	for _, key := range b.entry.Dictionaries {
		dict := files[key]
		if dict == nil || !dict.isDictionary() {
			return fmt.Errorf("its dictionary %016x is not there, or is damaged", key)
		}
		d.Dictionaries = append(d.Dictionaries, dict.entry.Descriptor)
		for _, needed := range append(slices.Clone(dict.dicts), dict) {
			if !seen[needed] {
				seen[needed] = true
				b.dicts = append(b.dicts, needed)
			}
		}
	}
	if b.entry.ID != 0 {
		for _, dict := range b.dicts {
			dict.waiting++
		}
	}
	return nil
}

// count changes what is promised for what was found.
func (f *Found) count(b *found, n int64) {
	b.space.Hold(n)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.bytes[b.key.space] += n
}

// Held returns how many bytes are promised in a space.
func (f *Found) Held(id tier.ID) int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bytes[id]
}

// drop removes a file that is not needed any more.
func (f *Found) drop(b *found) {
	b.volume().Forget(b.key.key)
	f.leave(b)
}

// leave ends the promise of a file.
func (f *Found) leave(b *found) {
	f.count(b, -b.bytes)
	_, _ = b.space.Release(b.promise), b.space.Release(b.header)
}

// begin takes a batch. If it is neither adopted nor forgotten, the caller must call list. It must
// call done.
func (f *Found) begin(key Key) (b *found, done func(), err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, nil, tier.ErrClosed
	}
	b = f.files[key]
	if b == nil || b.taken || b.isDictionary() {
		return nil, nil, fmt.Errorf("it is not there, or another caller has it: %w", tier.ErrReleased)
	}
	b.taken = true
	f.busy.Add(1)
	return b, f.busy.Done, nil
}

// list gives a batch back that could not be adopted.
func (f *Found) list(b *found) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b.taken = false
}

// end is called for a batch that was adopted or forgotten. Dictionaries that no other batch here
// needs go with it.
func (f *Found) end(b *found) error {
	f.turn <- struct{}{}
	defer func() { <-f.turn }()
	gone := []*found{b}
	f.mu.Lock()
	for _, d := range b.dicts {
		if d.waiting--; d.waiting == 0 {
			gone = append(gone, d)
		}
	}
	for _, g := range gone {
		g.gone = true
		delete(f.files, g.key)
	}
	f.mu.Unlock()
	var err error
	for _, d := range gone[1:] {
		if d.shared == nil {
			f.drop(d)
			continue
		}
		f.own(d)
		err = errors.Join(err, d.shared.Release())
		d.shared = nil
	}
	return err
}

// take lends the memory of a file as a buffer, nil if there is none. When the buffer is released, the
// file is as it was before, unless own was called.
func (f *Found) take(b *found) (*tier.Buffer, error) {
	memory, err := b.volume().Take(b.key.key)
	if err != nil || memory == nil {
		return nil, err
	}
	return b.space.Adopt(b.promise, memory), nil
}

// own makes a file that was taken one of this process: it goes with its memory.
func (f *Found) own(b *found) {
	b.volume().Own(b.key.key, func() { _ = b.space.Release(b.header) })
	f.count(b, -b.bytes)
	_ = b.space.Release(b.promise) // else bytes of the buffer would return to it
}

// payload makes a payload of a batch, verified.
func (f *Found) payload(ctx context.Context, b *found, im Images) (_ batch.Payload, err error) {
	if b.err != nil {
		return nil, b.err
	}
	shared, err := f.dictionaries(ctx, b, im)
	if err != nil {
		return nil, err
	}
	buf, err := f.take(b)
	if err != nil {
		return nil, errors.Join(err, releaseShared(shared))
	}
	parts := payload.Parts{Descriptor: b.entry.Descriptor, Space: b.space, Shared: shared}
	if buf != nil {
		parts.Buffers = []*tier.Buffer{buf}
	}
	if b.entry.Packed {
		parts.Encoding, parts.Runs = payload.Compressed, b.entry.Runs
	}
	p := payload.New(parts)
	if err := im.Verify(ctx, p); err != nil {
		return nil, errors.Join(err, p.Release())
	}
	f.own(b)
	return p, nil
}

// dictionaries returns a reference to each dictionary of a batch.
func (f *Found) dictionaries(ctx context.Context, b *found, im Images) (shared []batch.Shared, err error) {
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
		var s batch.Shared
		if d.shared == nil {
			err = f.adoptDictionary(ctx, d, im)
		}
		if err == nil {
			s, err = im.Again(d.shared)
		}
		if err != nil {
			return nil, errors.Join(err, releaseShared(shared))
		}
		shared = append(shared, s)
	}
	return shared, nil
}

// adoptDictionary makes a dictionary of a file, verified. The turn is held.
func (f *Found) adoptDictionary(ctx context.Context, d *found, im Images) error {
	buf, err := f.take(d)
	if err != nil {
		return err
	}
	s, err := im.AdoptDictionary(ctx, d.entry.Descriptor, buf) // it has bytes: see Entry.fits
	if err != nil {
		return err
	}
	if err := im.VerifyDictionary(ctx, s); err != nil {
		return errors.Join(err, s.Release())
	}
	d.shared = s
	return nil
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
	for _, b := range f.order {
		if b.gone {
			continue
		}
		if b.shared != nil { // a dictionary that batches here need still
			err = errors.Join(err, b.shared.Release())
		}
		f.leave(b)
	}
	return err
}

// List returns the batches that were neither adopted nor forgotten, by space, and the oldest first.
func (f *Found) List() []Batch {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.order = slices.DeleteFunc(f.order, func(b *found) bool { return b.gone })
	var out []Batch
	for _, b := range f.order {
		if !b.taken && !b.isDictionary() {
			out = append(out, Batch{Key: b.key, Entry: b.entry, Bytes: b.bytes, Space: b.key.space, Err: b.err})
		}
	}
	return out
}

// Adopt makes a batch of what was left under a key, by newBatch, which is given the batch's record.
// On an error it is listed still. tier.ErrReleased: it was adopted or forgotten.
func (f *Found) Adopt(
	ctx context.Context, key Key, im Images, newBatch func(batch.Payload, *Record) (*batch.Batch, error),
) (*batch.Batch, error) {
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
		payload: p, space: found.space, plan: e.Plan, operator: e.Operator, port: e.Port, partition: e.Partition,
		volume: found.volume(), key: found.key.key,
	})
	if err != nil {
		return nil, errors.Join(err, p.Release(), f.end(found))
	}
	return b, f.end(found)
}

// Forget removes a batch: its room is free again. tier.ErrReleased: it was adopted or forgotten.
func (f *Found) Forget(key Key) error {
	b, done, err := f.begin(key)
	if err != nil {
		return err
	}
	defer done()
	f.drop(b)
	return f.end(b)
}
