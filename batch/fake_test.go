package batch

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/pprof"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spillway-db/spillway/tier"
)

// heapPool is a Pool over the Go heap.
type heapPool struct{}

type heapMemory []byte

func (m heapMemory) Size() int64       { return int64(len(m)) }
func (m heapMemory) Extents() [][]byte { return [][]byte{m} }

func (heapPool) Charge(size int64) int64 { return (size + tier.Page - 1) / tier.Page * tier.Page }
func (heapPool) Alloc(size int64, _ []int64) (tier.Memory, error) {
	return make(heapMemory, size), nil
}
func (heapPool) Free(_ tier.Memory, reclaimed func()) { reclaimed() }
func (heapPool) Close() error                         { return nil }

func newSpace(t testing.TB, id string) *tier.Space {
	t.Helper()
	var parsed tier.ID
	err := parsed.UnmarshalText([]byte(id))
	if err != nil {
		t.Fatal(err)
	}
	s, err := tier.NewSpace(tier.SpaceConfig{ID: parsed, Capacity: 1 << 30, Node: -1, Backend: "heap", Pool: heapPool{}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// draw takes a buffer of size bytes out of s.
func draw(t testing.TB, s *tier.Space, size int64) *tier.Buffer {
	t.Helper()
	b, err := s.DrawNew(size)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// mustBeEmpty fails if anything of s is still in use.
func mustBeEmpty(t testing.TB, s *tier.Space) {
	t.Helper()
	if u := s.State().Usage; u.Used() != 0 {
		t.Errorf("%s is not empty: %+v", s.ID(), u)
	}
}

// form is a Payload that counts its releases and knows who reads it.
type form struct {
	space    *tier.Space
	desc     *Descriptor
	released atomic.Int32
	readers  atomic.Int32 // a release while it is above 0 is a bug
	broken   atomic.Bool  // and is noted here
}

func (f *form) Type() PayloadType       { return PlainImage }
func (f *form) Space() *tier.Space      { return f.space }
func (f *form) Bytes() int64            { return 100 }
func (f *form) Descriptor() *Descriptor { return f.desc }
func (f *form) Release() error {
	if f.readers.Load() != 0 {
		f.broken.Store(true)
	}
	if f.released.Add(1) > 1 {
		return tier.ErrReleased
	}
	return nil
}

func newBatch(t testing.TB, p Payload, o Observer) *Batch {
	t.Helper()
	b, err := New(Options{ID: 1, Payload: p, Observer: o})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestMain fails the package if a test leaves a goroutine behind.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		var stacks strings.Builder
		left := true
		for end := time.Now().Add(10 * time.Second); left && time.Now().Before(end); runtime.Gosched() {
			stacks.Reset()
			if err := pprof.Lookup("goroutine").WriteTo(&stacks, 2); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			left = strings.Contains(strings.ReplaceAll(stacks.String(), "batch.TestMain", ""), "spillway/batch.")
		}
		if left {
			fmt.Fprintln(os.Stderr, "goroutines left behind:\n"+stacks.String())
			code = 1
		}
	}
	os.Exit(code)
}

// commitAndOpen commits p and opens a handle in the same step.
func commitAndOpen(ctx context.Context, t *Transit, p Payload, last bool) (*Handle, error) {
	return t.b.Commit(ctx, t, p, CommitOptions{Open: true, Last: last})
}
