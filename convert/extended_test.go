package convert

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// growing are the types of dictionaries that can extend others, and one that cannot.
var growing = []struct {
	name   string
	dt     arrow.DataType
	whole  bool // each is an image of its own
	append func(b array.Builder, i int)
}{
	{name: "utf8", dt: arrow.BinaryTypes.String, append: func(b array.Builder, i int) {
		b.(*array.StringBuilder).Append(fmt.Sprintf("value %d, which is rather long, and longer", i))
	}},
	{name: "large binary", dt: arrow.BinaryTypes.LargeBinary, append: func(b array.Builder, i int) {
		b.(*array.BinaryBuilder).Append(fmt.Appendf(nil, "value %d%*s", i, i%17, ""))
	}},
	{name: "int64", dt: arrow.PrimitiveTypes.Int64, append: func(b array.Builder, i int) {
		b.(*array.Int64Builder).Append(int64(i) * 7)
	}},
	{name: "fixed", dt: &arrow.FixedSizeBinaryType{ByteWidth: 11}, append: func(b array.Builder, i int) {
		b.(*array.FixedSizeBinaryBuilder).Append(fmt.Appendf(nil, "%011d", i))
	}},
	{name: "views", dt: arrow.BinaryTypes.StringView, whole: true, append: func(b array.Builder, i int) {
		b.(*array.StringViewBuilder).AppendString(fmt.Sprintf("value %d, which is rather long", i))
	}},
}

// values makes an array of n values, of which those are null whose number nulls divides; 0: none.
// Values from the number other on are others.
func values(dt arrow.DataType, add func(array.Builder, int), n, nulls, other int) arrow.Array {
	b := array.NewBuilder(memory.DefaultAllocator, dt)
	defer b.Release()
	for i := range n {
		switch {
		case nulls > 0 && i%nulls == nulls-1:
			b.AppendNull()
		case i >= other:
			add(b, i+1_000_000)
		default:
			add(b, i)
		}
	}
	return b.NewArray()
}

// grown makes a record whose dictionary has the first n of some strings.
func grown(n int) arrow.RecordBatch { return codedBy(grownStrings(n), 0, 10) }

func grownStrings(n int) arrow.Array { return values(growing[0].dt, growing[0].append, n, 0, n) }

// TestDeltas: of the dictionaries of a stream, each longer than the one before, each space stores
// and is written the common values about once. All batches are the same as if they had a dictionary
// of their own each.
func TestDeltas(t *testing.T) {
	const step = 37
	batches := testseed.Rounds(120, 20)
	for _, c := range growing {
		for _, nulls := range []int{0, 13} {
			t.Run(fmt.Sprintf("%s/nulls=%d", c.name, nulls), func(t *testing.T) {
				m := newMachine(t, machineConfig{gpu: 64 << 20, host: 64 << 20, disk: 64 << 20})
				var all []*batch.Batch
				alone, longest := int64(0), int64(0)
				for i := range batches {
					rec := codedBy(values(c.dt, c.append, 1000+i*step, nulls, 1<<30), 0, step)
					l, err := image.NewLayout(rec, image.MaxInline)
					if err != nil {
						t.Fatal(err)
					}
					longest = l.Dictionaries[0].Desc.Body
					alone += longest
					l.Close()
					all = append(all, m.make(t, rec, tier.GPU))
				}
				// Each batch needs a page of its own, and a value may be there once for each level.
				most := 3*longest + int64(batches)*tier.Page
				check := func(k tier.Kind) {
					t.Helper()
					n := m.mover.DictionaryBytes(tier.ID{Kind: k})
					if c.whole != (n >= alone) || !c.whole && n > most {
						t.Errorf("%d bytes of dictionaries in %s, want %d at most; alone they are %d", n, k, most, alone)
					}
				}
				check(tier.GPU)
				for _, k := range []tier.Kind{tier.Disk, tier.Host, tier.GPU} {
					for i := range all {
						m.move(t, all[i], k)
					}
					check(k)
					for _, i := range []int{0, batches / 2, batches - 1, 7} {
						if err := m.sameDigest(t, all[i]); err != nil {
							t.Errorf("batch %d in %s: %v", i, k, err)
						}
					}
				}
				for i := range all {
					if err := m.same(t.Context(), all[(i*7)%batches]); err != nil {
						t.Errorf("batch %d: %v", (i*7)%batches, err)
					}
				}
				if n := len(all[batches-1].Info().Descriptor.AllDictionaries()); c.whole != (n == 1) || n > 40 {
					t.Errorf("the last batch needs %d dictionaries", n)
				}
				drop(t, all...)
			})
		}
	}
}

