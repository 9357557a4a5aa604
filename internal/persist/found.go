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

// Found lists the batches that earlier engines left on the disks of this engine, with the
// dictionaries that these batches need. A batch leaves the list when it is adopted or forgotten. A
// dictionary leaves when no listed batch needs it.
//
// Each file takes room on its volume, so each has promises of its space for as long as it is
// listed. Without them the space would give the same bytes to reservations. They are marked as held
// by the engine (Space.Hold), because the monitor cannot evict them.
//
// Found is safe for concurrent use, except for Add.
type Found struct {
	// turn is a token, held across I/O. Its holder makes the shared dictionaries of a batch or
	// gives them up, so that each dictionary is read and verified once, however many adoptions need
	// it. A caller that has turn may lock mu, but not the reverse.
	turn chan struct{}

	mu sync.Mutex // nothing else is called under it
	// closed makes begin fail, so that busy only falls from then on.
	closed bool
	busy   sync.WaitGroup // calls of Adopt and Forget
	all    []*Batch       // by space, the oldest first
}

// Batch is a file that an earlier engine left: of a batch, or of a dictionary that batches share.
// Its states, under Found.mu:
//
// Listed: neither taken nor gone. Its file stays when the engine closes, for the next one.
//
// Taken: one caller of Adopt or Forget has it, from begin to end. List leaves it out. If the caller
// fails, end makes it listed again.
//
// Gone: it was adopted or forgotten. After adoption its memory and its file belong to the new
// batch's image. Dictionaries become gone when waiting falls to 0; they are never taken.
//
// A Batch that Inspect made has no Found and no space, and always the first state.
type Batch struct {
	volumes.Persisted             // Room is charged in Space; Err: why the batch cannot be adopted
	Entry             *Entry      // nil if it cannot be read
	Space             *tier.Space // nil in a Directory

	in *Found
	// Adopt draws the image's buffer from promise. header covers the rest of the file, the header
	// and the rounding to whole pages, and after adoption goes back when the volume removes the
	// file.
	promise *books.Promise
	header  *books.Promise
	// dicts are all dictionaries that the batch needs, directly or for one of its dictionaries,
	// each once and after those that it needs itself. That is the order of
	// Descriptor.AllDictionaries, in which an image has its references.
	dicts []*Batch

	// Guarded by Found.mu.
	taken   bool // a batch: a caller is adopting or forgetting it
	gone    bool // it was adopted or forgotten, or is not needed any more
	waiting int  // batches that need the dictionary

	// shared is Found's own reference to a dictionary, nil until the first batch that needs it is
	// adopted. It keeps the dictionary's image while other listed batches may need it. Until end
	// calls own, the file is only lent: if the engine closes in between, it stays for the next
	// engine. Guarded by Found.turn.
	shared batch.Shared
}

// isDictionary reports whether b is a sound dictionary. A damaged file counts as a batch, so that
// programs see it in the list and can forget it.
func (b *Batch) isDictionary() bool { return b.Err == nil && b.Entry.ID == 0 }

func (b *Batch) volume() *volumes.Volume { return b.Space.Pool.(*volumes.Volume) }

// NewFound returns a list that is empty.
func NewFound() *Found { return &Found{turn: make(chan struct{}, 1)} }

// Add lists what persists in a space, and promises its bytes. The engine calls it when it opens the
// space, before the space has other users. An error means that the files take more than the space's
// capacity. A file that cannot be read is no error: it is listed with the reason in Err, and takes
// its room like the others.
func (f *Found) Add(space *tier.Space) (err error) {
	schemas := make(Schemas)
	files := make(map[uint64]*Batch)
	var added []*Batch
	for _, p := range space.Pool.(*volumes.Volume).Persisted() {
		b := &Batch{Persisted: p, Space: space, in: f}
		// Two promises, because they end at different times: see own.
		memory := space.Charge(p.Size)
		if b.header, err = space.Occupy(p.Room - memory); err == nil {
			if b.promise, err = space.Occupy(memory); err != nil {
				_ = space.Release(b.header)
			}
		}
		if err != nil {
			f.all = append(f.all, added...) // so that Close ends their promises
			return err
		}
		// From here to endPromise or own the file's bytes count as the engine's.
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
		// The batches of such a dictionary ended before the process, which was killed before it
		// removed the dictionary too. waiting is final only after all files were read, hence the
		// second loop.
		if b.isDictionary() && b.waiting == 0 { // its batches are gone
			b.forget()
		} else {
			f.all = append(f.all, b)
		}
	}
	return nil
}

