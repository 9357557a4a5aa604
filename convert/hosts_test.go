package convert

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
)

// hosts is a machine with two host spaces, as two NUMA nodes have them, and nothing else.
type hosts struct {
	spaces       [2]*tier.Space
	at           [2]reservation.Strategy
	pools        [2]*looking
	base         int64 // bytes of host:0 that staging holds
	reservations *reservation.Manager
	mover        *Mover
	ids          batch.IDs
}

// looking is a host space's pool whose memory calls back before it returns its place.
type looking struct {
	tier.Pool
	asked atomic.Pointer[func()]
}

type lookedAt struct {
	tier.HostMemory
	pool *looking
}

func (p *looking) Alloc(size int64, cuts []int64) (tier.Memory, error) {
	m, err := p.Pool.Alloc(size, cuts)
	if err != nil {
		return nil, err
	}
	return lookedAt{m.(tier.HostMemory), p}, nil
}

func (p *looking) Free(m tier.Memory, reclaimed func()) {
	p.Pool.Free(m.(lookedAt).HostMemory, reclaimed)
}

func (m lookedAt) Extents() [][]byte {
	if f := m.pool.asked.Load(); f != nil {
		(*f)()
	}
	return m.HostMemory.Extents()
}

// when calls f, once, when the memory of pool i is looked at next.
func (h *hosts) when(i int, f func()) {
	var once sync.Once
	g := func() { once.Do(f) }
	h.pools[i].asked.Store(&g)
}

func newHosts(t *testing.T, codec Codec, capacity [2]int64) *hosts {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	h := &hosts{}
	for i := range h.spaces {
		arena, err := host.NewArena(host.Config{Capacity: capacity[i], Node: -1})
		check(err)
		h.pools[i] = &looking{Pool: arena}
		h.spaces[i], err = tier.NewSpace(tier.SpaceConfig{
			ID: tier.ID{Kind: tier.Host, Ordinal: i}, Capacity: capacity[i], Pool: h.pools[i], Backend: "host", Node: i,
			Marks: tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9},
		})
		check(err)
		h.at[i] = reservation.Specific(h.spaces[i].ID())
	}
	var err error
	h.reservations, err = reservation.NewManager(reservation.Config{Spaces: h.spaces[:]})
	check(err)
	const chunk = 64 << 10
	r, err := h.reservations.TryReserve(h.at[0], 4*chunk, nil)
	check(err)
	buf, err := r.Alloc(4 * chunk)
	check(errors.Join(err, r.Release()))
	h.base = buf.Charge()
	staging := host.NewStaging(buf, chunk)
	permits, err := permit.New(permit.Config{})
	check(err)
	builtin := &transfer.Builtin{
		Codec:   codec,
		Streams: func(id tier.ID) (*devpool.Streams, error) { return nil, tier.ErrNotSupported },
		Staging: func(int) (transfer.Staging, error) { return staging, nil },
		Permits: permits,
	}
	var registry Registry
	h.mover, err = NewMover(MoverConfig{Reservations: h.reservations, Registry: &registry, Builtin: builtin, IDs: &h.ids})
	check(err)
	t.Cleanup(func() {
		err := errors.Join(h.reservations.Close(), staging.Close(), permits.Close())
		for _, s := range h.spaces {
			for _, l := range s.Leaks() {
				t.Errorf("leaked: %+v", l)
			}
			err = errors.Join(err, s.Close())
			if s.State().Used() != 0 {
				t.Errorf("%s ends with %+v", s.ID(), s.State().Usage)
			}
		}
		if err != nil {
			t.Error(err)
		}
	})
	return h
}

