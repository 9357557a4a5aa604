package convert

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

func TestMain(m *testing.M) { testseed.Main(m) }

// machine is all that a mover needs, small, with faults to be had everywhere.
type machine struct {
	spaces       map[tier.Kind]*tier.Space
	reservations *reservation.Manager
	waits        atomic.Pointer[func(context.Context, tier.ID, int64)] // see onWait
	registry     Registry
	mover        *Mover
	permits      *permit.Pool
	files        *faultfs.FS
	base         int64 // bytes of the host space that staging holds
	ids          batch.IDs

	records map[batch.ID]arrow.RecordBatch
	digests map[batch.ID]tier.Digest // of those that were asked for

	// comparing is held while a record is compared, because arrow-go counts the nulls of an array
	// when they are first asked for, which is a race where several goroutines share the array.
	comparing sync.Mutex
}

type machineConfig struct {
	gpus            gpus
	gpu, host, disk int64 // capacities; 0 for 4, 4 and 16 MiB
	chunk           int64 // of staging; 0 for 16 KiB
	faults          func(sim.Op) error
	rules           []faultfs.Rule
	files           disk.FS // instead of faultfs
	onDisk          bool    // as benchmarks are; other tests have a volume in memory, which waits for no disk
	buffered        bool    // no direct I/O: for tests of what types are, which move many small batches
	permits         permit.Config
	fast            bool // pages touched ahead and huge
	outside         bool // small dictionaries, too, are images of their own
	events          func(events.Event)
	copies          bool  // are kept; else each move is one of bytes
	codec           Codec // CodecAuto, the zero value, is CodecNone; auto is CodecAuto
	auto            bool
	wrap            func(tier.Device) tier.Device
	encrypt         bool            // the volume does
	closing         func(err error) // is called with the errors of closing; by default the test is
	clear           func(space tier.ID, enough func() bool)
}

// on calls f for events of a kind.
func on(kind events.Kind, f func(events.Event)) func(events.Event) {
	return func(e events.Event) {
		if e.Kind == kind {
			f(e)
		}
	}
}

func newMachine(t testing.TB, cfg machineConfig) *machine {
	t.Helper()
	size := func(n, otherwise int64) int64 {
		if n == 0 {
			return otherwise
		}
		return n
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m := &machine{spaces: make(map[tier.Kind]*tier.Space), records: make(map[batch.ID]arrow.RecordBatch), digests: make(map[batch.ID]tier.Digest)}
	full := tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9}

	dev := cfg.gpus.open(t, 0, sim.Config{Memory: size(cfg.gpu, 4<<20), Touch: cfg.fast}, cfg.faults)
	gpuPool, err := devpool.NewMemory(dev)
	check(err)
	arena, err := host.NewArena(host.Config{Capacity: size(cfg.host, 4<<20), Node: -1, Touch: cfg.fast, Huge: cfg.fast})
	check(err)
	cfg.gpus.pin(t, arena, dev)
	dir := testfs.MemoryDir(t)
	if _, bench := t.(*testing.B); bench || cfg.onDisk {
		dir = t.TempDir()
	}
	system := testfs.DiskFS(dir, disk.OS())
	if cfg.buffered {
		system = buffered{system}
	}
	m.files = faultfs.New(system, 1, cfg.rules...)
	files := cfg.files
	if files == nil {
		files = m.files
	}
	volume, err := volumes.Open(volumes.Config{
		Dir: dir, Capacity: size(cfg.disk, 16<<20), FS: files, Encrypt: cfg.encrypt,
	})
	check(err)
	for _, c := range []tier.SpaceConfig{
		{ID: tier.ID{Kind: tier.GPU}, Capacity: size(cfg.gpu, 4<<20), Pool: gpuPool, Backend: cfg.gpus.backend()},
		{ID: tier.ID{Kind: tier.Host}, Capacity: size(cfg.host, 4<<20), Pool: arena, Backend: "host"},
		{ID: tier.ID{Kind: tier.Disk}, Capacity: size(cfg.disk, 16<<20), Pool: volume, Backend: "disk"},
	} {
		c.Marks = full
		s, err := tier.NewSpace(c)
		check(err)
		m.spaces[c.ID.Kind] = s
	}
	m.reservations, err = reservation.NewManager(reservation.Config{
		Spaces: []*tier.Space{m.spaces[tier.GPU], m.spaces[tier.Host], m.spaces[tier.Disk]}, Clear: cfg.clear,
		Events: func(e events.Event) {
			if f := m.waits.Load(); f != nil && e.Kind == events.WaitBegun {
				(*f)(e.Context, e.To, e.Bytes)
			}
		},
	})
	check(err)
	wrapped := dev
	if cfg.wrap != nil {
		wrapped = cfg.wrap(dev)
	}
	streams, err := devpool.NewStreams(wrapped, 4)
	check(err)
	chunk := size(cfg.chunk, 16<<10)
	r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Host), 8*chunk, nil)
	check(err)
	buf, err := r.Alloc(8 * chunk)
	check(err)
	check(r.Release())
	m.base = buf.Charge()
	staging := host.NewStaging(buf, chunk)
	m.permits, err = permit.New(cfg.permits)
	check(err)
	codec := cfg.codec
	if codec == CodecAuto && !cfg.auto {
		codec = CodecNone
	}
	builtin := &transfer.Builtin{
		Codec:   codec,
		Outside: cfg.outside,
		Streams: func(tier.ID) (*devpool.Streams, error) { return streams, nil },
		Staging: func(int) (transfer.Staging, error) { return staging, nil },
		Permits: m.permits,
	}
	if !cfg.copies {
		for _, s := range m.spaces {
			t.Cleanup(s.Subscribe(func(bool) { s.DropAllClean() }))
		}
	}
	m.mover, err = NewMover(MoverConfig{Reservations: m.reservations, Registry: &m.registry, Builtin: builtin, IDs: &m.ids, Events: cfg.events})
	check(err)
	t.Cleanup(func() {
		err := errors.Join(m.reservations.Close(), staging.Close(), streams.Close())
		if e := m.permits.Close(); !errors.Is(e, tier.ErrClosed) { // a test may have closed it
			err = errors.Join(err, e)
		}
		for _, s := range m.spaces {
			for _, l := range s.Leaks() {
				t.Errorf("leaked: %+v", l)
			}
			err = errors.Join(err, s.Close())
		}
		err = errors.Join(err, dev.Close())
		switch {
		case cfg.closing != nil:
			cfg.closing(err)
		case err != nil:
			t.Errorf("closing the machine: %v", err)
		}
		for k, s := range m.spaces {
			if s.State().Used() != 0 {
				t.Errorf("%s ends with %+v", k, s.State().Usage)
			}
			if n := m.mover.DictionaryBytes(s.ID()); n != 0 {
				t.Errorf("%s ends with %d bytes of dictionaries", k, n)
			}
		}
		if d := &builtin.Dicts; d.Names() != 0 || len(d.Mu.Made) != 0 || len(d.Mu.Last) != 0 {
			t.Errorf("%d names of %d dictionaries in %d families are known at the end",
				d.Names(), len(d.Mu.Made), len(d.Mu.Last))
		}
		if n := m.files.Open(); n != 0 {
			t.Errorf("%d files are open at the end", n)
		}
	})
	return m
}

