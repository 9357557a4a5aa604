package convert

import (
	"context"
	"errors"
	"slices"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// moves moves b and returns what the mover said of it.
func (m *machine) moves(t *testing.T, b *batch.Batch, told *[]events.Event, k tier.Kind) events.Event {
	t.Helper()
	*told = nil
	if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
		t.Fatal(err)
	}
	last := len(*told) - 1
	if slices.IndexFunc(*told, func(e events.Event) bool { return e.Err == nil }) != last || last < 0 {
		t.Fatalf("the events of a move to %s are %+v", k, *told)
	}
	return (*told)[last]
}

func copyMachine(t *testing.T, cfg machineConfig) (*machine, *[]events.Event) {
	told := new([]events.Event)
	cfg.copies = true
	cfg.events = on(events.MoveEnded, func(ev events.Event) { *told = append(*told, ev) })
	return newMachine(t, cfg), told
}

// TestDownOntoACopyMovesNoBytes: what was on disk and in host memory once goes back there without a
// transfer, in whatever form it was stored, and is the same.
func TestDownOntoACopyMovesNoBytes(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  machineConfig
		rec  arrow.RecordBatch
		host bool // keeps copies of it
	}{
		"plain":      {machineConfig{}, numbered(1, 20_000), true},
		"packed":     {machineConfig{codec: CodecZstd}, numbered(1, 72_000), true},
		"encrypted":  {machineConfig{encrypt: true}, numbered(1, 20_000), true},
		"dictionary": {machineConfig{outside: true}, coded(1, 20_000), false},
	} {
		t.Run(name, func(t *testing.T) {
			m, told := copyMachine(t, c.cfg)
			b := m.put(t, c.rec, tier.GPU)
			for _, k := range []tier.Kind{tier.Host, tier.Disk, tier.Host, tier.GPU} {
				if ev := m.moves(t, b, told, k); ev.Copy || ev.Bytes == 0 {
					t.Errorf("the first move to %s: %+v", k, ev)
				}
			}
			want := []tier.ID{{Kind: tier.Host}, {Kind: tier.Disk}}
			if !c.host {
				want = want[1:]
			}
			if got := b.Copies(); !slices.Equal(got, want) {
				t.Fatalf("copies are in %v, want them in %v", got, want)
			}
			writes := m.files.Count("write")
			if ev := m.moves(t, b, told, tier.Host); ev.Copy != c.host || ev.Copy && ev.Bytes != 0 {
				t.Errorf("down to host memory: %+v", ev)
			}
			if err := m.same(t.Context(), b); err != nil {
				t.Error(err)
			}
			if ev := m.moves(t, b, told, tier.Disk); !ev.Copy || ev.Bytes != 0 {
				t.Errorf("down to disk: %+v", ev)
			}
			if n := m.files.Count("write"); n != writes {
				t.Errorf("%d writes for a copy", n-writes)
			}
			if err := m.same(t.Context(), b); err != nil {
				t.Error(err)
			}
			var edges, unmoved int64
			for _, e := range m.mover.Stats() {
				edges, unmoved = edges+e.Copies, unmoved+e.Unmoved
			}
			if n := b.Info().Descriptor.Body; edges != int64(len(want)) || unmoved != n*edges {
				t.Errorf("%d copies of %d bytes were used, %d bytes each", edges, unmoved, n)
			}
			if err := b.Drop(); err != nil {
				t.Fatal(err)
			}
			for k, s := range m.spaces {
				if u := s.State().Usage; u.Cached != 0 || k == tier.Disk && u.Used() != 0 {
					t.Errorf("%s holds %+v after the batch was dropped", k, u)
				}
			}
		})
	}
}

