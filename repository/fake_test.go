package repository

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// heapPool is a Pool over the Go heap.
type heapPool struct{}

type heapMemory []byte

func (m heapMemory) Size() int64       { return int64(len(m)) }
func (m heapMemory) Extents() [][]byte { return [][]byte{m} }

func (heapPool) Charge(size int64) int64 { return (size + tier.Page - 1) / tier.Page * tier.Page }
func (heapPool) Alloc(size int64, _ []int64) (tier.Memory, error) {
	return make(heapMemory, size), nil
}
func (heapPool) Free(_ tier.Memory, reclaimed func()) { reclaimed() }
func (heapPool) Close() error                         { return nil }

// bodySize is what every image of the fake takes.
const bodySize = tier.Page

// fakeMover moves images between heap pools that stand for the three tiers. It
// keeps the records beside, by descriptor, instead of laying them out.
type fakeMover struct {
	reservations *reservation.Manager

	mu      sync.Mutex
	records map[*batch.Descriptor]arrow.RecordBatch
	fault   func(op string) error // called at the start of each operation; may be nil
}

// newMover returns a mover over spaces with room for that many images: gpu:0,
// host:0 and disk:0. The test fails if any byte is still in use at its end.
func newMover(t testing.TB, gpu, host, disk int64) *fakeMover {
	t.Helper()
	m := &fakeMover{records: make(map[*batch.Descriptor]arrow.RecordBatch)}
	var spaces []*tier.Space
	for i, room := range []int64{gpu, host, disk} {
		s, err := tier.NewSpace(tier.SpaceConfig{
			ID: tier.ID{Kind: tier.Kinds()[i]}, Capacity: room * bodySize, Node: -1, Backend: "heap", Pool: heapPool{},
			Marks: tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9},
		})
		if err != nil {
			t.Fatal(err)
		}
		spaces = append(spaces, s)
	}
	var err error
	if m.reservations, err = reservation.NewManager(reservation.Config{Spaces: spaces}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, s := range spaces {
			if u := s.State().Usage; u.Used() != 0 {
				t.Errorf("%s ends with %+v", s.ID(), u)
			}
		}
		if err := m.reservations.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func (m *fakeMover) space(k tier.Kind) *tier.Space { return m.reservations.Spaces().InTier(k)[0] }

func (m *fakeMover) setFault(f func(op string) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fault = f
}

func (m *fakeMover) begin(op string) error {
	m.mu.Lock()
	f := m.fault
	m.mu.Unlock()
	if f == nil {
		return nil
	}
	return f(op)
}

// image takes memory for an image.
func (m *fakeMover) image(ctx context.Context, d *batch.Descriptor, to reservation.Strategy) (_ *batch.Image, err error) {
	r, err := m.reservations.Reserve(ctx, to, d.Body, nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Release()) }()
	buf, err := r.Alloc(d.Body)
	if err != nil {
		return nil, err
	}
	return batch.NewImage(d, buf, r.Space()), nil
}

func (m *fakeMover) IngestAs(
	ctx context.Context, rec arrow.RecordBatch, to reservation.Strategy, _, _ bool,
) (batch.Payload, error) {
	if err := m.begin("ingest"); err != nil {
		return nil, err
	}
	d := &batch.Descriptor{Schema: rec.Schema(), Rows: rec.NumRows(), Body: bodySize}
	p, err := m.image(ctx, d, to)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.records[d] = rec
	return p, nil
}

func (m *fakeMover) ReadRows(
	context.Context, *batch.Handle, *image.Rows, *tier.Space, func(),
) (arrow.RecordBatch, error) {
	panic("the fake has no bytes to read")
}

// move brings b to a space of the strategy. As any mover it waits for room before the
// transit, and not in it.
func (m *fakeMover) move(ctx context.Context, b *batch.Batch, to reservation.Strategy) error {
	if err := m.begin("move"); err != nil {
		return err
	}
	p, err := m.image(ctx, b.Info().Descriptor, to)
	if err != nil {
		return err
	}
	t, err := b.Transit(ctx)
	if err != nil {
		return errors.Join(err, p.Release())
	}
	return t.Commit(p, false)
}

func (m *fakeMover) Move(ctx context.Context, b *batch.Batch, to reservation.Strategy) error {
	if m.reaches(to, b.Info().Space) {
		return nil
	}
	return m.move(ctx, b, to)
}

func (m *fakeMover) MoveAs(context.Context, *batch.Batch, reservation.Strategy, batch.PayloadType) error {
	panic("the fake has one form")
}

func (m *fakeMover) Ahead(context.Context, *batch.Batch, reservation.Strategy) error {
	return &tier.NoSpaceError{}
}

func (m *fakeMover) Ended() context.Context { return context.Background() }