// builtIn returns the converter between plain images in two tiers.
func (m *machine) builtIn(t *testing.T, from, to tier.Kind) Func {
	t.Helper()
	f, err := m.registry.Lookup(ImageIn(from), ImageIn(to))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// buffered is a file system without direct I/O.
type buffered struct{ disk.FS }

func (b buffered) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	if direct {
		return nil, syscall.EINVAL
	}
	return b.FS.OpenAnonymous(dir, false)
}

// put makes a batch of rec in a tier, which is dropped when the test ends.
func (m *machine) put(t testing.TB, rec arrow.RecordBatch, k tier.Kind) *batch.Batch {
	t.Helper()
	p, err := m.mover.Ingest(t.Context(), rec, reservation.AnyInTier(k))
	if err != nil {
		t.Fatal(err)
	}
	return m.adopt(t, rec, p)
}

func (m *machine) adopt(t testing.TB, rec arrow.RecordBatch, p batch.Payload) *batch.Batch {
	t.Helper()
	b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: p})
	if err != nil {
		t.Fatal(err)
	}
	m.records[b.ID()] = rec
	t.Cleanup(func() {
		if err := b.Drop(); err != nil && b.Info().State != batch.Released {
			t.Error(err)
		}
	})
	return b
}

// rests checks that b is idle in a tier and that the books hold nothing but it. It must be the only
// batch.
func (m *machine) rests(t *testing.T, b *batch.Batch, k tier.Kind) {
	t.Helper()
	info := b.Info()
	if info.State != batch.Idle || info.Space.Kind != k || info.Active != 0 || info.Pending != 0 {
		t.Fatalf("batch is %+v, want it idle in %s", info, k)
	}
	m.settle()
	for kind, s := range m.spaces {
		want := int64(0)
		if kind == tier.Host {
			want = m.base
		}
		if kind == k {
			want += info.Bytes
			for _, d := range b.Info().Descriptor.AllDictionaries() {
				want += s.Charge(d.Body)
			}
		}
		if u := s.State().Usage; u.Live != want || u.Retired != 0 || u.Reserved != 0 {
			t.Fatalf("%s holds %+v, want %d live", kind, u, want)
		}
	}
}

// whole checks that b is at rest in a tier and has the bytes that it was made of.
func (m *machine) whole(t *testing.T, b *batch.Batch, k tier.Kind) {
	t.Helper()
	m.rests(t, b, k)
	err := m.sameDigest(t, b)
	if b.Info().Descriptor.Body <= m.spaces[tier.Host].State().Available { // else it is too large to be opened
		err = errors.Join(err, m.same(t.Context(), b))
	}
	if err != nil {
		t.Fatalf("in %s: %v", k, err)
	}
}

