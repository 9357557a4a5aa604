package transfer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"weak"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// Dictionaries is the store of the shared dictionaries: those that are images of their own. A
// Dictionary has at most one DictCopy in a space, which the batches there share: each of their
// images holds a reference, and the last release frees it. A DictCopy is not a clean image, though
// both are called copies.
//
//	batch.Image ──▶ DictCopy (GPU) ──▶ Dictionary ◀── identity ◀── *array.Data, weakly
//	batch.Image ──▶ DictCopy (disk) ──┘
//
// A dictionary is known while there is a copy of it, a caller that is about to make one holds it,
// or another dictionary extends it. It is recognised by the array.Data that it was laid out from,
// or that a record of Spillway's was opened with. So the records of a stream, which share the
// array.Data, share the dictionary, and a record that was opened and is put again finds the
// dictionary that it came from. Values are not compared, except for extensions.
//
// A request for room is for a batch's body and for the dictionaries that its target lacks,
// together, so no caller has room for one of them and waits for the other. No reference is held
// during such a wait. A reference would keep a dictionary in the target while the batches that
// share it are evicted, and two waiters, each with a dictionary that the other has no use for,
// could fill a space that has room for either of them. So a dictionary may leave the target during
// the wait. Each time the waiter looks for room, it takes references to the dictionaries that are
// there (Pin), asks for as much room as the others need, and gives the references up if there is
// too little: reservation.Options.Sized. While it has the references, it waits for copies that
// others make in their own room, for batches in transit, permits, streams and memory of lanes, but
// not for room.
//
// The zero value is empty and ready. The mutex is held for table look-ups only: never while bytes
// are copied or memory is taken or freed.
type Dictionaries struct {
	Mu struct {
		lockrank.Mutex[lockrank.Registry]
		// Known has the arrays by which dictionaries are recognised. The pointers are weak, so it
		// keeps no array from being collected. Entries of arrays and dictionaries that are gone
		// stay until a sweep; sweep is the length at which the next one is due.
		Known map[weak.Pointer[array.Data]]identity
		sweep int
		// Made finds a dictionary by its descriptor, which is its identity for batches. It has
		// those with a descriptor that are used.
		Made map[*batch.Descriptor]*Dictionary
		// Last has the longest dictionary of each family, which the next may extend.
		Last  map[family]*Dictionary
		lines uint64 // how many there were; see Dictionary.line
		// seed makes the sums of values differ from process to process, so that nobody can prepare
		// values with equal sums. 0 means that it was not chosen yet.
		seed  uint64
		bytes map[tier.ID]int64 // charged for copies that are there
	}
}

// identity is the dictionary that an array was recognised as.
type identity struct {
	dict  *Dictionary
	print []fingerprint
}

// fingerprint is one buffer of an array, or the shape of one of the arrays in it. That an array is
// the same object is not enough to recognise a dictionary, because arrow-go can give it other
// buffers (array.Data.Reset). A weak pointer equals another one only if both are of the same
// object, also after that is gone and its address is used again.
type fingerprint struct {
	buffer      weak.Pointer[memory.Buffer]
	address     uintptr // of the bytes; means something only because the buffer is the same
	length, off int
}

// Dictionary is one dictionary, wherever its copies are. Its plan is immutable.
//
// Being made: hold has returned it, Held is above 0, and desc is nil. Nothing was laid out yet, so
// its checksums are not known. If laying out fails, letGo forgets it.
//
// Known: desc is set, and Made has it. It stays known while there is a copy, or while a caller or
// an extension holds it.
//
// Forgotten: nothing uses it, and Known and Made lose it. An array that is put again then becomes a
// new dictionary.
type Dictionary struct {
	Store     *Dictionaries
	valueType arrow.DataType
	// plan has the nodes, spans and rows: those of its own image, without what its base has.
	plan  *batch.Descriptor
	Body  int64
	Parts []*Dictionary // the dictionaries outside that it refers to, by their numbers
	// base is the one that it extends, and which it holds; see extended.go. family is where others
	// look for a base; its zero value means that the dictionary takes no part in that. sums are of
	// the buffers of the whole array, to compare longer ones with. level is that of its image in
	// its chain.
	base   *Dictionary
	family family
	sums   []xxh3.Uint128
	level  int

	// Guarded by the store's mutex. Of the dictionaries of one line, each begins with the values of all
	// shorter ones; 0: it is in none.
	line uint64

	// Guarded by the store's mutex, too. desc is set once, before the first copy can be seen, and
	// holders of a copy may read it.
	desc   *batch.Descriptor
	Held   int         // callers that hold it, and dictionaries that extend it
	Copies []*DictCopy // one a space
}

