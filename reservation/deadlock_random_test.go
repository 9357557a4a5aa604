package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// company is a number of owners that hold in several spaces and want more, as they
// note it themselves.
type company struct {
	m      *reservation.Manager
	spaces []*tier.Space

	mu      sync.Mutex
	members []*member
	rolled  int
	split   int
}

type member struct {
	o       *reservation.Owner
	held    []int64 // by space
	waiting bool
	in      []int // spaces in which it waits
	need    int64
}

// stuck reports whether me could not be served even if all running owners gave back everything, and
// after that all that could go on then. It knows no doors.
func (c *company) stuck(me *member) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	stuck := make(map[*member]bool)
	for _, k := range c.members {
		stuck[k] = k.waiting || k == me
	}
	for changed := true; changed; {
		changed = false
		for _, k := range c.members {
			if !stuck[k] {
				continue
			}
			for _, i := range k.in {
				room := c.spaces[i].Capacity()
				for _, o := range c.members {
					if stuck[o] {
						room -= o.held[i]
					}
				}
				if k.need <= room {
					stuck[k], changed = false, true
					break
				}
			}
		}
	}
	return stuck[me]
}

// round does one piece of work: it takes parts bytes after another, which may wait,
// works, and gives all of it back, also after an error.
func (c *company) round(ctx context.Context, k *member, rng *rand.Rand, parts []part, doors bool) (err error) {
	var held []reservation.Reservation
	defer func() {
		c.mu.Lock()
		clear(k.held)
		c.mu.Unlock()
		for _, r := range held {
			err = errors.Join(err, r.Release())
		}
	}()
	for _, p := range parts {
		r, err := c.take(ctx, k, p, held)
		var e *reservation.DeadlockError
		if errors.As(err, &e) && !doors && !c.stuck(k) {
			return fmt.Errorf("told without need: %v", err)
		}
		if err != nil {
			return err
		}
		if !r.IsZero() {
			held = append(held, r)
		}
		time.Sleep(time.Duration(rng.IntN(3)) * time.Millisecond)
	}
	return nil
}

type part struct {
	in   []int // of these spaces
	n    int64
	grow bool
}

// take reserves, or grows what is held in the space already.
func (c *company) take(ctx context.Context, k *member, p part, held []reservation.Reservation) (reservation.Reservation, error) {
	var grown, r reservation.Reservation
	for _, h := range held {
		if p.grow && h.Space() == c.spaces[p.in[0]] {
			grown, p.in = h, p.in[:1]
		}
	}
	c.mu.Lock()
	k.waiting, k.in, k.need = true, p.in, p.n
	c.mu.Unlock()
	var err error
	if !grown.IsZero() {
		err = grown.Grow(ctx, p.n)
	} else {
		r, err = c.m.Reserve(ctx, pick{p.in}, p.n, reservation.WithOwner(k.o))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	k.waiting = false
	if err == nil {
		from := grown
		if !r.IsZero() {
			from = r
		}
		for i, s := range c.spaces {
			if s == from.Space() {
				k.held[i] += p.n
			}
		}
	}
	return r, err
}

// pick is a strategy of some spaces.
type pick struct{ in []int }

func (p pick) Candidates(s *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	for _, i := range p.in {
		dst = append(dst, s.All()[i])
	}
	return dst
}

func (pick) String() string { return "some" }

// parts are what a round takes; in each space at most its capacity in all.
func randomParts(rng *rand.Rand, spaces int) []part {
	left := make([]int64, spaces)
	for i := range left {
		left[i] = 100
	}
	var out []part
	for range 2 + rng.IntN(4) {
		i := rng.IntN(spaces)
		in := []int{i}
		if j := rng.IntN(spaces); j != i && rng.IntN(4) == 0 {
			in = append(in, j)
		}
		n := int64(100)
		for _, i := range in {
			n = min(n, left[i])
		}
		if n == 0 {
			continue
		}
		n = 1 + rng.Int64N(n)
		for _, i := range in {
			left[i] -= n
		}
		out = append(out, part{in, n, rng.IntN(2) == 0})
	}
	return out
}

// do works until the parts are done, rolling back and splitting as advised.
func (c *company) do(ctx context.Context, k *member, rng *rand.Rand, parts []part, doors bool) error {
	for {
		err := c.round(ctx, k, rng, parts, doors)
		var e *reservation.DeadlockError
		if !errors.As(err, &e) {
			return err
		}
		if rng.IntN(2) == 0 { // or else be back before the others
			if err := e.Wait(ctx); err != nil {
				return err
			}
		}
		c.mu.Lock()
		if !e.Split {
			c.rolled++
		} else {
			c.split++
		}
		c.mu.Unlock()
		if e.Split && len(parts) > 1 {
			if err := c.do(ctx, k, rng, parts[:len(parts)/2], doors); err != nil {
				return err
			}
			parts = parts[len(parts)/2:]
		}
	}
}

// Owners take bytes in several spaces and wait for each other. If they follow the advice, all of
// them finish; and none gets an error without need.
func TestRandomOwnersAllFinish(t *testing.T) {
	seeds, runs := 60, 0
	if testing.Short() || invariants.Enabled {
		seeds = 12
	}
	rolled, split := 0, 0
	for seed := range testseed.Each(t, seeds) {
		runs++
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			c := &company{}
			for i := range 1 + rng.IntN(3) {
				c.spaces = append(c.spaces, spaceOf(t, fmt.Sprintf("gpu:%d", i), 100))
			}
			doors := seed%2 == 0
			bypass := 1 << 20 // no waiter is behind a door
			if doors {
				bypass = rng.IntN(4) - 1
			}
			c.m = managerOf(t, reservation.Config{Spaces: c.spaces, Bypass: bypass, Grace: time.Duration(1+rng.IntN(100)) * time.Millisecond})
			for i := range 2 + rng.IntN(7) {
				c.members = append(c.members, &member{o: reservation.NewOwner(fmt.Sprint(i)), held: make([]int64, len(c.spaces))})
			}
			ctx, cancel := context.WithTimeoutCause(t.Context(), 24*time.Hour, errors.New("stalled"))
			defer cancel()
			var all sync.WaitGroup
			for i, k := range c.members {
				rng := rand.New(rand.NewPCG(seed, uint64(10+i)))
				all.Go(func() {
					for range 20 {
						if err := c.do(ctx, k, rng, randomParts(rng, len(c.spaces)), doors); err != nil {
							t.Errorf("seed %d: %v", seed, err)
							return
						}
					}
				})
			}
			all.Wait()
			rolled, split = rolled+c.rolled, split+c.split
		})
	}
	if rolled < runs && runs > 1 {
		t.Errorf("only %d deadlocks in %d runs: the test shows nothing", rolled, runs)
	}
	t.Logf("%d rolled back, %d split", rolled, split)
}

// The same on many threads, with real time: for the race detector. They go on until
// they have met often enough.
func TestOwnersInRealTime(t *testing.T) {
	m := managerOf(t, reservation.Config{
		Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)}, Grace: time.Millisecond, Movable: func(tier.ID) bool { return false },
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a defect takes so long
	defer cancel()
	var all sync.WaitGroup
	var told atomic.Int64
	for i := range 4 {
		o := reservation.NewOwner(fmt.Sprint(i))
		all.Go(func() {
			for told.Load() < 20 {
				r, err := m.Reserve(ctx, onGPU0, 30, reservation.WithOwner(o))
				if err == nil {
					runtime.Gosched()
					err = r.Grow(ctx, 60)
					release(t, r)
				}
				if errors.Is(err, reservation.ErrDeadlock) {
					told.Add(1)
				} else if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
}
