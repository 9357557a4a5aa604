package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

func smallEngine(t *testing.T) *spillway.Engine {
	t.Helper()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{{Memory: spillway.Bytes(8 << 20)}}, HostMemory: spillway.Bytes(8 << 20),
		Disks:  []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(16 << 20)}},
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := eng.Close(); err != nil {
			t.Errorf("closing the engine: %v", err)
		}
	})
	return eng
}

// records is a Source of a few batches.
type records []arrow.RecordBatch

func (r *records) Next(context.Context) (arrow.RecordBatch, error) {
	if len(*r) == 0 {
		return nil, io.EOF
	}
	rec := (*r)[0]
	*r = (*r)[1:]
	return rec, nil
}

func numbers(n int) *records {
	var out records
	for i := range n {
		out = append(out, arrowgen.Ints(uint64(i), 2000, 3)) // without nulls: every byte of a value counts
	}
	return &out
}

// TestEdgesOf: all pairs of six forms in three tiers; and what the registry no longer has is
// no edge.
func TestEdgesOf(t *testing.T) {
	eng := smallEngine(t)
	if edges, unknown := edgesOf(eng); len(edges) != 36 || len(unknown) != 0 {
		t.Errorf("%v, %v", edges, unknown)
	}
	if err := eng.Registry().Unregister(convert.ImageIn(tier.GPU), convert.ImageIn(tier.Disk)); err != nil {
		t.Fatal(err)
	}
	same := func(_ context.Context, p batch.Payload, _ *reservation.Reservation) (batch.Payload, error) {
		return p, nil
	}
	own := convert.Form{Type: "own", Kind: tier.GPU}
	if err := eng.Registry().Register(own, convert.ImageIn(tier.Host), same); err != nil {
		t.Fatal(err)
	}
	edges, unknown := edgesOf(eng)
	if len(edges) != 35 || len(unknown) != 1 || unknown[0] != "own in gpu to image in host" {
		t.Errorf("%v, %v", edges, unknown)
	}
}

// TestVerifyBatches: sound converters, no difference.
func TestVerifyBatches(t *testing.T) {
	eng := smallEngine(t)
	edges, _ := edgesOf(eng)
	res, err := verifyBatches(t.Context(), eng, edges, "numbers", numbers(3))
	if err != nil || res.batches != 3 || res.mismatches != 0 || res.first != nil {
		t.Errorf("%+v, %v", res, err)
	}
	moved := 0
	for _, e := range eng.Stats().Edges {
		if e.Batches < 3 {
			t.Errorf("%s to %s moved %d batches", e.From, e.To, e.Batches)
		}
		moved++
	}
	if moved != 9 { // clones are no moves, but batches change their form in all tiers
		t.Errorf("%d pairs of spaces moved anything", moved)
	}
}

// TestVerifyThereAndBack: a batch moves along a single edge, and back.
func TestVerifyThereAndBack(t *testing.T) {
	eng := smallEngine(t)
	edges, _ := edgesOf(eng)
	i := slices.IndexFunc(edges, func(e edge) bool {
		return e.fromType == batch.PlainImage && e.toType == batch.PlainImage &&
			e.from.Kind() == tier.GPU && e.to.Kind() == tier.Host
	})
	if _, err := verifyBatches(t.Context(), eng, edges[i:i+1], "numbers", numbers(1)); err != nil {
		t.Fatal(err)
	}
	moved := make(map[[2]tier.Kind]int64)
	for _, e := range eng.Stats().Edges {
		moved[[2]tier.Kind{e.From.Kind, e.To.Kind}] += e.Batches
	}
	there, back := moved[[2]tier.Kind{tier.GPU, tier.Host}], moved[[2]tier.Kind{tier.Host, tier.GPU}]
	if there != 1 || back != 1 {
		t.Errorf("moved %d times there and %d times back", there, back)
	}
}

// TestVerifyBrokenConverter: one that changes a byte is found, on its edge, and the
// first difference names the batch and the column.
func TestVerifyBrokenConverter(t *testing.T) {
	eng := smallEngine(t)
	edges, _ := edgesOf(eng)
	registry := eng.Registry()
	if err := registry.Unregister(convert.ImageIn(tier.GPU), convert.ImageIn(tier.Host)); err != nil {
		t.Fatal(err)
	}
	err := registry.Register(
		convert.ImageIn(tier.GPU),
		convert.ImageIn(tier.Host),
		func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			img := src.(*batch.Image)
			d := img.Descriptor()
			buf, err := r.Alloc(d.Body, d.Cuts()...)
			if err != nil {
				return nil, err
			}
			if err := copyDown(ctx, buf, img.Buffer()); err != nil {
				return nil, err
			}
			for _, s := range d.Buffers { // the first value of the first column
				if s.Offset >= 0 && s.Length >= 8*2000 {
					buf.Memory().(tier.HostMemory).Extents()[0][s.Offset] ^= 1
					break
				}
			}
			return batch.NewImage(d, buf, r.Space()), nil
		},
	)
	if err != nil {
		t.Fatal(err)
	}
	res, err := verifyBatches(t.Context(), eng, edges, "numbers", numbers(2))
	if err != nil {
		t.Fatal(err)
	}
	if res.batches != 2 || res.mismatches == 0 || res.first == nil ||
		!strings.Contains(res.first.Error(), "numbers, batch 1") {
		t.Errorf("%+v", res)
	}
}

// copyDown copies from the device, as a converter would.
func copyDown(ctx context.Context, dst, src *tier.Buffer) error {
	mem := src.Memory().(tier.DeviceMemory)
	s, err := mem.Device().NewStream()
	if err != nil {
		return err
	}
	at := mem.Addr()
	for _, e := range dst.Memory().(tier.HostMemory).Extents() {
		if err := mem.Device().CopyRegions(s, []tier.Region{{HostDst: e, Src: at}}); err != nil {
			return err
		}
		at += tier.Addr(len(e))
	}
	return s.Close() // waits
}

// TestVerifyTooLarge: a batch that does not fit twice is refused, and not waited for.
func TestVerifyTooLarge(t *testing.T) {
	eng := smallEngine(t)
	edges, _ := edgesOf(eng)
	big := records{arrowgen.Flights(1, 200_000)}
	_, err := verifyBatches(t.Context(), eng, edges, "big", &big)
	if !errors.Is(err, reservation.ErrExceeded) || !strings.Contains(err.Error(), "big, batch 1") {
		t.Errorf("got %v", err)
	}
}

// TestVerifyCancelled: a cancelled walk ends and leaves nothing.
func TestVerifyCancelled(t *testing.T) {
	eng := smallEngine(t)
	edges, _ := edgesOf(eng)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := verifyBatches(ctx, eng, edges, "numbers", numbers(1)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
