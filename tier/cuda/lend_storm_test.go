package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// Devices lend memory, share events, pin and unpin memory, copy by way of other memory and are
// closed, all at the same time, while what is lent comes back on threads of others, also when a
// context is lost: everything ends, and nothing is left.
func TestLendStorm(t *testing.T) {
	for seed := range testseed.Each(t, 4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			lose := seed%2 == 1
			r := &rig{Emulator: cudatest.New(t, cudatest.Config{Devices: 2, Memory: 32 << 20})}
			var err error
			r.driver, err = cuda.Load(r.Path)
			must(t, err)
			mem := pages(t, 4)
			var all sync.WaitGroup
			for i := range 6 {
				rng := rand.New(rand.NewPCG(seed, uint64(i)))
				all.Go(func() {
					for range 6 {
						if err := r.lendAndClose(rng, mem); err != nil && !lose {
							t.Error(err)
						}
					}
				})
			}
			if lose {
				for next := r.Calls("") + 300; r.Calls("") < next; {
					runtime.Gosched()
				}
				r.FailWork(0, driver.ErrIllegalAddress, true)
			}
			all.Wait()
			r.ClearFailures()
			for _, leak := range r.Leaks() {
				if !lose || !strings.Contains(leak, "with their context") { // from one that is lost nothing else can be had
					t.Error(leak)
				}
			}
		})
	}
}

// lendAndClose opens a device, and closes it while others work with it and with what it has lent.
func (r *rig) lendAndClose(rng *rand.Rand, mem []byte) error {
	d, err := r.driver.OpenDevice(cuda.Config{Ordinal: rng.IntN(2), Memory: 1 << 20, OnePiece: rng.IntN(2) > 0})
	if err != nil {
		return err
	}
	var users sync.WaitGroup
	var mu sync.Mutex
	var told []error
	tell := func(err error) {
		if err == nil || errors.Is(err, tier.ErrClosed) {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		told = append(told, err)
	}
	const size = 20_000
	for range 3 {
		seed := rng.Uint64()
		users.Go(func() {
			rng := rand.New(rand.NewPCG(seed, 1))
			tell(d.Pin(mem))
			back, err := d.Lend()
			if err != nil {
				tell(err)
				return
			}
			var end func() error
			s, err := d.NewStream()
			if err == nil {
				var a tier.Addr
				if a, err = d.Alloc(s, size); err == nil {
					tell(d.CopyToDevice(s, a, make([]byte, size)))
					tell(d.CopyToHost(s, make([]byte, size), a))
					var e uintptr
					if e, end, err = d.ShareEvent(s); err == nil {
						tell(d.AwaitShared(context.Background(), e))
					}
					tell(err)
				}
				if rng.IntN(2) == 0 {
					tell(d.Unpin(mem))
				}
				if rng.IntN(2) == 0 {
					tell(s.Close())
				}
			}
			users.Go(func() { // a thread of somebody else's
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				if end != nil {
					tell(end())
				}
				tell(back())
				tell(back())
			})
		})
	}
	users.Go(func() {
		for range rng.IntN(200) {
			runtime.Gosched()
		}
		tell(d.Close())
	})
	users.Wait()
	return errors.Join(told...)
}
