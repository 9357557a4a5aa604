package test

import (
	"context"
	"errors"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// asIs is a program's own form: a record that the program keeps, and the room that it takes.
type asIs struct {
	rec arrow.RecordBatch
	buf *tier.Buffer
}

func (*asIs) Type() batch.PayloadType { return "as-is" }
func (p *asIs) Space() *tier.Space    { return p.buf.Space() }
func (p *asIs) Bytes() int64          { return p.buf.Charge() }
func (p *asIs) Release() error        { return p.buf.Release() }

// imageOf is the converter of asIs to an image in host memory.
func imageOf(_ context.Context, src batch.Payload, r reservation.Reservation) (batch.Payload, error) {
	l, err := convert.NewLayout(src.(*asIs).rec)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	buf, err := r.AllocCuts(l.Size(), l.Cuts())
	if err != nil {
		return nil, err
	}
	err = l.WriteTo(buf.Memory().(tier.HostMemory).Extents())
	desc, e := l.Descriptor()
	if err := errors.Join(err, e); err != nil {
		return nil, errors.Join(err, buf.Release())
	}
	return batch.NewImage(desc, buf, r.Space()), nil
}

// A repository's Reader opens batches in a program's own form, by the converter that the
// program has registered, and in their places among others.
func TestReaderOfAProgramsOwnForm(t *testing.T) {
	eng, _ := openSmall(t, 1<<20, 4<<20)
	defer eng.Close()
	if err := eng.Registry().Register("as-is", batch.HostImage, imageOf); err != nil {
		t.Fatal(err)
	}
	plan, err := eng.Plan("p")
	if err != nil {
		t.Fatal(err)
	}
	recs := []arrow.RecordBatch{numberedRecord(0, 100, wordList(1, 10)), numberedRecord(1000, 200, wordList(1, 10))}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, rec := range recs {
		if i%2 == 0 {
			if err := repo.Put(t.Context(), 0, rec); err != nil {
				t.Fatal(err)
			}
			continue
		}
		r, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.Host), 128<<10)
		if err != nil {
			t.Fatal(err)
		}
		buf, err := r.Alloc(128 << 10)
		if err := errors.Join(err, r.Release()); err != nil {
			t.Fatal(err)
		}
		b, err := batch.New(batch.Options{ID: 1 << 40, Payload: &asIs{rec, buf}, Observer: eng.Observer()})
		if err != nil {
			t.Fatal(err)
		}
		if err := repo.PutBatch(0, b); err != nil {
			t.Fatal(err)
		}
	}
	repo.CloseInput()
	rd, err := repo.Reader(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer rd.Release()
	for i, want := range recs {
		if !rd.Next() {
			t.Fatalf("record %d: %v", i, rd.Err())
		}
		if err := convert.Equal(want, rd.RecordBatch()); err != nil {
			t.Errorf("record %d: %v", i, err)
		}
	}
	if rd.Next() || rd.Err() != nil {
		t.Errorf("there is more: %v", rd.Err())
	}
}
