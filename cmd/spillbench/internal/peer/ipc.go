package peer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/system"
)

// writeBuffer collects the paddings and headers that a FileWriter writes one by one;
// what is larger goes past it. Without it small batches would measure system calls.
const writeBuffer = 64 << 10

// ipcFiles is the peer's side: a file for each input, as a file has one schema.
type ipcFiles struct {
	r     *runner
	files []file // by input; nil if that had no batches
}

// withPeer gives f the peer's side with as much memory as ours has, and closes its files.
func (r *runner) withPeer(f func(*ipcFiles) error) (err error) {
	r.tidy()
	defer limitHeap(r.cfg.Memory)()
	p := &ipcFiles{r: r, files: make([]file, len(r.cfg.Inputs))}
	defer func() { err = errors.Join(err, p.close()) }()
	return f(p)
}

// close closes all files, with which they are gone.
func (p *ipcFiles) close() error {
	var errs []error
	for i, f := range p.files {
		if f != nil {
			errs = append(errs, f.Close())
			p.files[i] = nil
		}
	}
	return errors.Join(errs...)
}

// warmUp writes and reads everything once, from the page cache, and returns how long the reading
// took. The peer takes new memory of the page cache and of the heap each time. After warmUp that
// memory is not new to the machine. A virtual machine gives memory that is free for some seconds
// back to its host. Touching it again costs ten times as much as copying into it (measured: 0.45
// GiB/s against 4.7 of a core's time). That would count the host's time as the peer's. Ours uses
// memory that the arena has touched.
func (p *ipcFiles) warmUp(ctx context.Context, digest uint64) (read time.Duration, err error) {
	if _, err := p.write(ctx); err != nil {
		return 0, err
	}
	if read, err = p.read(ctx, digest, false); err != nil {
		return 0, err
	}
	return read, p.close()
}

// measure writes everything, syncs it, and reads it without the page cache. written
// is what writing took without the sync.
func (p *ipcFiles) measure(ctx context.Context, digest uint64) (t Times, written time.Duration, err error) {
	if written, err = p.write(ctx); err != nil {
		return t, written, err
	}
	synced, err := p.sync(ctx, written)
	t.Write = written + synced
	if err != nil {
		return t, written, err
	}
	for _, f := range p.files {
		if err := p.drop(f, 0); err != nil { // 0 is all of it
			return t, written, err
		}
	}
	t.Read, err = p.read(ctx, digest, true)
	return t, written, err
}

// write writes every input to a file of its own. What is timed is writing, not
// getting the batches.
func (p *ipcFiles) write(ctx context.Context) (took time.Duration, err error) {
	var w *ipc.FileWriter
	var buffer *bufio.Writer
	err = p.r.each(ctx, func(input int, rec arrow.RecordBatch) (err error) {
		if w == nil {
			if p.files[input], err = p.r.newFile(p.r.cfg.Dir); err != nil {
				return p.failed("making", err)
			}
			buffer = bufio.NewWriterSize(p.files[input], writeBuffer)
		}
		start := time.Now()
		if w == nil {
			w, err = ipc.NewFileWriter(buffer, ipc.WithSchema(rec.Schema()))
		}
		if err == nil {
			err = guard(func() error { return w.Write(rec) })
		}
		took += time.Since(start)
		p.r.cfg.Progress.Step()
		return p.failed("writing", err)
	}, func(int) error {
		if w == nil {
			return nil
		}
		start := time.Now()
		err := errors.Join(guard(w.Close), buffer.Flush())
		took += time.Since(start)
		w = nil
		return p.failed("writing", err)
	})
	return took, err
}

// sync waits until all files are on the disk, which has been at it for as long as
// writing them took.
func (p *ipcFiles) sync(ctx context.Context, written time.Duration) (time.Duration, error) {
	start := time.Now()
	size := int64(0)
	for _, f := range p.files {
		if f == nil {
			continue
		}
		if err := f.Sync(); err != nil {
			return time.Since(start), p.failed("syncing", err)
		}
		info, err := f.Stat()
		if err != nil {
			return time.Since(start), p.failed("syncing", err)
		}
		size += info.Size()
	}
	err := p.passed(ctx, start.Add(-written), size)
	return time.Since(start), err
}

