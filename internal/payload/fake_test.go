package payload

import (
	"testing"

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