// opened returns b as a record, from where it is.
func (m *machine) opened(ctx context.Context, b *batch.Batch) (arrow.RecordBatch, error) {
	h, err := m.mover.Acquire(ctx, b, reservation.Specific(b.Info().Space))
	if err != nil {
		return nil, err
	}
	rec, err := m.mover.Record(ctx, h)
	return transfer.Released(rec, errors.Join(err, h.Close()))
}

// same compares b, where it is, with the record that it was made of.
func (m *machine) same(ctx context.Context, b *batch.Batch) error {
	rec, err := m.opened(ctx, b)
	if err != nil {
		return err
	}
	defer rec.Release()
	return equal.Records(m.records[b.ID()], rec)
}

// sameDigest compares the digest of a batch, where it is, with that of its record.
func (m *machine) sameDigest(t *testing.T, b *batch.Batch) error {
	h, err := m.mover.Acquire(t.Context(), b, reservation.Specific(b.Info().Space))
	if err != nil {
		return err
	}
	got, err := m.mover.Digest(t.Context(), h)
	if want := m.heapDigest(t, b.ID()); err == nil && got != want {
		err = fmt.Errorf("the digest is %x, want %x", got, want)
	}
	return errors.Join(err, h.Close())
}

// heapDigest is heapDigest of the record that a batch was made of.
func (m *machine) heapDigest(t *testing.T, id batch.ID) tier.Digest {
	t.Helper()
	d, ok := m.digests[id]
	if !ok {
		d = heapDigest(t, m.records[id])
		m.digests[id] = d
	}
	return d
}

// heapDigest is the digest of rec's image, laid out on the heap.
func heapDigest(t *testing.T, rec arrow.RecordBatch) tier.Digest {
	t.Helper()
	l, err := image.NewLayout(rec, image.MaxInline)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var d tier.Digest
	at := int64(0)
	for _, part := range append([]*image.Layout{l}, l.Dictionaries...) {
		body := make([]byte, part.Desc.Body)
		if len(body) > 0 {
			if err := part.WriteTo([][]byte{body}); err != nil {
				t.Fatal(err)
			}
		}
		d = d.Add(tier.DigestBytes(body, at/8))
		at += part.Desc.Body
	}
	return d
}

// settle waits until the device is done with what was freed. A free that the
// device refused is tried again with the next allocation.
func (m *machine) settle() {
	s := m.spaces[tier.GPU]
	if s.State().Retired == 0 {
		return
	}
	changed := make(chan struct{}, 1)
	defer s.Subscribe(func(bool) {
		select {
		case changed <- struct{}{}:
		default:
		}
	})()
	if mem, err := s.Pool.Alloc(1, nil); err == nil {
		s.Pool.Free(mem, func() {})
	}
	for s.State().Retired != 0 {
		<-changed
	}
}

// numbered makes a record with strings, nulls and a number that identifies it.
func numbered(n int64, rows int) arrow.RecordBatch {
	numbers, offsets, valid := make([]int64, rows), make([]int32, rows+1), make([]byte, (rows+7)/8)
	var text []byte // without a builder, which the race detector makes slow
	of := fmt.Sprintf(" of %d", n)
	nulls := 0
	for i := range rows {
		numbers[i] = n + int64(i)
		if i%5 == 2 {
			nulls++
		} else {
			valid[i/8] |= 1 << (i % 8)
			text = append(strconv.AppendInt(text, int64(i), 10), of...)
		}
		offsets[i+1] = int32(len(text))
	}
	column := func(dt arrow.DataType, nulls int, buffers ...*memory.Buffer) arrow.Array {
		return array.MakeFromData(array.NewData(dt, rows, buffers, nil, nulls, 0))
	}
	return array.NewRecordBatch(arrow.NewSchema([]arrow.Field{
		{Name: "n", Type: arrow.PrimitiveTypes.Int64},
		{Name: "s", Type: arrow.BinaryTypes.String, Nullable: true},
	}, nil), []arrow.Array{
		column(arrow.PrimitiveTypes.Int64, 0, nil, memory.NewBufferBytes(arrow.Int64Traits.CastToBytes(numbers))),
		column(arrow.BinaryTypes.String, nulls, memory.NewBufferBytes(valid),
			memory.NewBufferBytes(arrow.Int32Traits.CastToBytes(offsets)), memory.NewBufferBytes(text)),
	}, int64(rows))
}

// onWait has f called when a wait for room begins, with the bytes of the whole request, until cancel
// is called.
func (m *machine) onWait(f func(ctx context.Context, space tier.ID, bytes int64)) (cancel func()) {
	m.waits.Store(&f)
	return func() { m.waits.Store(nil) }
}
