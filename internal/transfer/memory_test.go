package transfer

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// TestAlteredIsCorruptWhoeverReads: a transfer of anybody's with the memory of a volume returns a CorruptError.
func TestAlteredIsCorruptWhoeverReads(t *testing.T) {
	fsys := faultfs.New(disk.OS(), 1)
	v, err := volumes.Open(volumes.Config{Dir: t.TempDir(), Capacity: 1 << 20, FS: fsys, Encrypt: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	}()
	m, err := v.Alloc(1<<20, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Free(m, func() {})
	file := m.(tier.FileMemory)
	if err := file.WriteAt(t.Context(), make([]byte, 1<<20), 0); err != nil {
		t.Fatal(err)
	}
	defer fsys.Add(faultfs.Rule{Ops: []string{"read"}, Effect: faultfs.BitFlip()})()
	var c *image.CorruptError
	_, _, at := file.Locate(64 << 10)
	permits, err := permit.New(permit.Config{})
	if err != nil {
		t.Fatal(err)
	}
	b := &Builtin{Permits: permits}
	err = b.OnDisk(t.Context(), 100, false, func(ctx context.Context) error {
		return file.ReadAt(ctx, make([]byte, 100), 70_000)
	})
	if !errors.As(err, &c) || c.Offset != at {
		t.Errorf("reading: %v", err)
	}
}

// cutAt makes such memory of n bytes that is cut at these places.
func cutAt(n int64, cuts ...int64) (m hostMemory) {
	p := make([]byte, n)
	last := int64(0)
	for _, c := range append(cuts, n) {
		m = append(m, p[last:c:c])
		last = c
	}
	return m
}

// TestChunksThatExtentsSplitAreVerified: bytes from disk that are to lie in several extents of host
// memory are compared with their checksums wherever the extents end: a change of any part of a
// chunk that two or three of them share is found, and located where the chunk begins.
func TestChunksThatExtentsSplitAreVerified(t *testing.T) {
	v, err := volumes.Open(volumes.Config{Dir: t.TempDir(), Capacity: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	}()
	const chunk, page = payload.SumChunk, tier.Page
	sound := make([]byte, 5*chunk+3*page)
	rng := rand.NewChaCha8([32]byte{1})
	_, _ = rng.Read(sound) // never fails
	desc := &batch.Descriptor{Body: int64(len(sound))}
	for part := range slices.Chunk(sound, chunk) {
		desc.Sums = append(desc.Sums, xxh3.Hash(part))
	}
	m, err := v.Alloc(desc.Body, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Free(m, func() {})
	file := m.(tier.FileMemory)
	if err := file.WriteAt(t.Context(), sound, 0); err != nil {
		t.Fatal(err)
	}
	read := func(into hostMemory) error {
		src := &bytesFrom{Source: file, space: anyHost, desc: desc, size: desc.Body, verify: true}
		return new(Builtin).copy(t.Context(), &bytesTo{Sink: into, space: anyHost}, src)
	}
	first, step := testseed.Share(t, 3)
	for i, cuts := range [][]int64{
		{}, {chunk}, {page}, {chunk - page}, {chunk + page}, {chunk + page, chunk + 2*page},
		{page, 2*chunk + chunk/2, 3*chunk + page}, {3*chunk + 2*page}, {desc.Body - page},
	} {
		if i%step != first {
			continue
		}
		var parts []int64 // beginnings of what lies in one extent and one chunk
		last := int64(0)
		for _, end := range append(cuts, desc.Body) {
			for last < end {
				parts = append(parts, last)
				last = min(end, last-last%chunk+chunk)
			}
		}
		into := cutAt(desc.Body, cuts...)
		if err := read(into); err != nil || !bytes.Equal(bytes.Join(into, nil), sound) {
			t.Errorf("cut at %v: %v", cuts, err)
		}
		for _, at := range parts {
			page := sound[at/tier.Page*tier.Page:][:tier.Page] // files are written in whole pages
			changed := bytes.Clone(page)
			changed[at%tier.Page] ^= 4
			if err := file.WriteAt(t.Context(), changed, at/tier.Page*tier.Page); err != nil {
				t.Fatal(err)
			}
			err := read(cutAt(desc.Body, cuts...))
			volume, name, offset := file.Locate(at / chunk * chunk)
			var c *image.CorruptError
			if !errors.As(err, &c) || c.Offset != offset || c.Volume != volume+" "+name || c.Want != desc.Sums[at/chunk] {
				t.Errorf("cut at %v, byte %d changed: %v", cuts, at, err)
			}
			if err := file.WriteAt(t.Context(), page, at/tier.Page*tier.Page); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// pageMemory is a memory of another kind than the engine has: a map of pages.
type pageMemory struct {
	mu    sync.Mutex
	pages map[int64][]byte
}

func (m *pageMemory) ReadAt(_ context.Context, p []byte, off int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for part := range slices.Chunk(p, tier.Page) {
		copy(part, m.pages[off])
		off += tier.Page
	}
	return nil
}

func (m *pageMemory) WriteAt(_ context.Context, p []byte, off int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for part := range slices.Chunk(p, tier.Page) {
		m.pages[off] = bytes.Clone(part)
		off += tier.Page
	}
	return nil
}

// heapChunks is Staging of the heap.
type heapChunks struct{}

func (heapChunks) Borrow(context.Context, bool) ([]byte, error) { return make([]byte, 64<<10), nil }
func (heapChunks) Return([]byte)                                {}
func (heapChunks) Chunk() int64                                 { return 64 << 10 }

// TestAnotherKindOfMemory: a Source and a Sink are all that a further tier needs. Bytes go from and to
// host memory, between two such memories, and through a compressed form.
func TestAnotherKindOfMemory(t *testing.T) {
	b := &Builtin{Codec: codec.S2, Scratch: blocks(MinBlocks)}
	b.Staging = func(int) (Staging, error) { return heapChunks{}, nil }
	sound := bytes.Repeat([]byte("another kind of memory\n"), 3*MaxPiece/20)
	sound = sound[:len(sound)/tier.Page*tier.Page]
	size := int64(len(sound))
	one, two := &pageMemory{pages: make(map[int64][]byte)}, &pageMemory{pages: make(map[int64][]byte)}
	packed := &bytesTo{
		Sink: two, space: anyHost, frame: payload.FrameSize,
		runs: make([]payload.Run, (size+payload.RunSize-1)/payload.RunSize),
	}
	back := make([]byte, size)
	for _, step := range []struct {
		to   *bytesTo
		from *bytesFrom
	}{
		{&bytesTo{Sink: one}, &bytesFrom{Source: hostMemory{sound}}},
		{packed, &bytesFrom{Source: one}},
		{&bytesTo{Sink: one}, &bytesFrom{Source: two, runs: packed.runs, desc: new(payload.Descriptor)}},
		{&bytesTo{Sink: two}, &bytesFrom{Source: one}},
		{&bytesTo{Sink: hostMemory{back}}, &bytesFrom{Source: two}},
	} {
		step.to.space, step.from.space, step.from.size = anyHost, anyHost, size
		if err := b.copy(t.Context(), step.to, step.from); err != nil {
			t.Fatal(err)
		}
	}
	if n := packed.stored.Load(); n == 0 || n > size/4 || !bytes.Equal(back, sound) {
		t.Errorf("%d of %d bytes were stored, or other bytes came back", n, size)
	}
}
