package convert

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// columnsOf reads some columns of b where it is, and compares them.
func (m *machine) columnsOf(ctx context.Context, b *batch.Batch, want image.Selection) error {
	h, err := b.Open(ctx, tier.ID{}, false)
	if err != nil {
		return err
	}
	got, err := m.mover.Columns(ctx, h, want)
	if err = errors.Join(err, h.Close()); err != nil {
		return err
	}
	defer got.Release()
	m.comparing.Lock()
	defer m.comparing.Unlock()
	rec := m.records[b.ID()]
	c, err := want.Of(rec.Schema(), rec.NumRows())
	if err != nil {
		return err
	}
	expected := pick(rec, c.Fields, c.From, c.To)
	defer expected.Release()
	return equalParts(expected, got)
}

// mixed has a column that is read whole, one of strings long enough to be looked up, a
// dictionary of its own, and numbers.
func mixed(seed uint64, rows int) arrow.RecordBatch {
	gen := arrowgen.New(seed)
	strings := arrowgen.Strings(seed, rows, 1)
	codes := codedBy(words(int64(seed)), int64(seed), rows)
	list := gen.Array(arrow.ListOf(arrow.PrimitiveTypes.Int16), rows)
	return array.NewRecordBatch(arrow.NewSchema([]arrow.Field{
		{Name: "text", Type: arrow.BinaryTypes.String, Nullable: true}, {Name: "code", Type: codedType},
		{Name: "n", Type: arrow.PrimitiveTypes.Int64}, {Name: "list", Type: list.DataType(), Nullable: true},
	}, nil), []arrow.Array{strings.Column(0), codes.Column(0), codes.Column(1), list}, int64(rows))
}

const mixedRows = 40_000

// flip changes one bit at off of b's bytes on disk.
func flip(t *testing.T, b *batch.Batch, off int64) {
	t.Helper()
	h, err := b.Open(t.Context(), tier.ID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	file := h.Payload().(*batch.Image).Buffer().Memory().(tier.FileMemory)
	flipIn(t, file, off)
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
}

// flipIn changes one bit at off of a memory on disk, which is written in whole pages.
func flipIn(t *testing.T, file tier.FileMemory, off int64) {
	t.Helper()
	p := make([]byte, tier.Page)
	err := file.ReadAt(t.Context(), p, off/tier.Page*tier.Page)
	p[off%tier.Page] ^= 4
	if err := errors.Join(err, file.WriteAt(t.Context(), p, off/tier.Page*tier.Page)); err != nil {
		t.Fatal(err)
	}
}

// A flipped bit in a chunk that is needed is found, and said where; one in another is
// not noticed. The memory of what was read is given back.
func TestColumnsNoticeCorruptionInWhatTheyNeed(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, mixed(1, mixedRows), tier.Disk)
	spans := b.Info().Descriptor.Buffers
	// text has validity, offsets and bytes; code and n have no nulls.
	offsets, text, numbers := spans[1], spans[2], spans[6]
	if offsets.Length != 4*mixedRows+4 || text.Length < 4*payload.SumChunk || numbers.Length != 8*mixedRows {
		t.Fatalf("the buffers are %v", spans)
	}
	for _, c := range []struct {
		name string
		at   int64
		want image.Selection
		seen bool
	}{
		{"a number", numbers.Offset + 8*20_000, image.Selection{Columns: []string{"n"}}, true},
		{"a number that is one of the rows", numbers.Offset + 8*20_000,
			image.Selection{Columns: []string{"n"}, From: 19_999, To: 20_001}, true},
		{"a number that is not", numbers.Offset + 8*20_000,
			image.Selection{Columns: []string{"n"}, From: 30_000, To: 40_000}, false},
		{"a number of another column", numbers.Offset + 8*20_000,
			image.Selection{Columns: []string{"text", "code"}}, false},
		{"text", text.Offset + 200_000, image.Selection{Columns: []string{"text"}}, true},
		{"text of other rows", text.Offset + 100_000,
			image.Selection{Columns: []string{"text"}, From: mixedRows - 10}, false},
		{"an offset that is looked up", offsets.Offset + 4*20_000,
			image.Selection{Columns: []string{"text"}, From: 20_000, To: 39_000}, true},
		{"an offset between two", offsets.Offset + 4*20_000,
			image.Selection{Columns: []string{"text"}, From: 1000, To: 39_000}, true},
		{"an offset of other rows", offsets.Offset + 4*20_000,
			image.Selection{Columns: []string{"text"}, From: 39_000}, false},
	} {
		flip(t, b, c.at)
		err := m.columnsOf(t.Context(), b, c.want)
		var corrupt *image.CorruptError
		switch {
		case !c.seen && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.seen && !errors.As(err, &corrupt):
			t.Errorf("%s: not noticed: %v", c.name, err)
		case c.seen:
			h, err := b.Open(t.Context(), tier.ID{}, false)
			if err != nil {
				t.Fatal(err)
			}
			volume, file, at := h.Payload().(*batch.Image).Buffer().Memory().(tier.FileMemory).Locate(c.at / payload.SumChunk * payload.SumChunk)
			want := &image.CorruptError{Batch: b.ID(), Volume: volume + " " + file, Offset: at, Want: corrupt.Want, Got: corrupt.Got}
			if *corrupt != *want || corrupt.Want == corrupt.Got {
				t.Errorf("%s: told as %+v, want %+v", c.name, corrupt, want)
			}
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
		}
		flip(t, b, c.at) // back
		m.rests(t, b, tier.Disk)
	}
	m.whole(t, b, tier.Disk)
}

