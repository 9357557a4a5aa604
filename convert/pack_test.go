package convert

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// forms are all that a batch can have, with the tier of each.
var forms = []struct {
	form batch.PayloadType
	kind tier.Kind
}{
	{batch.PlainImage, tier.GPU}, {batch.PlainImage, tier.Host}, {batch.PlainImage, tier.Disk},
	{batch.CompressedImage, tier.Host}, {batch.CompressedImage, tier.Disk},
}

func (m *machine) form(t *testing.T, b *batch.Batch) batch.PayloadType {
	t.Helper()
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	form := tr.Payload().Type()
	if err := tr.Abort(); err != nil {
		t.Fatal(err)
	}
	return form
}

// TestAllForms: a batch takes every form after every other, and is whole in each.
func TestAllForms(t *testing.T) {
	t.Parallel()
	recs := []struct {
		name string
		rec  arrow.RecordBatch
	}{
		{"several runs", arrowgen.Flights(1, 30_000)},
		{"dictionary", coded(1, 6_000)},
		{"random", random(150_000)},
		{"nothing", arrowgen.Flights(1, 0)},
		{"no columns", arrowgen.New(1).Record(arrow.NewSchema(nil, nil), 7)},
		{"a few", arrowgen.Flights(1, 10)},
	}
	first, step := testseed.Share(t, 3)
	for i, codec := range []Codec{CodecNone, CodecS2, CodecZstd, CodecBitpack} {
		for j, r := range recs {
			if (i+j)%step != first {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s", codec, r.name), func(t *testing.T) {
				m := newMachine(t, machineConfig{gpu: 8 << 20, host: 24 << 20, disk: 24 << 20, codec: codec})
				b := m.put(t, r.rec, tier.Host)
				from := batch.PlainImage
				for _, n := range everyPair(len(forms)) {
					to := forms[n]
					if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(to.kind), to.form); err != nil {
						t.Fatalf("%s to %s: %v", from, to.form, err)
					}
					if got := m.form(t, b); got != to.form {
						t.Fatalf("%s to %s: it is a %s", from, to.form, got)
					}
					m.whole(t, b, to.kind)
					from = to.form
				}
			})
		}
	}
}

// everyPair returns a walk among n places that goes from each to each once, to itself as well.
func everyPair(n int) []int {
	walk := []int{0}
	for i := range n {
		walk = append(walk, i)
		for j := i + 2; j < n; j++ {
			walk = append(walk, j, i)
		}
		if i+1 < n {
			walk = append(walk, i+1)
		}
	}
	for i := n - 2; i >= 0; i-- {
		walk = append(walk, i)
	}
	return walk
}

func TestEveryPair(t *testing.T) {
	for n := range 7 {
		seen := make(map[[2]int]int)
		for walk := everyPair(n); len(walk) > 1; walk = walk[1:] {
			seen[[2]int{walk[0], walk[1]}]++
		}
		if len(seen) != n*n {
			t.Errorf("%d places: %d pairs", n, len(seen))
		}
	}
}

// random is a record that cannot be compressed.
func random(rows int) arrow.RecordBatch {
	rng := rand.New(rand.NewPCG(3, 3))
	bld := array.NewInt64Builder(memory.DefaultAllocator)
	defer bld.Release()
	for range rows {
		bld.Append(rng.Int64())
	}
	col := bld.NewInt64Array()
	defer col.Release()
	return array.NewRecordBatch(arrow.NewSchema([]arrow.Field{{Name: "random", Type: col.DataType()}}, nil), []arrow.Array{col}, -1)
}

// TestPackedEveryType: what is compressed comes back exactly, whatever its type.
func TestPackedEveryType(t *testing.T) {
	for _, dt := range slices.Concat(arrowgen.Flat(), arrowgen.Nested(arrow.BinaryTypes.String)) {
		t.Run(dt.String(), func(t *testing.T) {
			m := newMachine(t, machineConfig{codec: CodecBitpack})
			rec := arrowgen.New(7).Record(arrowgen.Schema(dt), 3000)
			b := m.put(t, rec, tier.GPU)
			for _, k := range []tier.Kind{tier.Disk, tier.Host, tier.Disk, tier.GPU} {
				m.move(t, b, k)
				m.whole(t, b, k)
			}
		})
	}
}

