package convert

import (
	"context"
	"errors"
	"slices"
	"weak"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/tier"
)

// dictionaries is the store of the dictionaries that are images of their own. A
// dictionary has at most one copy in a space, which the batches there share: each
// of their images holds a reference, and the last one to go frees the copy.
//
//	batch.Image ──▶ dictCopy (GPU) ──▶ dictionary ◀── identity ◀── *array.Data, weakly
//	batch.Image ──▶ dictCopy (disk) ──┘
//
// A dictionary is known for as long as a copy of it has a reference, or somebody
// who is about to make one holds it. It is recognised by the array.Data that it was
// laid out from, or that a record of Spillway's was opened with.
//
// The zero value is empty and ready. The mutex is held for table look-ups only:
// never while bytes are copied or memory is taken or freed.
type dictionaries struct {
	mu struct {
		lockrank.Mutex[lockrank.Registry]
		known  map[weak.Pointer[array.Data]]identity
		made   map[*batch.Descriptor]*dictionary
		bytes  map[tier.ID]int64 // charged for copies that are there
		yields int               // of the mutex; tests count them
	}
}

// identity says which dictionary an array is.
type identity struct {
	dict  *dictionary
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

// dictionary is one dictionary, wherever it lies. Its plan is immutable.
type dictionary struct {
	store     *dictionaries
	valueType arrow.DataType
	nodes     []batch.Node
	spans     []batch.Span
	body      int64
	parts     []*dictionary // the dictionaries outside that it refers to, by their numbers

	// Guarded by the store's mutex. desc is set once, before the first copy can
	// be seen, and may be read by whoever has a copy.
	desc   *batch.Descriptor
	users  int // references of all copies, and who holds the dictionary itself
	keys   []weak.Pointer[array.Data]
	sweep  int         // at how many keys those whose arrays are gone are looked for
	copies []*dictCopy // one a space
}

// dictCopy is a dictionary's body in one space. It is the batch.Shared of the
// images that use it.
type dictCopy struct {
	dict  *dictionary
	space *tier.Space
	ended chan struct{} // closed when the copy is there, or could not be made

	// Guarded by the store's mutex; buf is set once, when the copy is there, and
	// may be read by whoever has a reference.
	buf    *tier.Buffer // nil while it is being made
	refs   int
	opened []typedArray // the arrays that records in host memory share, each with a reference and its lease
}

// typedArray is an array as one of the types that a dictionary is used as.
type typedArray struct {
	dt   arrow.DataType
	data *array.Data
}

// charged returns what the copies in a space are charged.
func (s *dictionaries) charged(space tier.ID) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.bytes[space]
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
			f = fingerprint{buffer: weak.Make(b), address: addressOf(b.Bytes()), length: b.Len()}
		}
		to = append(to, f)
	}
	for _, c := range d.Children() {
		to = fingerprints(c, to)
	}
	return fingerprints(d.Dictionary(), to)
}

// resolve finds or makes the dictionary of each of the layouts, which are in the
// order of Layout.Dictionaries. afresh makes new ones of those that are known. All
// are held, until letGo.
func (s *dictionaries) resolve(layouts []*image.Layout, afresh bool) []*dictionary {
	if len(layouts) == 0 {
		return nil
	}
	out := make([]*dictionary, len(layouts))
	for i, l := range layouts {
		var parts []*dictionary
		for _, number := range l.Used() {
			parts = append(parts, out[number])
		}
		out[i] = s.hold(l, parts, afresh)
	}
	return out
}

func (s *dictionaries) hold(l *image.Layout, parts []*dictionary, afresh bool) *dictionary {
	source, valueType := l.Dictionary()
	plan := l.Plan()
	key, print := weak.Make(source), fingerprints(source, nil)
	var other *dictionary // what the array was, and is not any more
	for {
		s.mu.Lock()
		id, ok := s.mu.known[key]
		if !ok || id.dict == other {
			d := &dictionary{
				store: s, valueType: valueType, parts: parts, users: 1,
				nodes: plan.Nodes, spans: plan.Buffers, body: plan.Body,
			}
			s.nameLocked(d, key, print)
			s.mu.Unlock()
			return d
		}
		id.dict.users++
		s.mu.Unlock()
		if !afresh && slices.Equal(id.print, print) && id.dict.is(l, valueType, parts) {
			return id.dict
		}
		other = id.dict
		s.letGo(id.dict)
	}
}