// TestDigestOfABaseThatIsUsed: the digest does not depend on which dictionaries of a record extend which.
func TestDigestOfABaseThatIsUsed(t *testing.T) {
	m := newMachine(t, machineConfig{})
	short, long := grown(600), grown(900)
	fields := []arrow.Field{long.Schema().Field(0), short.Schema().Field(0)}
	both := array.NewRecordBatch(arrow.NewSchema(fields, nil), []arrow.Array{long.Column(0), short.Column(0)}, 10)
	all := []*batch.Batch{m.make(t, short, tier.Host), m.make(t, both, tier.Host)}
	if d := all[1].Info().Descriptor; d.AllDictionaries()[0] != d.Dictionaries[1] {
		t.Fatal("the first dictionary does not extend the second one: the test shows nothing")
	}
	for _, k := range tier.Kinds() {
		m.move(t, all[1], k)
		if err := m.sameDigest(t, all[1]); err != nil {
			t.Errorf("in %s: %v", k, err)
		}
	}
	drop(t, all...)
}

// TestDeltaStream: the dictionaries of arrow-go's reader extend each other. In host memory the array
// that all are slices of is there once, and charged.
func TestDeltaStream(t *testing.T) {
	m := newMachine(t, machineConfig{})
	var stream bytes.Buffer
	var all []*batch.Batch
	var wants []arrow.RecordBatch
	w := ipc.NewWriter(&stream, ipc.WithSchema(grown(300).Schema()), ipc.WithDictionaryDeltas(true))
	for i := range 50 {
		wants = append(wants, grown(300+10*i))
		if err := w.Write(wants[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := ipc.NewReader(&stream)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	for r.Next() {
		all = append(all, m.make(t, r.RecordBatch(), tier.Host))
		m.records[all[len(all)-1].ID()] = wants[len(all)-1]
	}
	if err := r.Err(); err != nil || len(all) != len(wants) {
		t.Fatalf("%d batches, %v", len(all), err)
	}
	segments := m.mover.DictionaryBytes(tier.ID{Kind: tier.Host})
	m.holds(t, tier.Host, segments, all...)
	var opened []arrow.RecordBatch
	for i := range all {
		opened = append(opened, m.record(t, all[i]))
	}
	first := m.records[all[len(all)-1].ID()]
	l, err := image.NewLayout(first, image.MaxInline)
	if err != nil {
		t.Fatal(err)
	}
	whole := m.spaces[tier.Host].Charge(l.Dictionaries[0].Desc.Body)
	l.Close()
	m.holds(t, tier.Host, segments+whole, all...)
	for i, rec := range opened {
		if err := equal.Records(wants[i], rec); err != nil {
			t.Errorf("batch %d: %v", i, err)
		}
	}
	// The store recognises the array of an opened record when the record is put again.
	again := m.make(t, opened[20], tier.Host)
	if shared(again) != shared(all[20]) {
		t.Error("an opened dictionary was not recognised")
	}
	drop(t, again)
	drop(t, all...)
	if n := m.mover.DictionaryBytes(tier.ID{Kind: tier.Host}); n != 0 {
		t.Errorf("%d bytes of dictionaries where no batch is", n)
	}
	if err := equal.Records(wants[30], opened[30]); err != nil {
		t.Error(err)
	}
	for _, rec := range opened {
		rec.Release()
	}
	m.holds(t, tier.Host, 0)
}

// TestFullHostOpensExtensions: a record is opened also where there is no room for its dictionary in
// one piece. The memory is Go's then, and charged beyond the limit.
func TestFullHostOpensExtensions(t *testing.T) {
	m := newMachine(t, machineConfig{})
	var all []*batch.Batch
	for i := range 6 {
		all = append(all, m.make(t, grown(300+200*i), tier.Host))
	}
	host := m.spaces[tier.Host]
	if err := host.SetLimit(host.State().Used()); err != nil {
		t.Fatal(err)
	}
	rec := m.record(t, all[5])
	if err := equal.Records(m.records[all[5].ID()], rec); err != nil {
		t.Error(err)
	}
	if host.State().Used() <= host.State().Limit {
		t.Errorf("%d bytes are charged, of which %d may be", host.State().Used(), host.State().Limit)
	}
	rec.Release()
	drop(t, all[1:]...)
	m.holds(t, tier.Host, m.spaces[tier.Host].Charge(shared(all[0]).Body), all[0])

	// And where not even the capacity has room.
	b := m.make(t, m.records[all[5].ID()], tier.Disk)
	err := host.SetLimit(host.Capacity)
	if err = errors.Join(err, m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Host))); err != nil {
		t.Fatal(err)
	}
	rest, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Host), host.State().Available, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.same(t.Context(), b); err != nil {
		t.Error(err)
	}
	if err := rest.Release(); err != nil {
		t.Fatal(err)
	}
	drop(t, all[0], b)
	m.holds(t, tier.Host, 0)
}

