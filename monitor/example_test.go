package monitor_test

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Two spaces of 100 bytes and a batch of 60 in the faster one. A request for 50 bytes there waits;
// the monitor moves the batch down.
func Example() {
	gpu, host := space(tier.GPU), space(tier.Host)
	var m *monitor.Monitor
	res, err := reservation.NewManager(reservation.Config{
		Spaces: []*tier.Space{gpu, host},
		Evict: func(ctx context.Context, id tier.ID, bytes int64) reservation.Eviction {
			return m.Evict(ctx, id, bytes)
		},
	})
	if err != nil {
		panic(err)
	}
	told := make(chan struct{})
	m, err = monitor.New(monitor.Config{
		Reservations: res,
		Mover:        mover{res, told},
		Policy:       monitor.LRU(),
	})
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- m.Run(ctx) }()

	r, err := res.Reserve(ctx, reservation.AnyInTier(tier.GPU), 60, nil)
	if err != nil {
		panic(err)
	}
	b, err := batch.New(batch.Options{ID: 1, Payload: image(r, 60), Observer: m})
	if err != nil {
		panic(err)
	}
	second, err := res.Reserve(ctx, reservation.AnyInTier(tier.GPU), 50, nil)
	if err != nil {
		panic(err)
	}
	<-told
	fmt.Println(gpu.State().Used(), "bytes used in", gpu.ID(), "and", host.State().Used(), "in", host.ID())

	stop()
	fmt.Println(<-ended)
	fmt.Println(second.Release(), b.Drop(), res.Close())
	// Output:
	// batch 1: gpu:0 to host:0, 60 bytes, demand, <nil>
	// 50 bytes used in gpu:0 and 60 in host:0
	// context canceled
	// <nil> <nil> <nil>
}

// image draws a body from r, which it releases.
func image(r *reservation.Reservation, size int64) *batch.Image {
	buf, err := r.Alloc(size)
	if err != nil {
		panic(err)
	}
	if err := r.Release(); err != nil {
		panic(err)
	}
	return batch.NewImage(&batch.Descriptor{Body: size}, buf, r.Space())
}

// mover is a stand-in for convert.Mover that copies no bytes. It moves one batch at a time, and prints
// the move that it makes.
type mover struct {
	res  *reservation.Manager
	told chan struct{}
}

func (m mover) Evict(_ context.Context, all []*batch.Batch, to tier.ID, reason string) []error {
	b := all[0]
	now := b.Info()
	err := m.move(b, to)
	fmt.Printf("batch %d: %s to %s, %d bytes, %s, %v\n", b.ID(), now.Space, to, now.Bytes, reason, err)
	close(m.told)
	return []error{err}
}

func (m mover) move(b *batch.Batch, to tier.ID) error {
	t, err := b.TryTransit()
	if err != nil {
		return err
	}
	defer t.Abort()
	r, err := m.res.TryReserve(reservation.Specific(to), t.Payload().Bytes(), nil)
	if err != nil {
		return err
	}
	return t.Commit(image(r, r.Bytes()), false)
}

func space(k tier.Kind) *tier.Space {
	s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: k}, Capacity: 100, Pool: pool{}})
	if err != nil {
		panic(err)
	}
	return s
}

// pool hands out memory without bytes.
type pool struct{}

type nothing int64

func (n nothing) Size() int64 { return int64(n) }

func (pool) Charge(n int64) int64                          { return n }
func (pool) Alloc(n int64, _ []int64) (tier.Memory, error) { return nothing(n), nil }
func (pool) Free(_ tier.Memory, reclaimed func())          { reclaimed() }
func (pool) Close() error                                  { return nil }