func (h *hosts) put(t *testing.T, rec arrow.RecordBatch, i int) *batch.Batch {
	t.Helper()
	p, err := h.mover.Ingest(t.Context(), rec, h.at[i])
	if err != nil {
		t.Fatal(err)
	}
	b, err := batch.New(batch.Options{ID: h.ids.Next(), Payload: p})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Drop(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// says checks that b is of a form in space i, alone, has its checksums and is rec.
func (h *hosts) says(t *testing.T, b *batch.Batch, rec arrow.RecordBatch, form batch.PayloadType, i int) {
	t.Helper()
	info := b.Info()
	if info.State != batch.Idle || info.Space.Ordinal != i || b.Info().Payload.Type() != form {
		t.Fatalf("batch is a %s: %+v, want a %s in host:%d", b.Info().Payload.Type(), info, form, i)
	}
	for j, s := range h.spaces {
		want := int64(0)
		if j == 0 {
			want = h.base
		}
		if j == i {
			want += info.Bytes
			for _, d := range b.Info().Descriptor.AllDictionaries() {
				want += s.Charge(d.Body)
			}
		}
		if u := s.State().Usage; u.Live != want || u.Reserved != 0 {
			t.Fatalf("%s holds %+v, want %d", s.ID(), u, want)
		}
	}
	if err := h.same(t.Context(), b, rec); err != nil {
		t.Fatal(err)
	}
}

func (h *hosts) same(ctx context.Context, b *batch.Batch, rec arrow.RecordBatch) error {
	hd, err := h.mover.Acquire(ctx, b, reservation.AnyInTier(tier.Host))
	if err != nil {
		return err
	}
	defer hd.Close()
	if img, ok := hd.Payload().(*batch.Image); ok && img.Type() == batch.PlainImage && img.Descriptor().Body > 0 {
		off := int64(0)
		v := image.Summer{Desc: img.Descriptor()}
		for _, e := range img.Buffer().Memory().(tier.HostMemory).Extents() {
			if err := v.Add(e, off); err != nil {
				return err
			}
			off += int64(len(e))
		}
	}
	got, err := h.mover.Record(ctx, hd)
	if err != nil {
		return err
	}
	defer got.Release()
	return equal.Records(rec, got)
}

// long makes a record whose image has at least so many bytes, in a few columns.
func long(size int64) arrow.RecordBatch {
	rec := arrowgen.Flights(3, 1000)
	d, err := image.NewLayout(rec, image.MaxInline)
	if err != nil {
		panic(err)
	}
	rows := size * 1000 / d.Desc.Body
	d.Close()
	rec.Release()
	return arrowgen.Flights(3, int(rows)+1)
}

// forms are what a batch can be in host memory.
var hostForms = []batch.PayloadType{batch.PlainImage, batch.CompressedImage}

// A batch of each type goes from one host space to the other and back in each form, and is
// what it was: also without rows, and with dictionaries.
func TestEveryTypeBetweenHostSpaces(t *testing.T) {
	h := newHosts(t, CodecS2, [2]int64{8 << 20, 8 << 20})
	h.mover.cfg.Builtin.Outside = true
	first, step := testseed.Share(t, 2)
	for n, typ := range arrowgen.Types() {
		if n%step != first {
			continue
		}
		for _, rows := range []int{0, 1, 67} {
			rec := arrowgen.New(uint64(n)).Record(arrowgen.Schema(typ), rows)
			func() {
				b := h.put(t, rec, 0)
				at := 0
				for _, from := range hostForms {
					for _, to := range hostForms {
						if err := h.mover.MoveAs(t.Context(), b, h.at[at], from); err != nil {
							t.Fatal(err)
						}
						if err := h.mover.MoveAs(t.Context(), b, h.at[1-at], to); err != nil {
							t.Fatalf("%s, %d rows, %s to %s: %v", typ, rows, from, to, err)
						}
						at = 1 - at
						if err := h.same(t.Context(), b, rec); err != nil || b.Info().Payload.Type() != to || b.Info().Space.Ordinal != at {
							t.Fatalf("%s, %d rows, %s to %s: a %s in %s: %v", typ, rows, from, to, b.Info().Payload.Type(), b.Info().Space, err)
						}
					}
				}
			}()
		}
	}
}

// Bodies of many pieces, and of sizes that are no multiple of one, go from one host space to
// the other in each form with every byte at its place.
func TestSizesBetweenHostSpaces(t *testing.T) {
	for _, size := range []int64{tier.Page, payload.SumChunk - tier.Page, payload.RunSize + tier.Page, transfer.MaxPiece, transfer.MaxPiece + tier.Page, 2*transfer.MaxPiece + 5*tier.Page}[:testseed.Rounds(6, 3)] {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			h := newHosts(t, CodecS2, [2]int64{2*size + 8<<20, 2*size + 8<<20})
			rec := long(size)
			defer rec.Release()
			for _, from := range hostForms {
				for _, to := range hostForms {
					t.Run(fmt.Sprintf("%s to %s", from, to), func(t *testing.T) { h.thereAndBack(t, rec, from, to) })
				}
			}
		})
	}
}

func (h *hosts) thereAndBack(t *testing.T, rec arrow.RecordBatch, from, to batch.PayloadType) {
	b := h.put(t, rec, 0)
	for _, step := range []struct {
		at   int
		form batch.PayloadType
	}{{0, from}, {1, to}, {0, from}} {
		if err := h.mover.MoveAs(t.Context(), b, h.at[step.at], step.form); err != nil {
			t.Fatal(err)
		}
		h.says(t, b, rec, step.form, step.at)
	}
}

