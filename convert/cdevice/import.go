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
// has made. Its bytes are not copied. They are charged in the space, as convert.Mover.AdoptTable
// describes; the caller makes a batch of the table, or releases it. If Import succeeds, array and
// schema are taken over. It waits for the array's event and for reads of the device, until ctx
// ends.
//
// An array that Export has made in the same space, or a slice of one, is recognized by its release
// callback and is not charged again, because the batch that it came from still is. If a library has
// wrapped it in structs of its own, it is charged twice.
//
// The error of a released struct is tier.ErrReleased, that of an inconsistent one a
// *convert.InvalidError. A type that Spillway does not have is tier.ErrNotSupported, and the memory
// of another device a *DeviceError. On an error both structs stay the caller's.
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
	// The memory of one process is one device for CPU, whatever the number.
	if array.DeviceType != dev.kind || dev.kind != CPU && array.DeviceID != dev.id {
		return nil, &DeviceError{
			Space: space.ID(), Type: array.DeviceType, ID: array.DeviceID, WantType: dev.kind, WantID: dev.id,
		}
	}
	// First the types, then the structs along them, and then the event: what is refused does not
	// wait.
	s, err := new(schemaReader).record(schema)
	if err != nil {
		return nil, err
	}
	columns, err := (&arrayReader{dev: dev}).record(&array.Array, s)
	if err != nil {
		return nil, err
	}
	if err := dev.wait(ctx, array.SyncEvent, cfg.Wait); err != nil {
		return nil, fmt.Errorf("cdevice: waiting for the array's event: %w", err)
	}
	// The interface allows a struct to be moved by copying it and marking the source as released.
	// The copy is Go's, and released with the table.
	moved := &DeviceArray{Array: array.Array}
	t, err := m.AdoptTable(ctx, convert.DeviceTable{
		Space: space, Schema: s, Rows: array.Array.Length, Columns: columns,
		Charged: callbacks().charged(&array.Array, space), Release: moved.Release,
	})
	if err != nil {
		return nil, err
	}
	// The schema was copied into Go types, and is not needed any more.
	array.Array.Release = 0
	schema.Close()
	schema.Release = 0
	return t, nil
}

// wait waits for the event of an array, if it has one. A program's function, from Config.Wait,
// comes before the device's own. A panic of it is an error.
func (d device) wait(
	ctx context.Context, event uintptr, program func(context.Context, uintptr) error,
) (err error) {
	switch {
	case event == 0:
		return nil
	case program != nil:
		defer guard.Error(&err, "Config.Wait")
		return program(ctx, event)
	case d.sharer == nil:
		return unsupported(nil, "an array with an event, without Config.Wait")
	}
	return d.sharer.AwaitShared(ctx, *at[uintptr](event))
}

// arrayReader reads the structs of an array from outside the engine, with limits on how many there
// may be. It reads host memory only; what the buffers contain is not looked at.
type arrayReader struct {
	dev     device
	structs int
	count   int64 // of buffers, in all structs
}

// record reads the columns of a record, which is a struct array of schema s. The struct may have an
// offset, which then applies to each child, as the columnar format has it. A struct with nulls is
// refused: a record has no place for them.
func (r *arrayReader) record(a *Array, s *arrow.Schema) ([]*convert.DeviceArray, error) {
	whole, err := r.array(nil, a, arrow.StructOf(s.Fields()...))
	switch {
	case err != nil:
		return nil, err
	case len(whole.Buffers) > 1:
		return nil, image.Path(nil).Invalid("%d buffers of a struct", a.NBuffers)
	case a.NullCount > 0 || whole.Nulls != 0 && a.NBuffers == 1:
		// A validity with an unknown number of nulls may have some, so it is refused too.
		return nil, unsupported(nil, "a record of which rows are null")
	}
	for i, c := range whole.Children {
		if c.Length < a.Offset || c.Length-a.Offset < a.Length {
			return nil, image.Path{s.Field(i).Name}.Invalid(
				"a column of %d rows in a record of %d from %d on", c.Length, a.Length, a.Offset)
		}
		// A column may be longer than the record. Its number of nulls was that of all its rows.
		c.Offset += a.Offset
		c.Length -= a.Offset
		if a.Offset > 0 && c.Nulls > 0 {
			c.Nulls = convert.Unknown
		}
	}
	return whole.Children, nil
}

