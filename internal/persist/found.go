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

// Key names a batch that was found.
type Key struct {
	in    *Found
	found *found
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
	all    []*found       // by space, the oldest first
}

// found is a batch or a dictionary.
type found struct {
	volumes.Persisted
	space   *tier.Space
	promise *books.Promise // of the bytes in the memory
	header  *books.Promise // of the rest
	entry   *Entry         // nil if it cannot be read
	err     error
	// dicts are all dictionaries that it needs, each once and after those that it needs itself.
	dicts []*found

	// Guarded by Found.mu.
	taken   bool // a batch: a caller is adopting or forgetting it
	gone    bool // it was adopted or forgotten, or is not needed any more
	waiting int  // batches that need the dictionary

	// shared is Found's reference to a dictionary, from the first batch that is adopted until the last
	// is adopted or forgotten. Meanwhile its file is lent. Guarded by Found.turn.
	shared batch.Shared
}

func (b *found) isDictionary() bool { return b.entry != nil && b.entry.ID == 0 && b.err == nil }

func (b *found) volume() *volumes.Volume { return b.space.Pool().(*volumes.Volume) }

// NewFound returns a list that is empty.
func NewFound() *Found { return &Found{turn: make(chan struct{}, 1)} }

// Add lists what persists in a space, and promises its bytes. It is called before anything else.
func (f *Found) Add(space *tier.Space) (err error) {
	var schemas Schemas
	files := make(map[uint64]*found)
	var added []*found
	for _, p := range space.Pool().(*volumes.Volume).Persisted() {
		b := &found{Persisted: p, space: space}
		memory := space.Charge(p.Size)
		if b.header, err = space.Occupy(p.Room - memory); err != nil {
			return err
		}
		if b.promise, err = space.Occupy(memory); err != nil {
			return err
		}
		space.Hold(p.Room)
		if b.entry, b.err = schemas.entry(&p); b.err == nil {
			b.err = b.findDictionaries(files)
		}
		if b.err != nil {
			b.err = &image.CorruptError{Volume: p.File, Cause: b.err}
		}
		files[p.Key] = b
		added = append(added, b)
	}
	for _, b := range added {
		if b.isDictionary() && b.waiting == 0 { // its batches are gone
			b.forget()
		} else {
			f.all = append(f.all, b)
		}
	}
	return nil
}

// entry reads the entry of a file, whose memory must be as long as the entry needs.
func (s *Schemas) entry(p *volumes.Persisted) (*Entry, error) {
	if p.Err != nil {
		return nil, p.Err
	}
	e, err := s.Read(p.Meta, p.Place)
	if err != nil {
		return nil, err
	}
	if n := e.Stored(); p.Size < n || n == 0 && p.Size > 0 {
		return nil, errFormat
	}
	return e, nil
}

func errDictionary(key uint64) error {
	return fmt.Errorf("its dictionary %016x is not there, or is damaged", key)
}

