package test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/topology"
)

// TestSmallBatchesSpill: the monitor moves small batches of host memory to a disk that is large
// enough, that is encrypted, that has room for a part of them, or that fails once or twice. All are whole, and the books are exact.
func TestSmallBatchesSpill(t *testing.T) {
	t.Parallel()
	top, err := topology.Discover(t.Context(), topology.Options{})
	if err != nil {
		t.Fatal(err)
	}
	writes := []string{"write"}
	for name, c := range map[string]struct {
		disk    int64
		encrypt bool
		fault   *faultfs.Rule
		some    bool // not all find room
	}{
		"all":         {disk: 8 << 20},
		"encrypted":   {disk: 8 << 20, encrypt: true},
		"a part":      {disk: 640 << 10, some: true},
		"fails once":  {disk: 8 << 20, fault: &faultfs.Rule{Ops: writes, Skip: 1, Times: 1, Effect: faultfs.Fail(syscall.EIO)}},
		"fails twice": {disk: 8 << 20, fault: &faultfs.Rule{Ops: writes, Skip: 1, Times: 2, Effect: faultfs.Fail(syscall.EIO)}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := testfs.MemoryDir(t)
			files := faultfs.New(testfs.DiskFS(dir, disk.OS()), 1)
			l := &life{t: t, dir: dir, ctx: t.Context(), files: files, seal: c.encrypt}
			var err error
			var log bytes.Buffer // the handler writes one line at a time
			l.eng, err = spillway.Open(t.Context(), spillway.Config{
				GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(4 << 20),
				HostMarks: tier.Marks{Limit: 1}, Topology: top, WriteAhead: -1,
				Disks:  []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(c.disk), FS: l.files, Encrypt: c.encrypt}},
				Logger: slog.New(slog.NewTextHandler(&log, nil)),
			})
			if err != nil {
				t.Fatal(err)
			}
			l.base = make(map[tier.ID]int64)
			for _, s := range l.eng.Stats().Spaces {
				l.base[s.ID] = s.Used()
			}
			l.spillSmall(c.fault, c.some)
			if err := l.eng.Close(); err != nil {
				t.Error(err)
			}
			l.gone()
			if n := strings.Count(log.String(), "a move failed"); c.fault == nil && n > 0 || c.fault != nil && (n == 0 || n > c.fault.Times) {
				t.Errorf("%d warnings of failed moves", n)
			}
		})
	}
}

// spillSmall puts 200 batches of a few pages in host memory, and asks for all of that.
func (l *life) spillSmall(fault *faultfs.Rule, some bool) {
	t := l.t
	t.Helper()
	plan, err := l.eng.Plan("small")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	host := l.eng.Spaces()[0]
	for i := range 200 {
		rec := numberedRecord(int64(i), 50+100*(i%5), wordList(1, 5))
		if err := repo.Put(t.Context(), i, rec, repository.WithPlacement(spillway.Specific(host.ID()))); err != nil {
			t.Fatal(err)
		}
		b, ok := repo.Peek(i)
		if !ok {
			t.Fatalf("batch %d is not there", i)
		}
		l.records, l.batches = append(l.records, rec), append(l.batches, b)
	}
	if fault != nil {
		l.files.Add(*fault)
	}
	before := l.files.Count("write")
	ctx := t.Context()
	if some { // then it would be refused after half a minute
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Second)
		defer cancel()
	}
	r, err := l.eng.Reserve(ctx, spillway.Specific(host.ID()), host.State().Room)
	if some != (err != nil) || err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("all of host memory is given with %v", err)
	}
	if n := l.files.Count("write") - before; !some && l.seal != (n >= len(l.batches)) {
		t.Errorf("%d batches took %d writes", len(l.batches), n)
	}
	if err == nil {
		if err := r.Release(); err != nil {
			t.Error(err)
		}
	}
	down := 0
	for _, b := range l.batches {
		for b.Info().State == batch.InTransit {
			<-b.Changed()
		}
		if b.Info().Space.Kind == tier.Disk {
			down++
		}
	}
	if down == 0 || some != (down < len(l.batches)) {
		t.Errorf("%d of %d batches are on the disk", down, len(l.batches))
	}
	l.whole()
}