// TestExtensionsAtRandom puts dictionaries of random lengths in random order, some of which have
// other values or nulls from some number on, on several goroutines. It moves, opens and drops the
// batches, and cancels moves.
func TestExtensionsAtRandom(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(6, 4)) {
		c := growing[seed%4]
		m := newMachine(t, machineConfig{gpu: 1 << 20, host: 64 << 20, disk: 64 << 20})
		var wg sync.WaitGroup
		for w := range 4 {
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			wg.Go(func() {
				var mine []*batch.Batch
				records := make(map[*batch.Batch]arrow.RecordBatch)
				fail := func(err error) {
					if err != nil && !errors.Is(err, tier.ErrNoSpace) && !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
				}
				for range 60 {
					k := tier.Kinds()[rng.IntN(3)]
					if len(mine) == 0 || rng.IntN(3) == 0 {
						n, other, nulls := 600+rng.IntN(900), 1<<30, 0
						if rng.IntN(4) == 0 {
							other = rng.IntN(n)
						}
						if seed%2 == 1 {
							nulls = 9 + rng.IntN(2)
						}
						rec := codedBy(values(c.dt, c.append, n, nulls, other), 0, 10)
						p, err := m.mover.TryIngest(t.Context(), rec, reservation.AnyInTier(k))
						if err != nil {
							fail(err)
							continue
						}
						b, err := batch.New(batch.Options{IDs: &m.ids, Payload: p})
						if err != nil {
							t.Error(err)
							return
						}
						mine, records[b] = append(mine, b), rec
						continue
					}
					i := rng.IntN(len(mine))
					b := mine[i]
					switch rng.IntN(5) {
					case 0:
						fail(b.Drop())
						mine = append(mine[:i], mine[i+1:]...)
					case 1, 2:
						ctx, cancel := context.WithCancel(t.Context())
						if rng.IntN(4) == 0 {
							go cancel()
						}
						fail(evictOne(ctx, m.mover, b, tier.ID{Kind: k}, "test"))
						cancel()
					default:
						h, err := m.mover.Acquire(t.Context(), b, reservation.Specific(b.Info().Space))
						if err != nil {
							fail(err)
							continue
						}
						rec, err := m.mover.Columns(t.Context(), h, image.Selection{})
						fail(err)
						if err == nil {
							fail(equal.Records(records[b], rec))
							rec.Release()
						}
						got, err := m.mover.Digest(t.Context(), h)
						if want := heapDigest(t, records[b]); err == nil && got != want {
							err = fmt.Errorf("the digest is %x, want %x", got, want)
						}
						fail(errors.Join(err, h.Close()))
					}
				}
				drop(t, mine...)
			})
		}
		wg.Wait()
		for _, s := range m.spaces {
			m.holds(t, s.Kind(), 0)
		}
		if t.Failed() {
			return
		}
	}
}

// TestBaseLaidOutFromALongerArray: the image of a base does not have the bits of the values that follow, so
// it is the same when it is laid out of a longer array in another space.
func TestBaseLaidOutFromALongerArray(t *testing.T) {
	m := newMachine(t, machineConfig{})
	put := func(n int, k tier.Kind) *batch.Batch {
		return m.make(t, codedBy(values(growing[0].dt, growing[0].append, n, 13, n), 0, 10), k)
	}
	short, long := put(603, tier.Host), put(911, tier.GPU)
	if all := long.Info().Descriptor.AllDictionaries(); len(all) != 2 || all[0] != shared(short) {
		t.Errorf("the dictionaries are %v, want that of the first batch and one more", all)
	}
	for _, b := range []*batch.Batch{short, long} {
		if err := m.same(t.Context(), b); err != nil {
			t.Error(err)
		}
	}
	drop(t, short, long)
}

