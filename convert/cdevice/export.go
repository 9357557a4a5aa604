package cdevice

import (
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// Export fills array and schema with the batch that h holds, an image or a table in a GPU's memory,
// as a struct of its columns. It takes h over: the handle is closed when the array's release
// callback is called; on an error it stays the caller's. The schema has a release callback of its
// own, and both must be called, in any order.
//
// Nothing is copied: the array's buffers are the batch's memory, which consumers must only read. A
// dictionary is the array that the batch shares with others; one that extends an earlier dictionary
// is copied to one piece of memory in the space, until the release. The lengths of a view's data
// buffers, the last of its buffers, are in host memory, as in Arrow's own implementation.
// Validities without nulls and buffers of size zero are NULL. The batch may have no buffer where no
// row has a value. For those, memory of zeros is taken in the space until the release, as much as
// the longest of them needs. If there is no room for it, the error is a *tier.NoSpaceError: Export
// does not wait.
//
// A table of others' arrays that are slices is exported where it is, too: with offsets
// (ArrowArray.offset), and with children whose first rows may belong to no row of their parent. A
// copy of such a table has only what the rows show, and may be tier.ErrNotSupported: as an image
// (convert.Mover.MoveAs, batch.PlainImage) it can be exported.
//
// array and schema are written over, whatever they hold, and only if there is no error. They may be
// C's memory or Go's; in Go's, the caller must keep them alive while C has their addresses.
func Export(h *batch.Handle, array *DeviceArray, schema *Schema, cfg Config) (err error) {
	if h == nil {
		return errors.New("cdevice: exporting a batch: the handle is nil")
	}
	p := h.Payload()
	if p == nil {
		return fmt.Errorf("cdevice: exporting a closed handle: %w", tier.ErrReleased)
	}
	dev, err := deviceOf(p.Space(), cfg)
	if err != nil {
		return err
	}
	img, ok := p.(*batch.Image)
	if !ok {
		return unsupported(nil, "a payload of type %s", p.Type())
	}
	if cfg.Event != 0 && cfg.Stream != nil {
		return errors.New("cdevice: exporting with Config.Event and with Config.Stream: want one of them")
	}
	// Each step below adds what releasing the array must give back. An error before the end gives
	// back what the steps so far have taken, except for the handle, which stays the caller's.
	nothing := func() error { return nil }
	closeHandle, endEvent, giveBack := nothing, nothing, nothing
	if l, ok := tier.As[tier.Lender](dev.Device); ok { // the memory of other backends ends with the device
		if giveBack, err = l.Lend(); err != nil {
			return err
		}
	}
	// The schema and the array are released separately, so each is an export of its own.
	r := callbacks()
	names, values := new(exported), &exported{space: img.Space()}
	s, w := &schemaWriter{exported: names}, &arrayWriter{exported: values, dev: dev}
	release := func() error {
		err := endEvent()
		for _, b := range w.taken {
			err = errors.Join(err, b.Release())
		}
		return errors.Join(err, closeHandle(), giveBack())
	}
	r.add(names)
	r.add(values)
	defer func() {
		if err != nil {
			r.drop(names)
			r.drop(values)
			err = errors.Join(err, release())
		}
	}()
	// The structs are made here, and copied to the caller's memory only at the end, when nothing
	// can fail any more: C may move the outermost structs, so nothing points to them.
	var outArray Array
	var outSchema Schema
	fields := img.Descriptor().Schema
	root := arrow.Field{Type: arrow.StructOf(fields.Fields()...), Metadata: fields.Metadata()}
	if err := s.field(&outSchema, root); err != nil {
		return err
	}
	if err := w.image(&outArray, img); err != nil {
		return err
	}
	event := cfg.Event
	if cfg.Stream != nil {
		if dev.sharer == nil {
			return unsupported(nil, "Config.Stream, for a device that has no events for others")
		}
		// C gets a pointer to the event's handle (cudaEvent_t *), which is in the export's own
		// memory.
		at, where := place[uintptr](&values.memory, 1)
		shared, end, err := dev.sharer.ShareEvent(cfg.Stream)
		if err != nil {
			return err
		}
		event, where[0], endEvent = at, shared, end
	}
	// From here on the export owns the handle.
	closeHandle = h.Close
	values.done = func() {
		if err := release(); err != nil && cfg.Failed != nil {
			panics.Do("Config.Failed", func() { cfg.Failed(err) })
		}
	}
	*array = DeviceArray{Array: outArray, DeviceID: dev.id, DeviceType: dev.kind, SyncEvent: event}
	*schema = outSchema
	return nil
}
