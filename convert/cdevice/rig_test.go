package cdevice

import (
	"errors"
	"sync"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
)

var (
	onGPU  = reservation.AnyInTier(tier.GPU)
	onHost = reservation.AnyInTier(tier.Host)
)

// rig is a GPU, host memory, and what moves batches between them.
type rig struct {
	gpu, host *tier.Space
	dev       tier.Device
	mover     *convert.Mover
	ids       batch.IDs
	close     func() error // once; the test's end does it, too
}

const rigMemory = 16 << 20

func newRig(t testing.TB, wrap func(tier.Device) tier.Device) *rig {
	t.Helper()
	device, err := sim.New(sim.Config{Memory: rigMemory})
	if err != nil {
		t.Fatal(err)
	}
	return newRigOn(t, device, wrap)
}

// newRigOn is newRig with a device, which it closes.
func newRigOn(t testing.TB, device tier.Device, wrap func(tier.Device) tier.Device) *rig {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const capacity, chunk = rigMemory, 16 << 10
	r := &rig{dev: device}
	if wrap != nil {
		r.dev = wrap(device)
	}
	pool, err := devpool.NewMemory(r.dev)
	check(err)
	arena, err := host.NewArena(host.Config{Capacity: capacity, Node: -1})
	check(err)
	full := tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9}
	r.gpu, err = tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU}, Capacity: capacity, Pool: pool,
		Backend: device.Info().Backend, Marks: full})
	check(err)
	r.host, err = tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.Host}, Capacity: capacity, Pool: arena,
		Backend: "host", Marks: full})
	check(err)
	reservations, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{r.gpu, r.host}})
	check(err)
	streams, err := devpool.NewStreams(r.dev, 4)
	check(err)
	res, err := reservations.TryReserve(onHost, 8*chunk, nil)
	check(err)
	buf, err := res.Alloc(8 * chunk)
	check(err)
	check(res.Release())
	staging := host.NewStaging(buf, chunk)
	permits, err := permit.New(permit.Config{})
	check(err)
	builtin := &transfer.Builtin{
		Streams: func(tier.ID) (*devpool.Streams, error) { return streams, nil },
		Staging: func(int) (transfer.Staging, error) { return staging, nil },
		Permits: permits,
	}
	var registry convert.Registry
	r.mover, err = convert.NewMover(convert.MoverConfig{Reservations: reservations, Registry: &registry, Builtin: builtin, IDs: &r.ids})
	check(err)
	r.close = sync.OnceValue(func() error {
		return errors.Join(r.mover.Close(), reservations.Close(), staging.Close(), streams.Close(), permits.Close(), r.gpu.Close(), r.host.Close(), device.Close())
	})
	t.Cleanup(func() {
		if err := r.close(); err != nil {
			t.Error(err)
		}
		for _, s := range []*tier.Space{r.gpu, r.host} {
			for _, l := range s.Leaks() {
				t.Errorf("leaked: %+v", l)
			}
			if s.State().Used() != 0 {
				t.Errorf("%s ends with %+v", s.ID(), s.State().Usage)
			}
		}
		if n := callbacks().open(); n != 0 {
			t.Errorf("%d exports are open at the end", n)
		}
	})
	return r
}

// open returns how many exports are not released.
func (r *releases) open() (n int) {
	r.out.Range(func(any, any) bool { n++; return true })
	return n
}

// batch makes a batch of a payload, which the test drops.
func (r *rig) batch(t testing.TB, p batch.Payload) *batch.Batch {
	t.Helper()
	b, err := batch.New(batch.Options{ID: r.ids.Next(), Payload: p})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// put makes a batch of a record on the GPU in a form.
func (r *rig) put(t testing.TB, rec arrow.RecordBatch, form batch.PayloadType) *batch.Batch {
	t.Helper()
	p, err := r.mover.Ingest(t.Context(), rec, onGPU)
	if err != nil {
		t.Fatal(err)
	}
	b := r.batch(t, p)
	if p.Type() == form {
		return b // to make it again would take the room twice
	}
	if err := r.mover.MoveAs(t.Context(), b, onGPU, form); err != nil {
		t.Fatal(err)
	}
	return b
}

func (r *rig) hold(t testing.TB, b *batch.Batch) *batch.Handle {
	t.Helper()
	h, err := r.mover.Acquire(t.Context(), b, onGPU)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// export exports a batch, which is in use until the array is released.
func (r *rig) export(t testing.TB, b *batch.Batch, cfg Config) (*DeviceArray, *Schema) {
	t.Helper()
	h := r.hold(t, b)
	array, schema := new(DeviceArray), new(Schema)
	if err := Export(h, array, schema, cfg); err != nil {
		_ = h.Close()
		t.Fatal(err)
	}
	return array, schema
}

func (r *rig) drop(t testing.TB, b *batch.Batch) {
	t.Helper()
	if err := b.Drop(); err != nil {
		t.Fatal(err)
	}
}