// TestCodecDecidesTheForm: what a batch becomes on disk follows from the codec; what is
// compressed in host memory stays so.
func TestCodecDecidesTheForm(t *testing.T) {
	for _, c := range []struct {
		codec Codec
		want  batch.PayloadType
	}{{CodecNone, batch.PlainImage}, {CodecS2, batch.CompressedImage}, {CodecZstd, batch.CompressedImage}, {CodecBitpack, batch.CompressedImage}} {
		m := newMachine(t, machineConfig{codec: c.codec})
		b := m.put(t, arrowgen.Flights(1, 20_000), tier.Host)
		raw := b.Info().Bytes
		m.move(t, b, tier.Disk)
		if got := m.form(t, b); got != c.want {
			t.Errorf("%s: a %s", c.codec, got)
		}
		if n := b.Info().Bytes; (n < raw*9/10) != (c.codec != CodecNone) {
			t.Errorf("%s: %d bytes of %d", c.codec, n, raw)
		}
		m.move(t, b, tier.Host)
		if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(tier.Host), batch.CompressedImage); err != nil {
			t.Fatal(err)
		}
		packed := b.Info().Bytes
		if packed > raw*9/10 {
			t.Errorf("%s: %d bytes of %d in host memory", c.codec, packed, raw)
		}
		m.move(t, b, tier.Disk)
		if got, n := m.form(t, b), b.Info().Bytes; got != batch.CompressedImage || n != packed {
			t.Errorf("%s: from host memory a %s of %d bytes, not %d", c.codec, got, n, packed)
		}
		m.whole(t, b, tier.Disk)
	}
}

// TestRandomIsStoredAsItIs: what cannot be compressed takes no more room than it is long.
func TestRandomIsStoredAsItIs(t *testing.T) {
	for _, codec := range []Codec{CodecS2, CodecZstd, CodecBitpack} {
		m := newMachine(t, machineConfig{codec: codec})
		b := m.put(t, random(200_000), tier.Host)
		raw := b.Info().Bytes
		m.move(t, b, tier.Disk)
		if n := b.Info().Bytes; n > raw {
			t.Errorf("%s: %d bytes of %d", codec, n, raw)
		}
		m.whole(t, b, tier.Disk)
	}
}

// TestEveryReadFlipped: each read of a packed batch gives one wrong bit once, and it is
// found, with its place.
func TestEveryReadFlipped(t *testing.T) { everyReadFlipped(t, false) }

// TestEveryReadFlippedEncrypted is the same on a volume that encrypts.
func TestEveryReadFlippedEncrypted(t *testing.T) { everyReadFlipped(t, true) }

func everyReadFlipped(t *testing.T, encrypt bool) {
	for _, codec := range []Codec{CodecS2, CodecNone, CodecZstd, CodecBitpack}[:testseed.Rounds(4, 2)] {
		for _, k := range []tier.Kind{tier.Host, tier.GPU} {
			m := newMachine(t, machineConfig{gpu: 8 << 20, host: 16 << 20, codec: codec, encrypt: encrypt})
			b := m.put(t, arrowgen.Flights(1, 100_000), k)
			if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(tier.Disk), batch.CompressedImage); err != nil {
				t.Fatal(err)
			}
			found := 0
			for ; ; found++ {
				hits := m.files.Hits()
				remove := m.files.Add(faultfs.Rule{Ops: []string{"read"}, Skip: found, Times: 1, Effect: faultfs.BitFlip()})
				err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k))
				hit := m.files.Hits() != hits
				remove()
				if !hit {
					if err != nil {
						t.Fatal(err)
					}
					break
				}
				var c *image.CorruptError
				if !errors.As(err, &c) || c.Batch != b.ID() || c.Volume == "" {
					t.Fatalf("%s to %s, read %d: %v", codec, k, found, err)
				}
				m.rests(t, b, tier.Disk)
			}
			if found < 4 {
				t.Errorf("%s to %s: only %d reads", codec, k, found)
			}
			m.whole(t, b, k)
		}
	}
}

