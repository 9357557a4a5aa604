package spillway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Kept is a batch that an engine before this one left on a disk with Disk.Keep, because
// its process ended before the batch did.
type Kept struct {
	ID        batch.ID // in the engine that left it
	Plan      string   // where it stood; empty if in no plan
	Operator  string
	Port      int
	Partition int
	Rows      int64
	Schema    *arrow.Schema
	Bytes     int64   // charged in Space, without dictionaries that it shares
	Space     tier.ID // of this engine
	Err       error   // why it cannot be adopted; it can be forgotten

	key keptKey
}

// keptKey names a record in a volume's manifest.
type keptKey struct {
	space tier.ID
	key   uint64
}

func compareKeys(a, b keptKey) int {
	return cmp.Or(compareIDs(a.space, b.space), cmp.Compare(a.key, b.key))
}

// found is the kept batches that nobody has adopted yet, and what they share. Its bytes
// are promised in the spaces, so that nobody counts on their room.
type found struct {
	e *Engine
	// turn is a token: one takes dictionaries at a time. mu is taken inside it.
	turn chan struct{}

	mu      sync.Mutex // nothing else is called under it
	closed  bool
	busy    sync.WaitGroup // who adopts or forgets
	batches map[keptKey]*foundBatch
	dicts   map[keptKey]*foundDictionary
	bytes   map[tier.ID]int64 // promised
}

// foundMemory is what one record keeps.
type foundMemory struct {
	key    keptKey
	volume *disk.Volume
	space  *tier.Space
	bytes  int64 // charged
}

type foundBatch struct {
	foundMemory
	kept  *convert.Kept // nil if it cannot be read
	desc  *batch.Descriptor
	dicts []*foundDictionary // in the order of desc.AllDictionaries
	err   error
}

// foundDictionary is a dictionary that kept batches need. From the first that is
// adopted until the last is adopted or forgotten it is held here, too.
type foundDictionary struct {
	foundMemory
	kept    *convert.Kept
	desc    *batch.Descriptor
	parts   []*foundDictionary
	waiting int          // batches that need it; guarded by found.mu
	shared  batch.Shared // nil while nobody has needed it; guarded by found.turn
}

func newFound(e *Engine) *found {
	return &found{
		e: e, turn: make(chan struct{}, 1), batches: make(map[keptKey]*foundBatch),
		dicts: make(map[keptKey]*foundDictionary), bytes: make(map[tier.ID]int64),
	}
}

