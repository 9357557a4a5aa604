package test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// refuser is an engine whose GPUs refuse allocations, or whose volumes' file systems are full, when
// it is set to.
type refuser struct {
	*spillway.Engine
	repo  *repository.Repository
	gpus  []*faultdev.Device
	files []*faultfs.FS
	begun chan struct{} // a wait for room has begun
}

func openRefuser(t *testing.T, gpus, disks int, codec convert.Codec) *refuser {
	t.Helper()
	r := &refuser{gpus: make([]*faultdev.Device, gpus), begun: make(chan struct{}, 1)}
	cfg := spillway.Config{HostMemory: spillway.Bytes(4 << 20), Codec: codec, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	cfg.Events = on(events.WaitBegun, func(spillway.Event) {
		select {
		case r.begun <- struct{}{}:
		default:
		}
	})
	for i := range r.gpus {
		cfg.GPUs = append(cfg.GPUs, spillway.GPUConfig{Backend: spillway.Sim, Memory: spillway.Bytes(4 << 20), Wrap: func(d tier.Device) (tier.Device, error) {
			r.gpus[i] = faultdev.New(d, 1)
			return r.gpus[i], nil
		}})
	}
	for range disks {
		fs := faultfs.New(disk.OS(), 1)
		r.files = append(r.files, fs)
		cfg.Disks = append(cfg.Disks, spillway.DiskConfig{Dir: t.TempDir(), Capacity: spillway.Bytes(16 << 20), FS: fs})
	}
	var err error
	if r.Engine, err = spillway.Open(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeClean(t, r.Engine) })
	plan, err := r.Plan("refused")
	if err != nil {
		t.Fatal(err)
	}
	if r.repo, err = plan.Repository("scan", 0); err != nil {
		t.Fatal(err)
	}
	return r
}

// refuse makes the device give no memory, whatever the books say.
func (r *refuser) refuse(gpu int) {
	r.gpus[gpu].Add(faultdev.Rule{Ops: []string{"alloc"}, Effect: faultdev.OutOfMemory()})
}

// whole checks where all batches lie, and that they are what was put.
func (r *refuser) whole(t *testing.T, words arrow.Array, want tier.ID) {
	t.Helper()
	n := int64(0)
	for b := range r.repo.Batches(0) {
		if at := b.Info().Space; at != want {
			t.Errorf("batch %d lies in %s, want %s", n, at, want)
		}
		h, err := r.Mover().Acquire(t.Context(), b, reservation.Specific(b.Info().Space))
		if err != nil {
			t.Fatal(err)
		}
		rec, err := r.Mover().Record(t.Context(), h)
		if err != nil {
			t.Fatal(err)
		}
		if err := convert.Equal(numberedRecord(n, 2000, words), rec); err != nil {
			t.Errorf("batch %d: %v", n, err)
		}
		rec.Release()
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		n++
	}
}

