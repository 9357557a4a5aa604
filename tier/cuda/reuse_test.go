package cuda_test

import (
	"runtime"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier/cuda"
)

// An allocation on one stream does not make that wait for another, on which memory of the size is
// freed behind work that goes on. Otherwise code that ends that work behind an event of the first
// stream would wait for ever.
func TestAllocationWaitsForNoOtherStream(t *testing.T) {
	r := load(t, cudatest.Config{})
	d := r.open(t, cuda.Config{Memory: 1 << 20})
	a, err := d.NewStream()
	must(t, err)
	b, err := d.NewStream()
	must(t, err)
	const n = 64 << 10
	first, err := d.Alloc(a, n)
	must(t, err)
	must(t, a.Sync())
	pull := plug(t, d, a)
	must(t, d.Free(a, first))
	second, err := d.Alloc(b, n)
	must(t, err)
	must(t, d.Fill(b, second, 1, n))
	done, err := d.Record(b)
	must(t, err)
	for ended := false; !ended; {
		select {
		case <-done.Done():
			ended = true
		default:
			if ended = r.Calls("internal dependency") > 0; ended {
				t.Error("the driver has made one stream wait for the other")
			}
			runtime.Gosched()
		}
	}
	pull()
	must(t, d.Free(b, second))
}

// A driver whose pools lack the attribute is used as it is.
func TestPoolThatTakesNoAttribute(t *testing.T) {
	r := load(t, cudatest.Config{})
	r.Fail("cuMemPoolSetAttribute", 1, driver.ErrInvalidValue, 1)
	d := r.open(t, cuda.Config{Memory: 1 << 20})
	s, err := d.NewStream()
	must(t, err)
	a, err := d.Alloc(s, 512)
	must(t, err)
	must(t, d.Free(s, a))
	must(t, s.Sync())
	if n := r.Calls("cuMemPoolSetAttribute"); n != 2 {
		t.Errorf("the pool was told %d things, want 2, of which the second was refused", n)
	}
}