// findKept lists what a volume has kept, and promises its bytes.
func (e *Engine) findKept(space *tier.Space, volume *disk.Volume) error {
	f := e.found
	var batches []*foundBatch
	var schemas convert.KeptSchemas
	for _, k := range volume.Kept() {
		m := foundMemory{key: keptKey{space.ID(), k.Key}, volume: volume, space: space}
		for _, n := range k.Sizes {
			m.bytes += space.Charge(n)
		}
		if err := space.Occupy(m.bytes); err != nil {
			return err
		}
		f.count(m, m.bytes)
		kept, err := schemas.Unmarshal(k.Meta, k.Shared)
		if err == nil && !fitMemories(kept.Memories(), k.Sizes) {
			err = convert.ErrKeptFormat
		}
		if err == nil && kept.ID == 0 {
			f.addDictionary(&foundDictionary{foundMemory: m, kept: kept, desc: kept.Descriptor})
			continue
		}
		b := &foundBatch{foundMemory: m, err: err}
		if err == nil {
			b.kept, b.desc = kept, kept.Descriptor
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

// fitMemories says whether memories are long enough.
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

// addDictionary adds a dictionary whose parts, which were kept before it, are there.
func (f *found) addDictionary(d *foundDictionary) {
	var err error
	if d.parts, err = f.named(d.foundMemory, d.kept.Dictionaries); err == nil {
		d.desc.Dictionaries = descriptorsOf(d.parts)
		f.dicts[d.key] = d
		return
	}
	f.batches[d.key] = &foundBatch{foundMemory: d.foundMemory, err: err} // so that it can be forgotten
}

// named finds dictionaries by their keys.
func (f *found) named(m foundMemory, keys []uint64) ([]*foundDictionary, error) {
	out := make([]*foundDictionary, len(keys))
	for i, key := range keys {
		d := f.dicts[keptKey{m.key.space, key}]
		if d == nil || key >= m.key.key {
			return nil, &convert.CorruptError{Volume: m.volume.Dir(), Cause: fmt.Errorf("the dictionary that was kept as %d is lost", key)}
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
func (f *found) needs(b *foundBatch) {
	if b.err != nil {
		return
	}
	var direct []*foundDictionary
	if direct, b.err = f.named(b.foundMemory, b.kept.Dictionaries); b.err != nil {
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
func (f *found) count(m foundMemory, n int64) {
	m.space.Hold(n)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.bytes[m.space.ID()] += n
}

// held returns what is promised in a space.
func (f *found) held(id tier.ID) int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.bytes[id]
}

// drop frees what nobody needs any more.
func (f *found) drop(m foundMemory) {
	m.volume.Forget(m.key.key)
	f.count(m, -m.bytes)
	m.space.Unreserve(m.bytes)
}

// begin takes a kept batch; it must be given back to list, or end. done must be called.
func (f *found) begin(key keptKey) (b *foundBatch, done func(), err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, nil, tier.ErrClosed
	}
	b = f.batches[key]
	if b == nil {
		return nil, nil, fmt.Errorf("it is not there, or somebody has it: %w", tier.ErrReleased)
	}
	delete(f.batches, key)
	f.busy.Add(1)
	return b, f.busy.Done, nil
}

// list gives a batch back that could not be adopted.
func (f *found) list(b *foundBatch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.batches[b.key] = b
}

// end is called for a batch that was adopted or forgotten: dictionaries that it was the last
// to need here go.
func (f *found) end(b *foundBatch) error {
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

// returns is the account of adopted memory: what could not be adopted after all becomes
// promised again.
type returns struct {
	space *tier.Space
	back  atomic.Bool
}

func (r *returns) Credit(n int64) bool {
	if r.back.Load() {
		r.space.Recall(n)
	}
	return r.back.Load()
}

// take hands the memories of a record out as buffers. putBack, called before they are
// released, undoes it.
func (f *found) take(m foundMemory) (buffers []*tier.Buffer, putBack func() error, err error) {
	memories, err := m.volume.Take(m.key.key)
	if err != nil {
		return nil, nil, err
	}
	f.count(m, -m.bytes)
	account := &returns{space: m.space}
	for _, mem := range memories {
		buffers = append(buffers, m.space.Adopt(mem, account))
	}
	return buffers, func() error {
		f.count(m, m.bytes)
		account.back.Store(true)
		return m.volume.PutBack(m.key.key)
	}, nil
}

// adopt makes a payload of a kept batch, verified.
func (f *found) adopt(ctx context.Context, b *foundBatch) (_ batch.Payload, err error) {
	if b.err != nil {
		return nil, b.err
	}
	shared, err := f.dictionaries(ctx, b)
	if err != nil {
		return nil, err
	}
	buffers, putBack, err := f.take(b.foundMemory)
	if err != nil {
		return nil, errors.Join(err, releaseShared(shared))
	}
	var p batch.Payload
	switch {
	case b.kept.Packed:
		runs := slices.Clone(b.kept.Runs)
		for i := range runs {
			runs[i].Buffer = buffers[i]
		}
		p = batch.NewPacked(b.desc, runs, b.space, shared...)
	case len(buffers) == 0:
		p = batch.NewImage(b.desc, nil, b.space, shared...)
	default:
		p = batch.NewImage(b.desc, buffers[0], b.space, shared...)
	}
	if err := f.e.mover.Verify(ctx, p); err != nil {
		return nil, errors.Join(err, putBack(), p.Release())
	}
	return p, nil
}

// dictionaries returns a reference to each dictionary of a batch.
func (f *found) dictionaries(ctx context.Context, b *foundBatch) (shared []batch.Shared, err error) {
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
			if err := f.adoptDictionary(ctx, d); err != nil {
				return nil, errors.Join(err, releaseShared(shared))
			}
		}
		s, err := f.e.builtin.Again(d.shared)
		if err != nil {
			return nil, errors.Join(err, releaseShared(shared))
		}
		shared = append(shared, s)
	}
	return shared, nil
}

// adoptDictionary brings a dictionary, verified. The turn is held.
func (f *found) adoptDictionary(ctx context.Context, d *foundDictionary) error {
	buffers, putBack, err := f.take(d.foundMemory)
	if err != nil {
		return err
	}
	var buf *tier.Buffer
	if len(buffers) > 0 {
		buf = buffers[0]
	}
	s, err := f.e.builtin.AdoptDictionary(ctx, d.desc, buf)
	if err != nil {
		return err
	}
	if err := f.e.mover.VerifyDictionary(ctx, s); err != nil {
		return errors.Join(err, putBack(), s.Release())
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

// close leaves what was neither adopted nor forgotten to the next engine.
func (f *found) close() error {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.busy.Wait()
	var err error
	for _, d := range f.dicts {
		if d.shared == nil {
			f.count(d.foundMemory, -d.bytes)
			d.space.Unreserve(d.bytes)
			continue
		}
		err = errors.Join(err, d.volume.PutBack(d.key.key), d.shared.Release())
	}
	for _, b := range f.batches {
		f.count(b.foundMemory, -b.bytes)
		b.space.Unreserve(b.bytes)
	}
	return err
}

// Kept lists the batches that were found on disks with Disk.Keep when the engine was
// opened, and that were neither adopted nor forgotten, in the order in which they came to
// their disks. They take room there, and stay there when the engine is closed.
func (e *Engine) Kept() []Kept {
	f := e.found
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]Kept, 0, len(f.batches))
	for _, b := range f.batches {
		k := Kept{Bytes: b.bytes, Space: b.space.ID(), Err: b.err, key: b.key}
		if b.kept != nil {
			k.ID, k.Plan, k.Operator, k.Port, k.Partition = b.kept.ID, b.kept.Plan, b.kept.Operator, b.kept.Port, b.kept.Partition
			k.Rows, k.Schema = b.desc.Rows, b.desc.Schema
		}
		out = append(out, k)
	}
	slices.SortFunc(out, func(a, b Kept) int { return compareKeys(a.key, b.key) })
	return out
}

// Adopt makes a kept batch one of this engine's: it reads all its bytes, compares them with
// their checksums, and returns the batch, idle on its disk and with an id of this engine. The
// caller owns it, as if it had made it: it puts it into a repository, or drops it. Other
// bytes are a *convert.CorruptError; after that and any other error the batch is kept still. One
// that was adopted or forgotten before is tier.ErrReleased.
func (e *Engine) Adopt(ctx context.Context, k Kept) (*batch.Batch, error) {
	b, err := e.adopt(ctx, k)
	if err != nil {
		var c *convert.CorruptError
		if errors.As(err, &c) {
			c.Batch = k.ID
		}
		return nil, fmt.Errorf("spillway: adopting batch %d of %s: %w", k.ID, k.Space, err)
	}
	return b, nil
}

func (e *Engine) adopt(ctx context.Context, k Kept) (*batch.Batch, error) {
	f, done, err := e.found.begin(k.key)
	if err != nil {
		return nil, err
	}
	defer done()
	p, err := e.found.adopt(ctx, f)
	if err != nil {
		e.found.list(f)
		return nil, err
	}
	b, err := e.newBatch(p, recordOf(p, f))
	if err != nil {
		return nil, errors.Join(err, p.Release(), e.found.end(f))
	}
	return b, e.found.end(f)
}

// ForgetKept drops a kept batch: its room is free again. One that was adopted or forgotten
// before is tier.ErrReleased.
func (e *Engine) ForgetKept(k Kept) error {
	b, done, err := e.found.begin(k.key)
	if err != nil {
		return fmt.Errorf("spillway: forgetting batch %d of %s: %w", k.ID, k.Space, err)
	}
	defer done()
	e.found.drop(b.foundMemory)
	return e.found.end(b)
}