// TestGPUThatRefuses: a device may have no memory though its space's books have room. What may
// go elsewhere goes there, by a Put, a move and an Acquire. What may not gets an error
// that says so with numbers.
func TestGPUThatRefuses(t *testing.T) {
	host, gpu1 := tier.ID{Kind: tier.Host}, tier.ID{Kind: tier.GPU, Ordinal: 1}
	words := wordList(1, 900)
	t.Run("put", func(t *testing.T) {
		r := openRefuser(t, 1, 1, convert.CodecNone)
		r.refuse(0)
		for n := range int64(10) {
			if err := r.repo.Put(t.Context(), 0, numberedRecord(n, 2000, words)); err != nil {
				t.Fatal(err)
			}
		}
		r.whole(t, words, host)
		if n := gpuOf(t, r.Engine).State().Used(); n != 0 {
			t.Errorf("%d bytes of what was refused are in use", n)
		}
	})
	t.Run("move", func(t *testing.T) {
		r := openRefuser(t, 2, 1, convert.CodecNone)
		if err := r.repo.Put(t.Context(), 0, numberedRecord(0, 2000, words), in(tier.Host)); err != nil {
			t.Fatal(err)
		}
		r.refuse(0)
		b, _ := r.repo.Peek(0)
		if err := r.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.GPU)); err != nil {
			t.Fatal(err)
		}
		r.whole(t, words, gpu1)
		if err := r.Mover().Move(t.Context(), b, reservation.Specific(host)); err != nil {
			t.Fatal(err)
		}
		h, err := r.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
		if err != nil {
			t.Fatal(err)
		}
		if h.Space().ID() != gpu1 {
			t.Errorf("it was acquired in %s", h.Space().ID())
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Run("only one", func(t *testing.T) {
		r := openRefuser(t, 1, 1, convert.CodecNone)
		r.refuse(0)
		gpu := gpuOf(t, r.Engine)
		err := r.repo.Put(t.Context(), 0, numberedRecord(0, 2000, words), in(tier.GPU))
		var full *tier.NoSpaceError
		if !errors.As(err, &full) || full.Space != gpu.ID() || full.Available < full.Requested || full.Available > gpu.State().Room {
			t.Fatalf("%v", err)
		}
		if !strings.Contains(err.Error(), "refuses what the space has promised; it has 0 bytes") {
			t.Errorf("%q does not say that the device refused", err)
		}
	})
	t.Run("the other is full for now", func(t *testing.T) {
		r := openRefuser(t, 1, 1, convert.CodecNone)
		r.refuse(0)
		host0, _ := r.Reservations().Spaces().ByID(host)
		most := host0.State().Available / tier.Page * tier.Page
		all, err := r.Reserve(t.Context(), reservation.AnyInTier(tier.Host), most)
		if err != nil {
			t.Fatal(err)
		}
		demand := r.begun
		put := make(chan error, 1)
		go func() {
			put <- r.repo.Put(t.Context(), 0, numberedRecord(0, 2000, words),
				repository.WithPlacement(reservation.AnyInTiers(tier.GPU, tier.Host)))
		}()
		select {
		case <-demand:
		case err := <-put:
			t.Fatalf("it did not wait: %v", err)
		}
		release(t, all)
		if err := <-put; err != nil {
			t.Fatal(err)
		}
		r.whole(t, words, host)

		// The wait may be ended, and then says both.
		b, err := r.repo.Take(t.Context(), 0, batch.Idle, repository.NoWait()) // or the monitor would move it away
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Discard(t.Context()); err != nil {
			t.Fatal(err)
		}
		free := host0.State().Available / tier.Page * tier.Page
		if all, err = r.Reserve(t.Context(), reservation.AnyInTier(tier.Host), free); err != nil {
			t.Fatal(err)
		}
		defer release(t, all)
		select {
		case <-demand:
		default:
		}
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-demand
			cancel()
		}()
		err = r.repo.Put(ctx, 0, numberedRecord(0, 2000, words), repository.WithPlacement(reservation.AnyInTiers(tier.GPU, tier.Host)))
		if !errors.Is(err, context.Canceled) || !errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("%v", err)
		}
	})
}

// TestFullVolumeBesideAnother: a file system may turn out to be full at a write, or at a request
// for room. That costs no Put an error while another volume has room. Without another, the error is
// that of the full one.
func TestFullVolumeBesideAnother(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"write", "allocate"} {
		for _, codec := range []convert.Codec{convert.CodecNone, convert.CodecS2} {
			for _, count := range []int{10, 900} { // the dictionary is in the body, or an image of its own
				t.Run(fmt.Sprintf("%s,%v,%d", op, codec, count), func(t *testing.T) { besideAFullVolume(t, op, codec, wordList(1, count)) })
			}
		}
	}
}

func besideAFullVolume(t *testing.T, op string, codec convert.Codec, words arrow.Array) {
	r := openRefuser(t, 1, 2, codec)
	r.files[0].Add(faultfs.Rule{Ops: []string{op}, Effect: faultfs.Fail(syscall.ENOSPC)})
	first := r.Reservations().Spaces().InTier(tier.Disk)[0]
	for n := range int64(20) {
		if err := r.repo.Put(t.Context(), 0, numberedRecord(n, 2000, words), in(tier.Disk)); err != nil {
			t.Fatalf("put %d: %v", n, err)
		}
	}
	r.whole(t, words, tier.ID{Kind: tier.Disk, Ordinal: 1})
	if n := first.State().Used(); n != 0 {
		t.Errorf("%d bytes of the full volume are in use", n)
	}
	if r.files[0].Hits() == 0 {
		t.Error("the full volume was not tried")
	}
	err := r.repo.Put(t.Context(), 0, numberedRecord(0, 2000, words), repository.WithPlacement(reservation.Specific(first.ID())))
	var full *tier.NoSpaceError
	if !errors.As(err, &full) || full.Space != first.ID() || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("%v", err)
	}
}
