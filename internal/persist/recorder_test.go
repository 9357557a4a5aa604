package persist

import (
	"errors"
	"io"
	"log/slog"
	"runtime"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// oneDictionary is a batch.Shared that one image has.
type oneDictionary struct {
	buf  *tier.Buffer
	desc *batch.Descriptor
}

func (d oneDictionary) Buffer() *tier.Buffer          { return d.buf }
func (d oneDictionary) Descriptor() *batch.Descriptor { return d.desc }
func (d oneDictionary) Release() error                { return d.buf.Release() }

// brokenDictionary is a program's own, which panics when it is armed.
type brokenDictionary struct {
	oneDictionary
	armed bool
}

func (d *brokenDictionary) Buffer() *tier.Buffer {
	if d.armed {
		panic("in Buffer")
	}
	return d.oneDictionary.Buffer()
}

// TestRecordOfABrokenDictionary: a panic is an error.
func TestRecordOfABrokenDictionary(t *testing.T) {
	r := NewRecorder(slog.New(slog.DiscardHandler))
	entry, _ := entryOfRecord(t, arrowgen.New(1).Record(arrowgen.Schema(arrow.PrimitiveTypes.Int64), 300))
	desc := &batch.Descriptor{Schema: entry.Descriptor.Schema, Dictionaries: []*batch.Descriptor{entry.Descriptor}}
	broken := &brokenDictionary{oneDictionary: oneDictionary{nil, entry.Descriptor}}
	p := batch.NewImage(desc, nil, new(tier.Space), broken)
	broken.armed = true
	end, _, err := r.record(1, &Record{image: p}, new(Record))
	if err == nil || len(r.turn) != 0 { // or the next waits for good
		t.Errorf("recorded: %v, %d have the turn", err, len(r.turn))
	}
	end()
}

// TestNothingReleasedIsRecorded: a batch that is dropped right before its record is written has
// none, for its room may be another's by then.
func TestNothingReleasedIsRecorded(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux, for locks that end with their process")
	}
	const capacity = 16 << 20
	volume, err := volumes.Open(volumes.Config{Dir: t.TempDir(), Capacity: capacity, Persist: true})
	if err != nil {
		t.Fatal(err)
	}
	space, err := tier.NewSpace(
		tier.SpaceConfig{ID: tier.ID{Kind: tier.Disk}, Capacity: capacity, Backend: "disk", Pool: volume},
	)
	if err != nil {
		t.Fatal(err)
	}
	r := NewRecorder(slog.New(slog.NewTextHandler(io.Discard, nil)))
	r.Add(space)
	entry, _ := entryOfRecord(t, arrowgen.New(1).Record(arrowgen.Schema(arrow.PrimitiveTypes.Int64), 300))
	desc := entry.Descriptor
	for name, payload := range map[string]func(*tier.Buffer) *batch.Image{
		"image": func(b *tier.Buffer) *batch.Image { return batch.NewImage(desc, b, space) },
		"packed": func(b *tier.Buffer) *batch.Image {
			parts := payload.Parts{Descriptor: desc, Space: space, Buffers: []*tier.Buffer{b}}
			parts.Type, parts.Runs = payload.CompressedImage, fullRuns(desc)
			return payload.New(parts)
		},
		"dictionary": func(b *tier.Buffer) *batch.Image {
			whole := &batch.Descriptor{Schema: desc.Schema, Dictionaries: []*batch.Descriptor{desc}}
			return batch.NewImage(whole, nil, space, oneDictionary{b, desc})
		},
	} {
		buf, err := space.DrawNew(desc.Body)
		if err != nil {
			t.Fatal(err)
		}
		p := payload(buf)
		end, key, err := r.record(1, &Record{image: p, volume: volume}, new(Record))
		if err != nil || len(volume.Persisted()) != 0 {
			t.Fatalf("%s: recorded as %d, %v", name, key, err)
		}
		end()
		if err := p.Release(); err != nil {
			t.Error(err)
		}
		_, key, err = r.record(1, &Record{image: p, volume: volume}, new(Record))
		if !errors.Is(err, tier.ErrReleased) {
			t.Errorf("%s: recorded as %d, %v", name, key, err)
		}
	}
	if err := space.Close(); err != nil {
		t.Error(err)
	}
}