// A body whose memory is in pieces on both sides, at other places, arrives whole.
func TestPiecesBetweenHostSpaces(t *testing.T) {
	h := newHosts(t, CodecNone, [2]int64{64 << 20, 64 << 20})
	rec := long(9 << 20)
	for i, gap := range []int64{2 << 20, 3 << 20} { // no piece is longer than that
		r, err := h.reservations.TryReserve(h.at[i], h.spaces[i].State().Available, nil)
		if err != nil {
			t.Fatal(err)
		}
		var all []*tier.Buffer
		for r.Unused() >= gap {
			buf, err := r.Alloc(gap)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, buf)
		}
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
		for n, buf := range all {
			if n%2 == 0 {
				if err := buf.Release(); err != nil {
					t.Fatal(err)
				}
				continue
			}
			t.Cleanup(func() {
				if err := buf.Release(); err != nil {
					t.Error(err)
				}
			})
		}
	}
	b := h.put(t, rec, 0)
	for _, i := range []int{1, 0, 1} {
		if err := h.mover.Move(t.Context(), b, h.at[i]); err != nil {
			t.Fatal(err)
		}
		tr, err := b.TryTransit()
		if err != nil {
			t.Fatal(err)
		}
		pieces := len(tr.Payload().(*batch.Image).Buffer().Memory().(tier.HostMemory).Extents())
		if err := tr.Abort(); err != nil {
			t.Fatal(err)
		}
		if pieces < 2 {
			t.Errorf("in host:%d the body is in %d piece: the test shows nothing", i, pieces)
		}
		if err := h.same(t.Context(), b, rec); err != nil {
			t.Fatalf("in host:%d: %v", i, err)
		}
	}
}

// A move between host spaces that is cancelled, that finds no room or whose memory fails
// leaves the batch whole where it was, in each form; after that it can be moved.
func TestFailuresBetweenHostSpaces(t *testing.T) {
	for _, from := range hostForms {
		for _, to := range hostForms {
			t.Run(fmt.Sprintf("%s to %s", from, to), func(t *testing.T) {
				h := newHosts(t, CodecS2, [2]int64{16 << 20, 16 << 20})
				rec := long(3 << 20)
				defer rec.Release()
				b := h.put(t, rec, 0)
				if err := h.mover.MoveAs(t.Context(), b, h.at[0], from); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				ours := errors.New("ours")
				h.when(0, func() { cancel(ours) }) // the source is looked at when all else is taken
				if err := h.mover.MoveAs(ctx, b, h.at[1], to); !errors.Is(err, ours) {
					t.Errorf("cancelled: %v", err)
				}
				h.says(t, b, rec, from, 0)

				fails := func() { panic("no memory there") } // scratch, too, is looked for there
				h.pools[1].asked.Store(&fails)
				if err := h.mover.MoveAs(t.Context(), b, h.at[1], to); err == nil {
					t.Error("it was moved into memory that fails")
				}
				h.pools[1].asked.Store(nil)
				h.says(t, b, rec, from, 0)

				all, err := h.reservations.TryReserve(h.at[1], h.spaces[1].State().Available, nil)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := h.mover.run(t.Context(), &move{b: b, to: h.at[1], as: to, evicts: true}); !errors.Is(err, tier.ErrNoSpace) {
					t.Errorf("without room: %v", err)
				}
				if err := all.Release(); err != nil {
					t.Fatal(err)
				}
				h.says(t, b, rec, from, 0)
				if err := h.mover.MoveAs(t.Context(), b, h.at[1], to); err != nil {
					t.Fatal(err)
				}
				h.says(t, b, rec, to, 1)
			})
		}
	}
}

// Many batches go both ways between two host spaces at once, each copied by several
// goroutines; none gets bytes of another.
func TestHostSpacesBothWaysAtOnce(t *testing.T) {
	const each = 3
	h := newHosts(t, CodecS2, [2]int64{48 << 20, 48 << 20})
	var wg sync.WaitGroup
	for i := range 2 * each {
		rec := arrowgen.Flights(uint64(i), 40_000+i*777)
		b := h.put(t, rec, i%2)
		wg.Go(func() {
			for n := range 4 {
				form := hostForms[(n/2+i)%2]
				at := (i + n + 1) % 2
				if err := h.mover.MoveAs(t.Context(), b, h.at[at], form); err != nil {
					t.Error(err)
					return
				}
				if err := h.same(t.Context(), b, rec); err != nil {
					t.Errorf("batch %d as a %s in host:%d: %v", i, form, at, err)
				}
			}
		})
	}
	wg.Wait()
}
