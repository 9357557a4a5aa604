package cuda_test

import (
	"bytes"
	"errors"
	"runtime"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// That the driver refuses to wait for a stream, after it has refused an event, does not mean that
// the work is done.
func TestRefusedToWait(t *testing.T) {
	r := load(t, cudatest.Config{Delay: 1e6})
	d := r.open(t, cuda.Config{Memory: 1 << 20})
	const n = 1000
	want, got := bytes.Repeat([]byte{3, 1, 4, 1}, n/4), make([]byte, n)
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	a, err := d.Alloc(s, n)
	if err := errors.Join(err, d.CopyToDevice(s, a, want), d.CopyToHost(s, got, a)); err != nil {
		t.Fatal(err)
	}
	r.Fail("cuEventRecord", 0, driver.ErrInvalidValue, 1)
	r.Fail("cuStreamSynchronize", 0, driver.ErrInvalidValue, 2)
	if err := s.Sync(); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the stream is done (%v) before its bytes are there", err)
	}
}

// The same of copies before one that is refused, which are under way.
func TestRefusedToWaitForCopiesBefore(t *testing.T) {
	r := load(t, cudatest.Config{Version: 12000, Without: []string{"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"}})
	d := r.open(t, cuda.Config{Memory: 1 << 20})
	const n = 1000
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	a, err := d.Alloc(s, n)
	opened := make(chan struct{})
	if err := errors.Join(err, s.Sync(), d.WaitEvent(s, foreign(opened))); err != nil {
		t.Fatal(err)
	}
	before := r.Calls("cuStreamSynchronize")
	r.Fail("cuMemcpyDtoHAsync_v2", 1, driver.ErrInvalidValue, 1)
	r.Fail("cuStreamSynchronize", 0, driver.ErrInvalidValue, 2)
	refused := make(chan error, 1)
	go func() {
		refused <- d.CopyRegions(s, []tier.Region{{HostDst: make([]byte, n), Src: a}, {HostDst: make([]byte, n), Src: a}})
	}()
	for len(refused) == 0 && r.Calls("cuStreamSynchronize") < before+3 {
		runtime.Gosched()
	}
	if len(refused) > 0 {
		t.Error("the call returns with a copy under way")
	}
	close(opened)
	if err := <-refused; !errors.Is(err, driver.ErrInvalidValue) {
		t.Errorf("a copy that is refused behind another: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
