package test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestFullOfDictionaries fills everything with batches that share a dictionary, or have one each
// that is larger than they are. A waiter for room then gets an error, instead of waiting for ever,
// and nothing is lost.
func TestFullOfDictionaries(t *testing.T) {
	t.Parallel()
	one := wordList(1, 1500)
	for name, words := range map[string]func(n int) arrow.Array{
		"shared": func(int) arrow.Array { return one },
		"each":   func(n int) arrow.Array { return wordList(uint64(n), 900) },
	} {
		t.Run(name, func(t *testing.T) {
			eng, err := spillway.Open(t.Context(), spillway.Config{
				GPUs:          []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(256 << 10)}},
				HostMemory:    spillway.Bytes(512 << 10),
				Disks:         []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(1 << 20)}},
				MonitorPeriod: time.Millisecond,
				StallTimeout:  300 * time.Millisecond,
				Logger:        slog.New(slog.NewTextHandler(io.Discard, nil)),
			})
			if err != nil {
				t.Fatal(err)
			}
			plan, err := eng.Plan("full")
			if err != nil {
				t.Fatal(err)
			}
			repo, err := plan.Repository("scan", 0)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a stall takes so long
			defer cancel()
			var put []arrow.RecordBatch
			for err == nil && len(put) < 1000 {
				rec := numberedRecord(int64(len(put)), 300, words(len(put)))
				err = repo.Put(ctx, 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU)))
				if err == nil {
					put = append(put, rec)
				}
			}
			if !errors.Is(err, tier.ErrNoSpace) || len(put) < 20 {
				t.Fatalf("after %d batches: %v", len(put), err)
			}
			got := 0
			check := func(h *spillway.Handle) {
				rec, err := eng.Mover().Record(ctx, h)
				if err != nil {
					t.Fatal(err)
				}
				n := rec.Column(0).(*array.Int64).Value(0)
				if err := convert.Equal(put[n], rec); err != nil {
					t.Errorf("batch %d: %v", n, err)
				}
				rec.Release()
				if err := h.Close(); err != nil {
					t.Fatal(err)
				}
				got++
			}
			// Those in host memory are read where they are and make room for the others.
			for b := range repo.Batches(0) {
				if b.Info().Space.Kind != tier.Host {
					continue
				}
				h, err := eng.Mover().Acquire(ctx, b, reservation.AnyInTier(tier.Host))
				if err := errors.Join(err, b.Drop()); err != nil {
					t.Fatal(err)
				}
				check(h)
			}
			for h, err := range repo.Drain(ctx, 0, tier.Host) {
				if err != nil {
					t.Fatal(err)
				}
				check(h)
			}
			if got != len(put) {
				t.Errorf("%d batches of %d came back", got, len(put))
			}
			if err := eng.Close(); err != nil {
				t.Error(err)
			}
			for _, s := range eng.Stats().Spaces {
				if s.Used() != 0 {
					t.Errorf("%s ends with %+v", s.ID, s.Usage)
				}
			}
		})
	}
}

// TestSharedDictionaryFillsTheGPU: a dictionary that is in the GPU already takes no room there
// again, so that batches which share a large one fill the GPU before host memory is used.
func TestSharedDictionaryFillsTheGPU(t *testing.T) {
	t.Parallel()
	const batches = 50
	eng, _ := openSmall(t, 64<<20, 128<<20)
	defer closeClean(t, eng)
	plan, err := eng.Plan("full")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	words := array.NewStringBuilder(memory.DefaultAllocator)
	defer words.Release()
	for n := range 30 {
		words.Append(strings.Repeat(string(rune('a'+n)), 1<<20))
	}
	dict := words.NewArray()
	indices := array.NewInt32Builder(memory.DefaultAllocator)
	defer indices.Release()
	for n := range 1 << 18 {
		indices.Append(int32(n % 30))
	}
	coded := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}
	column := array.NewDictionaryArray(coded, indices.NewArray(), dict)
	schema := arrow.NewSchema([]arrow.Field{{Name: "word", Type: coded}}, nil)
	rec := array.NewRecordBatch(schema, []arrow.Array{column}, 1<<18)
	for range batches {
		if err := repo.Put(t.Context(), 0, rec); err != nil {
			t.Fatal(err)
		}
	}
	gpu := gpuOf(t, eng)
	// The monitor may be at work between the marks.
	if least := gpu.State().Stop - 2<<20; gpu.State().Used() < least {
		t.Errorf("%d bytes of the GPU are in use, want %d or more of %d", gpu.State().Used(), least, gpu.Capacity)
	}
	if n := eng.Mover().DictionaryBytes(gpu.ID()); n > 31<<20 {
		t.Errorf("%d bytes of dictionaries are in the GPU", n)
	}
}