// TestEveryReadOfColumnsFailsOnce fails, shortens, corrupts and cancels each read once:
// the books are exact after that, and the batch whole.
func TestEveryReadOfColumnsFailsOnce(t *testing.T) { everyReadOfColumnsFailsOnce(t, false) }

// TestEveryReadOfColumnsFailsOnceEncrypted is the same on a volume that encrypts.
func TestEveryReadOfColumnsFailsOnceEncrypted(t *testing.T) { everyReadOfColumnsFailsOnce(t, true) }

func everyReadOfColumnsFailsOnce(t *testing.T, encrypt bool) {
	for name, c := range map[string]struct {
		effect func(cancel func()) faultfs.Effect
		want   error
		may    bool // it may succeed all the same
	}{
		"EIO":    {func(func()) faultfs.Effect { return faultfs.Fail(syscall.EIO) }, syscall.EIO, false},
		"short":  {func(func()) faultfs.Effect { return faultfs.Short() }, nil, true},
		"flip":   {func(func()) faultfs.Effect { return faultfs.BitFlip() }, image.ErrCorrupt, false},
		"cancel": {func(cancel func()) faultfs.Effect { return faultfs.Do(func(string, string) { cancel() }) }, context.Canceled, true},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{encrypt: encrypt})
			b := m.put(t, mixed(2, mixedRows), tier.Disk)
			for _, s := range []image.Selection{{Columns: []string{"list", "code"}},
				{Columns: []string{"text", "code"}, From: 10_000, To: 30_000}} {
				tried, failed := 0, 0
				for hit := true; hit; tried++ {
					ctx, cancel := context.WithCancel(t.Context())
					// Skip counts from when the rule is added.
					remove := m.files.Add(faultfs.Rule{Ops: []string{"read"}, Skip: tried, Times: 1, Effect: c.effect(cancel)})
					before := m.files.Count("read")
					err := m.columnsOf(ctx, b, s)
					hit = m.files.Count("read")-before > tried
					remove()
					cancel()
					switch {
					case err != nil && !errors.Is(err, c.want):
						t.Fatalf("read %d: %v, want %v", tried, err, c.want)
					case err != nil:
						failed++
					case hit && !c.may:
						t.Fatalf("read %d was hit and nobody noticed", tried)
					}
					m.rests(t, b, tier.Disk)
				}
				if tried < 4 || failed == 0 && c.want != nil {
					t.Errorf("%+v: %d reads were tried, %d failed", s, tried, failed)
				}
			}
			m.whole(t, b, tier.Disk)
		})
	}
}

