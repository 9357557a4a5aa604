package reservation_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
)

// simStreams returns Streams of a simulated GPU, some of its streams, and the
// manager. A page is charged for each allocation.
func simStreams(
	t *testing.T, capacity int64, n int,
) (*reservation.Streams, []tier.Stream, *reservation.Manager, *tier.Space) {
	t.Helper()
	dev, err := sim.New(sim.Config{Memory: capacity})
	if err != nil {
		t.Fatal(err)
	}
	pool, err := devpool.NewMemory(dev)
	if err != nil {
		t.Fatal(err)
	}
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: gpu0, Capacity: capacity, Marks: tier.Marks{Limit: 1}, Pool: pool, Backend: "sim",
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(space.Close(), dev.Close()); err != nil {
			t.Error(err)
		}
	})
	m := managerOf(t, reservation.Config{Spaces: []*tier.Space{space, spaceOf(t, "gpu:1", 100),
		spaceOf(t, "host:0", 100)}})
	s, err := reservation.NewStreams(m, gpu0)
	if err != nil {
		t.Fatal(err)
	}
	var streams []tier.Stream
	for range n {
		st, err := dev.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, st)
	}
	t.Cleanup(func() {
		for _, st := range streams {
			if err := st.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return s, streams, m, space
}

const granule = 4096 // a multiple of the simulated GPU's

func mustAllocOn(t testing.TB, s *reservation.Streams, on tier.Stream, size int64) *tier.Buffer {
	t.Helper()
	b, err := s.Alloc(on, size)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func wantStreamUsage(t testing.TB, what string, s *reservation.Streams, on tier.Stream, current, peak int64) {
	t.Helper()
	if now, most := s.Usage(on); now != current*granule || most != peak*granule {
		t.Errorf("%s: %d bytes, at most %d; want %d, %d", what, now, most, current*granule, peak*granule)
	}
}

// total is how many bytes are counted on all streams.
func total(s *reservation.Streams) int64 {
	now, _ := s.Usage(nil)
	return now
}

// Allocations on a stream draw from what is attached to it, one a stream; current
// and peak are kept by stream and in total.
func TestStreamsDrawFromWhatIsAttached(t *testing.T) {
	s, on, m, space := simStreams(t, 100*granule, 2)
	r := mustTry(t, m, onGPU0, 10*granule, nil)
	if err := s.Attach(on[0], r); err != nil {
		t.Fatal(err)
	}
	a := mustAllocOn(t, s, on[0], 4*granule)
	wantReservation(t, r, 10*granule, 6*granule)
	b := mustAllocOn(t, s, on[1], 8*granule-100) // nothing is attached there: from the space
	wantReservation(t, r, 10*granule, 6*granule)
	if used := space.State().Used(); used != 18*granule {
		t.Errorf("%d bytes are used", used)
	}
	if _, err := s.Alloc(on[0], 7*granule); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("more than is attached: %v", err)
	}
	wantStreamUsage(t, "the first stream", s, on[0], 4, 4)
	wantStreamUsage(t, "the second stream", s, on[1], 8, 8)
	wantStreamUsage(t, "all", s, nil, 12, 12)
	release(t, a)
	c := mustAllocOn(t, s, on[0], 3*granule)
	release(t, b)
	wantStreamUsage(t, "the first stream", s, on[0], 3, 4)
	wantStreamUsage(t, "the second stream", s, on[1], 0, 8)
	wantStreamUsage(t, "all", s, nil, 3, 12)
	if none, err := s.Alloc(on[0], 0); none != nil || err != nil {
		t.Errorf("no bytes: %v, %v", none, err)
	}

	// A buffer outlives the attachment, and the reservation.
	if got := s.Detach(on[0]); got != r {
		t.Errorf("%v was attached", got)
	}
	if got := s.Detach(on[0]); got != nil {
		t.Errorf("%v is attached still", got)
	}
	release(t, r)
	wantStreamUsage(t, "the first stream", s, on[0], 3, 4)
	s.Forget(on[0])
	s.Forget(nil)
	wantStreamUsage(t, "a forgotten stream", s, on[0], 0, 0)
	wantStreamUsage(t, "all", s, nil, 3, 12)
	release(t, c)
	wantStreamUsage(t, "all", s, nil, 0, 12)
	if used := space.State().Used(); used != 0 {
		t.Errorf("%d bytes are used", used)
	}
}

func TestAttachRefuses(t *testing.T) {
	s, on, m, _ := simStreams(t, 100*granule, 2)
	r := mustTry(t, m, onGPU0, granule, nil)
	other := mustTry(t, m, reservation.Specific(gpu1), 10, nil)
	gone, err := m.TryReserve(onGPU0, granule, nil)
	if err != nil {
		t.Fatal(err)
	}
	release(t, gone)
	if err := s.Attach(on[0], gone); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("a released reservation: %v", err)
	}
	if err := s.Attach(on[0], other); err == nil {
		t.Error("a reservation of another space was attached")
	}
	if err := s.Attach(nil, r); err == nil {
		t.Error("no stream was accepted")
	}
	if _, err := s.Alloc(nil, 1); err == nil {
		t.Error("no stream was accepted")
	}
	if err := s.Attach(on[0], r); err != nil {
		t.Fatal(err)
	}
	if err := s.Attach(on[0], r); err == nil {
		t.Errorf("a second one on a stream: %v", err)
	}
	if err := s.Attach(on[1], r); err != nil {
		t.Errorf("one on two streams: %v", err)
	}
	release(t, r, other)
	if _, err := s.Alloc(on[0], granule); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("what is attached was released: %v", err)
	}
	if err := s.Attach(on[0], gone); !errors.Is(err, tier.ErrReleased) {
		t.Error(err)
	}
	if _, err := reservation.NewStreams(m, host); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("streams of a host space: %v", err)
	}
	if _, err := reservation.NewStreams(m, tier.ID{Kind: tier.GPU, Ordinal: 7}); !errors.Is(err,
		reservation.ErrNoCandidate) {
		t.Errorf("streams of no space: %v", err)
	}
}

