package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// ownForm is a payload of the program's, in a form that nothing converts.
type ownForm struct{ buf *tier.Buffer }

func (ownForm) Type() batch.PayloadType { return "of-the-program" }
func (f ownForm) Space() *tier.Space    { return f.buf.Space() }
func (f ownForm) Bytes() int64          { return f.buf.Charge() }
func (f ownForm) Release() error        { return f.buf.Release() }

// inHost is inTier in host memory.
func inHost(t *testing.T, eng *spillway.Engine, id batch.ID, n int64, own bool) *batch.Batch {
	t.Helper()
	return inTier(t, eng, tier.Host, id, n, own)
}

// drawn is a buffer of the program's, of n bytes.
func drawn(t *testing.T, eng *spillway.Engine, k tier.Kind, n int64) *tier.Buffer {
	t.Helper()
	r, err := eng.Reserve(t.Context(), reservation.AnyInTier(k), n)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(n)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatal(err)
	}
	return buf
}

// inTier makes a batch of n bytes: an image, or in the program's own form.
func inTier(t *testing.T, eng *spillway.Engine, k tier.Kind, id batch.ID, n int64, own bool) *batch.Batch {
	t.Helper()
	buf := drawn(t, eng, k, n)
	var p batch.Payload = ownForm{buf}
	if !own {
		p = batch.NewImage(&batch.Descriptor{Rows: 1, Body: n}, buf, buf.Space())
	}
	b, err := batch.New(batch.Options{ID: id, Payload: p, Observer: eng.Observer(), Place: batch.Place{Plan: 1, Name: "of a program", Operator: "op", Seq: uint64(id)}})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func dropAll(t *testing.T, all []*batch.Batch) {
	t.Helper()
	for _, b := range all {
		if err := b.Discard(t.Context()); err != nil { // the monitor may be moving it
			t.Error(err)
		}
	}
}

// TestBatchesThatCannotBeConverted: the two batches that the policy moves first have a form
// that nothing converts. Others are moved in their place, and when there are no others,
// waiters get an error that says why.
func TestBatchesThatCannotBeConverted(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer // written by the monitor's goroutine alone, until Close
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(64 << 20),
		Disks:         []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(256 << 20)}},
		MonitorPeriod: time.Millisecond,
		StallTimeout:  300 * time.Millisecond,
		Logger:        slog.New(slog.NewTextHandler(&log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	const size = 1 << 20
	host := eng.Spaces()[0]
	empty := host.State().Used() // the engine's own
	var all []*batch.Batch
	for i := range 32 {
		all = append(all, inHost(t, eng, batch.ID(1000+i), size, i >= 30))
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), patience, errors.New("it takes for ever"))
	defer cancel()
	// 12 MiB more than there are.
	r, err := eng.Reserve(ctx, reservation.AnyInTier(tier.Host), host.State().Available+12*size)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Release(); err != nil {
		t.Error(err)
	}
	for i, b := range all[30:] {
		if at := b.Info().Space; at != host.ID() {
			t.Errorf("batch %d is in %s", 30+i, at)
		}
	}
	dropAll(t, all[:30])
	// What was moved is in the disk's memory a moment before it leaves the host's.
	untilUsage(host, func(u tier.Usage) bool { return u.Used() == empty+2*size })
	// With another converter they are tried, and reported, once more.
	if err := eng.Registry().Register(convert.Form{Type: "something", Kind: tier.GPU}, convert.ImageIn(tier.Host), func(context.Context, batch.Payload, *reservation.Reservation) (batch.Payload, error) {
		return nil, errors.New("it is not called")
	}); err != nil {
		t.Fatal(err)
	}
	_, err = eng.Reserve(ctx, reservation.AnyInTier(tier.Host), host.State().Available+size)
	var full *tier.NoSpaceError
	if !errors.As(err, &full) || full.Space != host.ID() {
		t.Errorf("with nothing left that can be moved: %v", err)
	} else if text := err.Error(); !strings.Contains(text, fmt.Sprintf("2 batches of %d bytes cannot be converted", 2*size)) || !strings.Contains(text, "no converter from of-the-program") {
		t.Errorf("the error does not say why: %v", err)
	}
	dropAll(t, all[30:])
	closeClean(t, eng)
	if n := strings.Count(log.String(), "a batch cannot be converted"); n != 4 || strings.Contains(log.String(), "a move failed") {
		t.Errorf("%d lines about two batches, twice:\n%s", n, &log)
	}
}