// read decodes a file's entry into b.Entry and finds its dictionaries in files, which has the files
// that were written before. On failure it sets b.Err. The memory must be as long as the entry
// needs.
func (b *Batch) read(schemas Schemas, files map[uint64]*Batch) {
	// b is added last, also when it is damaged: an entry that lists its own key does not find
	// itself, so there are no cycles, and a user of a damaged dictionary is reported as such.
	defer func() { files[b.Key] = b }()
	if b.Err != nil {
		return
	}
	if b.Entry, b.Err = schemas.Read(b.Meta, b.Place); b.Err != nil {
		return
	}
	// A batch without memory must not have a body either: nothing would describe those bytes.
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
		// dict.dicts is complete, because files come in the order in which they were written.
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

// endPromise gives back the file's bytes in the space. The caller has either removed the file, or
// leaves it to the next engine because this one closes.
func (b *Batch) endPromise() {
	b.Space.Hold(-b.Room)
	_, _ = b.Space.Release(b.promise), b.Space.Release(b.header)
}

// take lends the file's memory as a buffer that is drawn from b.promise. It returns nil if the
// batch has no memory. Releasing the buffer undoes take: the bytes return to the promise, and the
// volume lists the file again. After own, releasing it frees the memory and removes the file.
func (b *Batch) take() (*tier.Buffer, error) {
	memory, err := b.volume().Take(b.Key)
	if err != nil || memory == nil {
		return nil, err
	}
	return b.Space.Adopt(b.promise, memory), nil
}

// own makes the file one of this process, which cannot be undone. From now on the file ends with
// its memory. So own is called only after the bytes were verified.
func (b *Batch) own() {
	b.volume().Own(b.Key, func() { _ = b.Space.Release(b.header) })
	b.Space.Hold(-b.Room)
	// While a promise is open, bytes of its buffers return to it when they are freed. After its end
	// they return to the space, as those of any other image do. The header's promise stays open
	// until the volume removes the file, because the header takes room until then.
	_ = b.Space.Release(b.promise)
}

// begin takes a batch, so that concurrent calls cannot adopt it twice. It returns tier.ErrReleased
// if another caller has the batch or it is gone, and tier.ErrClosed after Close. If it returns nil,
// the caller must call end, which Close waits for.
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

// end ends what begin began. If gone is false, the batch is listed again. If it is true, the batch
// was adopted or forgotten, and end also gives up the dictionaries that no other listed batch
// needs. The caller must hold neither turn nor mu.
func (f *Found) end(b *Batch, gone bool) (err error) {
	defer f.busy.Done()
	if !gone {
		f.mu.Lock()
		defer f.mu.Unlock()
		b.taken = false
		return nil
	}
	// The token comes first: a concurrent adoption may be making one of these dictionaries.
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
		// No batch that needs the dictionary was adopted; all were forgotten.
		if d.shared == nil {
			d.forget()
			continue
		}
		// Adopted batches may still have references to the dictionary. Its file must now end with
		// its memory, which the last reference frees: that of Found, released here, or one of a
		// batch.
		d.own()
		err = errors.Join(err, d.shared.Release())
		d.shared = nil
	}
	return err
}

