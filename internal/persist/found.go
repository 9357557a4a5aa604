package persist

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// Found is the batches that earlier engines left and that were neither adopted nor forgotten yet, and
// their dictionaries. A promise of the space has the bytes of each, so that their room is not given
// to others. It is safe for concurrent use, except for Add.
type Found struct {
	// turn is a token: one takes dictionaries at a time. mu is taken inside it.
	turn chan struct{}

	mu     sync.Mutex // nothing else is called under it
	closed bool
	busy   sync.WaitGroup // calls of Adopt and Forget
	all    []*Batch       // by space, the oldest first
}

// Batch is a batch, or a dictionary that batches share, that an earlier engine left.
type Batch struct {
	volumes.Persisted             // Room is charged in Space; Err: why the batch cannot be adopted
	Entry             *Entry      // nil if it cannot be read
	Space             *tier.Space // nil in a Directory

	in      *Found
	promise *books.Promise // of the bytes in the memory
	header  *books.Promise // of the rest
	// dicts are all dictionaries that it needs, each once and after those that it needs itself.
	dicts []*Batch

	// Guarded by Found.mu.
	taken   bool // a batch: a caller is adopting or forgetting it
	gone    bool // it was adopted or forgotten, or is not needed any more
	waiting int  // batches that need the dictionary

	// shared is Found's reference to a dictionary, from the first batch that is adopted until the last
	// is adopted or forgotten. Meanwhile its file is lent. Guarded by Found.turn.
	shared batch.Shared
}

func (b *Batch) isDictionary() bool { return b.Err == nil && b.Entry.ID == 0 }

func (b *Batch) volume() *volumes.Volume { return b.Space.Pool.(*volumes.Volume) }

// NewFound returns a list that is empty.
func NewFound() *Found { return &Found{turn: make(chan struct{}, 1)} }

// Add lists what persists in a space, and promises its bytes. It is called before anything else.
func (f *Found) Add(space *tier.Space) (err error) {
	schemas := make(Schemas)
	files := make(map[uint64]*Batch)
	var added []*Batch
	for _, p := range space.Pool.(*volumes.Volume).Persisted() {
		b := &Batch{Persisted: p, Space: space, in: f}
		memory := space.Charge(p.Size)
		if b.header, err = space.Occupy(p.Room - memory); err != nil {
			return err
		}
		if b.promise, err = space.Occupy(memory); err != nil {
			return err
		}
		space.Hold(p.Room)
		b.read(schemas, files)
		if b.Err != nil {
			b.Err = &image.CorruptError{Volume: p.File, Cause: b.Err}
		} else if b.Entry.ID != 0 {
			for _, dict := range b.dicts {
				dict.waiting++
			}
		}
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

// read reads the entry of a file, whose memory must be as long as the entry needs, finds its
// dictionaries among files, where those that were written before it are, and adds it there: only
// then, because none is its own dictionary.
func (b *Batch) read(schemas Schemas, files map[uint64]*Batch) {
	defer func() { files[b.Key] = b }()
	if b.Err != nil {
		return
	}
	if b.Entry, b.Err = schemas.Read(b.Meta, b.Place); b.Err != nil {
		return
	}
	if n := b.Entry.Stored(); b.Size < n || n == 0 && b.Size > 0 {
		b.Entry, b.Err = nil, errFormat
		return
	}
	d, seen := b.Entry.Descriptor, make(map[*Batch]bool)
	for _, key := range b.Entry.Dictionaries {
		dict := files[key]
		if dict == nil || !dict.isDictionary() {
			b.Err = fmt.Errorf("its dictionary %016x is not there, or is damaged", key)
			b.dicts = nil // the batch does not count as one that needs them
			return
		}
		d.Dictionaries = append(d.Dictionaries, dict.Entry.Descriptor)
		for _, needed := range append(slices.Clone(dict.dicts), dict) {
			if !seen[needed] {
				seen[needed] = true
				b.dicts = append(b.dicts, needed)
			}
		}
	}
}

// forget removes a file that is not needed any more.
func (b *Batch) forget() {
	b.volume().Forget(b.Key)
	b.endPromise()
}

// endPromise ends the promise of a file's bytes.
func (b *Batch) endPromise() {
	b.Space.Hold(-b.Room)
	_, _ = b.Space.Release(b.promise), b.Space.Release(b.header)
}

// take lends the memory of a file as a buffer, nil if there is none. When the buffer is released, the
// file is as it was before, unless own was called.
func (b *Batch) take() (*tier.Buffer, error) {
	memory, err := b.volume().Take(b.Key)
	if err != nil || memory == nil {
		return nil, err
	}
	return b.Space.Adopt(b.promise, memory), nil
}

// own makes a file that was taken one of this process: it goes with its memory.
func (b *Batch) own() {
	b.volume().Own(b.Key, func() { _ = b.Space.Release(b.header) })
	b.Space.Hold(-b.Room)
	_ = b.Space.Release(b.promise) // else bytes of the buffer would return to it
}

// begin takes a batch. The caller must call end.
func (f *Found) begin(b *Batch) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.closed:
		return tier.ErrClosed
	case b == nil || b.in != f || b.taken || b.gone: // nothing that was found, or another engine's
		return fmt.Errorf("it is not there, or another caller has it: %w", tier.ErrReleased)
	}
	b.taken = true
	f.busy.Add(1)
	return nil
}

