package tiertest_test

import (
	"slices"
	"sync"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
)

// referencePool is the simplest pool of host memory that keeps the contract, unless it has a flaw.
type referencePool struct {
	capacity int64
	mem      []byte

	mu      sync.Mutex
	line    *extent.Allocator
	closed  bool
	pending sync.WaitGroup
	flaw    string // the promise that it breaks; "" for none
}

func newReferencePool(capacity int64, flaw string) *referencePool {
	b := make([]byte, capacity+tier.Page)
	skip := -address(b) & (tier.Page - 1)
	p := &referencePool{capacity: capacity, mem: b[skip:][:capacity], line: extent.New(capacity), flaw: flaw}
	if flaw == "more than the capacity" {
		p.line = extent.New(capacity + capacity/16)
		p.mem = append(p.mem[:capacity:capacity], make([]byte, capacity/16)...)
	}
	return p
}

type referenceMemory struct {
	size    int64
	extents [][]byte
	ranges  [][2]int64
}

func (m *referenceMemory) Size() int64       { return m.size }
func (m *referenceMemory) Extents() [][]byte { return m.extents }

func (p *referencePool) Charge(size int64) int64 {
	if p.flaw == "charges more for less" && size > 2*tier.Page && size <= 16*tier.Page {
		return 32 * tier.Page
	}
	if p.flaw == "charges too little" {
		return size / tier.Page * tier.Page
	}
	return (size + tier.Page - 1) / tier.Page * tier.Page
}

func (p *referencePool) Alloc(size int64, cuts []int64) (tier.Memory, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed && p.flaw != "allocates after Close" {
		return nil, tier.ErrClosed
	}
	if p.flaw == "splits anywhere" {
		cuts = nil
		for c := int64(tier.Page); c < size; c += tier.Page {
			cuts = append(cuts, c)
		}
	}
	m := &referenceMemory{size: size}
	bounds := append(slices.Clone(cuts), size)
	for at := int64(0); at < size; {
		largest := p.line.Largest()
		fit := int64(0)
		for _, b := range bounds {
			if n := b - at; n > 0 && (n+tier.Page-1)/tier.Page*tier.Page <= largest {
				fit = n
			}
		}
		if fit == 0 || p.flaw == "never splits" && fit < size {
			free := p.line.FreeBytes()
			for _, r := range m.ranges {
				p.line.Free(r[0], r[1])
			}
			e := &tier.NoSpaceError{Requested: size, Available: free}
			if p.flaw != "does not tell the largest piece" {
				e.Largest = p.line.Largest()
			}
			return nil, e
		}
		n := (fit + tier.Page - 1) / tier.Page * tier.Page
		off, _ := p.line.Alloc(n)
		m.ranges = append(m.ranges, [2]int64{off, n})
		e := p.mem[off : off+fit]
		if p.flaw == "starts between pages" {
			e = append(make([]byte, 0, fit+1), 0)[1 : fit+1][:fit]
		}
		if p.flaw == "all memories are one" {
			e = p.mem[:fit]
		}
		m.extents = append(m.extents, e)
		at += fit
	}
	if p.flaw == "has another size" {
		m.size++
	}
	return m, nil
}

func (p *referencePool) Free(m tier.Memory, reclaimed func()) {
	back := func() {
		p.mu.Lock()
		for i, r := range m.(*referenceMemory).ranges {
			if p.flaw == "loses a piece" && i > 0 {
				continue
			}
			p.line.Free(r[0], r[1])
		}
		p.mu.Unlock()
	}
	switch p.flaw {
	case "reclaims twice":
		back()
		reclaimed()
		reclaimed()
	case "reclaims before the bytes are free":
		reclaimed()
		back()
	case "reclaims late":
		p.pending.Go(func() { back(); reclaimed() })
	case "does not wait in Close":
		go func() { <-closed; back(); reclaimed() }()
	default:
		back()
		reclaimed()
	}
}

// closed blocks the pool that does not wait in Close. It is never closed.
var closed = make(chan struct{})

func (p *referencePool) Close() error {
	p.mu.Lock()
	again := p.closed
	p.closed = true
	p.mu.Unlock()
	if again {
		return tier.ErrClosed
	}
	p.pending.Wait()
	return nil
}