// Without a reservation an allocation neither waits nor takes what is kept for waiters.
func TestStreamsHeedTheDoor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)}, Bypass: -1})
		s, err := reservation.NewStreams(m, gpu0)
		if err != nil {
			t.Fatal(err)
		}
		on := &namedStream{}
		held := mustTry(t, m, onGPU0, 50, nil)
		if _, err := s.Alloc(on, 51); !errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("no room: %v", err)
		}
		b := mustAllocOn(t, s, on, 10)
		var large *reservation.Reservation
		served := make(chan error, 1)
		go func() {
			var err error
			large, err = m.Reserve(t.Context(), onGPU0, 90, nil)
			served <- err
		}()
		synctest.Wait()
		if _, err := s.Alloc(on, 10); !errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("what is kept for the oldest: %v", err)
		}
		if now, most := s.Usage(nil); now != 10 || most != 10 {
			t.Errorf("failures were counted: %d bytes, at most %d", now, most)
		}
		release(t, held, b)
		if err := <-served; err != nil {
			t.Fatal(err)
		}
		release(t, large)
	})
}

// namedStream is a stream that nothing is put on.
type namedStream struct{ tier.Stream }

// A buffer that the device has not given back yet counts still, and is counted off before its bytes
// can be reused.
func TestStreamsCountWhatTheDeviceHolds(t *testing.T) {
	m, space := one(t, 100, 0)
	s, err := reservation.NewStreams(m, gpu0)
	if err != nil {
		t.Fatal(err)
	}
	pool := space.Pool.(*heapPool)
	pool.hold = true
	on := &namedStream{}
	defer space.Subscribe(func(bool) {
		if now, used := total(s), space.State().Used(); now > used {
			t.Errorf("%d bytes are counted and %d used", now, used)
		}
	})()
	r := mustTry(t, m, onGPU0, 40, nil)
	if err := s.Attach(on, r); err != nil {
		t.Fatal(err)
	}
	b := mustAllocOn(t, s, on, 40)
	release(t, b)
	if got, _ := s.Usage(on); got != 40 {
		t.Errorf("%d bytes are counted while the device has them", got)
	}
	pool.reap()
	if now, most := s.Usage(on); now != 0 || most != 40 {
		t.Errorf("afterwards: %d, at most %d", now, most)
	}
	wantReservation(t, r, 40, 40)
	release(t, r)
}

