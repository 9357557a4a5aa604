package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// newExample returns a manager of one GPU of 1000 bytes and one host arena. An
// engine has one of all its spaces.
func newExample() *reservation.Manager { return newExampleOf(nil) }

// newExampleOf is newExample with a function that evicts batches.
func newExampleOf(evict func(context.Context, tier.ID, int64) reservation.Eviction) *reservation.Manager {
	var spaces []*tier.Space
	for _, id := range []tier.ID{{Kind: tier.GPU}, {Kind: tier.Host}} {
		s, err := tier.NewSpace(tier.SpaceConfig{
			ID: id, Capacity: 1000, Marks: tier.Marks{Limit: 1}, Pool: &heapPool{granule: 1}, Hint: "set GPUMemory",
		})
		if err != nil {
			log.Fatal(err)
		}
		spaces = append(spaces, s)
	}
	m, err := reservation.NewManager(reservation.Config{Spaces: spaces, Evict: evict})
	if err != nil {
		log.Fatal(err)
	}
	return m
}

func Example() {
	m := newExample() // of a GPU and a host arena of 1000 bytes each
	defer m.Close()
	ctx := context.Background()

	r, err := m.Reserve(ctx, reservation.AnyInTiers(tier.GPU, tier.Host), 600, nil)
	if err != nil {
		log.Fatal(err)
	}
	b, err := r.Alloc(200)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(r.Bytes(), "promised in", r.Space().ID(), "and", r.Unused(), "unused")

	r.Release() // the unused rest returns now,
	fmt.Println(r.Space().State().Used(), "used")
	b.Release() // and the buffer's bytes now
	fmt.Println(b.Space().State().Used(), "used")
	// Output:
	// 600 promised in gpu:0 and 400 unused
	// 200 used
	// 0 used
}

// What can never fit is refused at once; what does not fit now waits.
func ExampleManager_Reserve() {
	var first *reservation.Reservation
	m := newExampleOf(func(_ context.Context, space tier.ID, bytes int64) reservation.Eviction { // spill something
		fmt.Printf("%s lacks %d bytes\n", space, bytes)
		first.Release()
		return reservation.Eviction{Moved: 900}
	})
	defer m.Close()
	gpu := reservation.AnyInTier(tier.GPU)

	_, err := m.Reserve(context.Background(), gpu, 2000, nil)
	fmt.Println(errors.Is(err, reservation.ErrExceeded), err)

	first, _ = m.Reserve(context.Background(), gpu, 900, nil)
	second, err := m.Reserve(context.Background(), gpu, 400, nil)
	fmt.Println(second.Bytes(), err)
	second.Release()
	// Output:
	// true gpu:0: 2000 bytes exceed what may be had: 1000 available of 1000 (set GPUMemory)
	// gpu:0 lacks 300 bytes
	// 400 <nil>
}

// A policy lets a reservation grow when more is needed than was promised.
func ExampleIncrease() {
	m := newExample()
	defer m.Close()
	r, _ := m.TryReserve(reservation.AnyInTier(tier.GPU), 100, &reservation.Options{Policy: reservation.Increase(1.25)})
	defer r.Release()
	b, _ := r.Alloc(140) // 40 are missing, and 50 are added
	defer b.Release()
	fmt.Println(r.Bytes(), "promised and", r.Unused(), "unused")
	// Output: 150 promised and 10 unused
}

// emptiest is a strategy that does without the GPU while it is more than half
// full.
type emptiest struct{}

func (emptiest) Candidates(spaces *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	for _, s := range spaces.All() {
		if s.State().Used() <= s.Capacity/2 {
			dst = append(dst, s)
		}
	}
	return dst
}

func (emptiest) String() string { return "half empty" }

// A program can write a strategy of its own.
func ExampleStrategy() {
	m := newExample()
	defer m.Close()
	for range 2 {
		r, err := m.TryReserve(emptiest{}, 600, nil)
		if err != nil {
			log.Fatal(err)
		}
		defer r.Release()
		fmt.Println(r.Space().ID())
	}
	// Output:
	// gpu:0
	// host:0
}

// Two tasks hold half of the memory each and want the rest. One gets an error, and the other goes
// on.
func ExampleOwner() {
	m := newExample()
	defer m.Close()
	ctx := context.Background()
	gpu := reservation.AnyInTier(tier.GPU)
	holding := make(chan struct{}, 2)
	both := make(chan struct{})
	work := func(name string) {
		owner := &reservation.Options{Owner: reservation.NewOwner(name)}
		for first := true; ; first = false {
			r, err := m.Reserve(ctx, gpu, 500, owner)
			if err == nil && first {
				holding <- struct{}{}
				<-both
			}
			if err == nil {
				err = r.Grow(ctx, 500)
				r.Release()
			}
			var deadlock *reservation.DeadlockError
			if !errors.As(err, &deadlock) {
				return // done, or another error
			}
			fmt.Println("one gives way, with bytes that it held:", deadlock.Held)
			deadlock.Wait(ctx)
		}
	}
	var tasks sync.WaitGroup
	tasks.Go(func() { work("join") })
	tasks.Go(func() { work("sort") })
	<-holding
	<-holding
	close(both)
	tasks.Wait()
	fmt.Println("both are done")
	// Output:
	// one gives way, with bytes that it held: 500
	// both are done
}

// A hook may free something when an allocation fails, and ask for one more try.
func ExampleOptions_outOfMemory() {
	m := newExample()
	defer m.Close()
	var cached *tier.Buffer
	r, _ := m.TryReserve(reservation.AnyInTier(tier.GPU), 100, &reservation.Options{OutOfMemory: func(r *reservation.Reservation, requested int64, _ error) bool {
		fmt.Println(requested, "bytes of", r.Unused(), "unused")
		cached.Release()
		return true
	}})
	defer r.Release()
	cached, _ = r.Alloc(80)
	b, err := r.Alloc(60)
	fmt.Println(b.Size(), err)
	b.Release()
	// Output:
	// 60 bytes of 20 unused
	// 60 <nil>
}
