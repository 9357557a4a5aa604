package convert

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"weak"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// words makes a dictionary of 900 strings, which takes about 20 KiB.
func words(n int64) arrow.Array {
	b := array.NewStringBuilder(memory.DefaultAllocator)
	defer b.Release()
	for i := range 900 {
		b.Append(fmt.Sprintf("word %d of list %d", i, n))
	}
	return b.NewArray()
}

var codedType = &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}

// codedBy makes a record with a column of codes for dict's values.
func codedBy(dict arrow.Array, n int64, rows int) arrow.RecordBatch {
	codes, numbers := array.NewInt32Builder(memory.DefaultAllocator), array.NewInt64Builder(memory.DefaultAllocator)
	defer codes.Release()
	defer numbers.Release()
	for i := range rows {
		codes.Append(int32((i*7 + int(n)) % dict.Len()))
		numbers.Append(n + int64(i))
	}
	dt := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: dict.DataType()}
	words := array.NewDictionaryArray(dt, codes.NewArray(), dict)
	words.Dictionary() // makes it, so that several may compare with the record at once
	cols := []arrow.Array{words, numbers.NewArray()}
	return array.NewRecordBatch(arrow.NewSchema([]arrow.Field{
		{Name: "w", Type: dt, Nullable: dict.NullN() > 0}, {Name: "n", Type: arrow.PrimitiveTypes.Int64},
	}, nil), cols, int64(rows))
}

// coded makes a record with a dictionary of its own.
func coded(n int64, rows int) arrow.RecordBatch { return codedBy(words(n), n, rows) }

func shared(b *batch.Batch) *batch.Descriptor { return b.Info().Descriptor.Dictionaries[0] }

// holds checks that a space has exactly the given batches and dictionaries.
func (m *machine) holds(t *testing.T, k tier.Kind, dicts int64, batches ...*batch.Batch) {
	t.Helper()
	m.settle()
	want := dicts
	if k == tier.Host {
		want += m.base
	}
	for _, b := range batches {
		want += b.Info().Bytes
	}
	s := m.spaces[k]
	if u := s.State().Usage; u.Live != want || u.Retired != 0 || u.Reserved != 0 {
		t.Errorf("%s holds %+v, want %d live", k, u, want)
	}
	if n := m.mover.DictionaryBytes(s.ID()); n != dicts {
		t.Errorf("%s has %d bytes of dictionaries, want %d", k, n, dicts)
	}
}

func (m *machine) move(t *testing.T, b *batch.Batch, k tier.Kind) {
	t.Helper()
	if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
		t.Fatal(err)
	}
}

// make puts a batch that the caller drops.
func (m *machine) make(t *testing.T, rec arrow.RecordBatch, k tier.Kind) *batch.Batch {
	t.Helper()
	p, err := m.mover.Ingest(t.Context(), rec, reservation.AnyInTier(k))
	if err != nil {
		t.Fatal(err)
	}
	b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: p})
	if err != nil {
		t.Fatal(err)
	}
	m.records[b.ID()] = rec
	return b
}

func drop(t *testing.T, batches ...*batch.Batch) {
	t.Helper()
	for _, b := range batches {
		if err := b.Drop(); err != nil {
			t.Error(err)
		}
	}
}