// TestPlaceOfWhatIsWrong: of a run that nothing was gained by compressing, too, the frame is known
// in which a bit is wrong.
func TestPlaceOfWhatIsWrong(t *testing.T) {
	m := newMachine(t, machineConfig{gpu: 8 << 20, host: 16 << 20, codec: CodecBitpack})
	b := m.put(t, random(300_000), tier.Host)
	m.move(t, b, tier.Disk)
	img := b.Info().Payload.(*batch.Image)
	f := img.Buffer().Memory().(tier.FileMemory)
	var run payload.Run // one of the two whole ones that is not at the beginning
	for _, r := range img.Parts.Runs {
		if r.Offset > run.Offset && r.Stored() > 3*payload.FrameSize {
			run = r
		}
	}
	if run.Offset == 0 {
		t.Fatalf("all of %d runs are at the beginning", len(img.Parts.Runs))
	}
	page := make([]byte, tier.Page)
	at := run.Offset + 2*payload.FrameSize + 5*tier.Page
	if err := f.ReadAt(t.Context(), page, at); err != nil {
		t.Fatal(err)
	}
	page[99] ^= 4
	if err := f.WriteAt(t.Context(), page, at); err != nil {
		t.Fatal(err)
	}
	_, _, want := f.Locate(run.Offset + 2*payload.FrameSize)
	for _, k := range []tier.Kind{tier.Host, tier.GPU} {
		var c *image.CorruptError
		err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k))
		if !errors.As(err, &c) || k == tier.Host && c.Offset != want {
			t.Errorf("to %s: %v, want one at %d", k, err, want)
		}
		m.rests(t, b, tier.Disk)
	}
}

// TestRunsEndInZeros: the rest of a run's last page has no bytes of what was compressed before in the
// same scratch memory.
func TestRunsEndInZeros(t *testing.T) {
	m := newMachine(t, machineConfig{gpu: 8 << 20, host: 16 << 20, codec: CodecS2})
	m.move(t, m.put(t, random(200_000), tier.Host), tier.Disk) // fills the scratch memory
	b := m.put(t, arrowgen.Flights(1, 40_000), tier.Host)
	m.move(t, b, tier.Disk)
	img := b.Info().Payload.(*batch.Image)
	ends := 0
	for _, r := range img.Parts.Runs {
		end := r.Offset + r.Stored()
		rest := make([]byte, extent.RoundUp(end, tier.Page)-end)
		if err := img.Buffer().Memory().(tier.FileMemory).ReadAt(t.Context(), rest, end); err != nil {
			t.Fatal(err)
		}
		if len(rest) > 0 {
			ends++
		}
		if len(bytes.Trim(rest, "\x00")) > 0 {
			t.Errorf("a run at %d ends in other bytes than zeros", r.Offset)
		}
	}
	if ends == 0 {
		t.Error("no run ends within a page")
	}
}

// TestPackedFlippedInMemory: a bit that flips in host memory is found as well.
func TestPackedFlippedInMemory(t *testing.T) {
	m := newMachine(t, machineConfig{codec: CodecS2})
	b := m.put(t, arrowgen.Flights(1, 40_000), tier.Host)
	if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(tier.Host), batch.CompressedImage); err != nil {
		t.Fatal(err)
	}
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	img := tr.Payload().(*batch.Image)
	last := img.Parts.Runs[len(img.Parts.Runs)-1]
	p := img.Buffer().Memory().(tier.HostMemory).Extents()[0][last.Offset:]
	if err := tr.Abort(); err != nil {
		t.Fatal(err)
	}
	for _, at := range []int{0, 17, 4000} {
		p[at] ^= 8
		for _, k := range []tier.Kind{tier.GPU, tier.Disk} {
			if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); !errors.Is(err, image.ErrCorrupt) {
				t.Errorf("byte %d, to %s: %v", at, k, err)
			}
		}
		p[at] ^= 8
	}
	m.whole(t, b, tier.Host)
}

