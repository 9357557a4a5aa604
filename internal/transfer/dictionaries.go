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
// A dictionary is known while there is a copy of it, a caller that is about to make one holds it, or
// another dictionary extends it. It is recognised by the array.Data that it was laid out from, or that
// a record of Spillway's was opened with.
//
// A request for room is for a batch's body and for the dictionaries that its target lacks,
// together, so no caller has room for one of them and waits for the other. No reference is held
// during such a wait. A reference would keep a dictionary in the target while the batches that
// share it are evicted, and two waiters, each with a dictionary that the other has no use for,
// could fill a space that has room for either of them. So a dictionary may leave the target during
// the wait. Each time the waiter looks for room, it takes references to the dictionaries that are
// there (Pin), asks for as much room as the others need, and gives the references up if there is too
// little: reservation.Options.Sized. While it has the references, it waits for copies that others make in
// their own room, for batches in transit, permits, streams and memory of lanes, but not for room.
//
// The zero value is empty and ready. The mutex is held for table look-ups only:
// never while bytes are copied or memory is taken or freed.
type Dictionaries struct {
	Mu struct {
		lockrank.Mutex[lockrank.Registry]
		Known map[weak.Pointer[array.Data]]identity // a superset; see sweepLocked
		sweep int                                   // at how many names those in use are looked for
		Made  map[*batch.Descriptor]*Dictionary
		Last  map[family]*Dictionary // the longest of each family
		lines uint64                 // how many there were; see Dictionary.line
		seed  uint64                 // of the sums of values
		bytes map[tier.ID]int64      // charged for copies that are there
	}
}

// identity is the dictionary that an array was recognised as.
type identity struct {
	dict  *Dictionary
	print []fingerprint
}

// fingerprint is one buffer of an array, or the shape of one of the arrays in it.
// A weak pointer equals another one only if both are of the same object, also after
// that is gone and its address is used again. That the array is the same object is
// not enough: arrow-go can give it other buffers (array.Data.Reset).
type fingerprint struct {
	buffer      weak.Pointer[memory.Buffer]
	address     uintptr // of the bytes; means something only because the buffer is the same
	length, off int
}

// Dictionary is one dictionary, wherever it is. Its plan is immutable.
type Dictionary struct {
	Store     *Dictionaries
	valueType arrow.DataType
	plan      *batch.Descriptor // the nodes, spans and rows
	Body      int64
	Parts     []*Dictionary // the dictionaries outside that it refers to, by their numbers
	base      *Dictionary   // the one that it extends, which it holds; see extended.go
	family    family        // zero: it extends no other one, and no other one extends it
	sums      []xxh3.Uint128
	level     int

	// Guarded by the store's mutex. Of the dictionaries of one line, each begins with the values of all
	// shorter ones; 0: it is in none.
	line uint64

	// Guarded by the store's mutex, too. desc is set once, before the first copy can be seen, and
	// holders of a copy may read it.
	desc   *batch.Descriptor
	Held   int         // callers that hold it, and dictionaries that extend it
	Copies []*DictCopy // one a space
}

// DictCopy is a dictionary's body in one space. It is the batch.Shared of the
// images that use it.
type DictCopy struct {
	Dict  *Dictionary
	space *tier.Space
	ended chan struct{} // closed when the copy is there, or could not be made

	// Guarded by the store's mutex; buf is set once, when the copy is there, and holders of a
	// reference may read it.
	buf    *tier.Buffer // nil while it is being made
	Refs   int
	opened *array.Data // that records in host memory share, with a reference and its lease; nil: none was
	base   *DictCopy   // of the dictionary that it extends, with a reference

	// Of one that extends no other one, in host memory: the longest array that was assembled of a copy
	// which extends it, and is still there. See extended.go.
	whole *assembled
}

// Charged returns what the copies in a space are charged.
func (s *Dictionaries) Charged(space tier.ID) int64 {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Mu.bytes[space]
}

// fingerprints describes an array and all that is in it.
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
// makes those that the store does not have. With renew it makes all of them. Each is there once, after
// those that it uses or extends, with the layouts of all arrays that it was recognised as. The caller
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

