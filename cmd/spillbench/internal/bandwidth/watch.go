package bandwidth

import (
	"context"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Watch is the machine's file system for one volume. It knows which files are open, so that the
// limit can be measured in the file, and at the place, where batches are. It is safe for concurrent
// use; NewWatch makes one.
type Watch struct {
	disk.FS

	mu   sync.Mutex // nothing is done while it is held
	open map[*watched]struct{}
}

// NewWatch returns a file system that no file was opened on yet.
func NewWatch() *Watch { return &Watch{FS: disk.OS(), open: make(map[*watched]struct{})} }

type watched struct {
	disk.File
	on *Watch
}

// OpenAnonymous implements disk.FS.
func (w *Watch) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	return w.keep(w.FS.OpenAnonymous(dir, direct))
}

// Create implements disk.FS.
func (w *Watch) Create(path string, direct bool) (disk.File, error) {
	return w.keep(w.FS.Create(path, direct))
}

// Reopen implements disk.FS.
func (w *Watch) Reopen(path string, direct bool) (disk.File, error) {
	return w.keep(w.FS.Reopen(path, direct))
}

func (w *Watch) keep(f disk.File, err error) (disk.File, error) {
	if err != nil {
		return nil, err
	}
	out := &watched{File: f, on: w}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open[out] = struct{}{}
	return out, nil
}

// Close implements disk.File.
func (f *watched) Close() error {
	f.on.mu.Lock()
	delete(f.on.open, f)
	f.on.mu.Unlock()
	return f.File.Close()
}

// only returns the file that is open, if it is one alone; else nil.
func (w *Watch) only() disk.File {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.open) != 1 {
		return nil
	}
	for f := range w.open {
		return f.File
	}
	return nil
}

// place is where the batches of a load lie, or would: in one file, each in one piece.
type place struct {
	file disk.File
	at   []int64
}

// within reports whether all batches, of so many bytes, lie in the n bytes at first.
func (p *place) within(first, n, bytes int64) bool {
	for _, at := range p.at {
		if first < 0 || at < first || at-first > n-bytes {
			return false
		}
	}
	return true
}

// write and read do what is done without the engine, at the place.
func (p *place) write(ctx context.Context, l load, memory func(i int) []byte) error {
	return together(l.threads, func(i int) error { return requests(ctx, memory(i), p.at[i], p.file.WriteAt) })
}

func (p *place) read(ctx context.Context, l load, memory func(i int) []byte) error {
	return together(l.threads, func(i int) error { return requests(ctx, memory(i), p.at[i], p.file.ReadAt) })
}

// whereIs returns where in its file the memory is; false if it is in pieces.
func whereIs(f tier.FileMemory) (at int64, ok bool) {
	if f == nil || f.Size() == 0 {
		return 0, false
	}
	_, file, at := f.Locate(0)
	_, last, end := f.Locate(f.Size() - 1)
	return at, file == last && end-at == f.Size()-1
}

// bodyOf returns where a batch lies that is on disk and not compressed; else nil.
func bodyOf(t *batch.Transit) tier.FileMemory {
	if image, ok := t.Payload().(*batch.Image); ok {
		f, _ := image.Buffer().Memory().(tier.FileMemory)
		return f
	}
	return nil
}

// spot finds the place of the batches, which are on a disk; nil if there is none, because one is
// in pieces, or compressed, or there are several files.
func (b *bench) spot(w *Watch) *place {
	p := &place{file: w.only()}
	for _, x := range b.batches {
		t, err := x.TryTransit()
		if err != nil {
			return nil
		}
		at, ok := whereIs(bodyOf(t))
		if err := t.Abort(); err != nil || !ok {
			return nil
		}
		p.at = append(p.at, at)
	}
	if p.file == nil {
		return nil
	}
	return p
}