// A wait for room in host memory is cancelled, and has taken nothing.
func TestColumnsWaitForRoom(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, mixed(3, mixedRows), tier.Disk)
	s := image.Selection{Columns: []string{"text"}, From: 10_000, To: 30_000}
	all, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Host), m.spaces[tier.Host].State().Available, nil)
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan struct{}, 8)
	stop := m.onWait(func(context.Context, tier.ID, int64) { asked <- struct{}{} })
	defer stop()
	why := errors.New("why")
	u := m.start(t, func(ctx context.Context) error { return m.columnsOf(ctx, b, s) })
	<-asked
	u.cancel(why)
	u.ended(t, why)
	u = m.start(t, func(ctx context.Context) error { return m.columnsOf(ctx, b, s) })
	<-asked
	if err := all.Release(); err != nil {
		t.Fatal(err)
	}
	u.ended(t, nil)
	m.whole(t, b, tier.Disk)
}

// Only the dictionaries that the columns use come along, and two columns that share one
// have one array of it.
func TestColumnsBringTheirDictionariesOnly(t *testing.T) {
	m := newMachine(t, machineConfig{})
	one, other := words(1), words(2)
	a, c := codedBy(one, 1, 3000), codedBy(other, 2, 3000)
	rec := array.NewRecordBatch(arrow.NewSchema([]arrow.Field{
		{Name: "a", Type: codedType}, {Name: "n", Type: arrow.PrimitiveTypes.Int64},
		{Name: "c", Type: codedType}, {Name: "d", Type: codedType},
	}, nil), []arrow.Array{a.Column(0), a.Column(1), c.Column(0), codedBy(other, 3, 3000).Column(0)}, 3000)
	b := m.put(t, rec, tier.Disk)
	host := m.spaces[tier.Host]
	for _, s := range []struct {
		fields []int
		dicts  []*batch.Descriptor
	}{{[]int{1}, nil}, {[]int{3, 2}, b.Info().Descriptor.Dictionaries[1:]}, {[]int{0, 3}, b.Info().Descriptor.Dictionaries}} {
		got, err := m.columns(t, b, image.Selection{Fields: s.fields, From: 100, To: 2000})
		if err != nil {
			t.Fatal(err)
		}
		live := host.State().Used()
		want := int64(0)
		for _, d := range s.dicts {
			want += host.Charge(d.Body)
		}
		if live < m.base+want || live > m.base+want+2*host.Charge(b.Info().Descriptor.Body) {
			t.Errorf("columns %v: %d bytes are in use, %d are dictionaries'", s.fields, live-m.base, want)
		}
		if s.fields[0] == 3 {
			if x, y := got.Column(0).Data().Dictionary(), got.Column(1).Data().Dictionary(); x != y {
				t.Error("two columns have two arrays of one dictionary")
			}
		}
		got.Release()
		m.rests(t, b, tier.Disk)
	}
}

// The record outlives its handle and its batch, and its memory is given back with its
// last buffer.
func TestColumnsOutliveTheirBatch(t *testing.T) {
	m := newMachine(t, machineConfig{})
	rec := mixed(5, mixedRows)
	for _, k := range tier.Kinds() {
		b := m.make(t, rec, k)
		got, err := m.columns(t, b, image.Selection{Columns: []string{"text", "code", "list"}, From: 5000, To: 25_000})
		if err != nil {
			t.Fatal(err)
		}
		code := got.Column(1)
		code.Retain()
		drop(t, b)
		want := pick(rec, []int{0, 1, 3}, 5000, 25_000)
		if err := equal.Records(want, got); err != nil {
			t.Error(err)
		}
		got.Release()
		if used := m.spaces[tier.Host].State().Used(); used <= m.base {
			t.Errorf("%d bytes are in use while a column is held", used)
		}
		code.Release()
		m.holds(t, tier.Host, 0)
	}
}

