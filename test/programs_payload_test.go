package test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
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

// asIsIn is the form of asIs in a tier.
func asIsIn(k tier.Kind) convert.Form { return convert.Form{Type: "as-is", Kind: k} }

// imageOf is the converter of asIs to an image in host memory.
func imageOf(_ context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
	l, err := convert.NewLayout(src.(*asIs).rec)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	buf, err := r.Alloc(l.Desc.Body, l.Desc.Cuts()...)
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
	if err := eng.Registry().Register(asIsIn(tier.Host), convert.ImageIn(tier.Host), imageOf); err != nil {
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

// putAsIs puts a batch of a program's own form, which takes room in host memory.
func putAsIs(t *testing.T, eng *spillway.Engine, repo *repository.Repository, form func(*asIs) batch.Payload) *batch.Batch {
	t.Helper()
	r, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.Host), 128<<10)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(128 << 10)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatal(err)
	}
	b, err := eng.NewBatch(form(&asIs{numberedRecord(0, 100, wordList(1, 10)), buf}))
	if err == nil {
		err = repo.PutBatch(0, b)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// panickyRead is a program's own form, one of whose methods panics while its batch is read.
type panickyRead struct {
	*asIs
	method string
	reads  *atomic.Bool
}

func (p panickyRead) call(method string) {
	if p.method == method && p.reads.Load() {
		panic("in " + method)
	}
}

func (panickyRead) Type() batch.PayloadType { return "panicky" }

func (p panickyRead) Bytes() int64 {
	p.call("Bytes")
	return p.asIs.Bytes()
}

func (p panickyRead) Release() error {
	err := p.asIs.Release()
	p.call("Release")
	return err
}

// TestReaderOfABatchThatPanics: a Reader loses no rows when a payload panics. A record that was
// opened comes out; the panic of the payload's release is the Reader's error at the end. What was
// not opened is in the repository still.
func TestReaderOfABatchThatPanics(t *testing.T) {
	for method, wantRead := range map[string]int{"Bytes": 0, "Release": 2} {
		t.Run(method, func(t *testing.T) {
			eng, _ := openSmall(t, 1<<20, 4<<20)
			if err := eng.Registry().Register(convert.Form{Type: "panicky", Kind: tier.Host}, convert.ImageIn(tier.Host), func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
				return imageOf(ctx, src.(panickyRead).asIs, r)
			}); err != nil {
				t.Fatal(err)
			}
			repo := scanOf(t, eng)
			var reads atomic.Bool
			putAsIs(t, eng, repo, func(p *asIs) batch.Payload { return panickyRead{p, method, &reads} })
			want := numberedRecord(0, 100, wordList(1, 10))
			if err := repo.Put(t.Context(), 0, want); err != nil {
				t.Fatal(err)
			}
			repo.CloseInput()
			rd, err := repo.Reader(t.Context(), 0)
			if err != nil {
				t.Fatal(err)
			}
			reads.Store(true)
			read := 0
			for ; rd.Next(); read++ {
				if err := convert.Equal(want, rd.RecordBatch()); err != nil {
					t.Error(err)
				}
			}
			if left := repo.Len(0); read != wantRead || left != 2-wantRead {
				t.Errorf("of 2 batches %d were read and %d are left", read, left)
			}
			if err := rd.Err(); err == nil || !strings.Contains(err.Error(), "in "+method) {
				t.Errorf("the error is %v", err)
			}
			reads.Store(false)
			rd.Release()
			closeClean(t, eng)
		})
	}
}
