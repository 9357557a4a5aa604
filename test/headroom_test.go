package test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// runsOf is a record of n int64 that compress well.
func runsOf(n int) arrow.RecordBatch {
	b := array.NewInt64Builder(memory.DefaultAllocator)
	defer b.Release()
	for i := range n {
		b.Append(int64(i / 1000))
	}
	return array.NewRecordBatch(arrow.NewSchema([]arrow.Field{{Name: "n", Type: arrow.PrimitiveTypes.Int64}}, nil), []arrow.Array{b.NewArray()}, int64(n))
}

// openHostAndDisk opens an engine of 1 MiB of host memory and a disk that does not pack, without
// GPUs.
func openHostAndDisk(t *testing.T, disk int64, stallTimeout time.Duration) *spillway.Engine {
	t.Helper()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(mib),
		Disks:        []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(disk)}},
		StallTimeout: stallTimeout, Codec: convert.CodecNone,
	})
	if err != nil {
		t.Fatal(err)
	}
	return eng
}

// putRuns puts batches of some numbers of rows, the first that fits, until none fits for a moment:
// the monitor may move some a little later. It returns how many.
func putRuns(t *testing.T, repo *repository.Repository, rows ...int) (n int) {
	t.Helper()
	fits := func(rows int) bool { return repo.Put(t.Context(), 0, runsOf(rows), repository.WithoutWait()) == nil }
	for range 3 {
		for slices.ContainsFunc(rows, fits) {
			n++
		}
		time.Sleep(20 * time.Millisecond)
	}
	return n
}

// awaitDemand returns when somebody waits for room.
func awaitDemand(eng *spillway.Engine) {
	for len(eng.Reservations().Demand(nil)) == 0 {
		time.Sleep(time.Millisecond)
	}
}

var placedOnDisk = repository.WithPlacement(reservation.AnyInTier(tier.Disk))

// TestPackedHeadroom: the headroom of host is room for a batch as large as it is there, not as it
// is packed on the disk.
func TestPackedHeadroom(t *testing.T) {
	t.Parallel()
	for _, codec := range []convert.Codec{convert.CodecNone, convert.CodecZstd} {
		t.Run(fmt.Sprint(codec), func(t *testing.T) {
			eng, err := spillway.Open(t.Context(), spillway.Config{
				GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(mib),
				Disks:        []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(2 * mib)}},
				StallTimeout: time.Second, Codec: codec, Policy: monitor.LRU(),
			})
			if err != nil {
				t.Fatal(err)
			}
			plan, _ := eng.Plan("p")
			old, _ := plan.Repository("old", 0)
			repo, _ := plan.Repository("scan", 1)
			for range 3 {
				if err := old.Put(t.Context(), 0, runsOf(12_000), placedOnDisk); err != nil {
					t.Fatal(err)
				}
			}
			n := putRuns(t, repo, 12_000)
			for _, s := range eng.Stats().Spaces {
				t.Logf("%v: used %d of %d", s.ID, s.Used(), s.Capacity)
			}
			old.CloseInput()
			if b, ok := old.Peek(0); ok {
				t.Logf("the oldest: %+v", b.Info().Space)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			got := 0
			for h, err := range old.Drain(ctx, 0, tier.Host) {
				if err != nil {
					t.Errorf("after %d of 3 batches: %v", got, err)
					break
				}
				got++
				h.Close()
			}
			t.Logf("%d batches beside", n)
			for h, err := range old.Drain(ctx, 0, tier.Host) {
				if err != nil {
					break
				}
				h.Close()
			}
			eng.Close()
		})
	}
}