// TestCopyGoes with the batch, when it is opened for the last time, and when the batch gets another
// form where the copy lies.
func TestCopyGoes(t *testing.T) {
	m, told := copyMachine(t, machineConfig{codec: CodecZstd})
	b := m.put(t, numbered(1, 72_000), tier.Host)
	m.moves(t, b, told, tier.GPU)
	packed := reservation.AnyInTier(tier.Host)
	if err := m.mover.MoveAs(t.Context(), b, packed, batch.CompressedImage); err != nil {
		t.Fatal(err)
	}
	if ev := (*told)[1]; ev.Copy || len(b.Copies()) != 0 || m.spaces[tier.Host].State().Cached != 0 {
		t.Errorf("an image for a packed form: %+v, copies in %v", ev, b.Copies())
	}
	if err := m.same(t.Context(), b); err != nil {
		t.Error(err)
	}
	m.moves(t, b, told, tier.GPU)
	m.moves(t, b, told, tier.Disk)
	h, err := m.mover.Consume(t.Context(), b, reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	for k, s := range m.spaces {
		if n := s.State().Cached; n != 0 {
			t.Errorf("%s holds %d bytes of a copy of what is consumed", k, n)
		}
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}

// TestLeasedMemoryIsNoCopy: who reads it in host memory keeps it there after the batch has left,
// and its end frees the memory.
func TestLeasedMemoryIsNoCopy(t *testing.T) {
	m, told := copyMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 20_000), tier.Host)
	end := b.Info().Payload.(*batch.Image).Buffer().Lease()
	m.moves(t, b, told, tier.GPU)
	if got := b.Copies(); len(got) != 0 {
		t.Errorf("copies in %v", got)
	}
	end()
	if u := m.spaces[tier.Host].State().Usage; u.Live != m.base || u.Cached != 0 {
		t.Errorf("%+v", u)
	}
}

// TestDamagedCopyIsNotServed: what the disk has altered of a copy is noticed when it is read, and
// the batch is right while it is up. Where one batch is found corrupt, the copies of the others are
// not trusted: they are written again.
func TestDamagedCopyIsNotServed(t *testing.T) {
	for _, cfg := range []machineConfig{{}, {encrypt: true}, {codec: CodecZstd}} {
		m, told := copyMachine(t, cfg)
		a, b := m.put(t, numbered(1, 72_000), tier.Disk), m.put(t, numbered(2, 72_000), tier.Disk)
		m.moves(t, a, told, tier.GPU)
		remove := m.files.Add(faultfs.Rule{Ops: []string{"read"}, Effect: faultfs.BitFlip()})
		if err := m.same(t.Context(), a); err != nil {
			t.Errorf("up: %v", err)
		}
		if ev := m.moves(t, a, told, tier.Disk); !ev.Copy {
			t.Errorf("%+v", ev)
		}
		if err := m.same(t.Context(), a); !errors.Is(err, image.ErrCorrupt) {
			t.Errorf("down, on bytes that were altered: %v", err)
		}
		remove()
		m.moves(t, a, told, tier.GPU)
		remove = m.files.Add(faultfs.Rule{Ops: []string{"read"}, Effect: faultfs.BitFlip()})
		if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Host)); !errors.Is(err, image.ErrCorrupt) {
			t.Errorf("the other batch: %v", err)
		}
		remove()
		if ev := m.moves(t, a, told, tier.Disk); ev.Copy {
			t.Errorf("a copy beside corrupt bytes: %+v", ev)
		}
		if err := errors.Join(m.same(t.Context(), a), m.same(t.Context(), b)); err != nil {
			t.Error(err)
		}
	}
}

// TestFullDiskGivesCopiesBack before it refuses.
func TestFullDiskGivesCopiesBack(t *testing.T) {
	m, told := copyMachine(t, machineConfig{disk: 1 << 20})
	a, b := m.put(t, numbered(1, 30_000), tier.Disk), m.put(t, numbered(2, 30_000), tier.GPU)
	if n := a.Info().Bytes; 2*n < 1<<20 {
		t.Fatalf("two batches of %d bytes fit", n)
	}
	m.moves(t, a, told, tier.Host)
	if ev := m.moves(t, b, told, tier.Disk); ev.Copy || len(a.Copies()) != 0 {
		t.Errorf("%+v, and copies in %v", ev, a.Copies())
	}
	if err := errors.Join(m.same(t.Context(), a), m.same(t.Context(), b)); err != nil {
		t.Error(err)
	}
}

