package peer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/gen"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// spy makes files that tell what is done with them.
type spy struct {
	files []*spied
	fault func(file int, op string) error // what op does first; nil if nothing
}

func (s *spy) newFile(dir string) (file, error) {
	f, err := newFile(dir)
	if err != nil {
		return nil, err
	}
	out := &spied{file: f, spy: s, number: len(s.files)}
	s.files = append(s.files, out)
	return out, nil
}

// spied is one of those files.
type spied struct {
	file
	spy    *spy
	number int
	did    []string // in order; what is done several times in a row stands there once
	end    int64    // of the last read
}

func (f *spied) op(name string) error {
	if n := len(f.did); n == 0 || f.did[n-1] != name {
		f.did = append(f.did, name)
	}
	if f.spy.fault == nil {
		return nil
	}
	return f.spy.fault(f.number, name)
}

func (f *spied) Write(b []byte) (int, error) {
	if err := f.op("write"); err != nil {
		return 0, err
	}
	return f.file.Write(b)
}

func (f *spied) ReadAt(b []byte, off int64) (int, error) {
	if err := f.op("read"); err != nil {
		return 0, err
	}
	f.end = off + int64(len(b))
	return f.file.ReadAt(b, off)
}

func (f *spied) Sync() error {
	if err := f.op("sync"); err != nil {
		return err
	}
	return f.file.Sync()
}

func (f *spied) Stat() (os.FileInfo, error) {
	if err := f.op("stat"); err != nil {
		return nil, err
	}
	return f.file.Stat()
}

func (f *spied) drop(n int64) error {
	name := fmt.Sprint("drop ", n)
	switch n {
	case 0:
		name = "drop all"
	case f.end:
		name = "drop"
	}
	if err := f.op(name); err != nil {
		return err
	}
	return f.file.drop(n)
}

func (f *spied) Close() error { return errors.Join(f.op("close"), f.file.Close()) }

// twoBatches is an input of two small batches.
func twoBatches(seed uint64) gen.Config {
	return gen.Config{Seed: seed, Rows: 200, RowsPerBatch: 100}
}

// spiedRound returns a runner whose next files are those of a round, and are spied on.
func spiedRound(t *testing.T) (*runner, *spy) {
	t.Helper()
	two := func(int) gen.Config { return twoBatches(1) }
	run, s := newRig(t, tableOf(two), tableOf(two)).runner(), new(spy)
	if err := run.verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	run.newFile = s.newFile
	return run, s
}