// TestFirstNullOfALongerDictionary: a dictionary with nulls does not extend one that has no validity,
// whose values fill whole bytes of one.
func TestFirstNullOfALongerDictionary(t *testing.T) {
	m := newMachine(t, machineConfig{})
	put := func(n, nulls int) *batch.Batch {
		return m.make(t, codedBy(values(growing[0].dt, growing[0].append, n, nulls, n), 0, 10), tier.Host)
	}
	short, long := put(640, 0), put(900, 700)
	for i, b := range []*batch.Batch{long, short} {
		if err := m.same(t.Context(), b); err != nil {
			t.Errorf("batch %d: %v", i, err)
		}
	}
	drop(t, short, long)
}

// TestNullBecomesValue: a value may be null in one dictionary and not in a longer one, with the same
// bytes in all buffers but the validity, whose last byte is not complete in the shorter one.
func TestNullBecomesValue(t *testing.T) {
	m := newMachine(t, machineConfig{})
	numbers := func(n int, null int) arrow.Array {
		b := array.NewInt64Builder(memory.DefaultAllocator)
		defer b.Release()
		for i := range n {
			switch {
			case i == 5 || i == null:
				b.AppendNull()
			case i == 1000:
				b.Append(0)
			default:
				b.Append(int64(i))
			}
		}
		return b.NewArray()
	}
	var all []*batch.Batch
	for _, dict := range []arrow.Array{numbers(900, 5), numbers(1001, 1000), numbers(1700, 5)} {
		all = append(all, m.make(t, codedBy(dict, 0, 10), tier.Host))
	}
	if n := len(all[2].Info().Descriptor.AllDictionaries()); n != 2 {
		t.Fatalf("the last batch needs %d dictionaries: want its own and the first", n)
	}
	for _, i := range []int{2, 1, 0, 2} {
		if err := m.same(t.Context(), all[i]); err != nil {
			t.Errorf("batch %d: %v", i, err)
		}
	}
	drop(t, all...)
	m.holds(t, tier.Host, 0)
}

// TestChangedExtension: bytes of an extension's base that a program has changed, against Arrow's
// rules, are found when they are laid out again. The dictionary is then another one, which is whole.
func TestChangedExtension(t *testing.T) {
	m := newMachine(t, machineConfig{})
	long := grownStrings(900)
	a, b := m.make(t, grown(600), tier.GPU), m.make(t, codedBy(long, 0, 10), tier.GPU)
	if n := len(b.Info().Descriptor.AllDictionaries()); n != 2 {
		t.Fatalf("the batch needs %d dictionaries: the test shows nothing", n)
	}
	copy(long.Data().Buffers()[2].Bytes(), "other")
	d := m.make(t, codedBy(long, 0, 900), tier.Host)
	if shared(d) == shared(b) || len(d.Info().Descriptor.AllDictionaries()) != 1 {
		t.Error("an array with other bytes was taken for the dictionary that it was")
	}
	for _, k := range []tier.Kind{tier.Disk, tier.GPU, tier.Host} {
		m.move(t, d, k)
		if err := m.same(t.Context(), d); err != nil {
			t.Errorf("in %s: %v", k, err)
		}
	}
	drop(t, a, b, d)
}

// TestExtensionOfWhatIsLeft: when the longest dictionary is gone, a new one extends what is left.
func TestExtensionOfWhatIsLeft(t *testing.T) {
	m := newMachine(t, machineConfig{})
	put := func(n int) *batch.Batch {
		return m.make(t, grown(n), tier.Host)
	}
	a, b := put(600), put(900)
	drop(t, b)
	c := put(1000)
	if all := c.Info().Descriptor.AllDictionaries(); len(all) != 2 || all[0] != shared(a) {
		t.Errorf("the dictionaries are %v, want that of the first batch and one more", all)
	}
	drop(t, a)
	d := put(1100) // its chain is there still
	if all := d.Info().Descriptor.AllDictionaries(); len(all) != 3 {
		t.Errorf("%d dictionaries", len(all))
	}
	if err := m.same(t.Context(), d); err != nil {
		t.Error(err)
	}
	drop(t, c, d)
	if e := put(1200); len(e.Info().Descriptor.AllDictionaries()) != 1 {
		t.Error("a dictionary extends one that is gone")
	} else {
		drop(t, e)
	}
	m.holds(t, tier.Host, 0)
}