// DictCopy is a dictionary's body in one space. It is the batch.Shared of the images that use it.
//
// Being made: it is in Dictionary.Copies, and buf is nil. One caller of Acquire brings the bytes;
// others for the same space wait for ended.
//
// There: buf is set, and Refs counts the images and callers that have a reference.
//
// Gone: the last reference was released, and the copy left Copies. Its memory stays while arrays
// that were opened in it have leases.
type DictCopy struct {
	Dict  *Dictionary
	space *tier.Space
	ended chan struct{} // closed when the copy is there, or could not be made

	// Guarded by the store's mutex; buf is set once, when the copy is there, and holders of a
	// reference may read it.
	buf  *tier.Buffer // nil while it is being made
	Refs int
	// opened is the array that records in host memory share, with a reference to it and its lease;
	// nil if none was opened yet. It lets the dictionary be recognised when such a record is put.
	opened *array.Data
	base   *DictCopy // of the dictionary that it extends, with a reference

	// Of one that extends no other one, in host memory: the longest array that was assembled of a copy
	// which extends it, and is still there. See extended.go.
	whole *assembled
}

// Charged returns how many bytes the copies in a space are charged, with assembled arrays.
func (s *Dictionaries) Charged(space tier.ID) int64 {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Mu.bytes[space]
}

// fingerprints appends to to what identifies an array and all that is in it: children and
// dictionary too.
func fingerprints(d arrow.ArrayData, to []fingerprint) []fingerprint {
	if d == nil || d == arrow.ArrayData((*array.Data)(nil)) {
		return to
	}
	to = append(to, fingerprint{length: d.Len(), off: d.Offset()})
	for _, b := range d.Buffers() {
		f := fingerprint{length: -1}
		if b != nil {
			f = fingerprint{buffer: weak.Make(b), address: extent.Address(b.Bytes()), length: b.Len()}
		}
		to = append(to, f)
	}
	for _, c := range d.Children() {
		to = fingerprints(c, to)
	}
	return fingerprints(d.Dictionary(), to)
}

// Resolve returns the dictionaries of layouts, which are in the order of Layout.Dictionaries, and
// makes those that the store does not have. With renew it makes all of them, for a caller that has
// found that an array was changed (ErrChanged). Each dictionary is there once, after those that it
// uses or extends. of has for each the layouts of all arrays that it was recognised as. The caller
// must call end when it has copies of them, or does not need them any more.
func (s *Dictionaries) Resolve(
	layouts []*image.Layout, renew bool,
) (dicts []*Dictionary, of [][]*image.Layout, end func()) {
	numbered := make([]*Dictionary, len(layouts))
	seen := make(map[*Dictionary]int)
	for i, l := range layouts {
		var parts []*Dictionary
		for _, used := range l.Uses {
			parts = append(parts, numbered[used.Number])
		}
		d := s.hold(l, parts, renew)
		numbered[i] = d
		// A dictionary that extends others needs copies of these in the same space, so the whole
		// chain is returned. Their layouts read the same array.
		chain, chained := d.chain(), []*image.Layout{l}
		if d.base != nil {
			var plans []*batch.Descriptor
			for _, c := range chain {
				plans = append(plans, c.plan)
			}
			chained = l.Chain(plans)
		}
		for k, c := range chain {
			at, ok := seen[c]
			if !ok {
				at = len(dicts)
				seen[c], dicts, of = at, append(dicts, c), append(of, nil)
			}
			of[at] = append(of[at], chained[k])
		}
	}
	return dicts, of, func() { s.letGo(numbered...) }
}