func TestColumnsOfWhatIsClosed(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 100), tier.Disk)
	h, err := b.Open(t.Context(), tier.ID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	var se *image.SelectionError
	if _, err := m.mover.Columns(t.Context(), h,
		image.Selection{Columns: []string{"n", "none"}}); !errors.As(err, &se) || se.Column != "none" ||
		se.Columns != 2 || se.Rows != 100 {
		t.Errorf("a column that is not there: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := m.mover.Columns(t.Context(), h, image.Selection{}); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("a closed handle: %v", err)
	}
	if err := m.mover.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := m.mover.Columns(t.Context(), h, image.Selection{}); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("a closed mover: %v", err)
	}
}

// Columns are read while others move the batch from tier to tier.
func TestColumnsAndMovesAtTheSameTime(t *testing.T) {
	seed := testseed.One(t)
	m := newMachine(t, machineConfig{gpu: 8 << 20, host: 8 << 20})
	b := m.put(t, mixed(4, mixedRows), tier.Disk)
	var readers, movers sync.WaitGroup
	over := make(chan struct{})
	for i := range 3 {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			for range 40 {
				n := 1 + rng.Int64N(mixedRows-1)
				from := rng.Int64N(mixedRows - n)
				s := image.Selection{Fields: rng.Perm(4)[:1+rng.IntN(4)], From: from, To: from + n}
				if err := m.columnsOf(t.Context(), b, s); err != nil {
					t.Errorf("%+v: %v", s, err)
					return
				}
			}
		})
	}
	for i := range 2 {
		movers.Go(func() {
			rng := rand.New(rand.NewPCG(seed+1, uint64(i)))
			for {
				select {
				case <-over:
					return
				default:
				}
				err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Kinds()[rng.IntN(3)]))
				if err != nil && !errors.Is(err, batch.ErrState) {
					t.Error(err)
					return
				}
				runtime.Gosched() // with one processor no other goroutine would ever find the batch at rest
			}
		})
	}
	readers.Wait()
	close(over)
	movers.Wait()
	m.move(t, b, tier.Disk)
	m.whole(t, b, tier.Disk)
}

// What a descriptor says wrongly is an error or a record, and no panic.
func TestColumnsOfDescriptorsThatAreWrong(t *testing.T) {
	seed := testseed.One(t)
	m := newMachine(t, machineConfig{})
	b := m.put(t, mixed(6, mixedRows), tier.Disk)
	h, err := b.Open(t.Context(), tier.ID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		m.rests(t, b, tier.Disk)
	}()
	src := h.Payload().(*batch.Image)
	rng := rand.New(rand.NewPCG(seed, 9))
	wrong := 0
	for range testseed.Rounds(2000, 300) {
		d := *src.Descriptor()
		d.Nodes, d.Buffers = slices.Clone(d.Nodes), slices.Clone(d.Buffers)
		odd := []int64{-1, 0, 1, 63, 64, mixedRows - 1, d.Body, d.Body - 64, 1 << 40, 1<<63 - 1, -1 << 63}[rng.IntN(11)]
		switch i := rng.IntN(len(d.Buffers)); rng.IntN(6) {
		case 0:
			d.Buffers[i].Offset = odd
		case 1:
			d.Buffers[i].Length = odd
		case 2:
			d.Buffers = d.Buffers[:i]
		case 3:
			d.Nodes[rng.IntN(len(d.Nodes))].Length = odd
		case 4:
			d.Nodes[rng.IntN(len(d.Nodes))].Nulls = odd
		case 5:
			d.Nodes = d.Nodes[:rng.IntN(len(d.Nodes))]
		}
		s := image.Selection{Fields: rng.Perm(4)[:1+rng.IntN(4)], From: rng.Int64N(mixedRows), To: mixedRows - 1}
		if rng.IntN(2) == 0 {
			s.From, s.To = 0, 0
		} else if s.From > s.To {
			continue
		}
		if _, err := s.Of(d.Schema, d.Rows); err != nil {
			t.Fatal(err)
		}
		// Never released: its bytes are those of src.
		img := batch.NewImage(&d, src.Buffer(), src.Space(), src.Parts.Shared...)
		rec, err := m.mover.open(t.Context(), opener{}, img, &s)
		if err == nil {
			rec.Release()
			continue
		}
		if wrong++; !errors.Is(err, image.ErrInvalid) {
			t.Fatalf("%v %v: %v", d.Nodes, d.Buffers, err)
		}
	}
	if wrong < 100 {
		t.Errorf("only %d were wrong", wrong)
	}
	if used := m.spaces[tier.Host].State().Used(); used != m.base {
		t.Errorf("%d bytes are in use, want %d", used, m.base)
	}
}