// TestExtensionBesideWhatIsLeft: when the longest dictionary is gone, a new one that begins with the
// values of its base does not begin with those of another one that the longest began with.
func TestExtensionBesideWhatIsLeft(t *testing.T) {
	m := newMachine(t, machineConfig{})
	put := func(n, other int) *batch.Batch {
		return m.make(t, codedBy(values(growing[0].dt, growing[0].append, n, 0, other), 0, n), tier.Host)
	}
	a, b := put(600, 600), put(620, 620)
	longest := put(640, 640)
	if all := longest.Info().Descriptor.AllDictionaries(); len(all) != 2 || all[0] != shared(a) {
		t.Fatalf("the dictionaries are %v, want that of the first batch and one more", all)
	}
	drop(t, longest)
	c := put(660, 610)
	for i, b := range []*batch.Batch{c, b, a} {
		if err := m.same(t.Context(), b); err != nil {
			t.Errorf("batch %d: %v", i, err)
		}
	}
	drop(t, a, b, c)
	m.holds(t, tier.Host, 0)
}

// TestAdoptedExtension: an extension that is adopted keeps its base known until it is released.
func TestAdoptedExtension(t *testing.T) {
	m := newMachine(t, machineConfig{})
	var all []*batch.Batch
	for _, n := range []int{600, 900} {
		all = append(all, m.make(t, grown(n), tier.GPU))
	}
	descs := all[1].Info().Descriptor.AllDictionaries()
	base, extension := *descs[0], *descs[1]
	extension.Dictionaries = []*batch.Descriptor{&base}
	var adopted []batch.Shared
	for _, d := range []*batch.Descriptor{&base, &extension} {
		buf, err := m.spaces[tier.Host].DrawNew(d.Body)
		if err != nil {
			t.Fatal(err)
		}
		s, err := m.mover.cfg.Builtin.AdoptDictionary(t.Context(), d, buf)
		if err != nil {
			t.Fatal(err)
		}
		adopted = append(adopted, s)
	}
	c := adopted[0].(*transfer.DictCopy)
	for i, want := range []int{1, 0} { // the extension, and the reference of that one's copy
		if c.Dict.Held != want || c.Refs != 1+want {
			t.Errorf("after %d releases: held %d times, %d references, want %d and %d",
				i, c.Dict.Held, c.Refs, want, 1+want)
		}
		if err := adopted[1-i].Release(); err != nil {
			t.Error(err)
		}
	}
	drop(t, all...)
}