// TestErrnoOfAProgramsConverter: an errno that a converter of the program's returns says nothing of
// the disk: the batch is skipped, and all others move there.
func TestErrnoOfAProgramsConverter(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EIO} {
		var log bytes.Buffer // read after Close
		eng, err := spillway.Open(t.Context(), spillway.Config{
			GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(16 << 20),
			Disks:         []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
			MonitorPeriod: time.Millisecond,
			Logger:        slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := eng.Registry().Register(convert.Form{Type: ownForm{}.Type(), Kind: tier.Host}, convert.ImageIn(tier.Disk), func(context.Context, batch.Payload, *reservation.Reservation) (batch.Payload, error) {
			return nil, &os.PathError{Op: "write", Path: "index.of-the-program", Err: errno}
		}); err != nil {
			t.Fatal(err)
		}
		const size, bad = 256 << 10, 6
		var all []*batch.Batch
		for i := range 32 {
			all = append(all, inHost(t, eng, batch.ID(1000+i), size, i >= 32-bad)) // the first to be moved
		}
		ctx, cancel := context.WithTimeoutCause(t.Context(), patience, errors.New("it takes for ever"))
		r, err := eng.Reserve(ctx, reservation.AnyInTier(tier.Host), eng.Spaces()[0].State().Available+12*size)
		cancel()
		if err != nil {
			t.Error(err)
		} else if err := r.Release(); err != nil {
			t.Error(err)
		}
		dropAll(t, all)
		closeClean(t, eng)
		if n := strings.Count(log.String(), "a batch cannot be converted"); n != bad || strings.Contains(log.String(), "a move failed") {
			t.Errorf("%v: %d lines about %d batches:\n%s", errno, n, bad, &log)
		}
	}
}

// TestBatchesForTheDiskAlone: batches on a GPU for which the program has a converter to disk, and
// none to host memory, go to disk.
func TestBatchesForTheDiskAlone(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer // read after Close
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(16 << 20)}}, HostMemory: spillway.Bytes(64 << 20),
		Disks:         []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(256 << 20)}},
		MonitorPeriod: time.Millisecond,
		Logger:        slog.New(slog.NewTextHandler(&log, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := eng.Registry().Register(convert.Form{Type: ownForm{}.Type(), Kind: tier.GPU}, convert.ImageIn(tier.Disk), func(_ context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
		buf, err := r.Alloc(src.Bytes())
		if err != nil {
			return nil, err
		}
		return batch.NewImage(&batch.Descriptor{Rows: 1, Body: src.Bytes()}, buf, buf.Space()), nil
	}); err != nil {
		t.Fatal(err)
	}
	var all []*batch.Batch
	for i := range 8 {
		all = append(all, inTier(t, eng, tier.GPU, batch.ID(1000+i), 1<<20, true))
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), patience, errors.New("it takes for ever"))
	defer cancel()
	r, err := eng.Reserve(ctx, reservation.AnyInTier(tier.GPU), eng.Spaces()[0].State().Available+4<<20)
	if err != nil {
		t.Error(err)
	} else if err := r.Release(); err != nil {
		t.Error(err)
	}
	dropAll(t, all)
	closeClean(t, eng)
	if strings.Contains(log.String(), "a batch cannot be converted") {
		t.Errorf("told of batches that can be moved:\n%s", &log)
	}
}

// TestForeignCancellation: a file system that returns context.Canceled has failed. Moves to it are
// tried less and less often, and waiters for them get an error.
func TestForeignCancellation(t *testing.T) {
	files := faultfs.New(disk.OS(), 1)
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(16 << 20),
		Disks:         []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20), FS: files}},
		MonitorPeriod: time.Millisecond,
		StallTimeout:  300 * time.Millisecond,
		Logger:        slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(fmt.Errorf("elsewhere: %w", context.Canceled))})
	var all []*batch.Batch
	for i := range 8 {
		all = append(all, inHost(t, eng, batch.ID(1000+i), 1<<20, false))
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), patience/4, errors.New("it takes for ever"))
	defer cancel()
	_, err = eng.Reserve(ctx, reservation.AnyInTier(tier.Host), eng.Spaces()[0].State().Available+4<<20)
	if !errors.Is(err, tier.ErrNoSpace) || !strings.Contains(err.Error(), "elsewhere") {
		t.Errorf("waiting for a disk that cannot be written: %v", err)
	}
	if n := files.Count("write"); n > 1000 {
		t.Errorf("%d writes", n)
	}
	dropAll(t, all)
	closeClean(t, eng)
}

// TestConverterReleasesATasksReservation: that is not its own. But the task's function has
// succeeded and its inputs are consumed, so RunTask returns no error.
func TestConverterReleasesATasksReservation(t *testing.T) {
	if invariants.Enabled {
		t.Skip("needs a build without -tags invariants, which panics")
	}
	eng, err := callbackEngine(t, func(*spillway.Config) {})
	if err != nil {
		t.Fatal(err)
	}
	repo := scanOf(t, eng)
	if err := eng.Registry().Wrap(convert.ImageIn(tier.Host), convert.ImageIn(tier.GPU), func(inner convert.Func) convert.Func {
		return func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			p, err := inner(ctx, src, r)
			return p, errors.Join(err, r.Release())
		}
	}); err != nil {
		t.Fatal(err)
	}
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.Host))); err != nil {
		t.Fatal(err)
	}
	c, err := repo.Claim(t.Context(), 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	runs := 0
	err = eng.RunTask(t.Context(), spillway.Task{Operator: "join", Inputs: []*repository.Claim{c}}, func(context.Context, *spillway.Grant, []*spillway.Handle) error {
		runs++
		return nil
	})
	if err != nil || runs != 1 || repo.Total() != 0 {
		t.Errorf("the task ran %d times, %d inputs are left: %v", runs, repo.Total(), err)
	}
	closeClean(t, eng)
}
