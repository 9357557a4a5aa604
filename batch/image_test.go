package batch

import (
	"reflect"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
)

// TestImage: the image releases its buffer, and says who reads beyond it.
func TestImage(t *testing.T) {
	host := newSpace(t, "host:0")
	schema := arrow.NewSchema([]arrow.Field{{Name: "a", Type: arrow.PrimitiveTypes.Int64}}, nil)
	d := &Descriptor{Schema: schema, Rows: 5, Body: 8192}
	b := newBatch(t, NewImage(d, draw(t, host, 8192), host), nil)
	if b.Info().Descriptor != d || b.Info().Payload.Type() != PlainImage {
		t.Errorf("descriptor %p, type %q", b.Info().Descriptor, b.Info().Payload.Type())
	}
	if err := b.TryCreateTask(); err != nil {
		t.Fatal(err)
	}
	h, err := b.TryLock(host.ID())
	if err != nil {
		t.Fatal(err)
	}
	end := h.Payload().(*Image).Buffer().Lease()
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if info := b.Info(); !info.Leased || info.Bytes != 8192 || info.Rows != 5 || info.Space != host.ID() {
		t.Errorf("%+v", info)
	}
	end()
	if b.Info().Leased {
		t.Error("leased after the last lease ended")
	}
	if err := b.Drop(); err != nil {
		t.Fatal(err)
	}
	mustBeEmpty(t, host)
	if b.Info().Payload != nil || b.Info().Descriptor != d {
		t.Error("a dropped batch forgets its data and keeps its descriptor")
	}
}

// TestSize: a batch takes a quarter of the 2 KiB that one at rest may take in all, at most.
func TestSize(t *testing.T) {
	size := reflect.TypeFor[Batch]().Size()
	t.Logf("a batch is %d bytes, a handle %d, a transit %d, a descriptor %d", size,
		reflect.TypeFor[Handle]().Size(), reflect.TypeFor[Transit]().Size(), reflect.TypeFor[Descriptor]().Size())
	if size > 512 {
		t.Errorf("a batch is %d bytes, limit 512", size)
	}
}