// image makes an image of a batch's file and verifies all bytes. On success the file belongs to the
// image. On an error everything is as before: the references to dictionaries are released, and the
// buffer, whose memory was only lent, is returned.
func (f *Found) image(
	ctx context.Context, b *Batch, mover *convert.Mover, builtin *transfer.Builtin,
) (*batch.Image, error) {
	// Err is why the file could not be read; such a batch can only be forgotten.
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
	// The image owns the buffer and the references from here on: p.Release gives both back.
	p := payload.New(parts)
	if err := mover.Verify(ctx, p); err != nil {
		return nil, errors.Join(err, p.Release())
	}
	b.own()
	return p, nil
}

// dictionaries returns a new reference to each of b.dicts, in that order. A dictionary that no
// earlier adoption needed is first made of its file, and verified. On an error the caller must
// release the references that are returned with it. Waiting for the token ends with ctx.
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
		// Dictionaries that d needs come before it in b.dicts, so they have been made by now and
		// hold a reference in Found, as AdoptDictionary requires.
		if d.shared == nil {
			buf, err := d.take()
			if err != nil {
				return shared, err
			}
			made, err := builtin.AdoptDictionary(ctx, d.Entry.Descriptor, buf) // it has bytes: see Entry.fits
			if err != nil {
				return shared, err
			}
			// Verify gets an image with only d's own bytes.
			alone := *made.Descriptor()
			alone.Dictionaries = nil // they are verified by themselves
			if err := mover.Verify(ctx, batch.NewImage(&alone, made.Buffer(), made.Buffer().Space())); err != nil {
				return shared, errors.Join(err, made.Release())
			}
			d.shared = made
		}
		// Found keeps d.shared. The batch gets a reference of its own, which it releases when it
		// ends.
		again, err := builtin.Again(d.shared)
		if err != nil {
			return shared, err
		}
		shared = append(shared, again)
	}
	return shared, nil
}

// Close leaves the files of batches that were neither adopted nor forgotten to the next engine. It
// makes further calls fail with tier.ErrClosed, waits for calls in progress, and ends the promises,
// so that the spaces' books come to 0. The engine calls it before it closes the volumes.
func (f *Found) Close() (err error) {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.busy.Wait()
	f.mu.Lock()
	all := slices.Clone(f.all) // List, which works still, moves its elements
	f.mu.Unlock()
	// No call of Adopt or Forget is in progress now, and none can begin. So gone and shared are
	// stable without mu and turn.
	for _, b := range all {
		if b.gone {
			continue
		}
		// Releasing it returns the lent memory to the volume, which lists the file again.
		if b.shared != nil { // a dictionary that batches here need still
			err = errors.Join(err, b.shared.Release())
		}
		b.endPromise()
	}
	return err
}

// List returns the batches that are listed, by space, and the oldest first in each. It leaves out
// dictionaries, and batches that a call is adopting or forgetting now. It takes time in proportion
// to the number of files.
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

// Adopt makes a listed batch one of this engine: it verifies the bytes and calls newBatch with the
// image and with the record that the engine's recorder must know before the batch changes.
// Otherwise the recorder would write a second file. tier.ErrReleased means that the batch was
// adopted or forgotten, or that another call has it now. If reading or verifying fails, the batch
// stays listed.
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
		// The file belongs to the image by now. Releasing the image frees the memory and removes the
		// file, so the batch is gone, even though it was not adopted. It must be free before end,
		// for which Close waits.
		err = errors.Join(err, p.Release())
		return nil, errors.Join(err, f.end(b, true))
	}
	_ = f.end(b, true)
	// An error of end is that of a dictionary which no listed batch needs. The batch is adopted, and
	// somebody must own it.
	return adopted, nil
}

// Forget removes a listed batch and its file, and frees the room. A damaged one can be forgotten
// too. tier.ErrReleased means that the batch was adopted or forgotten, or that another call has it
// now.
func (f *Found) Forget(b *Batch) error {
	if err := f.begin(b); err != nil {
		return err
	}
	b.forget()
	return f.end(b, true)
}
