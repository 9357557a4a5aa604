package cdevice

import (
	"context"
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/tier"
)

// Import makes a table of a record in the memory of a space's device that code outside the engine
// has made. Its bytes are not copied, and are charged in the space, as convert.Mover.AdoptTable
// describes; the caller makes a batch of it. An array that Export has made in the same space, or a
// slice of one, is recognized, and is not charged again. The exception is an array with
// another release callback. If Import succeeds, array and schema are taken over.
//
// The error of a released struct is tier.ErrReleased, that of an inconsistent one a
// *convert.InvalidError. A type that Spillway does not have is tier.ErrNotSupported, and the memory
// of another device a *DeviceError.
func Import(
	ctx context.Context, m *convert.Mover, space *tier.Space, array *DeviceArray, schema *Schema, cfg Config,
) (batch.Payload, error) {
	switch {
	case array == nil || schema == nil || space == nil || m == nil:
		return nil, errors.New("cdevice: importing needs a mover, a space, an array and a schema")
	case array.Array.Release == 0 || schema.Release == 0:
		return nil, fmt.Errorf("cdevice: importing an array or a schema that is %w", tier.ErrReleased)
	}
	dev, err := deviceOf(space, cfg)
	if err != nil {
		return nil, err
	}
	if array.DeviceType != dev.kind || dev.kind != CPU && array.DeviceID != dev.id {
		return nil, &DeviceError{
			Space: space.ID(), Type: array.DeviceType, ID: array.DeviceID, WantType: dev.kind, WantID: dev.id,
		}
	}
	sr := new(schemaReader)
	s, err := sr.record(schema)
	if err != nil {
		return nil, err
	}
	columns, err := (&arrayReader{dev: dev}).record(&array.Array, s)
	if err != nil {
		return nil, err
	}
	if array.SyncEvent != 0 {
		wait := cfg.Wait
		if wait == nil {
			wait = dev.wait
		}
		if err := await(ctx, wait, array.SyncEvent); err != nil {
			return nil, fmt.Errorf("cdevice: waiting for the array's event: %w", err)
		}
	}
	mem := new(memory)
	where, moved := place[Array](mem, 1)
	if mem.err != nil {
		return nil, mem.err
	}
	moved[0] = array.Array
	t, err := m.AdoptTable(ctx, convert.DeviceTable{
		Space: space, Schema: s, Rows: array.Array.Length, Columns: columns,
		Charged: callbacks().charged(&array.Array, space),
		Release: func() {
			callbacks().call(where, moved[0].Release)
			mem.free()
		},
	})
	if err != nil {
		mem.free()
		return nil, err
	}
	array.Array.Release = 0
	schema.Close()
	schema.Release = 0
	return t, nil
}

// await waits for an event, and makes a panic of wait an error.
func await(ctx context.Context, wait func(context.Context, uintptr) error, event uintptr) (err error) {
	defer guard.Error(&err, "Config.Wait")
	return wait(ctx, event)
}

// arrayReader reads structs from outside the engine.
type arrayReader struct {
	dev     device
	path    image.Path
	structs int
	count   int64 // of buffers, in all structs
}

// record reads the columns. Rows that the struct around them leaves out at its beginning are
// left out in each.
func (r *arrayReader) record(a *Array, s *arrow.Schema) ([]*convert.DeviceArray, error) {
	if err := r.check(a, 1); err != nil {
		return nil, err
	}
	valid := uintptr(0)
	if a.NBuffers == 1 {
		valid = several[uintptr](a.Buffers, 1)[0]
	}
	switch {
	case a.NBuffers > 1:
		return nil, r.path.Invalid("%d buffers of a struct", a.NBuffers)
	case a.NullCount > 0 || a.NullCount != 0 && valid != 0:
		return nil, unsupported(r.path, "a record of which rows are null")
	case a.Dictionary != 0:
		return nil, r.path.Invalid("a struct with a dictionary")
	}
	columns, err := r.children(a, s.Fields())
	if err != nil {
		return nil, err
	}
	for _, c := range columns {
		if c.Length < a.Offset || c.Length-a.Offset < a.Length {
			return nil, r.path.Invalid("a column of %d rows in a record of %d from %d on", c.Length, a.Length, a.Offset)
		}
		c.Offset += a.Offset
		c.Length -= a.Offset
		if a.Offset > 0 && c.Nulls > 0 {
			c.Nulls = convert.Unknown
		}
	}
	return columns, nil
}

