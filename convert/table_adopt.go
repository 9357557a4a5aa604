package convert

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// AdoptTable makes a batch.ScatteredImage of memory that is on a device already, without copying it. The
// caller must have waited for all work that writes it. It must not change until Release is called,
// when the payload is released and the memory is not leased. The bytes that the rows use are
// charged in the space as live ones, above its limit too: they are there. If they exceed its
// capacity, the error is a *tier.NoSpaceError. Memory that several columns share, or that is
// Charged, is charged once; but memory that two tables share is charged for each of them.
//
// Arrays may be slices: the payload has what they show. When the table becomes an image, three
// things are adjusted: offsets that do not begin at 0, bits that do not begin with a byte, and run
// ends of a slice. List views, dense unions and the data of views keep all of their children or
// bytes. Dictionaries are in the body of the image, each column's by itself.
//
// The lengths of buffers are read from the device, through pinned chunks: the first and last offset
// of lists and strings, the run ends of slices, validity where nulls must be counted. An array
// whose parts do not fit together is an *InvalidError. Addresses outside of the device's memory are
// found by devices that know (tier.Borrower), or when they are read. On an error the memory stays
// the caller's.
func (m *Mover) AdoptTable(ctx context.Context, t image.DeviceTable) (_ batch.Payload, err error) {
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	switch {
	case t.Space == nil || !t.Space.Kind().IsDevice():
		return nil, errors.New("convert: a table to adopt must be in the space of a GPU")
	case t.Schema == nil:
		return nil, errors.New("convert: a table without a schema")
	}
	mem := &lentMemory{panics: &m.panics}
	defer func() {
		if err != nil {
			err = ofLost(err, t.Space)
			mem.endLoans()
		}
	}()
	defer guard.Error(&err, "convert: adopting a table")
	if err := image.CheckEndian(t.Schema); err != nil {
		return nil, err
	}
	p, err := image.PlanTable(t, func(reads []image.Peek) error { return m.cfg.Builtin.Peek(ctx, t.Space, reads) })
	if err != nil {
		return nil, err
	}
	mem.size = covered(p.Ranges, t.Charged) - covered(t.Charged)
	promise, err := t.Space.Occupy(t.Space.Charge(mem.size))
	if err != nil {
		return nil, err
	}
	defer t.Space.Release(promise)
	if pool, ok := t.Space.Pool.(interface{ Device() tier.Device }); ok {
		dev, borrows := tier.As[tier.Borrower](pool.Device())
		for _, r := range p.Ranges {
			if !borrows || r.Length <= 0 {
				continue
			}
			end, err := dev.Borrow(r.Addr, r.Length)
			if err != nil {
				return nil, fmt.Errorf("convert: adopting a table: %w", err)
			}
			mem.loans = append(mem.loans, end)
		}
	}
	mem.release = t.Release
	return payload.New(payload.Parts{
		Descriptor: p.Descriptor, Space: t.Space, Type: payload.ScatteredImage, Ranges: p.Ranges, Adjustments: p.Adjust,
		Kept: covered(p.Ranges) - mem.size, Buffers: []*tier.Buffer{t.Space.Adopt(promise, mem)},
	}), nil
}

// covered returns how many bytes are in any of the ranges.
func covered(ranges ...[]payload.DeviceRange) (n int64) {
	all := slices.Concat(ranges...)
	slices.SortFunc(all, func(a, b payload.DeviceRange) int { return cmp.Compare(a.Addr, b.Addr) })
	end := tier.Addr(0)
	for _, r := range all {
		if to := r.Addr + tier.Addr(max(0, r.Length)); to > end {
			n += int64(to - max(r.Addr, end))
			end = to
		}
	}
	return n
}

// lentMemory is the memory of an adopted table.
type lentMemory struct {
	size    int64      // not charged elsewhere
	loans   []func()   // each ends a loan of the device's
	release func()     // the owner's; may be nil
	panics  *guard.Log // of both: the memory is its owner's again all the same
}

// Size implements tier.Memory.
func (m *lentMemory) Size() int64 { return m.size }

// GiveBack returns the memory to its owner. The space calls it in the place of its pool's Free.
func (m *lentMemory) GiveBack(reclaimed func()) {
	m.endLoans()
	if m.release != nil {
		m.panics.Do("DeviceTable.Release", m.release)
	}
	reclaimed()
}

func (m *lentMemory) endLoans() {
	for _, end := range m.loans {
		m.panics.Do("the end of a loan by Borrower.Borrow", end)
	}
	m.loans = nil
}