// TestEveryOperationFailsOnceWithCopies: the batch is whole where it was, and so are the books,
// when a transfer fails or is cancelled while copies are kept, used and given up.
func TestEveryOperationFailsOnceWithCopies(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]error{"EIO": syscall.EIO, "flip": image.ErrCorrupt, "cancel": context.Canceled} {
		t.Run(name, func(t *testing.T) {
			hits := 0
			for n, hit := 0, true; hit; n += testseed.Rounds(1, 3) {
				m, _ := copyMachine(t, machineConfig{disk: 320 << 10})
				both := []*batch.Batch{m.put(t, numbered(1, 6000), tier.GPU), m.put(t, numbered(2, 6000), tier.Host)}
				ctx, cancel := context.WithCancel(t.Context())
				effect := map[string]faultfs.Effect{
					"EIO": faultfs.Fail(syscall.EIO), "flip": faultfs.BitFlip(), "cancel": faultfs.Do(func(string, string) { cancel() }),
				}[name]
				ops := []string{"read", "write"}
				if name == "flip" {
					ops = ops[:1]
				}
				before := m.files.Hits()
				remove := m.files.Add(faultfs.Rule{Ops: ops, Skip: n, Times: 1, Effect: effect})
				for _, k := range []tier.Kind{tier.Disk, tier.GPU, tier.Disk, tier.Host, tier.Disk} {
					for _, b := range both { // the disk has no room for both and a copy
						from := b.Info().Space.Kind
						if err := m.mover.Move(ctx, b, reservation.AnyInTier(k)); err != nil {
							if !errors.Is(err, want) {
								t.Fatalf("operation %d, %s to %s: %v", n, from, k, err)
							}
							if at := b.Info(); at.Space.Kind != from || at.State != batch.Idle {
								t.Fatalf("operation %d: it failed, and the batch is %+v", n, at)
							}
							ctx = t.Context()
							if err := m.mover.Move(ctx, b, reservation.AnyInTier(k)); err != nil {
								t.Fatalf("operation %d, %s to %s again: %v", n, from, k, err)
							}
						}
						m.copyBooks(t, both...)
					}
				}
				if hit = m.files.Hits() != before; hit {
					hits++
				}
				remove()
				cancel()
				if err := errors.Join(m.same(t.Context(), both[0]), m.same(t.Context(), both[1])); err != nil {
					t.Fatalf("operation %d: %v", n, err)
				}
			}
			if hits < 4 {
				t.Errorf("there are only %d operations", hits)
			}
		})
	}
}

// copyBooks checks that the spaces hold the batches and their copies, and nothing else.
func (m *machine) copyBooks(t *testing.T, batches ...*batch.Batch) {
	t.Helper()
	m.settle()
	live, cached := map[tier.Kind]int64{tier.Host: m.base}, make(map[tier.Kind]int64)
	for _, b := range batches {
		live[b.Info().Space.Kind] += b.Info().Bytes
		b.EachClean(func(p batch.Payload) { cached[p.Space().Kind()] += p.Bytes() })
	}
	for k, s := range m.spaces {
		u := s.State().Usage
		if u.Live != live[k] || u.Cached != cached[k] || u.Retired != 0 || u.Reserved != 0 || u.Live+u.Cached > s.Capacity {
			t.Fatalf("%s holds %+v, want %d live and %d of copies", k, u, live[k], cached[k])
		}
	}
}

