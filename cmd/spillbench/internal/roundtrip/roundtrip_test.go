package roundtrip

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

func engine(t *testing.T) *spillway.Engine {
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

// TestEdges: all pairs of six forms in three tiers; and what the registry no longer has is
// no edge.
func TestEdges(t *testing.T) {
	eng := engine(t)
	if edges, unknown := Edges(eng); len(edges) != 36 || len(unknown) != 0 {
		t.Errorf("%v, %v", edges, unknown)
	}
	if err := eng.Registry().Unregister(convert.ImageIn(tier.GPU), convert.ImageIn(tier.Disk)); err != nil {
		t.Fatal(err)
	}
	same := func(_ context.Context, p batch.Payload, _ reservation.Reservation) (batch.Payload, error) {
		return p, nil
	}
	if err := eng.Registry().Register(convert.Form{Type: "own", Kind: tier.GPU}, convert.ImageIn(tier.Host), same); err != nil {
		t.Fatal(err)
	}
	edges, unknown := Edges(eng)
	if len(edges) != 35 || len(unknown) != 1 || unknown[0] != "own in gpu to image in host" {
		t.Errorf("%v, %v", edges, unknown)
	}
}

// TestWhole: sound converters, no difference.
func TestWhole(t *testing.T) {
	eng := engine(t)
	edges, _ := Edges(eng)
	res, err := Run(t.Context(), eng, edges, "numbers", numbers(3))
	if err != nil || res.Batches != 3 || res.Mismatches != 0 || res.First != nil {
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

// TestThereAndBack: a batch moves along a single edge, and back.
func TestThereAndBack(t *testing.T) {
	eng := engine(t)
	edges, _ := Edges(eng)
	i := slices.IndexFunc(edges, func(e Edge) bool {
		return e.FromType == batch.PlainImage && e.ToType == batch.PlainImage &&
			e.From.Kind() == tier.GPU && e.To.Kind() == tier.Host
	})
	if _, err := Run(t.Context(), eng, edges[i:i+1], "numbers", numbers(1)); err != nil {
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

// TestBrokenConverter: one that changes a byte is found, on its edge, and the
// first difference names the batch and the column.
func TestBrokenConverter(t *testing.T) {
	eng := engine(t)
	edges, _ := Edges(eng)
	registry := eng.Registry()
	if err := registry.Unregister(convert.ImageIn(tier.GPU), convert.ImageIn(tier.Host)); err != nil {
		t.Fatal(err)
	}
	err := registry.Register(
		convert.ImageIn(tier.GPU),
		convert.ImageIn(tier.Host),
		func(ctx context.Context, src batch.Payload, r reservation.Reservation) (batch.Payload, error) {
			img := src.(*batch.Image)
			d := img.Descriptor()
			buf, err := r.AllocCuts(d.Body, d.Cuts())
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
	res, err := Run(t.Context(), eng, edges, "numbers", numbers(2))
	if err != nil {
		t.Fatal(err)
	}
	if res.Batches != 2 || res.Mismatches == 0 || res.First == nil ||
		!strings.Contains(res.First.Error(), "numbers, batch 1") {
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
		if err := mem.Device().CopyToHost(s, e, at); err != nil {
			return err
		}
		at += tier.Addr(len(e))
	}
	return s.Close() // waits
}

// TestTooLarge: a batch that does not fit twice is refused, and not waited for.
func TestTooLarge(t *testing.T) {
	eng := engine(t)
	edges, _ := Edges(eng)
	big := records{arrowgen.Flights(1, 200_000)}
	_, err := Run(t.Context(), eng, edges, "big", &big)
	if !errors.Is(err, reservation.ErrExceeded) || !strings.Contains(err.Error(), "big, batch 1") {
		t.Errorf("got %v", err)
	}
}

// TestCancelled: a cancelled walk ends and leaves nothing.
func TestCancelled(t *testing.T) {
	eng := engine(t)
	edges, _ := Edges(eng)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, eng, edges, "numbers", numbers(1)); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