// TestFlippedBeforeItWasPacked: a bit that flipped in host memory before a batch was compressed,
// so that the run's checksum is of wrong bytes, is found by those of the body.
func TestFlippedBeforeItWasPacked(t *testing.T) {
	m := newMachine(t, machineConfig{codec: CodecS2})
	b := m.put(t, arrowgen.Flights(1, 20_000), tier.Host)
	b.Info().Payload.(*batch.Image).Buffer().Memory().(tier.HostMemory).Extents()[0][5000] ^= 8
	m.move(t, b, tier.Disk)
	if got := m.form(t, b); got != batch.CompressedImage {
		t.Fatalf("a %s", got)
	}
	for _, k := range []tier.Kind{tier.Host, tier.GPU} {
		if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); !errors.Is(err, image.ErrCorrupt) {
			t.Errorf("to %s: %v", k, err)
		}
		m.rests(t, b, tier.Disk)
	}
}

// TestPackCancelled: a move that is cancelled while the disk is slow ends, and the batch is
// whole where it was.
func TestPackCancelled(t *testing.T) {
	m := newMachine(t, machineConfig{codec: CodecS2, gpu: 8 << 20, host: 16 << 20})
	b := m.put(t, arrowgen.Flights(1, 100_000), tier.GPU)
	ctx, cancel := context.WithCancel(t.Context())
	remove := m.files.Add(faultfs.Rule{Ops: []string{"write"}, Skip: 2, Effect: faultfs.Do(func(string, string) { cancel() })})
	if err := m.mover.Move(ctx, b, reservation.AnyInTier(tier.Disk)); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	remove()
	m.whole(t, b, tier.GPU)
}