// hold returns the dictionary of l, known or new, and holds it for the caller, who must let it go.
// parts are the dictionaries that l uses.
func (s *Dictionaries) hold(l *image.Layout, parts []*Dictionary, renew bool) *Dictionary {
	source, valueType := l.Source, l.ValueType
	key, print := weak.Make(source), fingerprints(source, nil)
	var made *Dictionary
	// At most two turns: comparing values with earlier dictionaries takes long, so a new one is
	// made without the lock, and then entered, unless another caller was faster.
	for {
		s.Mu.Lock()
		id, ok := s.Mu.Known[key]
		if ok && !renew && id.dict.used() && slices.Equal(id.print, print) && id.dict.is(l, valueType, parts) {
			id.dict.Held++
			s.Mu.Unlock()
			if made != nil {
				s.letGo(made) // another caller was faster
			}
			return id.dict
		}
		if made != nil {
			s.nameLocked(made, key, print)
			s.Mu.Unlock()
			return made
		}
		s.Mu.Unlock()
		of := &l.Desc
		plan := &batch.Descriptor{Rows: of.Rows, Nodes: of.Nodes, Buffers: of.Buffers, Body: of.Body, Block: of.Block}
		made = &Dictionary{Store: s, valueType: valueType, plan: plan, Body: plan.Body, Parts: parts, Held: 1}
		if len(parts) == 0 && !renew {
			s.extend(made, l)
		}
	}
}

// is reports whether a layout of l would be the image of d. The array is the same, but it may be
// used as another type, or with other dictionaries within.
func (d *Dictionary) is(l *image.Layout, valueType arrow.DataType, parts []*Dictionary) bool {
	plan, whole := &l.Desc, image.Whole(d.plan)
	return (d.base == nil || l.Growing() != nil) &&
		whole.Body == plan.Body && slices.Equal(whole.Nodes, plan.Nodes) && slices.Equal(whole.Buffers, plan.Buffers) &&
		slices.Equal(d.Parts, parts) && equal.Types(d.valueType, valueType)
}

// used reports whether anybody needs d to be known. The caller has the store's mutex.
func (d *Dictionary) used() bool { return d.Held > 0 || len(d.Copies) > 0 }

// minSweep is how many names there are at least before a sweep.
const minSweep = 8

// nameLocked makes key a name of d. When there are twice as many names as were in use at the last
// sweep, it sweeps, so each name costs a constant number of looks, however many there are.
func (s *Dictionaries) nameLocked(d *Dictionary, key weak.Pointer[array.Data], print []fingerprint) {
	if len(s.Mu.Known) >= max(s.Mu.sweep, minSweep) {
		s.sweepLocked()
	}
	if s.Mu.Known == nil {
		s.Mu.Known = make(map[weak.Pointer[array.Data]]identity)
	}
	s.Mu.Known[key] = identity{d, print}
}

// sweepLocked forgets the names of dictionaries that are forgotten, and of arrays that are gone.
func (s *Dictionaries) sweepLocked() {
	maps.DeleteFunc(s.Mu.Known, func(k weak.Pointer[array.Data], id identity) bool {
		return k.Value() == nil || !id.dict.used()
	})
	s.Mu.sweep = 2 * len(s.Mu.Known)
}

// Names returns how many arrays are recognised now.
func (s *Dictionaries) Names() int {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.sweepLocked()
	return len(s.Mu.Known)
}

// letGo ends the holding of dictionaries, and forgets those that nobody uses.
func (s *Dictionaries) letGo(dicts ...*Dictionary) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, d := range dicts {
		d.Held--
		s.forgetLocked(d)
	}
}

