package arrowmem_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier"
)

// build makes an array as rows says by appending to a builder.
func build(mem memory.Allocator, rows arrow.Array) (b array.Builder, made func() arrow.Array) {
	b = array.NewBuilder(mem, rows.DataType())
	return b, func() arrow.Array {
		b.Reserve(rows.Len() / 2)
		for i := range rows.Len() {
			if rows.IsNull(i) {
				b.AppendNull()
			} else if err := b.AppendValueFromString(rows.ValueStr(i)); err != nil {
				b.AppendEmptyValue()
			}
		}
		return b.NewArray()
	}
}

// buildable says that arrow-go has a builder for the type that takes strings or
// empty values.
func buildable(rows arrow.Array) (ok bool) {
	defer func() { ok = recover() == nil }()
	_, f := build(memory.NewGoAllocator(), rows)
	f().Release()
	return true
}

func arraysOfAllTypes(t *testing.T, n int) []arrow.Array {
	g := arrowgen.New(1)
	var all []arrow.Array
	skipped := 0
	for _, dt := range append(arrowgen.Flat(), arrowgen.Nested(arrow.PrimitiveTypes.Int32)...) {
		rows := g.Array(dt, n)
		t.Cleanup(rows.Release)
		if !buildable(rows) {
			t.Logf("arrow-go cannot build %s so", dt)
			skipped++
			continue
		}
		all = append(all, rows)
	}
	if skipped > len(all)/4 {
		t.Errorf("%d types of %d were left out", skipped, len(all)+skipped)
	}
	return all
}

// TestBuildersOfAllTypes builds within a promise what arrow-go builds on the heap,
// under arrow-go's own checks.
func TestBuildersOfAllTypes(t *testing.T) {
	a := allocatorOf(t, 1<<20, 512<<10, nil)
	for _, rows := range arraysOfAllTypes(t, 150) {
		checked := memory.NewCheckedAllocator(a)
		wb, want := build(memory.NewGoAllocator(), rows)
		gb, got := build(checked, rows)
		w, g := want(), got()
		if !array.Equal(w, g) && fmt.Sprint(w) != fmt.Sprint(g) { // no NaN is equal to another
			t.Errorf("%s: the arrays differ", rows.DataType())
		}
		w.Release()
		g.Release()
		wb.Release()
		gb.Release()
		checked.AssertSize(t, 0)
		if a.live() != 0 {
			t.Errorf("%s: %d bytes are left", rows.DataType(), a.live())
			return
		}
	}
}

// refuser refuses the nth allocation for good.
type refuser struct {
	*arrowmem.Allocator
	left int
	full func() // panics as a full reservation does
}

func (r *refuser) Allocate(size int) []byte {
	if r.left--; r.left < 0 {
		r.full()
	}
	return r.Allocator.Allocate(size)
}

func (r *refuser) Reallocate(size int, b []byte) []byte {
	if r.left--; r.left < 0 && size > len(b) { // to make it shorter is never refused
		r.full()
	}
	return r.Allocator.Reallocate(size, b)
}

// TestRefusalAtEveryAllocation: whichever allocation is refused, the builder's panic
// becomes the error, and after the builder's Release, and Close for what it forgot,
// nothing is left.
func TestRefusalAtEveryAllocation(t *testing.T) {
	m, s := arenaOf(t, 1<<20)
	lost := make(map[string]int)
	for _, rows := range arraysOfAllTypes(t, 20) {
		for n, done := 0, false; !done; n++ {
			r, err := m.TryReserve(reservation.AnyInTier(tier.Host), 256<<10, nil)
			if err != nil {
				t.Fatal(err)
			}
			a, err := arrowmem.New(r)
			if err != nil {
				t.Fatal(err)
			}
			mem := &refuser{Allocator: a, left: n, full: func() { a.Allocate(1 << 20) }}
			var b array.Builder
			err = guarded(func() {
				var made func() arrow.Array
				b, made = build(mem, rows)
				made().Release()
				done = true
			})
			if !done && !errors.Is(err, reservation.ErrExceeded) || done && err != nil {
				t.Fatalf("%s, allocation %d: %v", rows.DataType(), n, err)
			}
			mem.left = 1 << 30
			if b != nil {
				b.Release()
			}
			if s.State().Live > 0 {
				lost[rows.DataType().Name()]++
			}
			if err := a.Close(); err != nil && !isUnfreed(err) {
				t.Error(err)
			}
			release(t, r)
			if s.State().Used() != 0 {
				t.Fatalf("%s, allocation %d: %d bytes are left", rows.DataType(), n, s.State().Used())
			}
		}
	}
	// The documentation of Allocator names these.
	delete(lost, "binary_view")
	delete(lost, "string_view")
	if len(lost) > 0 {
		t.Errorf("builders that lost memory when they were refused: %v", lost)
	}
}

// TestConcatenateWrapsRefusals: arrow-go recovers there, and its error is the same.
func TestConcatenateWrapsRefusals(t *testing.T) {
	g := arrowgen.New(2)
	rows := g.Array(arrow.BinaryTypes.String, 1000)
	defer rows.Release()
	a := allocatorOf(t, 1<<20, 1000, nil)
	err := arrowmem.Guard(func() error {
		both, err := array.Concatenate([]arrow.Array{rows, rows}, a)
		if err == nil {
			both.Release()
		}
		return err
	})
	var exceeded *reservation.ExceededError
	if !errors.As(err, &exceeded) {
		t.Errorf("%v", err)
	}
	if a.live() > 0 {
		if err := a.Close(); !isUnfreed(err) {
			t.Error(err)
		}
	}
}

// TestAllocatorConcurrently: goroutines build, and free each other's arrays, while the
// promise is given up in the middle; all that they had comes back.
func TestAllocatorConcurrently(t *testing.T) {
	for _, policy := range []reservation.LimitPolicy{
		reservation.Fail(), reservation.Ignore(), reservation.Increase(1.25),
	} {
		m, s := arenaOf(t, 1<<20)
		r, err := m.TryReserve(reservation.AnyInTier(tier.Host), 100<<10, &reservation.Options{Policy: policy})
		if err != nil {
			t.Fatal(err)
		}
		a, err := arrowmem.New(r)
		if err != nil {
			t.Fatal(err)
		}
		arrays := make(chan arrow.Array, 8)
		var builders, readers sync.WaitGroup
		for g := range 4 {
			builders.Go(func() {
				for i := range 100 {
					b := array.NewStringBuilder(a)
					err := guarded(func() {
						for j := range i * 3 {
							b.Append(fmt.Sprint("value ", g, i, j))
						}
						arrays <- b.NewArray()
					})
					if err != nil && !errors.Is(err, reservation.ErrExceeded) &&
						!errors.Is(err, tier.ErrReleased) && !errors.Is(err, tier.ErrNoSpace) {
						t.Error(err)
					}
					b.Release()
					if g == 0 && i == 70 {
						release(t, r)
					}
				}
			})
		}
		for range 2 {
			readers.Go(func() {
				for arr := range arrays {
					for i := range arr.Len() {
						if v := arr.(*array.String).Value(i); len(v) < 9 || v[:6] != "value " {
							t.Errorf("a value is %q", v)
						}
					}
					arr.Release()
				}
			})
		}
		builders.Wait()
		close(arrays)
		readers.Wait()
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if s.State().Used() != 0 {
			t.Errorf("%v: %d bytes are left", policy, s.State().Used())
		}
	}
}