// is says whether l is the plan of d.
func (d *dictionary) is(l *image.Layout, valueType arrow.DataType, parts []*dictionary) bool {
	plan := l.Plan()
	return d.body == plan.Body && slices.Equal(d.nodes, plan.Nodes) && slices.Equal(d.spans, plan.Buffers) &&
		slices.Equal(d.parts, parts) && equal.Types(d.valueType, valueType)
}

// leastSweep is how many names of one dictionary there may be before any is looked at.
const leastSweep = 8

// nameLocked makes key a name of d. When there are twice as many names as were in use the last
// time, it forgets those whose arrays are gone: so each costs a look or two, however many there are.
func (s *dictionaries) nameLocked(d *dictionary, key weak.Pointer[array.Data], print []fingerprint) {
	if len(d.keys) >= max(d.sweep, leastSweep) {
		d.keys = slices.DeleteFunc(d.keys, func(k weak.Pointer[array.Data]) bool {
			if k.Value() != nil {
				return false
			}
			s.unnameLocked(d, k)
			return true
		})
		d.sweep = 2 * len(d.keys)
	}
	d.keys = append(d.keys, key)
	if s.mu.known == nil {
		s.mu.known = make(map[weak.Pointer[array.Data]]identity)
	}
	s.mu.known[key] = identity{d, print}
}

func (s *dictionaries) unnameLocked(d *dictionary, key weak.Pointer[array.Data]) {
	if s.mu.known[key].dict == d {
		delete(s.mu.known, key)
	}
}

// distinct returns each of dicts once.
func distinct(dicts []*dictionary) []*dictionary {
	if len(dicts) < 2 {
		return dicts
	}
	var seen lookup.Table[*dictionary]
	var once []*dictionary
	for i, d := range dicts {
		if seen.Of(dicts, d) == i {
			once = append(once, d)
		}
	}
	return once
}

// underLock is for how many dictionaries the mutex is held at a time: some 10 µs.
const underLock = 128

// yieldLocked is called for each of many dictionaries, from number 0 on. Now and then it lets
// others have the mutex, so that a batch of many does not hold the others up.
func (s *dictionaries) yieldLocked(i int) {
	if i == 0 || i%underLock != 0 {
		return
	}
	s.mu.yields++
	s.mu.Unlock()
	s.mu.Lock()
}

// letGo ends the holding of dictionaries.
func (s *dictionaries) letGo(dicts ...*dictionary) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, d := range dicts {
		s.yieldLocked(i)
		s.leaveLocked(d)
	}
}

// leaveLocked takes a user away; nobody knows the dictionary after the last.
func (s *dictionaries) leaveLocked(d *dictionary) {
	if d.users--; d.users > 0 {
		return
	}
	for _, k := range d.keys {
		s.unnameLocked(d, k)
	}
	d.keys = nil
	delete(s.mu.made, d.desc)
}

// of returns the dictionaries that descriptors name. One that is gone by now is
// returned as one without copies.
func (s *dictionaries) of(descs []*batch.Descriptor) []*dictionary {
	if len(descs) == 0 {
		return nil
	}
	out := make([]*dictionary, len(descs))
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, d := range descs {
		s.yieldLocked(i)
		if out[i] = s.mu.made[d]; out[i] == nil {
			out[i] = &dictionary{store: s, body: d.Body}
		}
	}
	return out
}

func (d *dictionary) copyLocked(space *tier.Space) *dictCopy {
	for _, c := range d.copies {
		if c.space == space {
			return c
		}
	}
	return nil
}