// passed waits until a disk of the configured rate has passed n bytes since start. So the disk is
// never idle, however the bytes are requested, as behind a page cache that writes behind and reads
// ahead.
func (p *ipcFiles) passed(ctx context.Context, start time.Time, n int64) error {
	rate := p.r.cfg.Rate
	if rate <= 0 {
		return nil
	}
	ahead := time.Until(start.Add(time.Duration(float64(n) / float64(rate) * float64(time.Second))))
	if ahead <= 0 {
		return nil
	}
	wait := time.NewTimer(ahead)
	defer wait.Stop()
	select {
	case <-wait.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// drop drops the first n bytes of a file from the page cache; 0 is all of it.
func (p *ipcFiles) drop(f file, n int64) error {
	if f == nil {
		return nil
	}
	err := f.drop(n)
	if errors.Is(err, errors.ErrUnsupported) {
		p.r.res.CacheStays = true
		return nil
	}
	return p.failed("dropping the page cache of", err)
}

// read reads and touches everything. With cold set it drops from the page cache what it has read,
// batch by batch. So the cache has no more memory than our side has, and takes memory that it had
// before; see warmUp. Dropping counts in the time, of which it is a hundredth: the disk reads ahead
// meanwhile.
func (p *ipcFiles) read(ctx context.Context, digest uint64, cold bool) (took time.Duration, err error) {
	got := uint64(0)
	start := time.Now()
	in, err := p.reader()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, in.close()) }()
	for {
		rec, done, err := in.record(ctx)
		if err == io.EOF {
			break
		}
		if err != nil {
			return 0, err
		}
		if cold {
			if err := p.passed(ctx, start, in.read); err != nil {
				return 0, errors.Join(err, done())
			}
		}
		got += touch(rec)
		if err := done(); err != nil {
			return 0, err
		}
		p.r.cfg.Progress.Step()
		if cold {
			if err := p.drop(in.files[0].at.file, in.files[0].at.end); err != nil {
				return 0, err
			}
		}
	}
	took = time.Since(start)
	return took, checkDigest(ArrowIPC, got, digest)
}

// position is a file that knows where the last read in it ended, and counts what is read.
type position struct {
	file
	end  int64
	read *int64
}

func (p *position) ReadAt(b []byte, off int64) (int, error) {
	n, err := p.file.ReadAt(b, off)
	p.end = off + int64(n)
	*p.read += int64(n)
	return n, err
}

// reader returns a reader of all files from their beginnings.
func (p *ipcFiles) reader() (*ipcReader, error) {
	in := &ipcReader{p: p}
	for _, f := range p.files {
		if f == nil {
			continue
		}
		err := guard(func() error {
			at := &position{file: f, read: &in.read}
			// The files are our own, and may hold large batches.
			r, err := ipc.NewFileReader(at, ipc.WithBodySizeLimit(0), ipc.WithAllocator(p.r.mem))
			if err == nil {
				in.files = append(in.files, openFile{r, at})
			}
			return err
		})
		if err != nil {
			return nil, errors.Join(p.failed("reading", err), in.close())
		}
	}
	return in, nil
}

// ipcReader reads the batches of all files, in order.
type ipcReader struct {
	p     *ipcFiles
	files []openFile // those that are not read to their ends
	next  int        // in the first of them
	read  int64      // bytes, of all files
}

type openFile struct {
	*ipc.FileReader
	at *position
}

// record returns the next batch, and what releases it; io.EOF at the end.
func (in *ipcReader) record(ctx context.Context) (arrow.RecordBatch, func() error, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, nil, err
	}
	for len(in.files) > 0 && in.next == in.files[0].NumRecords() {
		if err := in.files[0].Close(); err != nil {
			return nil, nil, in.p.failed("reading", err)
		}
		in.files, in.next = in.files[1:], 0
	}
	if len(in.files) == 0 {
		return nil, nil, io.EOF
	}
	var rec arrow.RecordBatch
	err := guard(func() (err error) {
		rec, err = in.files[0].RecordBatchAt(in.next)
		return err
	})
	if err != nil {
		return nil, nil, in.p.failed("reading", err)
	}
	in.next++
	return rec, func() error { rec.Release(); return nil }, nil
}

// close closes the readers that are left; the files stay open.
func (in *ipcReader) close() error {
	var errs []error
	for _, f := range in.files {
		errs = append(errs, f.Close())
	}
	in.files = nil
	return errors.Join(errs...)
}

// failed says that it is the peer that failed, and where; nil for nil.
func (p *ipcFiles) failed(doing string, err error) error {
	if err == nil {
		return nil
	}
	var path *os.PathError
	if errors.As(err, &path) {
		err = path.Err // a file without a name has none that would help
	}
	return fmt.Errorf("%s: %s a file in %s: %w", ArrowIPC, doing, p.r.cfg.Dir, err)
}

// guard runs f and makes a panic an error: arrow-go panics on some arrays.
func guard(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("%s panicked: %v", ArrowIPC, v)
		}
	}()
	return f()
}

// file is a file of the peer's. Tests replace it by one that records its calls.
type file interface {
	io.Writer
	ipc.ReadAtSeeker
	io.Closer
	Sync() error
	Stat() (os.FileInfo, error)
	drop(n int64) error // see system.DropCache
}

// diskFile is a file as the system has it.
type diskFile struct{ *os.File }

func (f diskFile) drop(n int64) error { return system.DropCache(f.File, n) }

// newFile makes an anonymousFile.
func newFile(dir string) (file, error) {
	f, err := anonymousFile(dir)
	if err != nil {
		return nil, err
	}
	return diskFile{f}, nil
}

// anonymousFile makes a file in dir that has no name, or where that cannot be loses
// it at once, so that nothing stays, however the process ends.
func anonymousFile(dir string) (*os.File, error) {
	if f, err := system.OpenNameless(dir); err == nil {
		return f, nil
	}
	f, err := os.CreateTemp(dir, ".spillbench-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