// TestPeersFilesAreColdWhenRead: what the peer has written is synced and dropped from the page
// cache before it is read, and each batch is dropped when it has been read.
func TestPeersFilesAreColdWhenRead(t *testing.T) {
	run, s := spiedRound(t)
	if err := run.roundOfPeer(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	warm := []string{"write", "read", "close"}
	cold := []string{"write", "sync", "stat", "drop all", "read", "drop", "read", "drop", "close"}
	for i, want := range [][]string{warm, warm, cold, cold} {
		if i >= len(s.files) || !slices.Equal(s.files[i].did, want) {
			t.Fatalf("file %d of %d: want %q of %+v", i, len(s.files), want, s.files)
		}
	}
}

// TestPeersFilesFail: whatever cannot be done with a file of the peer's is the error of its
// round, and nothing is left; the rig looks for that.
func TestPeersFilesFail(t *testing.T) {
	run, s := spiedRound(t)
	injected := errors.New("injected")
	for _, file := range []int{1, 3} { // the second of those that are warm, and of those that are cold
		ops := []string{"write", "read", "close"}
		if file == 3 {
			ops = append(ops, "sync", "stat", "drop all", "drop")
		}
		for _, op := range ops {
			s.files = nil
			s.fault = func(n int, did string) error {
				if n == file && did == op {
					return injected
				}
				return nil
			}
			if err := run.roundOfPeer(t.Context(), 1); !errors.Is(err, injected) || op != "close" && !strings.Contains(err.Error(), ArrowIPC) {
				t.Errorf("%s of file %d: %v", op, file, err)
			}
			for i, f := range s.files {
				if n := len(f.did); n > 0 && f.did[n-1] != "close" {
					t.Errorf("%s of file %d: file %d ends with %q", op, file, i, f.did)
				}
			}
		}
	}
	s.fault = func(_ int, did string) error {
		if strings.HasPrefix(did, "drop") {
			return fmt.Errorf("dropping: %w", errors.ErrUnsupported)
		}
		return nil
	}
	if err := run.roundOfPeer(t.Context(), 1); err != nil || !run.res.CacheStays {
		t.Errorf("where the page cache cannot be dropped: it stays: %v, %v", run.res.CacheStays, err)
	}
}

// TestPeerIsCancelledAtTheRate: a batch for whose bytes the disk is waited for is released
// when the context ends.
func TestPeerIsCancelledAtTheRate(t *testing.T) {
	run, s := spiedRound(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("why")
	s.fault = func(file int, did string) error {
		if file == 2 && did == "drop all" {
			run.cfg.Rate = 1
		}
		// The footers of both files are read first, then a batch of the first.
		if file == 2 && did == "read" && slices.Equal(s.files[len(s.files)-1].did, []string{"write", "sync", "stat", "drop all", "read"}) {
			cancel(why)
		}
		return nil
	}
	if err := run.roundOfPeer(ctx, 1); !errors.Is(err, why) {
		t.Errorf("ended with %v", err)
	}
}

// withOurs calls f with our side on an engine that has the memory of the rig.
func withOurs(t *testing.T, run *runner, f func(*ours) error) {
	t.Helper()
	if err := run.withOurs(t.Context(), f); err != nil {
		t.Fatal(err)
	}
}

// TestRoomIsBelowTheTrigger, at which the monitor would begin to move what is to be timed.
func TestRoomIsBelowTheTrigger(t *testing.T) {
	run := newRig(t, tableOf(func(int) gen.Config { return gen.Config{Seed: 1, Rows: 3_000, RowsPerBatch: 20} })).runner()
	full := errors.New("full")
	withOurs(t, run, func(o *ours) error {
		err := run.each(t.Context(), func(_ int, rec arrow.RecordBatch) error {
			space, err := o.room(rec)
			if err != nil {
				return err
			}
			if space == nil {
				return full
			}
			l, err := convert.NewLayout(rec)
			if err != nil {
				return err
			}
			defer l.Close()
			if space.PressureBytes()+space.Charge(l.Size()) >= space.Trigger() {
				t.Errorf("%d bytes and %d come to the trigger %d", space.PressureBytes(), l.Size(), space.Trigger())
			}
			return o.put(t.Context(), 0, rec, space)
		}, nil)
		if !errors.Is(err, full) || len(o.batches) == 0 {
			t.Errorf("%d batches were put: %v", len(o.batches), err)
		}
		return nil
	})
}

// TestDictionariesNeedRoom: so does a batch whose indices take next to nothing.
func TestDictionariesNeedRoom(t *testing.T) {
	const size = hostMemory - 16<<10
	run := newRig(t, recordsOf(t, coded(t, strings.Repeat("x", size)))).runner()
	err := run.verify(t.Context())
	var e *reservation.ExceededError
	if !errors.As(err, &e) || e.Requested < size || e.Hint == "" {
		t.Errorf("ended with %v", err)
	}
}

// TestReadWaitsForNoRoom: however many goroutines read, no more do than there is room for.
func TestReadWaitsForNoRoom(t *testing.T) {
	r := newRig(t, tableOf(func(int) gen.Config { return gen.Config{Seed: 1, Rows: 3_000, RowsPerBatch: 375} }))
	r.Workers = 8
	run := r.runner()
	withOurs(t, run, func(o *ours) error {
		if _, _, err := o.write(t.Context()); err != nil {
			return err
		}
		before := o.eng.Reservations().Waits().Count
		_, _, err := o.read(t.Context())
		if n := o.eng.Reservations().Waits().Count - before; n > 0 {
			t.Errorf("%d times a goroutine waited for room", n)
		}
		return err
	})
}

// TestMovedBeforeItIsTimed: a batch that has left host memory by itself is an error.
func TestMovedBeforeItIsTimed(t *testing.T) {
	run := newRig(t, tableOf(func(int) gen.Config { return twoBatches(1) })).runner()
	withOurs(t, run, func(o *ours) error {
		return run.each(t.Context(), func(_ int, rec arrow.RecordBatch) error {
			space, err := o.room(rec)
			if err != nil {
				return err
			}
			if err := o.put(t.Context(), 0, rec, space); err != nil {
				return err
			}
			b := o.batches[len(o.batches)-1]
			if err := o.eng.Mover().Move(t.Context(), b.Batch, reservation.AnyInTier(tier.Disk)); err != nil {
				return err
			}
			if _, err := o.spill(t.Context()); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("batch %d was put", b.ID())) {
				t.Errorf("ended with %v", err)
			}
			return nil
		}, nil)
	})
}
