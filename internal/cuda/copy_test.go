package cuda_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/extent"
)

// Bytes go to the device, over it, and back.
func TestCopy(t *testing.T) {
	const n = 100_000
	r := open(t, cudatest.Config{})
	d := r.devices[0]
	s, a, b := r.stream(d), r.alloc(d, n), r.alloc(d, n)
	in, out := r.host(d, n), r.host(d, n)
	pattern(in, 1)
	r.do(func(c *cuda.Calls) error {
		return errors.Join(
			c.CopyToDevice(s, a, extent.Address(in), n),
			c.Fill(s, b, 9, n),
			c.CopyOnDevice(s, b+100, a+100, n-200),
			c.CopyToHost(s, extent.Address(out), b, n))
	})
	ok(t, r.wait(d, s))
	want := bytes.Clone(in)
	for i := range 100 {
		want[i], want[n-1-i] = 9, 9
	}
	if !bytes.Equal(out, want) {
		t.Error("what came back is not what was sent")
	}
}