// A buffer that is said to be outside of the body, or at a place that is not aligned, is an error
// before anything of it is read.
func TestColumnsOutsideOfTheBody(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, mixed(6, mixedRows), tier.Disk)
	h, err := b.Open(t.Context(), tier.ID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	src := h.Payload().(*batch.Image)
	s := image.Selection{Fields: []int{0, 1, 2, 3}, From: mixedRows / 2, To: mixedRows - 1}
	if _, err := s.Of(src.Descriptor().Schema, src.Descriptor().Rows); err != nil {
		t.Fatal(err)
	}
	for i, span := range src.Descriptor().Buffers {
		for _, odd := range []int64{-64, span.Offset + 8, src.Descriptor().Body, 1<<63 - 64, 1<<63 - 1} {
			d := *src.Descriptor()
			d.Buffers = slices.Clone(d.Buffers)
			d.Buffers[i].Offset = odd
			img := batch.NewImage(&d, src.Buffer(), src.Space(), src.Parts.Shared...)
			rec, err := m.mover.open(t.Context(), opener{}, img, &s)
			if err == nil {
				rec.Release()
			}
			if !errors.Is(err, image.ErrInvalid) && (err != nil || span.Length > 0) {
				t.Errorf("buffer %d at %d: %v", i, odd, err)
			}
		}
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	m.rests(t, b, tier.Disk)
}

// Memory in several pieces is filled across their ends, and opened in place.
func TestColumnsInSeveralExtents(t *testing.T) {
	seed := testseed.One(t)
	m := newMachine(t, machineConfig{})
	b := m.put(t, arrowgen.Flights(7, mixedRows), tier.Disk)
	h, err := b.Open(t.Context(), tier.ID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	src := h.Payload().(*batch.Image)
	rng := rand.New(rand.NewPCG(seed, 7))
	for i := range 50 {
		s := image.Selection{Fields: rng.Perm(5)[:1+rng.IntN(5)], From: rng.Int64N(mixedRows / 2),
			To: mixedRows/2 + 1 + rng.Int64N(mixedRows/2)}
		c, err := s.Of(src.Descriptor().Schema, src.Descriptor().Rows)
		if err != nil {
			t.Fatal(err)
		}
		p, err := c.Plan(src.Descriptor(), m.pieces(t, src, false))
		if err != nil {
			t.Fatal(err)
		}
		extents := arrowgen.Split(rng, p.Memory.Cuts(), make([]byte, p.Memory.Body))
		got, err := p.Open(m.pieces(t, src, true), extents, image.NewLease(nil), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := equal.Records(pick(m.records[b.ID()], c.Fields, c.From, c.To), got); err != nil {
			t.Fatal(fmt.Errorf("%d: %+v in %d extents: %w", i, s, len(extents), err))
		}
		got.Release()
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
}

// Several requests are under way: four of six wait for each other, which would never end
// if one came after the other.
func TestColumnsHaveSeveralRequestsUnderWay(t *testing.T) {
	m := newMachine(t, machineConfig{host: 16 << 20})
	b := m.put(t, arrowgen.Ints(1, 6*transfer.ColumnRequest/8, 1), tier.Disk)
	var reads atomic.Int64
	four := make(chan struct{})
	defer m.files.Add(faultfs.Rule{Ops: []string{"read"}, Times: 4, Effect: faultfs.Do(func(string, string) {
		if reads.Add(1) == 4 {
			close(four)
		}
		<-four
	})})()
	if err := m.columnsOf(t.Context(), b, image.Selection{}); err != nil {
		t.Fatal(err)
	}
	if n := reads.Load(); n != 4 {
		t.Errorf("%d requests waited for each other", n)
	}
}