// missing returns what the dictionaries that are not in a space would be charged
// there.
func (s *dictionaries) missing(space *tier.Space, dicts []*dictionary) int64 {
	_, missing := s.look(space, dicts, false)
	return missing
}

// pin takes a reference to those that are in a space, and returns them and what
// the others would be charged there.
func (s *dictionaries) pin(space *tier.Space, dicts []*dictionary) (pins []*dictCopy, missing int64) {
	return s.look(space, dicts, true)
}

// look is pin, or missing without it. Each of dicts is there once.
func (s *dictionaries) look(space *tier.Space, dicts []*dictionary, pin bool) (pins []*dictCopy, missing int64) {
	var away []*dictionary
	s.mu.Lock()
	for i, d := range dicts {
		s.yieldLocked(i)
		switch c := d.copyLocked(space); {
		case c == nil || c.buf == nil:
			away = append(away, d)
		case pin:
			c.refs++
			d.users++
			pins = append(pins, c)
		}
	}
	s.mu.Unlock()
	for _, d := range away {
		missing += space.Charge(d.body)
	}
	return pins, missing
}

// errChanged: what an array says is not what it said when it was laid out before.
var errChanged = errors.New("convert: a dictionary was changed while it was in use")

// acquire returns a reference to the copy of d in a space. If there is none, bring
// makes it: it returns the body's memory and the descriptor, or an error and has
// taken nothing. Only one does so at a time; the others wait for it, and one of
// them tries in its turn if it fails. Who makes a copy waits for nobody else who
// does, so that this ends. d is held by the caller, or a copy of it is.
func (s *dictionaries) acquire(ctx context.Context, d *dictionary, space *tier.Space,
	bring func() (*tier.Buffer, *batch.Descriptor, error)) (*dictCopy, error) {
	for {
		s.mu.Lock()
		c := d.copyLocked(space)
		switch {
		case c == nil:
			c = newCopy(d, space)
			d.copies = append(d.copies, c)
			s.mu.Unlock()
			return c, s.finish(c, bring)
		case c.buf != nil:
			c.refs++
			d.users++
			s.mu.Unlock()
			return c, nil
		}
		s.mu.Unlock()
		select {
		case <-c.ended:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func newCopy(d *dictionary, space *tier.Space) *dictCopy {
	return &dictCopy{dict: d, space: space, ended: make(chan struct{})}
}

// finish makes what acquire has announced. Also a panic ends the announcement.
func (s *dictionaries) finish(c *dictCopy, bring func() (*tier.Buffer, *batch.Descriptor, error)) (err error) {
	lockrank.AssertNone("a dictionary is copied")
	var buf *tier.Buffer
	var desc *batch.Descriptor
	err = errors.New("convert: the copy of a dictionary was broken off")
	defer func() {
		s.mu.Lock()
		if err == nil {
			err = s.publishLocked(c, buf, desc)
		}
		if err != nil {
			c.dict.copies = slices.DeleteFunc(c.dict.copies, func(o *dictCopy) bool { return o == c })
		}
		s.mu.Unlock()
		close(c.ended)
		if err != nil {
			err = errors.Join(err, buf.Release())
		}
	}()
	buf, desc, err = bring()
	return err
}

// publishLocked lets others see a copy.
func (s *dictionaries) publishLocked(c *dictCopy, buf *tier.Buffer, desc *batch.Descriptor) error {
	d := c.dict
	switch {
	case d.desc == nil:
		d.desc = desc
		if s.mu.made == nil {
			s.mu.made = make(map[*batch.Descriptor]*dictionary)
		}
		s.mu.made[desc] = d
	case d.desc != desc && (!slices.Equal(d.desc.Sums, desc.Sums) || !slices.Equal(d.desc.Dictionaries, desc.Dictionaries)):
		return errChanged
	}
	c.buf, c.refs = buf, 1
	d.users++
	if s.mu.bytes == nil {
		s.mu.bytes = make(map[tier.ID]int64)
	}
	s.mu.bytes[c.space.ID()] += buf.Charge()
	return nil
}

// Descriptor returns what the bytes mean, and which dictionary it is.
func (c *dictCopy) Descriptor() *batch.Descriptor { return c.dict.desc }

// Buffer returns the bytes.
func (c *dictCopy) Buffer() *tier.Buffer { return c.buf }

// Release gives one reference up; the last one frees the copy. Its memory stays
// for as long as arrays that were opened in it need it.
func (c *dictCopy) Release() error {
	s := c.dict.store
	s.mu.Lock()
	if c.refs == 0 {
		s.mu.Unlock()
		if invariants.Enabled {
			panic("convert: a dictionary was released more often than taken")
		}
		return tier.ErrReleased
	}
	var opened []typedArray
	last := false
	if c.refs--; c.refs == 0 {
		last = true
		c.dict.copies = slices.DeleteFunc(c.dict.copies, func(o *dictCopy) bool { return o == c })
		s.mu.bytes[c.space.ID()] -= c.buf.Charge()
		opened, c.opened = c.opened, nil
	}
	s.leaveLocked(c.dict)
	s.mu.Unlock()
	if !last {
		return nil
	}
	for _, o := range opened {
		o.data.Release()
	}
	return c.buf.Release()
}

// releaseAll gives up one reference to each.
func releaseAll[S batch.Shared](shared []S) error {
	var err error
	for _, c := range shared {
		err = errors.Join(err, c.Release())
	}
	return err
}

// open returns the array of a copy in host memory, and a reference to it. All who
// open it as the same type get the same array, so that it is recognised when it
// comes back. The caller has a reference to the copy.
func (c *dictCopy) open(dt arrow.DataType, find image.Finder) (*array.Data, error) {
	s := c.dict.store
	for {
		s.mu.Lock()
		opened := c.opened // only ever appended to while there is a reference
		s.mu.Unlock()
		for _, o := range opened {
			if equal.Types(o.dt, dt) {
				o.data.Retain()
				return o.data, nil
			}
		}
		extents, release, err := inPlace(c.buf)
		if err != nil {
			return nil, err
		}
		l := image.NewLease(release)
		data, err := image.OpenDictionary(c.dict.desc, dt, extents, l, find)
		if err != nil {
			l.End()
			return nil, err
		}
		l.Free(nil)
		print := fingerprints(data, nil)
		s.mu.Lock()
		if len(c.opened) == len(opened) {
			data.Retain()
			c.opened = append(c.opened, typedArray{dt, data})
			s.nameLocked(c.dict, weak.Make(data), print)
			s.mu.Unlock()
			return data, nil
		}
		s.mu.Unlock()
		data.Release() // somebody else has opened it
	}
}

// finderOf looks for opened dictionaries among the shared ones of an image.
func finderOf(shared []batch.Shared) image.Finder {
	if len(shared) == 0 {
		return nil
	}
	var s struct { // one piece of memory for both
		find image.Finder
		at   lookup.Table[*batch.Descriptor]
	}
	s.find = func(d *batch.Descriptor, dt arrow.DataType) (*array.Data, error) {
		i := s.at.Find(len(shared), func(i int) *batch.Descriptor { return shared[i].Descriptor() }, d)
		if i >= 0 {
			if c, ok := shared[i].(*dictCopy); ok {
				return c.open(dt, s.find)
			}
		}
		return nil, errors.New("convert: an image without a dictionary that it needs")
	}
	return s.find
}

// inPlace returns the extents of a buffer in host memory and the end of a lease
// on it.
func inPlace(buf *tier.Buffer) (extents [][]byte, release func(), err error) {
	if buf == nil {
		return nil, func() {}, nil
	}
	mem, ok := buf.Memory().(tier.HostMemory)
	if !ok {
		return nil, nil, errNotInPlace(buf.Memory())
	}
	return mem.Extents(), buf.Lease(), nil
}
