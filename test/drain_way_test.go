package test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// counted is an image that counts the calls of Leased: one for each reading of its batch's Info,
// and one for each change that is announced.
type counted struct {
	*batch.Image
	asked *atomic.Int64
}

const countedForm batch.PayloadType = "counted"

func (c counted) Type() batch.PayloadType {
	if c.Space().Kind() == tier.GPU {
		return batch.PlainImage
	}
	return countedForm
}

func (c counted) Leased() int {
	c.asked.Add(1)
	return c.Image.Leased()
}

// tellings counts the calls of an engine's observer.
type tellings struct {
	batch.Registrar
	n atomic.Int64
}

func (o *tellings) BatchChanged(b *batch.Batch, now batch.Info) {
	o.n.Add(1)
	o.Registrar.BatchChanged(b, now)
}

// TestDrainTellsOnce: draining a batch announces its departure and its arrival, which is its end. A
// batch that is there already is announced once.
func TestDrainTellsOnce(t *testing.T) {
	for _, from := range tier.Kinds() {
		t.Run(from.String(), func(t *testing.T) {
			eng, repo := openTasks(t, 1<<20, 1<<20, 0, 0)
			var asked atomic.Int64
			inner, err := eng.Registry().Lookup(convert.ImageIn(from), convert.ImageIn(tier.GPU))
			if err != nil {
				t.Fatal(err)
			}
			err = eng.Registry().Register(convert.Form{Type: countedForm, Kind: from}, convert.ImageIn(tier.GPU), func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
				out, err := inner(ctx, src.(counted).Image, r)
				if err != nil {
					return nil, err
				}
				return counted{out.(*batch.Image), &asked}, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			p, err := eng.Mover().Ingest(t.Context(), numberedRecord(1, 300, wordList(1, 10)), reservation.AnyInTier(from))
			if err != nil {
				t.Fatal(err)
			}
			told := &tellings{Registrar: eng.Observer().(batch.Registrar)}
			b, err := batch.New(batch.Options{ID: 1, Payload: counted{p.(*batch.Image), &asked}, Observer: told})
			if err := errors.Join(err, repo.PutBatch(0, b)); err != nil {
				t.Fatal(err)
			}
			told.n.Store(0)
			asked.Store(0)
			for h, err := range repo.Drain(t.Context(), 0, tier.GPU) {
				if err != nil {
					t.Fatal(err)
				}
				if err := h.Close(); err != nil {
					t.Fatal(err)
				}
			}
			want := int64(2)
			if from == tier.GPU {
				want = 1
			}
			if n := told.n.Load(); n != want {
				t.Errorf("the observer was told %d times, want %d", n, want)
			}
			if n := asked.Load() - told.n.Load(); n != 1 {
				t.Errorf("the batch's Info was read %d times, want once", n)
			}
			closeClean(t, eng)
		})
	}
}

// TestSpillIsAnnouncedOnce: moving a batch to a disk that persists announces its departure, its
// arrival and the end of the record, however many runs the packed image has. A record that is
// written again, because the batch changed meanwhile, ends once more.
func TestSpillIsAnnouncedOnce(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	for codec, form := range map[convert.Codec]batch.PayloadType{convert.CodecNone: batch.PlainImage, convert.CodecS2: batch.CompressedImage} {
		t.Run(string(form), func(t *testing.T) {
			eng := persistentEngine(t, t.TempDir(), func(cfg *spillway.Config) {
				cfg.Codec, cfg.HostMemory, cfg.Disks[0].Capacity = codec, spillway.Bytes(24<<20), spillway.Bytes(32<<20)
			})
			p, err := eng.Mover().Ingest(t.Context(), numberedRecord(1, 500_000, wordList(1, 10)), reservation.AnyInTier(tier.Host))
			if err != nil {
				t.Fatal(err)
			}
			told := &tellings{Registrar: eng.Observer().(batch.Registrar)}
			b, err := batch.New(batch.Options{ID: 1, Payload: p, Observer: told})
			if err != nil {
				t.Fatal(err)
			}
			told.n.Store(0)
			if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err != nil {
				t.Fatal(err)
			}
			now := b.Info()
			if runs := now.Payload.(*payload.Image).Parts.Runs; now.Form != form || runs != nil && len(runs) < 10 {
				t.Fatalf("the batch is a %s of %d bytes", now.Form, now.Bytes)
			}
			if n := told.n.Load(); n > 6 {
				t.Errorf("the observer was called %d times, want at most 6", n)
			}
			if err := b.Drop(); err != nil {
				t.Error(err)
			}
			closeEngine(t, eng)
		})
	}
}
