package cdevice

import (
	"errors"
	"fmt"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// Export fills array and schema with the batch that h holds, an image or a table in a GPU's
// memory, as a struct of its columns. It takes h over: the handle is closed when the array's
// release callback is called; on an error it stays the caller's. The schema has a release
// callback of its own.
//
// Nothing is copied: the array's buffers are the batch's memory, which consumers only read. A
// dictionary is the array that the batch shares with others; one that extends an earlier dictionary
// is copied to one piece of memory in the space, until the release. The lengths of a view's data buffers,
// the last of its buffers, are in host memory, as in Arrow's own implementation. Validities without
// nulls and buffers of size zero are NULL. The batch may have no buffer where no row has a value.
// For those, memory of zeros is taken in the space until the release, as much as the longest of
// them needs. If there is no room for it, the error is a *tier.NoSpaceError.
//
// A table of others' arrays that are slices is exported where it is, too: with offsets
// (ArrowArray.offset), and with children whose first rows may belong to no row of their parent. A
// copy of such a table has only what the rows show, and may be tier.ErrNotSupported: as an image
// (convert.Mover.MoveAs, batch.PlainImage) it can be exported.
//
// array and schema are written over, whatever they hold. They may be C's memory or Go's; in
// Go's, the caller must keep them alive while C has their addresses.
func Export(h *batch.Handle, array *DeviceArray, schema *Schema, cfg Config) (err error) {
	if h == nil {
		return errors.New("cdevice: exporting a batch: the handle is nil")
	}
	payload := h.Payload()
	if payload == nil {
		return fmt.Errorf("cdevice: exporting a closed handle: %w", tier.ErrReleased)
	}
	dev, err := deviceOf(payload.Space(), cfg)
	if err != nil {
		return err
	}
	if cfg.Event != 0 && cfg.Stream != nil {
		return errors.New("cdevice: exporting with Config.Event and with Config.Stream: want one of them")
	}
	back, err := dev.lend()
	if err != nil {
		return err
	}
	r := callbacks()
	names := &exported{mem: new(memory)}
	var endEvent func() error
	w := &arrayWriter{dev: dev, space: payload.Space()}
	values := &exported{mem: new(memory), done: func() {
		if err := errors.Join(endEvent(), w.release(), h.Close(), back()); err != nil && cfg.Failed != nil {
			panics.Do("Config.Failed", func() { cfg.Failed(err) })
		}
	}}
	w.mem, w.id = values.mem, r.add(values)
	s := &schemaWriter{mem: names.mem, id: r.add(names)}
	defer func() {
		if err != nil {
			r.drop(w.id, s.id)
			err = errors.Join(err, w.release(), back())
		}
	}()
	var outArray Array
	var outSchema Schema
	desc, err := w.open(payload)
	if err != nil {
		return err
	}
	root := arrow.Field{Type: arrow.StructOf(desc.Schema.Fields()...), Metadata: desc.Schema.Metadata()}
	if err := s.field(&outSchema, root); err != nil {
		return err
	}
	if err := w.record(&outArray, desc); err != nil {
		return err
	}
	if err := w.zeros(); err != nil {
		return err
	}
	var event uintptr
	if event, endEvent, err = dev.event(values.mem, cfg.Stream); err != nil {
		return err
	}
	if err = errors.Join(names.mem.err, values.mem.err); err != nil {
		return errors.Join(err, endEvent())
	}
	values.space, values.ranges = payload.Space(), charged(payload, w.taken)
	values.left.Store(w.count)
	names.left.Store(s.count)
	*array = DeviceArray{Array: outArray, DeviceID: dev.id, DeviceType: dev.kind, SyncEvent: cfg.Event | event}
	*schema = outSchema
	return nil
}

// drop forgets exports that no consumer has seen.
func (r *releases) drop(ids ...uintptr) {
	for _, id := range ids {
		r.mu.Lock()
		e := r.mu.out[id]
		delete(r.mu.out, id)
		r.mu.Unlock()
		e.mem.free()
	}
}

// charged is the memory that an export keeps in its space.
func charged(p batch.Payload, bufs []*tier.Buffer) (out []payload.DeviceRange) {
	var shared []batch.Shared
	if p, ok := p.(*batch.Image); ok {
		shared, out = p.Shared(), slices.Clone(p.Parts().Ranges)
		if p.Parts().Encoding != payload.Scattered {
			bufs = append(bufs, p.Buffer())
		}
	}
	for _, s := range shared {
		bufs = append(bufs, s.Buffer())
	}
	for _, b := range bufs {
		if m, ok := b.Memory().(tier.DeviceMemory); ok {
			out = append(out, payload.DeviceRange{Addr: m.Addr(), Length: m.Size()})
		}
	}
	return out
}
