package peer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/system"
	"github.com/spillway-db/spillway/convert"
)

// ipcFiles is the peer's side: a file for each input, because a file has one schema.
type ipcFiles struct {
	r     *runner
	files []*os.File // of inputs with batches, in order
}

// withPeer calls f with the peer's side, which has as much memory as ours has, and closes its files.
// f goes through all batches so many times. Meanwhile the Go heap may grow by Config.Memory from its
// size now; a lower limit that is set already stays.
func (r *runner) withPeer(phase string, passes int64, f func(*ipcFiles) error) (err error) {
	r.cfg.Progress.Begin(phase, passes*r.res.Batches)
	debug.FreeOSMemory() // which our side has left
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	limit := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(limit)
	debug.SetMemoryLimit(min(limit, int64(m.Sys-m.HeapReleased)+r.cfg.Memory))
	p := &ipcFiles{r: r}
	defer func() { err = errors.Join(err, p.close()) }()
	return f(p)
}

// close closes all files. They have no names, so they are gone.
func (p *ipcFiles) close() (err error) {
	for _, f := range p.files {
		err = errors.Join(err, f.Close())
	}
	p.files = nil
	return err
}

// measure writes and reads everything twice: through the page cache (warm, without the sync of cold),
// and synced and without the page cache (cold).
//
// The first pass is untimed but for its reading. The peer takes new memory of the page cache and of
// the heap each time; after the pass that memory is not new to the machine. A virtual machine
// returns memory that is free for some seconds to its host, and touching it again costs ten times
// as much as copying into it (measured: 0.45 GiB/s against 4.7 of a core's time). That would count
// the host's time as the peer's. Our side uses memory that the arena has touched.
func (p *ipcFiles) measure(ctx context.Context, round *Round) (err error) {
	read := func(cold bool) (time.Duration, error) {
		return p.r.timed(ArrowIPC, func(f check) error { return p.read(ctx, cold, f) })
	}
	if _, err := p.write(ctx); err != nil {
		return err
	}
	if round.Warm.Read, err = read(false); err != nil {
		return err
	}
	if err := p.close(); err != nil {
		return err
	}
	if round.Warm.Write, err = p.write(ctx); err != nil {
		return err
	}
	if round.Peer.Write, err = p.sync(ctx, round.Warm.Write); err != nil {
		return err
	}
	round.Peer.Read, err = read(true)
	return err
}

// write writes every input to a file of its own, and returns how long that took without reading the
// source.
func (p *ipcFiles) write(ctx context.Context) (took time.Duration, err error) {
	var w *ipc.FileWriter // of the input with batches that was read last
	// The buffer collects the paddings and headers that a FileWriter writes one by one; larger writes
	// bypass it. Without it small batches would measure system calls.
	buffer := bufio.NewWriterSize(nil, 64<<10)
	timed := func(doing string, f func() error) error {
		start := time.Now()
		err := p.try(doing, f)
		took += time.Since(start)
		return err
	}
	finish := func() error {
		if w == nil {
			return nil
		}
		return timed("writing", func() error { return errors.Join(w.Close(), buffer.Flush()) })
	}
	last := -1
	err = p.r.each(ctx, func(input int, rec arrow.RecordBatch) error {
		if input != last {
			if err := finish(); err != nil {
				return err
			}
			err := timed("making", func() error {
				f, err := system.OpenUnlinked(p.r.cfg.Dir)
				if err != nil {
					return err
				}
				p.files = append(p.files, f)
				buffer.Reset(f)
				w, err = ipc.NewFileWriter(buffer, ipc.WithSchema(rec.Schema()))
				return err
			})
			if err != nil {
				return err
			}
			last = input
		}
		p.r.cfg.Progress.Step()
		return timed("writing", func() error { return w.Write(rec) })
	})
	if err == nil {
		err = finish()
	}
	return took, err
}

// sync waits until all files are on the disk, and then drops them from the page cache. It returns
// how long writing them took with that: the disk has been at work since the first write.
func (p *ipcFiles) sync(ctx context.Context, written time.Duration) (took time.Duration, err error) {
	start := time.Now().Add(-written)
	for _, f := range p.files {
		if err := p.try("syncing", f.Sync); err != nil {
			return 0, err
		}
	}
	err = p.r.passed(ctx, start, p.r.res.Bytes)
	took = time.Since(start)
	for _, f := range p.files {
		err = errors.Join(err, p.drop(f, 0)) // 0 is all of it
	}
	return took, err
}

// passed waits until a disk of the configured rate has passed n bytes since start. So the disk is
// never idle, however the bytes are requested, as behind a page cache that writes behind and reads
// ahead.
func (r *runner) passed(ctx context.Context, start time.Time, n int64) error {
	if r.cfg.Rate <= 0 {
		return nil
	}
	took := time.Duration(float64(n) / float64(r.cfg.Rate) * float64(time.Second))
	select {
	case <-time.After(time.Until(start.Add(took))):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// drop drops the first n bytes of a file from the page cache; 0 is all of it.
func (p *ipcFiles) drop(f *os.File, n int64) error {
	return p.try("dropping the page cache of", func() error {
		err := system.DropCache(f, n)
		if errors.Is(err, errors.ErrUnsupported) {
			p.r.res.CacheStays, err = true, nil
		}
		return err
	})
}

// read calls f with every batch, in order. If cold is set it drops from the page cache what it has
// read, batch by batch. So the cache has no more memory than our side has, and takes memory that it
// had before; see measure. Dropping counts in the time, of which it is a hundredth: the disk reads
// ahead meanwhile.
func (p *ipcFiles) read(ctx context.Context, cold bool, f check) error {
	start, bytes := time.Now(), int64(0)
	for _, file := range p.files {
		at := &position{File: file}
		var in *ipc.FileReader
		err := p.try("reading", func() (err error) {
			// The files are our own, and may hold large batches.
			in, err = ipc.NewFileReader(at, ipc.WithBodySizeLimit(0))
			return err
		})
		for i := 0; err == nil && i < in.NumRecords(); i++ {
			var rec arrow.RecordBatch
			err = p.try("reading", func() (err error) {
				rec, err = in.RecordBatchAt(i)
				return err
			})
			if err != nil {
				break
			}
			bytes += convert.LogicalBytes(rec)
			if err = context.Cause(ctx); err == nil && cold {
				err = p.r.passed(ctx, start, bytes)
			}
			if err == nil {
				err = f(rec)
			}
			rec.Release()
			if err == nil && cold {
				err = p.drop(file, at.end)
			}
			p.r.cfg.Progress.Step()
		}
		if in != nil {
			err = errors.Join(err, in.Close())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// position is a file that remembers where the last read in it ended.
type position struct {
	*os.File
	end int64
}

// ReadAt implements io.ReaderAt.
func (p *position) ReadAt(b []byte, off int64) (int, error) {
	n, err := p.File.ReadAt(b, off)
	p.end = off + int64(n)
	return n, err
}

// try runs f, makes a panic an error, because arrow-go panics on some arrays, and labels the error as
// the peer's.
func (p *ipcFiles) try(doing string, f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("it panicked: %v", v)
		}
		if err != nil {
			err = fmt.Errorf("%s: %s a file in %s: %w", ArrowIPC, doing, p.r.cfg.Dir, err)
		}
	}()
	return f()
}
