package transfer

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// heapPool is a Pool of the heap.
type heapPool struct{ tier.Pool }

func (heapPool) Charge(size int64) int64 { return size }
func (heapPool) Alloc(n int64, _ []int64) (tier.Memory, error) {
	return heapMemory(make([]byte, n)), nil
}
func (heapPool) Free(_ tier.Memory, reclaimed func()) { reclaimed() }

// TestWaitersForACopy: callers that want the copy of a dictionary that another one makes wait for
// it. If that one fails, one of them makes it, and all get that.
func TestWaitersForACopy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host, err := tier.NewSpace(tier.SpaceConfig{
			ID: tier.ID{Kind: tier.Host}, Capacity: 1 << 20, Node: -1, Backend: "heap", Pool: heapPool{},
		})
		if err != nil {
			t.Fatal(err)
		}
		s := new(Dictionaries)
		d := &Dictionary{Store: s, Body: tier.Page, Held: 1}
		fail := make(chan error)
		go func() {
			_, err := s.Acquire(t.Context(), d, host, func(*payload.Parts) error { return <-fail })
			if !errors.Is(err, errFails) {
				t.Errorf("the first: %v", err)
			}
		}()
		synctest.Wait()
		gone, cancel := context.WithCancelCause(t.Context())
		made := 0
		all := make(chan *DictCopy, 3)
		for i := range 4 {
			ctx := t.Context()
			if i == 0 {
				ctx = gone
			}
			go func() {
				c, err := s.Acquire(ctx, d, host, func(parts *payload.Parts) error {
					made++
					buf, err := host.DrawNew(tier.Page)
					parts.Buffers, parts.Descriptor = []*tier.Buffer{buf}, new(batch.Descriptor)
					return err
				})
				if i == 0 {
					if c != nil || err != errFails {
						t.Errorf("the one whose context ended: %v", err)
					}
					return
				}
				if err != nil {
					t.Error(err)
				}
				all <- c
			}()
		}
		synctest.Wait()
		cancel(errFails)
		fail <- errFails
		synctest.Wait()
		if made != 1 || len(all) != 3 || len(d.Copies) != 1 {
			t.Fatalf("%d copies were made, and %d callers have one", made, len(all))
		}
		for range 3 {
			c := <-all
			if c != d.Copies[0] || c.Refs == 0 {
				t.Error("a caller has another copy")
			}
			defer c.Release()
		}
	})
}