// array reads an array of type dt, and all below it. a may be nil, which is an error. The number
// and lengths of structs are checked before their pointers are followed; lengths of buffers are not
// in the interface, and become convert.Unknown.
func (r *arrayReader) array(p image.Path, a *Array, dt arrow.DataType) (out *convert.DeviceArray, err error) {
	if a == nil {
		return nil, p.Invalid("the array is missing")
	}
	sh, ok := shape.Of(dt)
	r.structs++
	r.count += max(0, a.NBuffers)
	switch {
	case r.structs > maxStructs || len(p) > maxDepth:
		return nil, p.Invalid("more than %d arrays, or nested deeper than %d", maxStructs, maxDepth)
	case !ok:
		return nil, unsupported(p, "the type %s", dt)
	case a.Release == 0:
		return nil, p.Invalid("an array that is released")
	case a.Length < 0 || a.Length > image.MaxRows || a.Offset < 0 || a.Offset > image.MaxRows ||
		a.NullCount < convert.Unknown || a.NullCount > a.Length:
		return nil, p.Invalid("length %d, offset %d, %d nulls", a.Length, a.Offset, a.NullCount)
	case a.NBuffers < 0 || a.NBuffers > maxStructs || a.NBuffers > 0 && a.Buffers == 0 || r.count > maxBuffers:
		return nil, p.Invalid("%d buffers at %#x, %d in all", a.NBuffers, a.Buffers, r.count)
	case a.NChildren != int64(sh.NumChildren) || a.NChildren > 0 && a.Children == 0:
		return nil, p.Invalid("%d children at %#x, want %d", a.NChildren, a.Children, sh.NumChildren)
	case (sh.Values != nil) != (a.Dictionary != 0):
		// The schema and the array must agree on everything that decides which pointers are followed.
		return nil, p.Invalid("a dictionary is there: %v", a.Dictionary != 0)
	}
	out = &convert.DeviceArray{Length: a.Length, Offset: a.Offset, Nulls: a.NullCount}
	all := several[uintptr](a.Buffers, a.NBuffers)
	// Binary and string views have two buffers, then any number of data buffers, and last the
	// lengths of those, as int64 in host memory. These are the only lengths that the interface has.
	var sizes []int64
	if sh.Views && len(all) > 0 {
		last, n := all[len(all)-1], len(all)-3
		if n < 0 || n > 0 && last == 0 {
			return nil, p.Invalid("%d buffers of views, without the lengths", len(all))
		}
		all, sizes = all[:len(all)-1], several[int64](last, int64(n))
	}
	out.Buffers = make([]payload.DeviceRange, len(all))
	for i, at := range all {
		b := &out.Buffers[i]
		if at != 0 {
			b.Length = convert.Unknown
			if b.Addr, err = r.dev.AddrOf(at); err != nil {
				return nil, p.Invalid("buffer %d: %v", i, err)
			}
		}
		if i >= 2 && sh.Views {
			b.Length = sizes[i-2]
		}
	}
	// Without a validity there are no nulls, so they need not be counted on the device.
	if len(all) > 0 && all[0] == 0 && out.Nulls == convert.Unknown {
		out.Nulls = 0
	}
	for i, c := range several[uintptr](a.Children, a.NChildren) {
		name, dt := sh.Child(i)
		child, err := r.array(append(p, name), at[Array](c), dt)
		if err != nil {
			return nil, err
		}
		out.Children = append(out.Children, child)
	}
	if sh.Values != nil {
		out.Dictionary, err = r.array(append(p, "dictionary"), at[Array](a.Dictionary), sh.Values)
	}
	return out, err
}
