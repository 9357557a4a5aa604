package volumes_test

import (
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// TestRandomPersistRaces: goroutines persist, read, forget and free the same memories, others take what
// was found, and sometimes the volume is closed meanwhile. Then exactly what was not taken is used, is
// there for the next volume, and no header's room is lost.
func TestRandomPersistRaces(t *testing.T) {
	const size, found = 9000, 6
	seed := testseed.One(t)
	for round := range uint64(6) {
		dir := tempDir(t)
		sealed := func(c *volumes.Config) {
			if round%2 == 1 {
				c.Encrypt, c.Key = true, make([]byte, 32)
			}
		}
		v := openPersistent(t, dir, sealed)
		var left []tier.FileMemory
		for i := range uint64(found) {
			_, e := persist(t, v, i, size)
			left = append(left, e)
		}
		leave(t, v, left...)
		v = openPersistent(t, dir, sealed)

		var headers, owned atomic.Int64
		occupy := func(int64) (func(), error) {
			headers.Add(1)
			return func() { headers.Add(-1) }, nil
		}
		wrong := func(err error) {
			if err != nil && !errors.Is(err, tier.ErrReleased) && !errors.Is(err, tier.ErrClosed) {
				t.Error(err)
			}
		}
		var all sync.WaitGroup
		var goroutines uint64
		begin := func(f func(r *rand.Rand)) {
			goroutines++
			r := rand.New(rand.NewPCG(seed+round, goroutines))
			all.Go(func() { f(r) })
		}
		for range 8 {
			e := alloc(t, v, size)
			write(t, e, random(size, 1), 0)
			var users sync.WaitGroup // the last frees it, unless another has done so
			users.Add(2)
			free := sync.OnceFunc(func() { v.Free(e, func() {}) })
			begin(func(*rand.Rand) {
				defer users.Done()
				for range 3 {
					key, err := v.Persist(metaOf(1), placeOf(1), occupy, e)
					if wrong(err); err == nil {
						wrong(v.SetPlace(key, placeOf(2)))
						v.Forget(key)
					}
				}
			})
			begin(func(r *rand.Rand) {
				defer users.Done()
				for range r.IntN(20) {
					wrong(e.ReadAt(t.Context(), make([]byte, size), 0))
				}
				if r.IntN(2) == 0 {
					free()
				}
			})
			begin(func(*rand.Rand) {
				users.Wait()
				free()
			})
		}
		for _, k := range v.Persisted() {
			begin(func(r *rand.Rand) {
				for range 4 {
					m, err := v.Take(k.Key)
					if wrong(err); err != nil {
						return
					}
					wrong(v.SetPlace(k.Key, placeOf(3)))
					last := r.IntN(4) == 0
					if last {
						owned.Add(1)
						v.Own(k.Key, func() { owned.Add(-1) })
					}
					if v.Free(m, func() {}); last {
						return
					}
				}
				if r.IntN(2) == 0 {
					v.Forget(k.Key)
				}
			})
		}
		for range 3 {
			begin(func(*rand.Rand) { // a batch without memory
				key, err := v.Persist(metaOf(9), placeOf(9), occupy, nil)
				if wrong(err); err == nil {
					v.Forget(key)
				}
			})
		}
		early := round%3 == 0
		if early {
			begin(func(*rand.Rand) { closeVolume(t, v) })
		}
		all.Wait()
		stays, used := v.Persisted(), v.Stats().Used
		for _, k := range stays {
			used -= k.Room
		}
		if used != 0 || headers.Load() != 0 || owned.Load() != 0 {
			t.Errorf("round %d: %d bytes, %d headers and %d owned files are left", round, used, headers.Load(), owned.Load())
		}
		if !early {
			closeVolume(t, v)
		}
		v = openPersistent(t, dir, sealed)
		if again := v.Persisted(); len(again) != len(stays) {
			t.Errorf("round %d: %d of %d are there", round, len(again), len(stays))
		}
		for _, k := range v.Persisted() {
			if k.Err != nil {
				t.Error(k.Err)
			}
			v.Forget(k.Key)
		}
		closeVolume(t, v)
		wantEmpty(t, dir)
	}
}