// TestExtensionThatDoesNotFit: opening an adopted dictionary checks it against its base, and the
// dictionaries that it claims to extend can still be opened.
func TestExtensionThatDoesNotFit(t *testing.T) {
	for name, spoil := range map[string]func(*batch.Descriptor){
		"begins beyond its base": func(d *batch.Descriptor) { d.From[2] += 1 << 20 },
		"begins in a word":       func(d *batch.Descriptor) { d.From[2]++ },
		"huge":                   func(d *batch.Descriptor) { d.From[1], d.From[2] = 1<<61, 1<<61 },
		"without a buffer":       func(d *batch.Descriptor) { d.Buffers[2] = payload.Absent },
	} {
		m := newMachine(t, machineConfig{})
		var all []*batch.Batch
		for _, n := range []int{600, 900, 1300} {
			all = append(all, m.make(t, grown(n), tier.Host))
		}
		copyOf := func(b *tier.Buffer) *tier.Buffer {
			c, err := m.spaces[tier.Host].DrawNew(b.Size())
			if err != nil {
				t.Fatal(err)
			}
			copy(c.Memory().(tier.HostMemory).Extents()[0], b.Memory().(tier.HostMemory).Extents()[0])
			return c
		}
		var adopted []batch.Shared
		var opens []*batch.Batch
		for i, b := range all {
			img := b.Info().Payload.(*batch.Image)
			old := img.Parts.Shared[i]
			dict := *old.Descriptor()
			dict.From, dict.Buffers = slices.Clone(dict.From), slices.Clone(dict.Buffers)
			if i > 0 {
				dict.Dictionaries = []*batch.Descriptor{adopted[i-1].Descriptor()}
			}
			if i == 2 {
				spoil(&dict)
			}
			s, err := m.mover.cfg.Builtin.AdoptDictionary(t.Context(), &dict, copyOf(old.Buffer()))
			if err != nil {
				t.Fatal(err)
			}
			adopted = append(adopted, s)
			var shared []batch.Shared
			for _, s := range adopted {
				s, err := m.mover.cfg.Builtin.Again(s)
				if err != nil {
					t.Fatal(err)
				}
				shared = append(shared, s)
			}
			desc := *img.Descriptor()
			desc.Dictionaries = []*batch.Descriptor{&dict}
			p := batch.NewImage(&desc, copyOf(img.Buffer()), img.Space(), shared...)
			again, err := batch.New(batch.Options{IDs: &m.ids, Payload: p})
			if err != nil {
				t.Fatal(err)
			}
			m.records[again.ID()] = m.records[b.ID()]
			opens = append(opens, again)
		}
		for i, b := range opens {
			err := m.same(t.Context(), b)
			var invalid *image.InvalidError
			if bad := i == 2; bad != errors.As(err, &invalid) || !bad && err != nil {
				t.Errorf("%s: batch %d: %v", name, i, err)
			}
		}
		drop(t, append(all, opens...)...)
		if err := transfer.ReleaseAll(adopted); err != nil {
			t.Error(err)
		}
		m.holds(t, tier.Host, 0)
	}
}

// TestLastBitsOfADictionary: a dictionary that differs from the beginning of a longer one in bits of its
// last values alone keeps them: here its last value is null, and an empty string in the longer one.
func TestLastBitsOfADictionary(t *testing.T) {
	m := newMachine(t, machineConfig{})
	strings := func(rows int, null bool) arrow.Array {
		b := array.NewStringBuilder(memory.DefaultAllocator)
		defer b.Release()
		for i := range rows {
			switch {
			case i == 3 || i == 702 && null:
				b.AppendNull()
			case i == 702:
				b.Append("")
			default:
				b.Append(fmt.Sprintf("value %d, which is rather long", i))
			}
		}
		return b.NewArray()
	}
	var all []*batch.Batch
	for _, dict := range []arrow.Array{strings(300, true), strings(703, true), strings(1500, false), strings(1900, false)} {
		all = append(all, m.make(t, codedBy(dict, 0, dict.Len()), tier.Host))
	}
	for _, i := range []int{3, 1, 2, 0} {
		if err := m.same(t.Context(), all[i]); err != nil {
			t.Errorf("batch %d: %v", i, err)
		}
	}
	drop(t, all...)
}

// TestOpenedExtensionsShareAnArray: in host memory all are slices of the array of the longest one that is
// there, also if a longer one is in another space.
func TestOpenedExtensionsShareAnArray(t *testing.T) {
	m := newMachine(t, machineConfig{gpu: 16 << 20, host: 16 << 20})
	var all []*batch.Batch
	for i := range 20 {
		all = append(all, m.make(t, grown(1000+300*i), tier.GPU))
	}
	for _, b := range all[:15] {
		m.move(t, b, tier.Host)
	}
	before := m.mover.DictionaryBytes(tier.ID{Kind: tier.Host})
	l, err := image.NewLayout(m.records[all[14].ID()], image.MaxInline)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	want := m.spaces[tier.Host].State().Used() + m.spaces[tier.Host].Charge(l.Dictionaries[0].Desc.Body)
	var opened []arrow.RecordBatch
	for _, b := range all[:15] {
		opened = append(opened, m.record(t, b))
	}
	n, used := m.mover.DictionaryBytes(tier.ID{Kind: tier.Host}), m.spaces[tier.Host].State().Used()
	if n == before || used != want {
		t.Errorf("%d bytes are in use, %d for dictionaries, want %d", m.spaces[tier.Host].State().Used(), n, want)
	}
	for _, rec := range opened {
		rec.Release()
	}
	drop(t, all...)
}