// What a stream frees of an overdrawn reservation goes to the space at once, and is counted off
// before: a listener never finds more counted than used.
func TestStreamsCountOffBeforeTheyCredit(t *testing.T) {
	m, space := one(t, 100, 0)
	s, err := reservation.NewStreams(m, gpu0)
	if err != nil {
		t.Fatal(err)
	}
	on := &namedStream{}
	r := mustTry(t, m, onGPU0, 40, &reservation.Options{Policy: reservation.Ignore()})
	if err := s.Attach(on, r); err != nil {
		t.Fatal(err)
	}
	a, b := mustAllocOn(t, s, on, 40), mustAllocOn(t, s, on, 20)
	told := 0
	defer space.Subscribe(func(bool) {
		told++
		if now, used := total(s), space.State().Used(); now > used {
			t.Errorf("%d bytes are counted and %d used", now, used)
		}
	})()
	release(t, b)
	if told == 0 {
		t.Error("the release was not told")
	}
	release(t, a)
	s.Detach(on)
	release(t, r)
}

// Streams whose buffers are freed elsewhere: each is credited where it was charged,
// and the peaks are exact. All streams reach their most at once, and never have more.
func TestStreamsAtOnce(t *testing.T) {
	const each, rounds = 8, 200
	t.Run("memory that is back at once", func(t *testing.T) {
		m, _ := one(t, 1024*granule, 0)
		s, err := reservation.NewStreams(m, gpu0)
		if err != nil {
			t.Fatal(err)
		}
		on := make([]tier.Stream, 6)
		for i := range on {
			on[i] = &namedStream{}
		}
		streamsAtOnce(t, s, m, on, each, rounds)
		for i, st := range on {
			wantStreamUsage(t, fmt.Sprintf("stream %d", i), s, st, 0, each)
		}
		wantStreamUsage(t, "all", s, nil, 0, each*int64(len(on)))
	})
	t.Run("a device", func(t *testing.T) {
		s, on, m, space := simStreams(t, 1024*granule, 6)
		streamsAtOnce(t, s, m, on, each, rounds)
		for total(s) > 0 { // the device has it still
			runtime.Gosched()
		}
		var sum int64
		for i, st := range on {
			now, most := s.Usage(st)
			if sum += most; now != 0 || most < each*granule {
				t.Errorf("stream %d: %d bytes, at most %d", i, now, most)
			}
		}
		if _, most := s.Usage(nil); most < int64(len(on))*each*granule || most > min(sum, space.State().Peak) {
			t.Errorf("all: %d; the streams had %d, the space %+v", most, sum, space.State().Usage)
		}
	})
}

func streamsAtOnce(t *testing.T, s *reservation.Streams, m *reservation.Manager, on []tier.Stream, each, rounds int) {
	freed := make(chan func())
	var allocators, freers, full sync.WaitGroup
	full.Add(len(on))
	for range 2 {
		freers.Go(func() {
			for free := range freed {
				free()
			}
		})
	}
	for i, st := range on {
		if i%2 == 0 { // the others take from the space
			r := mustTry(t, m, onGPU0, 100*granule, nil)
			defer release(t, r)
			if err := s.Attach(st, r); err != nil {
				t.Fatal(err)
			}
			defer s.Detach(st)
		}
		allocators.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 1))
			mine := make([]*tier.Buffer, each)
			alloc := func(k int) {
				var err error
				if mine[k], err = s.Alloc(st, granule); err != nil {
					t.Error(err)
				}
			}
			for k := range mine {
				alloc(k)
			}
			full.Done()
			full.Wait()           // all hold their most now
			free := func(k int) { // on another goroutine, and it is over then
				done := make(chan struct{})
				freed <- func() { defer close(done); release(t, mine[k]) }
				<-done
			}
			for range rounds {
				k := rng.IntN(each)
				free(k)
				alloc(k)
				if now, most := s.Usage(nil); now > most {
					t.Errorf("%d bytes, at most %d", now, most)
				}
			}
			for k := range mine {
				free(k)
			}
		})
	}
	allocators.Wait()
	close(freed)
	freers.Wait()
}
