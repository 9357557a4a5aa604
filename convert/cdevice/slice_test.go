package cdevice

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// slice makes a batch of the rows of b from one on, in b's memory, as if a slice had been imported.
func (r *rig) slice(t testing.TB, b *batch.Batch, from, to int) *batch.Batch {
	t.Helper()
	a, s := r.export(t, b, Config{Failed: func(err error) { t.Error(err) }})
	a.Array.Offset, a.Array.Length = int64(from), int64(to-from)
	table, err := Import(t.Context(), r.mover, r.gpu, a, s, Config{})
	if err != nil {
		t.Fatal(err)
	}
	return r.batch(t, table)
}

// cuts are slices of 100 rows: with and without bitmaps that begin within a byte, and with nothing
// in them.
var cuts = [][2]int{{0, 100}, {3, 97}, {8, 100}, {13, 14}, {64, 71}, {99, 100}, {50, 50}}

// A batch of slices of foreign arrays, of every type, is exported without a copy, and is the same
// when it comes back; and so is a slice of that again.
func TestSlicesOfEveryType(t *testing.T) {
	lib := buildConsumer(t)
	r := newRig(t, nil)
	first, step := testseed.Half(t, 3)
	for i, dt := range arrowgen.Types() {
		if nestedExtension(dt) || hasExtension(dt) {
			continue
		}
		rec := arrowgen.New(uint64(i)).Record(arrowgen.Schema(dt, arrow.PrimitiveTypes.Int32), 100)
		b := r.put(t, rec, batch.PlainImage)
		for k, cut := range cuts {
			if (i+k)%step != first {
				continue
			}
			t.Run(fmt.Sprintf("%d %s/%d", i, dt.Name(), cut), func(t *testing.T) {
				c := r.slice(t, b, cut[0], cut[1])
				want := rec.NewSlice(int64(cut[0]), int64(cut[1]))
				defer want.Release()
				a, s := r.export(t, c, Config{})
				if n := call(lib.missing, a, s); n != 0 {
					t.Errorf("%d buffers of %s are missing", n, dt)
				}
				a.Release()
				s.Close()
				d := r.slice(t, c, 0, cut[1]-cut[0])
				r.says(t, d, want)
				from := (cut[1] - cut[0]) / 3
				rest := want.NewSlice(int64(from), want.NumRows())
				defer rest.Release()
				e := r.slice(t, d, from, cut[1]-cut[0])
				r.says(t, e, rest)
				for _, x := range []*batch.Batch{e, d, c} {
					r.drop(t, x)
				}
			})
		}
		r.drop(t, b)
		rec.Release()
	}
}

// A program in C reads of a slice what it shows.
func TestConsumerInCOfSlices(t *testing.T) {
	lib := buildConsumer(t)
	r := newRig(t, nil)
	for seed := range testseed.Each(t, 20) {
		rec := arrowgen.New(seed).Record(consumable(), 100)
		b := r.put(t, rec, batch.ScatteredImage)
		for _, cut := range cuts {
			c := r.slice(t, b, cut[0], cut[1])
			want := rec.NewSlice(int64(cut[0]), int64(cut[1]))
			a, s := r.export(t, c, Config{Failed: func(err error) { t.Error(err) }})
			if got, want := call(lib.consume, a, s), hashedRows(cut[1]-cut[0], want.Columns()...); got != want {
				t.Errorf("rows %d of seed %d: the consumer read %#x, want %#x", cut, seed, got, want)
			}
			want.Release()
			r.drop(t, c)
		}
		r.drop(t, b)
		rec.Release()
	}
}

// The copy of a slice lacks what the interface would have before its first row. The error says what
// to do, and that works.
func TestCopyOfASlice(t *testing.T) {
	lib := buildConsumer(t)
	r := newRig(t, nil)
	rec := arrowgen.New(1).Record(consumable(), 100)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	whole := r.slice(t, b, 3, 97)
	of := whole.Info().Payload.(*batch.Image)
	if len(of.Parts.Adjustments) == 0 || !isLent(of) {
		t.Fatal("the slice is none")
	}
	copied := r.batch(t, payload.New(payload.Parts{
		Type: payload.ScatteredImage, Descriptor: of.Descriptor(), Space: r.gpu,
		Ranges: of.Parts.Ranges, Adjustments: of.Parts.Adjustments,
	}))
	h := r.hold(t, copied)
	if err := Export(h, new(DeviceArray), new(Schema), Config{}); !errors.Is(err, tier.ErrNotSupported) || !strings.Contains(err.Error(), "batch.PlainImage") {
		t.Errorf("the copy of a slice: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if err := r.mover.MoveAs(t.Context(), copied, onGPU, batch.PlainImage); err != nil {
		t.Fatal(err)
	}
	want := rec.NewSlice(3, 97)
	defer want.Release()
	a, s := r.export(t, copied, Config{})
	if got, want := call(lib.consume, a, s), hashedRows(94, want.Columns()...); got != want {
		t.Errorf("the consumer read %#x, want %#x", got, want)
	}
	for _, x := range []*batch.Batch{copied, whole, b} {
		r.drop(t, x)
	}
}