// TestOutputWhileHoldingInput: an operator holds its input open and puts its output, for which
// there is room. Nobody else frees anything.
func TestOutputWhileHoldingInput(t *testing.T) {
	t.Parallel()
	eng := openHostAndDisk(t, 2*mib, 100*time.Millisecond)
	repo := scanOf(t, eng)
	putRuns(t, repo, 12_000)
	repo.CloseInput()
	plan, err := eng.Plan("q")
	if err != nil {
		t.Fatal(err)
	}
	out, _ := plan.Repository("out", 1)
	n := 0
	for h, err := range repo.Drain(t.Context(), 0, tier.Host) {
		if err != nil {
			t.Errorf("after %d: %v", n, err)
			break
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		begin := time.Now()
		err = out.Put(ctx, 0, runsOf(11_000)) // somewhat less than the input
		cancel()
		h.Close()
		if err != nil {
			for _, s := range eng.Spaces() {
				t.Logf("%v: %d available", s.ID(), s.State().Available)
			}
			t.Errorf("the output of batch %d, after %v: %v", n, time.Since(begin), err)
			break
		}
		n++
	}
	t.Logf("%d were worked on", n)
	eng.Close()
}

// TestConsumersBesideAHugeBatch: all tiers are full. Consumers of batches of 96 KiB go on in 1 MiB
// of host memory, also if one batch on the disk is larger than half of it.
func TestConsumersBesideAHugeBatch(t *testing.T) {
	t.Parallel()
	for _, rows := range []int{12_000, 80_000} {
		eng := openHostAndDisk(t, 3*mib, time.Second)
		plan, _ := eng.Plan("p")
		old, _ := plan.Repository("old", 0)
		repo, _ := plan.Repository("scan", 1)
		for range 3 {
			if err := old.Put(t.Context(), 0, runsOf(12_000), placedOnDisk); err != nil {
				t.Fatal(err)
			}
		}
		if err := repo.Put(t.Context(), 0, runsOf(rows), placedOnDisk); err != nil {
			t.Fatal(err)
		}
		putRuns(t, repo, 12_000, 3_000, 500) // so that what is left is not by chance enough
		old.CloseInput()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		got := 0
		for h, err := range old.Drain(ctx, 0, tier.Host) {
			if err != nil {
				t.Errorf("beside a batch of %d rows, after %d of 3: %v", rows, got, err)
				break
			}
			got++
			h.Close()
		}
		cancel()
		eng.Close()
	}
}

// TestTasksBesideAWaitingPut: all tiers are full, and a Put waits. Tasks that fit into the headroom
// of the GPU run one after the other.
func TestTasksBesideAWaitingPut(t *testing.T) {
	t.Parallel()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(mib)}}, HostMemory: spillway.Bytes(mib),
		Disks:        []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(2 * mib)}},
		StallTimeout: 5 * time.Second, Codec: convert.CodecNone,
	})
	if err != nil {
		t.Fatal(err)
	}
	repo := scanOf(t, eng)
	if err := repo.Put(t.Context(), 0, runsOf(12_000), placedOnDisk); err != nil {
		t.Fatal(err)
	}
	putRuns(t, repo, 12_000)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	put := make(chan error, 1)
	go func() { put <- repo.Put(ctx, 0, runsOf(12_000)) }()
	awaitDemand(eng)
	for i := range 20 { // more than may pass a waiter that leaves no headroom
		begin := time.Now()
		task := spillway.Task{Output: 32 << 10, Overhead: admission.None}
		err := eng.RunTask(ctx, task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil })
		if d := time.Since(begin); err != nil || d > time.Second {
			t.Errorf("task %d, after %v: %v", i+1, d, err)
			break
		}
	}
	cancel()
	<-put
	eng.Close()
}

// TestPutThatFitsWithoutHeadroom: everything is full but for the headroom of host, and nothing is
// open. A Put that fits there has it when it has waited for StallTimeout, and is not refused then.
func TestPutThatFitsWithoutHeadroom(t *testing.T) {
	t.Parallel()
	for range 3 {
		eng := openHostAndDisk(t, 2*mib, 100*time.Millisecond)
		repo := scanOf(t, eng)
		if err := repo.Put(t.Context(), 0, runsOf(12_000), placedOnDisk); err != nil {
			t.Fatal(err)
		}
		putRuns(t, repo, 12_000)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		if err := repo.Put(ctx, 0, runsOf(6_000)); err != nil {
			t.Error(err)
		}
		cancel()
		eng.Close()
	}
}