// end is called with a batch that begin has taken. gone: it was adopted or forgotten. Dictionaries
// that no other batch here needs go with it.
func (f *Found) end(b *Batch, gone bool) (err error) {
	defer f.busy.Done()
	if !gone {
		f.mu.Lock()
		defer f.mu.Unlock()
		b.taken = false
		return nil
	}
	f.turn <- struct{}{}
	defer func() { <-f.turn }()
	var unneeded []*Batch
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
func (f *Found) image(
	ctx context.Context, b *Batch, mover *convert.Mover, builtin *transfer.Builtin,
) (*batch.Image, error) {
	if b.Err != nil {
		return nil, b.Err
	}
	shared, err := f.dictionaries(ctx, b, mover, builtin)
	var buf *tier.Buffer
	if err == nil {
		buf, err = b.take()
	}
	if err != nil {
		for _, s := range shared {
			err = errors.Join(err, s.Release())
		}
		return nil, err
	}
	parts := payload.Parts{Descriptor: b.Entry.Descriptor, Space: b.Space, Shared: shared}
	if buf != nil {
		parts.Buffers = []*tier.Buffer{buf}
	}
	if b.Entry.Packed {
		parts.Type, parts.Runs = payload.CompressedImage, b.Entry.Runs
	}
	p := payload.New(parts)
	if err := mover.Verify(ctx, p); err != nil {
		return nil, errors.Join(err, p.Release())
	}
	b.own()
	return p, nil
}

// dictionaries returns a reference to each dictionary of a batch, also after an error to those that it
// has. It makes one of the file of each that no batch before needed, and verifies it.
func (f *Found) dictionaries(
	ctx context.Context, b *Batch, mover *convert.Mover, builtin *transfer.Builtin,
) (shared []batch.Shared, err error) {
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
			buf, err := d.take()
			if err != nil {
				return shared, err
			}
			made, err := builtin.AdoptDictionary(ctx, d.Entry.Descriptor, buf) // it has bytes: see Entry.fits
			if err != nil {
				return shared, err
			}
			alone := *made.Descriptor()
			alone.Dictionaries = nil // they are verified by themselves
			if err := mover.Verify(ctx, batch.NewImage(&alone, made.Buffer(), made.Buffer().Space())); err != nil {
				return shared, errors.Join(err, made.Release())
			}
			d.shared = made
		}
		again, err := builtin.Again(d.shared)
		if err != nil {
			return shared, err
		}
		shared = append(shared, again)
	}
	return shared, nil
}

// Close leaves what was neither adopted nor forgotten to the next engine.
func (f *Found) Close() (err error) {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.busy.Wait()
	f.mu.Lock()
	all := slices.Clone(f.all) // List, which works still, moves its elements
	f.mu.Unlock()
	for _, b := range all {
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
func (f *Found) List() (out []*Batch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all = slices.DeleteFunc(f.all, func(b *Batch) bool { return b.gone })
	for _, b := range f.all {
		if !b.taken && !b.isDictionary() {
			out = append(out, b)
		}
	}
	return out
}

// Adopt makes a batch of one of List, by newBatch, which is given the batch's record. On an error it
// is listed still. tier.ErrReleased: it was adopted or forgotten.
func (f *Found) Adopt(
	ctx context.Context, b *Batch, mover *convert.Mover, builtin *transfer.Builtin,
	newBatch func(batch.Payload, *Record) (*batch.Batch, error),
) (*batch.Batch, error) {
	if err := f.begin(b); err != nil {
		return nil, err
	}
	p, err := f.image(ctx, b, mover, builtin)
	if err != nil {
		return nil, errors.Join(err, f.end(b, false))
	}
	adopted, err := newBatch(p, &Record{
		image: p, space: b.Space.ID(), volume: b.volume(), key: b.Key, place: b.Entry.Place,
	})
	if err != nil {
		err = errors.Join(err, p.Release())
	}
	return adopted, errors.Join(err, f.end(b, true))
}

// Forget removes a batch: its room is free again. tier.ErrReleased: it was adopted or forgotten.
func (f *Found) Forget(b *Batch) error {
	if err := f.begin(b); err != nil {
		return err
	}
	b.forget()
	return f.end(b, true)
}