// TestCommitOfOtherBytesEndsCopies: what a program commits as the batch's form stays so.
func TestCommitOfOtherBytesEndsCopies(t *testing.T) {
	m, told := copyMachine(t, machineConfig{})
	b, other := m.put(t, numbered(1, 20_000), tier.Disk), numbered(7, 20_000)
	m.moves(t, b, told, tier.GPU)
	p, err := m.mover.Ingest(t.Context(), other, reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	if err := tr.Commit(p, false); err != nil {
		t.Fatal(err)
	}
	m.records[b.ID()] = other
	if ev := m.moves(t, b, told, tier.Disk); ev.Copy {
		t.Errorf("%+v", ev)
	}
	if err := m.same(t.Context(), b); err != nil {
		t.Error(err)
	}
}

// wrapper is a payload of a program's own: an image, and something else that it must give back.
type wrapper struct {
	*batch.Image
	released *int
}

func (wrapper) Type() batch.PayloadType { return "wrapper" }
func (w wrapper) Release() error {
	*w.released++
	return w.Image.Release()
}

// TestProgramsPayloadIsNoCopy: it is released when the batch leaves it, also if it embeds an image.
func TestProgramsPayloadIsNoCopy(t *testing.T) {
	m, told := copyMachine(t, machineConfig{})
	p, err := m.mover.Ingest(t.Context(), numbered(1, 1000), reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.registry.Register(Form{"wrapper", tier.Host}, ImageIn(tier.GPU), func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
		return m.builtIn(t, tier.Host, tier.GPU)(ctx, src.(wrapper).Image, r)
	}); err != nil {
		t.Fatal(err)
	}
	released := 0
	b := m.adopt(t, numbered(1, 1000), wrapper{p.(*batch.Image), &released})
	m.moves(t, b, told, tier.GPU)
	if released != 1 || len(b.Copies()) != 0 {
		t.Errorf("it was released %d times; copies in %v", released, b.Copies())
	}
}

// TestMoveAfterMoveAsChoosesAgain: host memory gets the image, which is opened in place, and not
// what was packed once.
func TestMoveAfterMoveAsChoosesAgain(t *testing.T) {
	m, told := copyMachine(t, machineConfig{codec: CodecZstd})
	b := m.put(t, numbered(1, 72_000), tier.Host)
	if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(tier.Host), batch.CompressedImage); err != nil {
		t.Fatal(err)
	}
	m.moves(t, b, told, tier.GPU)
	m.moves(t, b, told, tier.Host)
	if f := b.Info().Form; f != batch.PlainImage {
		t.Errorf("it is a %s", f)
	}
}

// TestCleanImageOfAnyEncoding: a batch goes back onto its clean image on disk, although a move without
// one would compress it.
func TestCleanImageOfAnyEncoding(t *testing.T) {
	m, told := copyMachine(t, machineConfig{codec: CodecZstd})
	b := m.put(t, numbered(1, 72_000), tier.Host)
	if err := m.mover.MoveAs(t.Context(), b, toDisk, batch.PlainImage); err != nil {
		t.Fatal(err)
	}
	m.moves(t, b, told, tier.Host)
	if ev := m.moves(t, b, told, tier.Disk); !ev.Copy || b.Info().Form != batch.PlainImage {
		t.Errorf("%+v, and it is a %s", ev, b.Info().Form)
	}
	m.moves(t, b, told, tier.Host)
	m.spaces[tier.Disk].DropAllClean()
	if ev := m.moves(t, b, told, tier.Disk); ev.Copy || b.Info().Form != batch.CompressedImage {
		t.Errorf("without a clean image: %+v, and it is a %s", ev, b.Info().Form)
	}
}

// TestLateFullDiskGivesCopiesBack: so does one that notices when it is written that it is full.
func TestLateFullDiskGivesCopiesBack(t *testing.T) {
	m, told := copyMachine(t, machineConfig{rules: []faultfs.Rule{{Ops: []string{"allocate"}, Effect: faultfs.Fail(errors.ErrUnsupported)}}})
	a, b := m.put(t, numbered(1, 30_000), tier.Disk), m.put(t, numbered(1, 30_000), tier.GPU)
	m.moves(t, a, told, tier.Host)
	defer m.files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.ENOSPC), Times: 1})()
	if ev := m.moves(t, b, told, tier.Disk); ev.Copy || len(a.Copies()) != 0 {
		t.Errorf("%+v, and copies in %v", ev, a.Copies())
	}
}