// record opens b.
func (m *machine) record(t *testing.T, b *batch.Batch) arrow.RecordBatch {
	t.Helper()
	rec, err := m.opened(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

// A dictionary that many batches share is there once in each space where one of
// them is, and leaves it with the last.
func TestDictionaryIsCountedOnceASpace(t *testing.T) {
	m := newMachine(t, machineConfig{})
	dict := words(1)
	var all []*batch.Batch
	for i := range 8 {
		all = append(all, m.make(t, codedBy(dict, int64(i), 500), tier.GPU))
	}
	body := shared(all[0]).Body
	if body < 16<<10 || all[0].Info().Descriptor.Body >= body {
		t.Fatalf("a dictionary of %d bytes, batches of %d", body, all[0].Info().Descriptor.Body)
	}
	charge := func(k tier.Kind) int64 { return m.spaces[k].Charge(body) }
	m.holds(t, tier.GPU, charge(tier.GPU), all...)
	for i, b := range all {
		if shared(b) != shared(all[0]) {
			t.Errorf("batch %d has another dictionary", i)
		}
	}
	for _, b := range all[:4] {
		m.move(t, b, tier.Host)
	}
	for _, b := range all[:2] {
		m.move(t, b, tier.Disk)
	}
	m.holds(t, tier.Disk, charge(tier.Disk), all[:2]...)
	m.holds(t, tier.Host, charge(tier.Host), all[2:4]...)
	m.holds(t, tier.GPU, charge(tier.GPU), all[4:]...)
	for _, b := range all {
		if err := m.same(t.Context(), b); err != nil {
			t.Error(err)
		}
	}
	drop(t, all[4:7]...)
	m.holds(t, tier.GPU, charge(tier.GPU), all[7])
	drop(t, all[7])
	m.holds(t, tier.GPU, 0)
	m.move(t, all[2], tier.GPU) // from host, where one stays
	m.holds(t, tier.GPU, charge(tier.GPU), all[2])
	m.holds(t, tier.Host, charge(tier.Host), all[3])
	m.move(t, all[3], tier.Disk)
	m.holds(t, tier.Host, 0)
	drop(t, all[2])
	c, err := m.mover.Clone(t.Context(), all[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	m.holds(t, tier.Disk, charge(tier.Disk), all[0], all[1], all[3], c)
	drop(t, all[0], all[1], all[3], c)
	m.holds(t, tier.Disk, 0)
}

// Arrays that were opened in place keep the dictionary's memory, and share one
// array of it; it is the same dictionary still when they are put again.
func TestOpenedDictionary(t *testing.T) {
	m := newMachine(t, machineConfig{})
	dict := words(2)
	a, b := m.make(t, codedBy(dict, 1, 300), tier.Host), m.make(t, codedBy(dict, 2, 300), tier.Disk)
	first, again := m.record(t, a), m.record(t, a)
	of := func(r arrow.RecordBatch) arrow.ArrayData { return r.Column(0).Data().Dictionary() }
	if of(first) != of(again) {
		t.Error("two records of a batch have different dictionaries")
	}
	again.Release()
	other := m.record(t, b) // through a copy that goes at once
	if of(other) != of(first) {
		t.Error("a record of another batch has another dictionary")
	}
	slice := other.NewSlice(10, 90)
	back := m.make(t, slice, tier.GPU)
	if shared(back) != shared(a) {
		t.Error("an opened dictionary was not recognised")
	}
	drop(t, a)
	if n := m.mover.DictionaryBytes(tier.ID{Kind: tier.Host}); n != 0 {
		t.Errorf("%d bytes of dictionaries in host memory, where no batch is", n)
	}
	other.Release()
	drop(t, b, back)
	if err := equal.Records(slice, codedBy(dict, 2, 300).NewSlice(10, 90)); err != nil {
		t.Error(err)
	}
	slice.Release()
	if err := equal.Records(first, codedBy(dict, 1, 300)); err != nil {
		t.Error(err)
	}
	column := first.Column(0).(*array.Dictionary)
	column.Retain()
	first.Release()
	if column.Dictionary().ValueStr(column.GetValueIndex(0)) != "word 1 of list 2" {
		t.Error("the column's dictionary is gone")
	}
	if used := m.spaces[tier.Host].State().Used(); used <= m.base {
		t.Error("no memory is kept for a column")
	}
	column.Release()
	m.holds(t, tier.Host, 0)
}

// A dictionary of a dictionary: both are outside, and are needed together. A
// record may also have two arrays that are one dictionary.
func TestDictionaryOfDictionary(t *testing.T) {
	m := newMachine(t, machineConfig{})
	outer := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: codedType}
	values := codedBy(words(3), 5, 3000).Column(0)
	codes := array.NewInt32Builder(memory.DefaultAllocator)
	for i := range 400 {
		codes.Append(int32(i * 5))
	}
	indices := codes.NewArray()
	rec := array.NewRecordBatch(arrow.NewSchema([]arrow.Field{{Name: "d", Type: outer}, {Name: "l", Type: codedType}}, nil),
		[]arrow.Array{array.NewDictionaryArray(outer, indices, values), array.NewSlice(values, 7, 407)}, 400)
	b := m.make(t, rec, tier.GPU)
	if all := b.Info().Descriptor.AllDictionaries(); len(all) != 2 || len(all[1].Dictionaries) != 1 || all[1].Dictionaries[0] != all[0] {
		t.Fatalf("dictionaries %v", all)
	}
	for _, k := range script {
		m.move(t, b, k)
		m.whole(t, b, k)
	}
	m.move(t, b, tier.Host)
	opened := m.record(t, b)
	mixed := array.NewRecordBatch(arrow.NewSchema([]arrow.Field{{Name: "a", Type: outer}, {Name: "b", Type: outer}}, nil),
		[]arrow.Array{rec.Column(0), opened.Column(0)}, 400)
	c := m.make(t, mixed, tier.Disk)
	if d := c.Info().Descriptor; len(d.Dictionaries) != 2 || d.Dictionaries[0] != d.Dictionaries[1] || len(d.AllDictionaries()) != 2 ||
		d.Dictionaries[0] != b.Info().Descriptor.Dictionaries[0] {
		t.Errorf("dictionaries %v of %v", d.AllDictionaries(), b.Info().Descriptor.AllDictionaries())
	}
	for _, k := range script {
		m.move(t, c, k)
		if err := m.same(t.Context(), c); err != nil {
			t.Error(err)
		}
	}
	mixed.Release()
	opened.Release()
	drop(t, b, c)
}

// An array that is given other buffers, or other bytes, is another dictionary;
// and a source is not kept alive.
func TestChangedDictionary(t *testing.T) {
	m := newMachine(t, machineConfig{})
	dict, other := words(4), words(5)
	a := m.make(t, codedBy(dict, 1, 300), tier.GPU)
	before := codedBy(words(4), 1, 300)
	data := dict.Data().(*array.Data)
	data.Reset(data.DataType(), other.Len(), other.Data().Buffers(), nil, 0, 0)
	for _, b := range other.Data().Buffers() {
		if b != nil {
			b.Retain() // Reset has taken the slice, and later gives up what is in it
		}
	}
	b := m.make(t, codedBy(array.MakeFromData(data), 1, 300), tier.GPU)
	if shared(a) == shared(b) {
		t.Error("an array with other buffers was taken for the dictionary that it was")
	}
	// A caller that breaks Arrow's rules and changes bytes gets what was there when the copy was
	// made: old or new, never a mix of a descriptor and other bytes.
	bytes := data.Buffers()[2].Bytes()
	copy(bytes, bytes[len(bytes)-5:])
	c := m.make(t, codedBy(array.MakeFromData(data), 1, 300), tier.Host)
	if shared(c) == shared(b) {
		t.Error("an array with other bytes was taken for the dictionary that it was")
	}
	for _, k := range script {
		for _, x := range []*batch.Batch{b, c} {
			m.move(t, x, k)
		}
		if err := m.same(t.Context(), c); err != nil {
			t.Error(err)
		}
	}
	m.records[a.ID()] = before
	if err := m.same(t.Context(), a); err != nil {
		t.Error(err)
	}
	drop(t, a, b, c)

	d, data6, bytes6 := func() (*batch.Batch, weak.Pointer[array.Data], weak.Pointer[byte]) {
		rec := coded(6, 10)
		b := m.make(t, rec, tier.Host)
		delete(m.records, b.ID())
		data := rec.Column(0).Data().Dictionary().(*array.Data)
		return b, weak.Make(data), weak.Make(&data.Buffers()[2].Bytes()[0])
	}()
	for i := 0; data6.Value() != nil || bytes6.Value() != nil; i++ {
		if i == 100 {
			t.Fatal("the source of a dictionary is kept alive")
		}
		runtime.GC()
	}
	drop(t, d)
}

// Records of an IPC stream whose dictionary is replaced now and then.
func TestReplacedDictionaries(t *testing.T) {
	m := newMachine(t, machineConfig{})
	var stream bytes.Buffer
	lists := []int64{1, 1, 2, 2, 2, 1, 3}
	schema := coded(0, 1).Schema()
	w := ipc.NewWriter(&stream, ipc.WithSchema(schema))
	var wants []arrow.RecordBatch
	for i, list := range lists {
		rec := codedBy(words(list), int64(i), 200)
		wants = append(wants, rec)
		if err := w.Write(rec); err != nil {
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
	var all []*batch.Batch
	for r.Next() {
		all = append(all, m.make(t, r.RecordBatch(), tier.Kinds()[len(all)%3]))
	}
	if err := r.Err(); err != nil || len(all) != len(lists) {
		t.Fatalf("%d batches, %v", len(all), err)
	}
	for i, b := range all {
		m.records[b.ID()] = wants[i]
		if err := m.same(t.Context(), b); err != nil {
			t.Error(err)
		}
		if i > 0 && (shared(b) == shared(all[i-1])) != (lists[i] == lists[i-1]) {
			t.Errorf("batch %d of list %d, batch %d of list %d: the same dictionary: %v",
				i-1, lists[i-1], i, lists[i], shared(b) == shared(all[i-1]))
		}
	}
	drop(t, all...)
}

// Many batches that share two dictionaries are moved, cloned, read and put at
// once.
func TestSharedDictionaryConcurrently(t *testing.T) {
	seed := testseed.One(t)
	m := newMachine(t, machineConfig{})
	dicts := []arrow.Array{words(1), words(2)}
	var all []*batch.Batch
	for i := range 12 {
		all = append(all, m.put(t, codedBy(dicts[i%2], int64(i), 400), tier.Kinds()[i%3]))
	}
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			for range 60 {
				n := rng.IntN(len(all))
				b, to := all[n], reservation.AnyInTier(tier.Kinds()[rng.IntN(3)])
				var err error
				switch rng.IntN(6) {
				case 0:
					var p batch.Payload
					if p, err = m.mover.Ingest(t.Context(), m.records[b.ID()], to); err == nil {
						err = p.Release()
					}
				case 1:
					var c *batch.Batch
					if c, err = m.mover.Clone(t.Context(), b, nil); err == nil {
						err = c.Drop()
					}
				case 2:
					err = m.same(t.Context(), b)
				case 3:
					ctx, cancel := context.WithCancel(t.Context())
					go cancel()
					err = m.mover.Move(ctx, b, to)
					if errors.Is(err, context.Canceled) {
						err = nil
					}
					cancel()
				default:
					err = m.mover.Move(t.Context(), b, to)
				}
				if err != nil && !errors.Is(err, batch.ErrState) {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	at := make(map[tier.Kind]map[*batch.Descriptor]bool)
	in := make(map[tier.Kind][]*batch.Batch)
	for _, b := range all {
		if err := m.same(t.Context(), b); err != nil {
			t.Error(err)
		}
		k := b.Info().Space.Kind
		if at[k] == nil {
			at[k] = make(map[*batch.Descriptor]bool)
		}
		at[k][shared(b)] = true
		in[k] = append(in[k], b)
	}
	for k, s := range m.spaces {
		m.holds(t, k, int64(len(at[k]))*s.Charge(shared(all[0]).Body), in[k]...)
	}
}

// Of several concurrent callers one makes the copy. When that fails, the next tries; a cancelled
// one goes away; and a panic is a failure, too.
func TestOneMakesTheCopy(t *testing.T) {
	m := newMachine(t, machineConfig{})
	space := m.spaces[tier.Host]
	l, err := image.NewLayout(coded(1, 10), image.MaxInline)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	store := &m.mover.cfg.Builtin.Dicts
	dicts, _, end := store.Resolve(l.Dictionaries, false)
	dict := dicts[0]
	defer end()
	again, _, end := store.Resolve(l.Dictionaries, false)
	if again[0] != dict {
		t.Error("two dictionaries of one array")
	}
	end()

	var makers atomic.Int32
	begun, fail := make(chan struct{}), make(chan error)
	broken := errors.New("broken")
	first := make(chan error)
	go func() {
		_, err := store.Acquire(t.Context(), dict, space, func(*payload.Parts) error {
			makers.Add(1)
			close(begun)
			return <-fail
		})
		first <- err
	}()
	<-begun
	gone, cancel := context.WithCancelCause(t.Context())
	cancel(broken)
	if _, err := store.Acquire(gone, dict, space, nil); !errors.Is(err, broken) {
		t.Errorf("cancelled: %v", err)
	}
	if _, n := store.Pin(space, []*transfer.Dictionary{dict}); n != space.Charge(dict.Body) {
		t.Errorf("%d bytes are missing while a copy is made", n)
	}
	results := make(chan *transfer.DictCopy)
	for range 5 {
		go func() {
			c, err := store.Acquire(t.Context(), dict, space, func(parts *payload.Parts) error {
				makers.Add(1)
				r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Host), dict.Body, nil)
				if err != nil {
					return err
				}
				buf, err := r.Alloc(dict.Body)
				sub := l.Dictionaries[0]
				desc := sub.Desc
				parts.Buffers, parts.Descriptor = []*tier.Buffer{buf}, &desc
				return errors.Join(err, r.Release())
			})
			if err != nil {
				t.Error(err)
			}
			results <- c
		}()
	}
	fail <- broken
	if err := <-first; !errors.Is(err, broken) {
		t.Errorf("the first ended with %v", err)
	}
	var got []*transfer.DictCopy
	for range 5 {
		got = append(got, <-results)
	}
	if slices.ContainsFunc(got, func(c *transfer.DictCopy) bool { return c != got[0] }) || makers.Load() != 2 {
		t.Errorf("%d made a copy, copies %v", makers.Load(), got)
	}
	if err := transfer.ReleaseAll(got); err != nil {
		t.Error(err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was swallowed")
			}
		}()
		_, _ = store.Acquire(t.Context(), dict, space, func(*payload.Parts) error { panic("no") })
	}()
	if len(dict.Copies) != 0 {
		t.Error("a copy is announced that nobody makes")
	}
	m.holds(t, tier.Host, 0)
}

// The dictionary that was in the target when room was reserved may have left it
// when there is room.
func TestDictionaryLeavesWhileRoomIsWaitedFor(t *testing.T) {
	m := newMachine(t, machineConfig{gpu: 512 << 10})
	dict := words(7)
	there, b := m.make(t, codedBy(dict, 1, 10_000), tier.GPU), m.put(t, codedBy(dict, 2, 10_000), tier.Host)
	gpu := m.spaces[tier.GPU]
	rest, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), gpu.State().Available, nil)
	if err != nil {
		t.Fatal(err)
	}
	waiting := make(chan struct{}, 8)
	defer m.onWait(func(context.Context, tier.ID, int64) { waiting <- struct{}{} })()
	done := make(chan error)
	go func() { done <- m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.GPU)) }()
	<-waiting
	if d := m.reservations.Demand(nil); len(d) != 1 || d[0].Bytes != gpu.Charge(b.Info().Descriptor.Body) {
		t.Errorf("demand %+v, want that of the body alone", d)
	}
	drop(t, there)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := rest.Release(); err != nil {
		t.Fatal(err)
	}
	m.whole(t, b, tier.GPU)
}