// forgetLocked forgets a dictionary that nobody uses, and then its base if nobody uses that any
// more.
func (s *Dictionaries) forgetLocked(d *Dictionary) {
	for ; d != nil && !d.used(); d = d.base {
		delete(s.Mu.Made, d.desc)
		if s.Mu.Last[d.family] == d {
			if s.Mu.Last[d.family] = d.base; d.base == nil {
				delete(s.Mu.Last, d.family)
			} else { // others of its line may be longer
				s.newLineLocked(d.base)
			}
		}
		if d.base != nil {
			d.base.Held--
		}
	}
}

// Of returns the dictionaries that descriptors name. For one that is gone by now it returns a
// placeholder without copies, which has the right length for a reservation.
func (s *Dictionaries) Of(descs []*batch.Descriptor) []*Dictionary {
	if len(descs) == 0 {
		return nil
	}
	out := make([]*Dictionary, len(descs))
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for i, d := range descs {
		if out[i] = s.Mu.Made[d]; out[i] == nil {
			out[i] = &Dictionary{Store: s, Body: d.Body}
		}
	}
	return out
}

// copyLocked returns the copy in a space, also one that is being made, or nil.
func (d *Dictionary) copyLocked(space *tier.Space) *DictCopy {
	for _, c := range d.Copies {
		if c.space == space {
			return c
		}
	}
	return nil
}

// Pin takes a reference to each of those dictionaries that are in a space, and returns these
// references, which the caller must release, and what the others would be charged there, in bytes.
// A copy that is being made counts as missing. Each of dicts is there once.
func (s *Dictionaries) Pin(space *tier.Space, dicts []*Dictionary) (pins []*DictCopy, missing int64) {
	var away []*Dictionary
	s.Mu.Lock()
	for _, d := range dicts {
		if c := d.copyLocked(space); c != nil && c.buf != nil {
			c.Refs++
			pins = append(pins, c)
		} else {
			away = append(away, d)
		}
	}
	s.Mu.Unlock()
	for _, d := range away {
		missing += space.Charge(d.Body)
	}
	return pins, missing
}

// ErrChanged reports that an array has other values than when it was laid out before.
var ErrChanged = errors.New("convert: a dictionary was changed while it was in use")

