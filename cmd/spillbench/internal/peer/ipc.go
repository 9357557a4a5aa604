package peer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
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
	cold  bool       // they are read without the page cache
}

// close closes all files. They have no names, so they are gone.
func (p *ipcFiles) close(context.Context) (err error) {
	for _, f := range p.files {
		err = errors.Join(err, f.Close())
	}
	p.files = nil
	return err
}

// write writes every input to a new file of its own, and returns how long that took without reading
// the source. In the second pass it syncs the files, and drops them from the page cache.
func (p *ipcFiles) write(ctx context.Context, second bool) (took, written time.Duration, err error) {
	if err := p.close(ctx); err != nil {
		return 0, 0, err
	}
	p.cold = second
	var w *ipc.FileWriter // of the input with batches that was read last
	// The buffer collects the paddings and headers that a FileWriter writes one by one; larger writes
	// bypass it. Without it small batches would measure system calls.
	buffer := bufio.NewWriterSize(nil, 64<<10)
	finish := func() error {
		if w == nil {
			return nil
		}
		return errors.Join(w.Close(), buffer.Flush())
	}
	timed := func(doing string, f func() error) error {
		start := time.Now()
		err := p.try(doing, f)
		written += time.Since(start)
		return err
	}
	last := -1
	err = p.r.each(ctx, func(input int, rec arrow.RecordBatch) error {
		p.r.cfg.Progress.Step()
		if input == last {
			return timed("writing", func() error { return w.Write(rec) })
		}
		last = input
		return timed("making", func() error {
			if err := finish(); err != nil {
				return err
			}
			f, err := system.OpenUnlinked(p.r.cfg.Dir)
			if err != nil {
				return err
			}
			p.files = append(p.files, f)
			buffer.Reset(f)
			if w, err = ipc.NewFileWriter(buffer, ipc.WithSchema(rec.Schema())); err != nil {
				return err
			}
			return w.Write(rec)
		})
	})
	if err == nil {
		err = timed("writing", finish)
	}
	took = written
	if err == nil && second {
		took, err = p.sync(ctx, written)
	}
	return took, written, err
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
		err = errors.Join(err, p.drop(f))
	}
	return took, err
}

// passed waits until a disk of the configured rate has passed n bytes since start. So the disk is
// never idle, however the bytes are requested, as behind a page cache that writes behind and reads
// ahead.
func (r *runner) passed(ctx context.Context, start time.Time, n int64) error {
	if r.cfg.Rate <= 0 {
		return context.Cause(ctx)
	}
	took := time.Duration(float64(n) / float64(r.cfg.Rate) * float64(time.Second))
	select {
	case <-time.After(time.Until(start.Add(took))):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// drop drops a file from the page cache.
func (p *ipcFiles) drop(f *os.File) error {
	return p.try("dropping the page cache of", func() error {
		err := system.DropCache(f, 0) // 0 is all of it
		if errors.Is(err, errors.ErrUnsupported) {
			p.r.res.CacheStays, err = true, nil
		}
		return err
	})
}

// read calls f with every batch, in order. If cold is set, it reads at the configured rate, and drops
// from the page cache each file that it has read.
func (p *ipcFiles) read(ctx context.Context, f check) (err error) {
	start, passed := time.Now(), int64(0)
	for _, file := range p.files {
		var in *ipc.FileReader
		err := p.try("reading", func() (err error) {
			// The files are our own, and may hold large batches.
			in, err = ipc.NewFileReader(file, ipc.WithBodySizeLimit(0))
			return err
		})
		if err != nil {
			return err
		}
		for i := 0; err == nil && i < in.NumRecords(); i++ {
			var rec arrow.RecordBatch
			err = p.try("reading", func() (err error) {
				rec, err = in.RecordBatchAt(i)
				return err
			})
			if err != nil {
				break
			}
			if p.cold {
				passed += convert.LogicalBytes(rec)
			}
			if err = p.r.passed(ctx, start, passed); err == nil {
				err = f(rec)
			}
			rec.Release()
			p.r.cfg.Progress.Step()
		}
		if p.cold {
			err = errors.Join(err, p.drop(file))
		}
		if err = errors.Join(err, in.Close()); err != nil {
			return err
		}
	}
	return nil
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