// check checks what is the same in all structs, and counts them.
func (r *arrayReader) check(a *Array, depth int) error {
	r.structs++
	r.count += max(0, a.NBuffers)
	switch {
	case r.structs > maxStructs || depth > maxDepth:
		return r.path.Invalid("more than %d arrays, or nested deeper than %d", maxStructs, maxDepth)
	case a.Release == 0:
		return r.path.Invalid("an array that is released")
	case a.Length < 0 || a.Length > image.MaxRows || a.Offset < 0 || a.Offset > image.MaxRows ||
		a.NullCount < convert.Unknown || a.NullCount > a.Length:
		return r.path.Invalid("length %d, offset %d, %d nulls", a.Length, a.Offset, a.NullCount)
	case a.NBuffers < 0 || a.NBuffers > maxStructs || a.NBuffers > 0 && a.Buffers == 0 || r.count > maxBuffers:
		return r.path.Invalid("%d buffers at %#x, %d in all", a.NBuffers, a.Buffers, r.count)
	case a.NChildren < 0 || a.NChildren > maxStructs || a.NChildren > 0 && a.Children == 0:
		return r.path.Invalid("%d children at %#x", a.NChildren, a.Children)
	}
	return nil
}

// children reads the children of a, which has been checked.
func (r *arrayReader) children(a *Array, fields []arrow.Field) ([]*convert.DeviceArray, error) {
	if a.NChildren != int64(len(fields)) {
		return nil, r.path.Invalid("%d children, want %d", a.NChildren, len(fields))
	}
	var out []*convert.DeviceArray
	for i, f := range fields {
		child, err := r.array(several[uintptr](a.Children, a.NChildren)[i], f.Name, f.Type)
		if err != nil {
			return nil, err
		}
		out = append(out, child)
	}
	return out, nil
}

// array reads the array at p, which may be 0.
func (r *arrayReader) array(p uintptr, name string, dt arrow.DataType) (*convert.DeviceArray, error) {
	r.path = append(r.path, name)
	if p == 0 {
		return nil, r.path.Invalid("the array is missing")
	}
	a := at[Array](p)
	if err := r.check(a, len(r.path)+1); err != nil {
		return nil, err
	}
	sh, ok := shape.Of(dt)
	if !ok {
		return nil, unsupported(r.path, "the type %s", dt)
	}
	out := &convert.DeviceArray{Length: a.Length, Offset: a.Offset, Nulls: a.NullCount}
	var all []uintptr
	if a.NBuffers > 0 {
		all = several[uintptr](a.Buffers, a.NBuffers)
	}
	var sizes []int64 // of the data buffers of views; the last buffer has them
	if sh.Views && len(all) > 0 {
		last, n := all[len(all)-1], len(all)-3
		if n < 0 || n > 0 && last == 0 {
			return nil, r.path.Invalid("%d buffers of views, without the lengths", len(all))
		}
		if n > 0 {
			sizes = several[int64](last, int64(n))
		}
		all = all[:len(all)-1]
	}
	out.Buffers = make([]payload.DeviceRange, len(all))
	for i, p := range all {
		b := &out.Buffers[i]
		if p != 0 {
			b.Length = convert.Unknown
			var err error
			if b.Addr, err = r.dev.addr(p); err != nil {
				return nil, r.path.Invalid("buffer %d: %v", i, err)
			}
		}
		if i >= 2 && sh.Views {
			b.Length = sizes[i-2]
		}
	}
	if len(all) > 0 && all[0] == 0 && out.Nulls == convert.Unknown {
		out.Nulls = 0
	}
	var fields []arrow.Field
	if n, ok := sh.Type.(arrow.NestedType); ok {
		fields = n.Fields()
	}
	var err error
	if out.Children, err = r.children(a, fields); err != nil {
		return nil, err
	}
	if (sh.Values != nil) != (a.Dictionary != 0) {
		return nil, r.path.Invalid("a dictionary is there: %v", a.Dictionary != 0)
	}
	if sh.Values != nil {
		if out.Dictionary, err = r.array(a.Dictionary, "dictionary", sh.Values); err != nil {
			return nil, err
		}
	}
	r.path = r.path[:len(r.path)-1]
	return out, nil
}