// hold returns the dictionary of l, which the caller holds then.
func (s *Dictionaries) hold(l *image.Layout, parts []*Dictionary, renew bool) *Dictionary {
	source, valueType := l.Source, l.ValueType
	key, print := weak.Make(source), fingerprints(source, nil)
	var made *Dictionary
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

// is reports whether l is the plan of d.
func (d *Dictionary) is(l *image.Layout, valueType arrow.DataType, parts []*Dictionary) bool {
	plan, whole := &l.Desc, image.Whole(d.plan)
	return (d.base == nil || l.Growing() != nil) &&
		whole.Body == plan.Body && slices.Equal(whole.Nodes, plan.Nodes) && slices.Equal(whole.Buffers, plan.Buffers) &&
		slices.Equal(d.Parts, parts) && equal.Types(d.valueType, valueType)
}

// used reports whether anybody needs d to be known. The caller has the store's mutex.
func (d *Dictionary) used() bool { return d.Held > 0 || len(d.Copies) > 0 }

// leastSweep is how many names there may be before any is looked at.
const minSweep = 8

// nameLocked makes key a name of d. When there are twice as many names as were in use the last time, it
// forgets the others: so each costs a look or two, however many there are.
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

// letGo ends the holding of dictionaries.
func (s *Dictionaries) letGo(dicts ...*Dictionary) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, d := range dicts {
		d.Held--
		s.forgetLocked(d)
	}
}

// forgetLocked forgets a dictionary that nobody uses, and then perhaps its base.
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

// Of returns the dictionaries that descriptors name. One that is gone by now is
// returned as one without copies.
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

func (d *Dictionary) copyLocked(space *tier.Space) *DictCopy {
	for _, c := range d.Copies {
		if c.space == space {
			return c
		}
	}
	return nil
}

// Pin takes a reference to those dictionaries that are in a space, and returns them and what the
// others would be charged there. Each of dicts is there once.
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

// Acquire returns a reference to the copy of d in a space. If there is none, bring makes it: it sets the
// memory and the descriptor of parts. Acquire releases the memory if bring fails. Only one caller
// makes a copy at a time. The others wait for it, and one of them tries in its turn if it fails. A
// caller that makes a copy waits for no other that does, so this ends. The caller holds d, or a
// copy of it.
func (s *Dictionaries) Acquire(
	ctx context.Context, d *Dictionary, space *tier.Space, bring func(parts *payload.Parts) error,
) (c *DictCopy, err error) {
	s.Mu.Lock()
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

// publishLocked lets others see a copy.
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

// Buffer returns the bytes.
func (c *DictCopy) Buffer() *tier.Buffer { return c.buf }

// partsOf returns what an image of a dictionary alone is made of.
func partsOf(s batch.Shared, space *tier.Space) *payload.Parts {
	return &payload.Parts{Descriptor: s.Descriptor(), Space: space, Buffers: []*tier.Buffer{s.Buffer()}}
}

// Release gives one reference up; the last one frees the copy, and releases that of its base. Its
// memory stays for as long as arrays that were opened in it need it.
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

// open returns the array of a copy in host memory, and a reference to it. All that open it get the same
// array, so that it is recognised when it comes back. The caller has a reference to the copy.
func (c *DictCopy) open(dt arrow.DataType, find image.Finder) (*array.Data, error) {
	s := c.Dict.Store
	s.Mu.Lock()
	opened := c.opened
	s.Mu.Unlock()
	if opened != nil && equal.Types(opened.DataType(), dt) {
		opened.Retain()
		return opened, nil
	}
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

// FinderOf looks for opened dictionaries among the shared ones of an image.
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

// InPlace returns the extents of a buffer in host memory and the end of a lease
// on it.
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

// AdoptDictionary makes an image of a dictionary that was kept, whose bytes are in buf,
// Known as d, and returns a reference. It takes buf over, also when it fails. The caller
// has references to d.Dictionaries in the same space.
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