// A dictionary that is corrupt on disk is found, and where.
func TestCorruptDictionary(t *testing.T) {
	m := newMachine(t, machineConfig{})
	dict := words(8)
	a, b := m.put(t, codedBy(dict, 1, 100), tier.Disk), m.put(t, codedBy(dict, 2, 100), tier.Disk)
	tr, err := b.Transit(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	file := tr.Payload().(*batch.Image).Parts.Shared[0].Buffer().Memory().(tier.FileMemory)
	if err := tr.Abort(); err != nil {
		t.Fatal(err)
	}
	page := make([]byte, tier.Page)
	flip := func() {
		if err := file.ReadAt(t.Context(), page, 8192); err != nil {
			t.Fatal(err)
		}
		page[77] ^= 4
		if err := file.WriteAt(t.Context(), page, 8192); err != nil {
			t.Fatal(err)
		}
	}
	flip()
	volume, name, at := file.Locate(0)
	for _, k := range []tier.Kind{tier.Host, tier.GPU} {
		for _, x := range []*batch.Batch{a, b} {
			err := m.mover.Move(t.Context(), x, reservation.AnyInTier(k))
			var c *image.CorruptError
			if !errors.As(err, &c) || c.Batch != x.ID() || c.Volume != volume+" "+name || c.Offset != at {
				t.Errorf("%v, want corruption of batch %d on %s %s at %d", err, x.ID(), volume, name, at)
			}
		}
		m.holds(t, k, 0)
	}
	h, err := m.mover.Acquire(t.Context(), a, reservation.AnyInTier(tier.Disk))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.mover.Record(t.Context(), h); !errors.Is(err, image.ErrCorrupt) {
		t.Errorf("opened: %v", err)
	}
	if _, err := m.mover.Digest(t.Context(), h); !errors.Is(err, image.ErrCorrupt) {
		t.Errorf("digest: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	flip()
	for _, x := range []*batch.Batch{a, b} {
		m.move(t, x, tier.GPU)
		if err := m.same(t.Context(), x); err != nil {
			t.Error(err)
		}
	}
}

// Putting a record with a dictionary fails at each device operation in turn:
// nothing is left of it, and it works the next time. So it does beside a batch
// that has the dictionary elsewhere.
func TestEveryDeviceOperationOfAPutFailsOnce(t *testing.T) {
	injected := errors.New("injected")
	for _, beside := range []bool{false, true} {
		tried := 0
		for hit := true; hit; tried++ {
			n := int64(tried)
			var armed atomic.Bool
			var seen atomic.Int64
			m := newMachine(t, machineConfig{faults: func(op sim.Op) error {
				if op.Kind == sim.OpFree || !armed.Load() || seen.Add(1) != n+1 {
					return nil
				}
				return injected
			}})
			dict := words(9)
			var other *batch.Batch
			if beside {
				other = m.make(t, codedBy(dict, 3, 50), tier.Disk)
			}
			armed.Store(true)
			rec := codedBy(dict, 1, 6000)
			p, err := m.mover.Ingest(t.Context(), rec, reservation.AnyInTier(tier.GPU))
			armed.Store(false)
			if hit = seen.Load() > n; hit {
				if !errors.Is(err, injected) {
					t.Fatalf("operation %d: %v", n, err)
				}
				m.holds(t, tier.GPU, 0)
				p, err = m.mover.Ingest(t.Context(), rec, reservation.AnyInTier(tier.GPU))
			}
			if err != nil {
				t.Fatal(err)
			}
			b := m.adopt(t, rec, p)
			if beside {
				if shared(b) != shared(other) {
					t.Error("another dictionary")
				}
				drop(t, other)
			}
			m.whole(t, b, tier.GPU)
		}
		if tried < 8 {
			t.Errorf("only %d operations", tried)
		}
	}
}

// TestDictionaryComesBack: an array whose dictionary was forgotten is a new dictionary, which batches
// share like the first one.
func TestDictionaryComesBack(t *testing.T) {
	m := newMachine(t, machineConfig{})
	dict, gpu := words(3), m.spaces[tier.GPU]
	drop(t, m.make(t, codedBy(dict, 1, 1000), tier.GPU))
	m.settle()
	one, two := m.make(t, codedBy(dict, 1, 1000), tier.GPU), m.make(t, codedBy(dict, 2, 1000), tier.GPU)
	if shared(one) != shared(two) {
		t.Error("two dictionaries of one array")
	}
	if there, missing := m.mover.Charges(gpu, one, two); there != gpu.State().Used() || missing != 0 {
		t.Errorf("%d bytes are there and %d missing, want %d and none", there, missing, gpu.State().Used())
	}
	drop(t, one, two)
}