// Acquire returns a reference to the copy of d in a space. If there is none, it calls bring to make
// it: bring sets the memory and the descriptor of parts, and Acquire releases the memory if bring
// fails.
//
// Only one caller makes a copy at a time. The others wait for it, until ctx ends; if it fails, one
// of them tries in its turn. A caller that is making a copy does not wait for another one
// meanwhile: callers acquire dictionaries one after the other. So waiting ends. The caller must
// hold d, or a copy of it, so that it is not forgotten meanwhile.
func (s *Dictionaries) Acquire(
	ctx context.Context, d *Dictionary, space *tier.Space, bring func(parts *payload.Parts) error,
) (c *DictCopy, err error) {
	s.Mu.Lock()
	// Wait while another caller makes the copy. It may fail, so look again afterwards.
	for c = d.copyLocked(space); c != nil && c.buf == nil; c = d.copyLocked(space) {
		s.Mu.Unlock()
		select {
		case <-c.ended:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		s.Mu.Lock()
	}
	if c != nil {
		c.Refs++
		s.Mu.Unlock()
		return c, nil
	}
	c = &DictCopy{Dict: d, space: space, ended: make(chan struct{})}
	d.Copies = append(d.Copies, c)
	s.Mu.Unlock()
	lockrank.AssertNone("a dictionary is copied")
	parts := payload.Parts{Space: space}
	err = errors.New("convert: the copy of a dictionary was broken off") // by a panic
	defer func() {
		s.Mu.Lock()
		if err == nil {
			err = s.publishLocked(c, parts.Buffers[0], parts.Descriptor) // it is not empty
		}
		if err != nil {
			d.Copies = slices.DeleteFunc(d.Copies, func(o *DictCopy) bool { return o == c })
		}
		s.Mu.Unlock()
		close(c.ended)
		if err != nil {
			c, err = nil, errors.Join(err, parts.Release())
		}
	}()
	return c, bring(&parts)
}

// publishLocked makes a copy visible to others, and sets the dictionary's descriptor at its first
// copy. A later copy that was laid out from the same array must have the same checksums: if not,
// the array was changed meanwhile, and the error is ErrChanged.
func (s *Dictionaries) publishLocked(c *DictCopy, buf *tier.Buffer, desc *batch.Descriptor) error {
	d := c.Dict
	switch {
	case d.desc == nil:
		d.desc = desc
		if s.Mu.Made == nil {
			s.Mu.Made = make(map[*batch.Descriptor]*Dictionary)
		}
		s.Mu.Made[desc] = d
	case d.desc != desc &&
		(!slices.Equal(d.desc.Sums, desc.Sums) || !slices.Equal(d.desc.Dictionaries, desc.Dictionaries)):
		return ErrChanged
	}
	c.buf, c.Refs = buf, 1
	if d.base != nil { // the caller has a reference to its copy here
		c.base = d.base.copyLocked(c.space)
		c.base.Refs++
	}
	if s.Mu.bytes == nil {
		s.Mu.bytes = make(map[tier.ID]int64)
	}
	s.Mu.bytes[c.space.ID()] += buf.Charge()
	return nil
}

// Descriptor returns what the bytes mean, and which dictionary it is.
func (c *DictCopy) Descriptor() *batch.Descriptor { return c.Dict.desc }

// Buffer returns the memory. The caller must have a reference.
func (c *DictCopy) Buffer() *tier.Buffer { return c.buf }

// partsOf returns the parts of a dictionary as if it were an image of a batch, to read its bytes.
// They are borrowed: the caller must not release them.
func partsOf(s batch.Shared, space *tier.Space) *payload.Parts {
	return &payload.Parts{Descriptor: s.Descriptor(), Space: space, Buffers: []*tier.Buffer{s.Buffer()}}
}

// Release gives one reference up; the last one frees the copy, and releases that of its base. Its
// memory stays for as long as arrays that were opened in it need it. A release more than there were
// references is tier.ErrReleased.
func (c *DictCopy) Release() error {
	s := c.Dict.Store
	s.Mu.Lock()
	if c.Refs == 0 {
		s.Mu.Unlock()
		if invariants.Enabled {
			panic("convert: a dictionary was released more often than taken")
		}
		return tier.ErrReleased
	}
	c.Refs--
	last := c.Refs == 0
	var opened *array.Data
	var whole *assembled
	if last {
		c.Dict.Copies = slices.DeleteFunc(c.Dict.Copies, func(o *DictCopy) bool { return o == c })
		s.Mu.bytes[c.space.ID()] -= c.buf.Charge()
		opened, c.opened = c.opened, nil
		// The array that was assembled of this copy's chain is of use to no one else.
		if root := c.root(); root.whole != nil && root.whole.dict == c.Dict {
			whole, root.whole = root.whole, nil
			s.Mu.bytes[c.space.ID()] -= whole.charge()
		}
	}
	s.forgetLocked(c.Dict)
	s.Mu.Unlock()
	if !last {
		return nil
	}
	if opened != nil {
		opened.Release()
	}
	err := errors.Join(whole.release(), c.buf.Release())
	if c.base != nil {
		err = errors.Join(err, c.base.Release())
	}
	return err
}

// ReleaseAll gives up one reference to each.
func ReleaseAll[S batch.Shared](shared []S) error {
	var err error
	for _, c := range shared {
		err = errors.Join(err, c.Release())
	}
	return err
}

// open returns the array of a copy in host memory as type dt, and a reference to it. All that open
// it get the same array, so that it is recognised when it comes back. The caller must have a
// reference to the copy.
func (c *DictCopy) open(dt arrow.DataType, find image.Finder) (*array.Data, error) {
	s := c.Dict.Store
	s.Mu.Lock()
	opened := c.opened
	s.Mu.Unlock()
	if opened != nil && equal.Types(opened.DataType(), dt) {
		opened.Retain()
		return opened, nil
	}
	// Open it without the lock. Two goroutines may do so at the same time; the second one drops its
	// array.
	desc, extents, release, err := c.inPlace()
	if err != nil {
		return nil, err
	}
	l := image.NewLease(release)
	data, err := image.OpenDictionary(desc, dt, extents, l, find)
	if err != nil {
		l.End()
		return nil, err
	}
	l.Free(nil)
	print := fingerprints(data, nil)
	s.Mu.Lock()
	if c.opened == nil && c.base == nil { // an extension would keep memory that a longer array replaces
		data.Retain()
		c.opened = data
	} else if c.opened != nil && equal.Types(c.opened.DataType(), dt) { // another goroutine has opened it
		data, opened = c.opened, data
		data.Retain()
		s.Mu.Unlock()
		opened.Release()
		return data, nil
	}
	s.nameLocked(c.Dict, weak.Make(data), print)
	s.Mu.Unlock()
	return data, nil
}

// FinderOf returns an image.Finder that looks for dictionaries among the shared ones of an image,
// which must be in host memory. The arrays have leases of their own, so shared may be released
// afterwards.
func FinderOf(shared []batch.Shared) image.Finder {
	if len(shared) == 0 {
		return nil
	}
	copies := make(map[*batch.Descriptor]*DictCopy, len(shared))
	for _, s := range shared {
		if c, ok := s.(*DictCopy); ok {
			copies[c.Descriptor()] = c
		}
	}
	var find image.Finder
	find = func(d *batch.Descriptor, dt arrow.DataType) (*array.Data, error) {
		if c := copies[d]; c != nil {
			return c.open(dt, find)
		}
		return nil, errors.New("convert: an image without a dictionary that it needs")
	}
	return find
}

// InPlace returns the extents of a buffer in host memory, and a function that ends a lease on it. A
// nil buffer has neither bytes nor a lease.
func InPlace(buf *tier.Buffer) (extents [][]byte, release func(), err error) {
	if buf == nil {
		return nil, func() {}, nil
	}
	mem, ok := buf.Memory().(tier.HostMemory)
	if !ok {
		return nil, nil, fmt.Errorf("convert: %T cannot be opened in place", buf.Memory())
	}
	return mem.Extents(), buf.Lease(), nil
}

// AdoptDictionary makes a dictionary of one that persisted, whose bytes are in buf, and returns a
// reference. It becomes known as d, so d must be the descriptor that the batches refer to.
// AdoptDictionary takes buf over, also when it fails. The caller must have references to
// d.Dictionaries in the same space.
func (b *Builtin) AdoptDictionary(ctx context.Context, d *batch.Descriptor, buf *tier.Buffer) (batch.Shared, error) {
	s := &b.Dicts
	dict := &Dictionary{Store: s, valueType: d.Schema.Field(0).Type, plan: d, Body: d.Body, Held: 1}
	if parts := s.Of(d.Dictionaries); d.From == nil {
		dict.Parts = parts
	} else {
		s.extends(dict, parts[0])
	}
	defer s.letGo(dict)
	return s.Acquire(ctx, dict, buf.Space(), func(parts *payload.Parts) error {
		parts.Descriptor, parts.Buffers = d, []*tier.Buffer{buf}
		return nil
	})
}

// Again returns another reference to a dictionary, to which the caller has one.
func (b *Builtin) Again(shared batch.Shared) (batch.Shared, error) {
	c, ok := shared.(*DictCopy)
	if !ok {
		return nil, fmt.Errorf("convert: sharing %T: %w", shared, tier.ErrNotSupported)
	}
	b.Dicts.Mu.Lock()
	defer b.Dicts.Mu.Unlock()
	c.Refs++
	return c, nil
}