// TestPackedSideBySide: transfers that share few chunks do not hold each other up.
func TestPackedSideBySide(t *testing.T) {
	m := newMachine(t, machineConfig{gpu: 24 << 20, host: 24 << 20, disk: 48 << 20, codec: CodecS2, chunk: 4096})
	var all []*batch.Batch
	for i := range 4 {
		all = append(all, m.put(t, arrowgen.Flights(uint64(i), 50_000), tier.GPU))
	}
	var wg sync.WaitGroup
	for _, b := range all {
		wg.Go(func() {
			for range 3 {
				for _, k := range []tier.Kind{tier.Disk, tier.Host, tier.Disk, tier.GPU} {
					if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	for _, b := range all {
		if err := m.same(t.Context(), b); err != nil {
			t.Error(err)
		}
	}
}

// TestPackedPanics: a device that panics while a batch is packed or unpacked costs the move,
// and nothing else.
func TestPackedPanics(t *testing.T) {
	armed := false
	m := newMachine(t, machineConfig{codec: CodecS2, faults: func(op sim.Op) error {
		if armed && op.Stage == sim.Submit && (op.Kind == sim.OpCopyToHost || op.Kind == sim.OpCopyToDevice) {
			panic("the driver is confused")
		}
		return nil
	}})
	b := m.put(t, arrowgen.Flights(1, 20_000), tier.GPU)
	armed = true
	if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err == nil {
		t.Error("it was packed")
	}
	armed = false
	m.whole(t, b, tier.GPU)
	m.move(t, b, tier.Disk)
	armed = true
	if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.GPU)); err == nil {
		t.Error("it was unpacked")
	}
	armed = false
	m.whole(t, b, tier.Disk)
}

// TestIngestPacked: what is put on disk at once is compressed there, too.
func TestIngestPacked(t *testing.T) {
	recs := []arrow.RecordBatch{arrowgen.Flights(1, 100_000), coded(1, 100_000), arrowgen.Flights(1, 10)} // several runs, a dictionary, a few rows
	first, step := testseed.Share(t, 3)
	for i, codec := range []Codec{CodecS2, CodecZstd, CodecBitpack} {
		for j, rec := range recs {
			if (i+j)%step != first {
				continue
			}
			m := newMachine(t, machineConfig{codec: codec, gpu: 8 << 20, host: 16 << 20})
			b := m.put(t, rec, tier.Disk)
			if got := m.form(t, b); got != batch.CompressedImage {
				t.Errorf("%s, record %d: a %s", codec, j, got)
			}
			m.whole(t, b, tier.Disk)
			m.move(t, b, tier.GPU)
			m.whole(t, b, tier.GPU)
		}
	}
}

// TestEveryWriteOfAnIngestFailsOnce: nothing is left of a record that could not be put on
// disk, and it can be put again.
func TestEveryWriteOfAnIngestFailsOnce(t *testing.T) {
	for _, rec := range []arrow.RecordBatch{arrowgen.Flights(1, 100_000), coded(1, 400_000)} {
		m := newMachine(t, machineConfig{codec: CodecS2, gpu: 8 << 20, host: 16 << 20})
		for n := 0; ; n++ {
			hits := m.files.Hits()
			ctx, cancel := context.WithCancel(t.Context())
			effect := faultfs.Fail(syscall.EIO)
			if n%2 == 1 {
				effect = faultfs.Do(func(string, string) { cancel() })
			}
			remove := m.files.Add(faultfs.Rule{Ops: []string{"write"}, Skip: n / 2, Times: 1, Effect: effect})
			p, err := m.mover.Ingest(ctx, rec, reservation.AnyInTier(tier.Disk))
			hit := m.files.Hits() != hits
			remove()
			cancel()
			if err == nil {
				if hit && n%2 == 0 {
					t.Errorf("write %d failed and nobody noticed", n/2)
				}
				m.whole(t, m.adopt(t, rec, p), tier.Disk)
				break
			}
			if !hit || !errors.Is(err, syscall.EIO) && !errors.Is(err, context.Canceled) {
				t.Fatalf("write %d: %v", n/2, err)
			}
			m.settle()
			for k, s := range m.spaces {
				want := int64(0)
				if k == tier.Host {
					want = m.base
				}
				if u := s.State().Usage; u.Live != want || u.Reserved != 0 {
					t.Fatalf("write %d: %s holds %+v", n/2, k, u)
				}
			}
		}
	}
}

// TestAutoIngest: on a slow disk records are compressed also when they are put there at once, from
// the second one on: samples are taken of all of the first.
func TestAutoIngest(t *testing.T) {
	m := newMachine(t, machineConfig{gpu: 8 << 20, host: 24 << 20, disk: 24 << 20, auto: true,
		rules: []faultfs.Rule{{Ops: []string{"read", "write"}, Effect: faultfs.Throttle(5 << 20)}}})
	m.put(t, arrowgen.Flights(1, 90_000), tier.Disk).Drop()
	m.settle()
	b := m.put(t, arrowgen.Flights(1, 90_000), tier.Disk)
	if n, raw := b.Info().Bytes, b.Info().Descriptor.Body; n > raw*3/4 {
		t.Errorf("%d bytes of %d", n, raw)
	}
	m.whole(t, b, tier.Disk)
}

// TestIngestElsewhere: a record for which one space has no room after all is put into the next
// one, whether either compresses it or not, and however much of it was laid out before.
func TestIngestElsewhere(t *testing.T) {
	for name, fault := range map[string]struct {
		op   sim.OpKind
		left int
	}{
		"then compressed":                      {sim.OpAlloc, 2}, // the body has room, its dictionary has none
		"then compressed, and laid out before": {sim.OpCopyToDevice, 9},
	} {
		t.Run(name, func(t *testing.T) {
			left := 0
			m := newMachine(t, machineConfig{codec: CodecS2, outside: true, faults: func(op sim.Op) error {
				if op.Kind == fault.op && op.Stage == sim.Submit {
					if left--; left == 0 {
						return tier.ErrOutOfBudget
					}
				}
				return nil
			}})
			rec := coded(1, 100_000)
			left = fault.left
			p, err := m.mover.Ingest(t.Context(), rec, reservation.AnyInTiers(tier.GPU, tier.Disk))
			if err != nil {
				t.Fatal(err)
			}
			if left > 0 {
				t.Errorf("the fault was %d operations away", left)
			}
			m.whole(t, m.adopt(t, rec, p), tier.Disk)
		})
	}
	for name, rec := range map[string]arrow.RecordBatch{
		"compressed before": arrowgen.Flights(1, 100_000), "compressed before, with a dictionary": coded(1, 100_000),
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{codec: CodecS2, gpu: 16 << 20, host: 16 << 20, outside: true})
			remove := m.files.Add(faultfs.Rule{Ops: []string{"write"}, Skip: 2, Effect: faultfs.Fail(syscall.ENOSPC)})
			p, err := m.mover.Ingest(t.Context(), rec, reservation.AnyInTiers(tier.Disk, tier.GPU))
			remove()
			if err != nil {
				t.Fatal(err)
			}
			m.whole(t, m.adopt(t, rec, p), tier.GPU)
		})
	}
}
