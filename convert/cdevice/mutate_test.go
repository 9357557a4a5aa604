package cdevice

import (
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"weak"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/testseed"
)

// spoil changes one number or pointer of a random struct in the tree.
func spoil(a *Array, rng *rand.Rand) {
	if a.NChildren > 0 && rng.IntN(4) > 0 {
		spoil(at[Array](several[uintptr](a.Children, a.NChildren)[rng.Int64N(a.NChildren)]), rng)
		return
	}
	if a.Dictionary != 0 && rng.IntN(2) > 0 {
		spoil(at[Array](a.Dictionary), rng)
		return
	}
	odd := []int64{-1, -2, math.MinInt64, math.MaxInt64, 1 << 47, 1 << 48, 1<<48 + 1, 1 << 60, 1 << 62}[rng.IntN(9)]
	near := rng.Int64N(5) - 2
	switch rng.IntN(7) {
	case 0:
		a.Length = odd
	case 1:
		a.Offset = odd
	case 2:
		a.NullCount = odd
	case 3:
		a.Length += near
	case 4:
		a.NullCount += near
	case 5:
		a.NBuffers = min(a.NBuffers, max(-1, a.NBuffers+near))
	case 6:
		if a.NBuffers > 0 {
			several[uintptr](a.Buffers, a.NBuffers)[rng.Int64N(a.NBuffers)] = 0
		}
	}
}

// Structs in which a number is wrong, or a buffer missing, are refused, or shown as far as there is
// memory: what is not there is not read.
func TestImportOfSpoiltStructs(t *testing.T) {
	r := newRig(t, nil)
	runs, refused, taken := 0, 0, 0
	all := testseed.Rounds(1500, 250)
	for seed := range testseed.Each(t, all) {
		runs++
		rng := rand.New(rand.NewPCG(seed, 7))
		rec := randomColumn(seed, rng)
		if rec == nil {
			continue
		}
		a, s := r.produce(t, rec, rng, 0, rec.NumRows())
		keep := a.Array
		saved := snapshot(&a.Array)
		spoil(&a.Array, rng)
		table, err := Import(t.Context(), r.mover, r.gpu, a, s, Config{})
		if err != nil {
			refused++
			restore(saved)
			a.Array = keep
			a.Release()
			s.Close()
			rec.Release()
			continue
		}
		taken++
		restore(saved)
		b := r.batch(t, table)
		h := r.hold(t, b)
		got, err := r.mover.Record(t.Context(), h)
		if err == nil {
			got.Release()
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		h = r.hold(t, b)
		a, s = new(DeviceArray), new(Schema)
		if err := Export(h, a, s, Config{}); err != nil { // there is no memory where it should be
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		} else {
			a.Release()
			s.Close()
		}
		r.drop(t, b)
		rec.Release()
	}
	if runs > 1 && (refused < all/6 || taken < all/6) {
		t.Errorf("%d were refused, %d taken", refused, taken)
	}
}

type original struct {
	at  *Array
	was Array
	buf []uintptr
}

func snapshot(a *Array) (all []original) {
	k := original{at: a, was: *a}
	if a.NBuffers > 0 {
		k.buf = append(k.buf, several[uintptr](a.Buffers, a.NBuffers)...)
	}
	all = append(all, k)
	if a.NChildren > 0 {
		for _, c := range several[uintptr](a.Children, a.NChildren) {
			all = append(all, snapshot(at[Array](c))...)
		}
	}
	if a.Dictionary != 0 {
		all = append(all, snapshot(at[Array](a.Dictionary))...)
	}
	return all
}

// restore makes the structs what they were, but for the first, which may have been moved.
func restore(all []original) {
	for i, k := range all {
		if i > 0 {
			*k.at = k.was
		}
		if k.was.NBuffers > 0 {
			copy(several[uintptr](k.was.Buffers, k.was.NBuffers), k.buf)
		}
	}
}

// Children that are moved out of an array, and out of each other, are released by many threads in
// any order: the batch is free with the last.
func TestMovedChildrenAreReleasedByMany(t *testing.T) {
	r := newRig(t, nil)
	dict := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String}
	inner := arrow.StructOf(arrow.Field{Name: "a", Type: arrow.ListOf(dict)}, arrow.Field{Name: "b", Type: arrow.PrimitiveTypes.Int8})
	rec := arrowgen.New(4).Record(arrowgen.Schema(inner, arrow.PrimitiveTypes.Int64, dict), 100)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, b)
	for seed := range testseed.Each(t, testseed.Rounds(200, 60)) {
		rng := rand.New(rand.NewPCG(seed, 9))
		a, s := r.export(t, b, Config{Failed: func(err error) { t.Error(err) }})
		s.Close()
		pieces := []*Array{&a.Array}
		for i := 0; i < len(pieces); i++ {
			from := several[uintptr](pieces[i].Children, pieces[i].NChildren)
			if pieces[i].Dictionary != 0 {
				from = append(slices.Clone(from), pieces[i].Dictionary)
			}
			for _, c := range from {
				if rng.IntN(3) > 0 {
					moved := new(Array)
					*moved = *at[Array](c)
					at[Array](c).Release = 0
					pieces = append(pieces, moved)
				}
			}
		}
		rng.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
		var all sync.WaitGroup
		for _, p := range pieces[1:] {
			all.Go(func() { callbacks().call(addressOf(p), p.Release) })
		}
		all.Wait()
		if b.Info().State == batch.Idle {
			t.Error("the batch is free with a part of it out")
		}
		callbacks().call(addressOf(pieces[0]), pieces[0].Release)
		if b.Info().State != batch.Idle || callbacks().open() != 0 {
			t.Errorf("the batch is %s, and %d exports are out", b.Info().State, callbacks().open())
		}
	}
}

// TestStructsAreKeptUntilTheRelease: the garbage collector keeps the structs of an export while it
// is not released, and takes them then.
func TestStructsAreKeptUntilTheRelease(t *testing.T) {
	r := newRig(t, nil)
	rec := arrowgen.New(4).Record(arrowgen.Schema(arrow.ListOf(arrow.PrimitiveTypes.Int32)), 100)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, b)
	a, s := r.export(t, b, Config{})
	column, field := a.Array.Child(0), at[Schema](several[uintptr](s.Children, 1)[0])
	kept := map[string]func() bool{}
	for name, p := range map[string]uintptr{
		"a column": several[uintptr](a.Array.Children, 1)[0], "a field": several[uintptr](s.Children, 1)[0],
		"a field's children": field.Children, "a column's buffers": column.Buffers,
	} {
		w := weak.Make(at[uintptr](p))
		kept[name] = func() bool { return w.Value() != nil }
	}
	runtime.GC()
	for name, kept := range kept {
		if !kept() {
			t.Errorf("%s was taken before the release", name)
		}
	}
	if t.Failed() {
		return // a release would read them
	}
	a.Release()
	s.Close()
	runtime.GC()
	for name, kept := range kept {
		if kept() {
			t.Errorf("%s is still there after the release", name)
		}
	}
}