// findDictionaries finds the dictionaries of b, which were written before it, among files.
func (b *found) findDictionaries(files map[uint64]*found) error {
	d := b.entry.Descriptor
	seen := make(map[*found]bool)
	for _, key := range b.entry.Dictionaries {
		dict := files[key]
		if dict == nil || !dict.isDictionary() {
			return errDictionary(key)
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

// forget removes a file that is not needed any more.
func (b *found) forget() {
	b.volume().Forget(b.Key)
	b.endPromise()
}

// endPromise ends the promise of a file's bytes.
func (b *found) endPromise() {
	b.space.Hold(-b.Room)
	_, _ = b.space.Release(b.promise), b.space.Release(b.header)
}

// take lends the memory of a file as a buffer, nil if there is none. When the buffer is released, the
// file is as it was before, unless own was called.
func (b *found) take() (*tier.Buffer, error) {
	memory, err := b.volume().Take(b.Key)
	if err != nil || memory == nil {
		return nil, err
	}
	return b.space.Adopt(b.promise, memory), nil
}

// own makes a file that was taken one of this process: it goes with its memory.
func (b *found) own() {
	b.volume().Own(b.Key, func() { _ = b.space.Release(b.header) })
	b.space.Hold(-b.Room)
	_ = b.space.Release(b.promise) // else bytes of the buffer would return to it
}

// begin takes a batch. The caller must call end.
func (f *Found) begin(key Key) (*found, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := key.found
	switch {
	case f.closed:
		return nil, tier.ErrClosed
	case key.in != f || b.taken || b.gone: // another engine's, or of nothing that was found
		return nil, fmt.Errorf("it is not there, or another caller has it: %w", tier.ErrReleased)
	}
	b.taken = true
	f.busy.Add(1)
	return b, nil
}

// end is called with a batch that begin has returned. gone: it was adopted or forgotten. Dictionaries
// that no other batch here needs go with it.
func (f *Found) end(b *found, gone bool) (err error) {
	defer f.busy.Done()
	if !gone {
		f.mu.Lock()
		defer f.mu.Unlock()
		b.taken = false
		return nil
	}
	f.turn <- struct{}{}
	defer func() { <-f.turn }()
	var unneeded []*found
	f.mu.Lock()
	b.gone = true
	for _, d := range b.dicts {
		if d.waiting--; d.waiting == 0 {
			d.gone = true
			unneeded = append(unneeded, d)
		}
	}
	f.mu.Unlock()
	for _, d := range unneeded {
		if d.shared == nil {
			d.forget()
			continue
		}
		d.own()
		err = errors.Join(err, d.shared.Release())
		d.shared = nil
	}
	return err
}

// image makes an image of a batch, verified.
func (f *Found) image(ctx context.Context, b *found, im Images) (*batch.Image, error) {
	if b.err != nil {
		return nil, b.err
	}
	shared, err := f.dictionaries(ctx, b, im)
	if err != nil {
		return nil, err
	}
	buf, err := b.take()
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
	b.own()
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
	buf, err := d.take()
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
func (f *Found) Close() (err error) {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.busy.Wait()
	for _, b := range f.all {
		if b.gone {
			continue
		}
		if b.shared != nil { // a dictionary that batches here need still
			err = errors.Join(err, b.shared.Release())
		}
		b.endPromise()
	}
	return err
}

// List returns the batches that were neither adopted nor forgotten, by space, and the oldest first.
func (f *Found) List() []Batch {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all = slices.DeleteFunc(f.all, func(b *found) bool { return b.gone })
	var out []Batch
	for _, b := range f.all {
		if !b.taken && !b.isDictionary() {
			out = append(out, Batch{Key: Key{f, b}, Entry: b.entry, Bytes: b.Room, Space: b.space.ID(), Err: b.err})
		}
	}
	return out
}

// Adopt makes a batch of what was left under a key, by newBatch, which is given the batch's record.
// On an error it is listed still. tier.ErrReleased: it was adopted or forgotten.
func (f *Found) Adopt(
	ctx context.Context, key Key, im Images, newBatch func(batch.Payload, *Record) (*batch.Batch, error),
) (*batch.Batch, error) {
	found, err := f.begin(key)
	if err != nil {
		return nil, err
	}
	p, err := f.image(ctx, found, im)
	if err != nil {
		return nil, errors.Join(err, f.end(found, false))
	}
	e := found.entry
	b, err := newBatch(p, &Record{
		image: p, space: found.space.ID(), volume: found.volume(), key: found.Key,
		place: place{e.Plan, e.Operator, e.Port, e.Partition},
	})
	if err != nil {
		return nil, errors.Join(err, p.Release(), f.end(found, true))
	}
	return b, f.end(found, true)
}

// Forget removes a batch: its room is free again. tier.ErrReleased: it was adopted or forgotten.
func (f *Found) Forget(key Key) error {
	b, err := f.begin(key)
	if err != nil {
		return err
	}
	b.forget()
	return f.end(b, true)
}
