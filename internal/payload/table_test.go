package payload

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

// scattered returns the parts of a table of two buffers.
func scattered(t *testing.T, gpu *tier.Space) Parts {
	t.Helper()
	return Parts{
		Descriptor: &Descriptor{Rows: 8, Nodes: []Node{{Length: 8}}, Buffers: []Span{Absent, {Length: 64}, {Offset: 64, Length: 8}}, Body: tier.Page, Sums: []uint64{1}},
		Ranges:     []DeviceRange{{}, {Addr: 4096, Length: 64}, {Addr: 1 << 20, Length: 8}},
		Buffers:    []*tier.Buffer{draw(t, gpu, 64), draw(t, gpu, 8)},
		Space:      gpu,
		Type:       ScatteredImage,
	}
}

func TestTable(t *testing.T) {
	gpu := newSpace(t, "gpu:0")
	defer mustBeEmpty(t, gpu)
	p := New(scattered(t, gpu))
	if p.Type() != ScatteredImage || p.Space() != gpu || p.Bytes() != 2*tier.Page || p.Descriptor().Rows != 8 ||
		len(p.Parts.Ranges) != 3 {
		t.Errorf("%s in %s of %d bytes", p.Type(), p.Space().ID(), p.Bytes())
	}
	end, ok := p.TryLease()
	if !ok {
		t.Fatal("no lease")
	}
	if p.Leased() != 2 {
		t.Errorf("%d leases", p.Leased())
	}
	if err := p.Release(); err != nil {
		t.Fatal(err)
	}
	if gpu.State().Used() != 2*tier.Page {
		t.Errorf("%d bytes are used under a lease", gpu.State().Used())
	}
	end()
	end()
	if !invariants.Enabled {
		if err := p.Release(); !errors.Is(err, tier.ErrReleased) {
			t.Errorf("a second release: %v", err)
		}
	}
}

func TestNewPanicsOnBugs(t *testing.T) {
	gpu, other := newSpace(t, "gpu:0"), newSpace(t, "gpu:1")
	for name, do := range map[string]func(*Parts){
		"no descriptor":         func(p *Parts) { p.Descriptor = nil },
		"no space":              func(p *Parts) { p.Space = nil },
		"host memory":           func(p *Parts) { p.Space = newSpace(t, "host:0") },
		"another space":         func(p *Parts) { p.Space = other },
		"a range too few":       func(p *Parts) { p.Ranges = p.Ranges[:2] },
		"a short range":         func(p *Parts) { p.Ranges[1].Length-- },
		"a dictionary too few":  func(p *Parts) { p.Descriptor.Dictionaries = []*Descriptor{{}} },
		"a dictionary too many": func(p *Parts) { p.Shared = make([]Shared, 1) },
	} {
		parts := scattered(t, gpu)
		bufs := parts.Buffers
		do(&parts)
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			New(parts)
		}()
		for _, b := range bufs {
			if err := b.Release(); err != nil {
				t.Error(err)
			}
		}
	}
	mustBeEmpty(t, gpu)
}