func (m *fakeMover) reaches(to reservation.Strategy, id tier.ID) bool {
	return slices.ContainsFunc(to.Candidates(m.reservations.Spaces(), nil), func(s *tier.Space) bool { return s.ID() == id })
}

func (m *fakeMover) Acquire(ctx context.Context, b *batch.Batch, to reservation.Strategy) (*batch.Handle, error) {
	return m.open(ctx, b, to, false)
}

func (m *fakeMover) Consume(ctx context.Context, b *batch.Batch, to reservation.Strategy) (*batch.Handle, error) {
	return m.open(ctx, b, to, true)
}

func (m *fakeMover) open(ctx context.Context, b *batch.Batch, to reservation.Strategy, last bool) (*batch.Handle, error) {
	if err := m.begin("acquire"); err != nil {
		return nil, err
	}
	for {
		changed := b.Changed()
		at := b.Info().Space
		if m.reaches(to, at) {
			h, err := b.Open(ctx, at, last)
			var se *batch.StateError
			if errors.As(err, &se) && se.Status == batch.SpaceMismatch {
				continue // moved since
			}
			return h, err
		}
		err := m.move(ctx, b, to)
		var se *batch.StateError
		switch {
		case err == nil:
		case errors.As(err, &se) && se.State == batch.Processing:
			select {
			case <-changed:
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		default:
			return nil, err
		}
	}
}

func (m *fakeMover) Record(ctx context.Context, h *batch.Handle) (arrow.RecordBatch, error) {
	if err := m.begin("record"); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	rec := m.records[h.Payload().(*batch.Image).Descriptor()]
	rec.Retain()
	return rec, nil
}

var (
	schemaA = arrow.NewSchema([]arrow.Field{{Name: "n", Type: arrow.PrimitiveTypes.Int64}}, nil)
	schemaB = arrow.NewSchema([]arrow.Field{{Name: "n", Type: arrow.PrimitiveTypes.Int32}}, nil)
)

// record returns a record of schemaA with one row, n.
func record(n int64) arrow.RecordBatch {
	b := array.NewRecordBuilder(memory.DefaultAllocator, schemaA)
	defer b.Release()
	b.Field(0).(*array.Int64Builder).Append(n)
	return b.NewRecordBatch()
}

// recordB returns a record of schemaB with one row, n.
func recordB(n int32) arrow.RecordBatch {
	b := array.NewRecordBuilder(memory.DefaultAllocator, schemaB)
	defer b.Release()
	b.Field(0).(*array.Int32Builder).Append(n)
	return b.NewRecordBatch()
}

func number(rec arrow.RecordBatch) int64 { return rec.Column(0).(*array.Int64).Value(0) }

// numberOf returns the number in the record of a batch of the fake.
func (m *fakeMover) numberOf(b *batch.Batch) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return number(m.records[b.Info().Descriptor])
}

// newPlan returns a manager over m, which is closed at the test's end.
func newPlan(t testing.TB, m Mover) *Manager {
	t.Helper()
	plan := NewManager("test", 7, Config{Mover: m})
	t.Cleanup(func() {
		if err := closeAll(context.Background(), plan); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
	})
	return plan
}

// closeAll closes a plan that may have batches left.
func closeAll(ctx context.Context, plan *Manager) error {
	_, err := plan.Close(ctx)
	return err
}

func ensure(t testing.TB, plan *Manager, operator string) *Repository {
	t.Helper()
	r, err := plan.Ensure(Key{Operator: operator})
	check(t, err)
	return r
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantError(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("error %v, want one that matches %v", err, want)
	}
}

// form is a payload without memory, for tests in which nothing moves.
type form struct{ space *tier.Space }

func (f form) Type() batch.PayloadType { return batch.PlainImage }
func (f form) Space() *tier.Space      { return f.space }
func (f form) Bytes() int64            { return 10 }
func (f form) Release() error          { return nil }

// newBatch returns a batch that is in no repository.
func newBatch(t testing.TB, id batch.ID, s *tier.Space) *batch.Batch {
	t.Helper()
	b, err := batch.New(batch.Options{ID: id, Payload: form{s}})
	check(t, err)
	return b
}

// TestMain fails the package if a test leaves a goroutine behind.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		var stacks strings.Builder
		left := true
		for end := time.Now().Add(10 * time.Second); left && time.Now().Before(end); runtime.Gosched() {
			stacks.Reset()
			if err := pprof.Lookup("goroutine").WriteTo(&stacks, 2); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			left = strings.Contains(strings.ReplaceAll(stacks.String(), "repository.TestMain", ""), "spillway/repository.")
		}
		if left {
			fmt.Fprintln(os.Stderr, "goroutines left behind:\n"+stacks.String())
			code = 1
		}
	}
	os.Exit(code)
}
