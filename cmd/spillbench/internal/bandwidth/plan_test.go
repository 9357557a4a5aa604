package bandwidth

import (
	"slices"
	"testing"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/tier"
)

// TestPlan: of our side as much is moved as was planned, but for batches that were already where an
// edge begins, whatever the limit is.
func TestPlan(t *testing.T) {
	for name, config := range map[string]func(*testing.T) Config{
		"files of its own": func(t *testing.T) Config { return small(engine(t)) },
		"the volume's file": func(t *testing.T) Config {
			w := NewWatch()
			cfg := small(engineOn(t, w, convert.CodecNone))
			cfg.Watched = map[tier.ID]*Watch{{Kind: tier.Disk}: w}
			return cfg
		},
		"a driver's copies": func(t *testing.T) Config { return small(emulated(t)) },
	} {
		t.Run(name, func(t *testing.T) { testPlan(t, config(t)) })
	}
}

func testPlan(t *testing.T, cfg Config) {
	plan, err := Plan(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Run(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	moved := int64(0)
	for _, e := range cfg.Engine.Stats().Edges {
		moved += e.Bytes
	}
	links, _ := linksOf(cfg.Engine)
	slack := int64(len(links)) * 3 * (64 + 256) << 10 // each load, on each link
	if moved > plan.Ours || moved < plan.Ours-slack {
		t.Errorf("%d bytes were moved, and %d planned", moved, plan.Ours)
	}
	if plan.Limit < plan.Ours { // it is measured twice in each round
		t.Errorf("%d bytes of the limit, and %d of ours", plan.Limit, plan.Ours)
	}
	memories := cfg
	memories.Between = []tier.Kind{tier.GPU, tier.Host}
	rest, err := Plan(memories)
	if err != nil {
		t.Fatal(err)
	}
	disks := slices.ContainsFunc(cfg.Engine.Spaces(), func(s *tier.Space) bool { return s.Kind() == tier.Disk })
	if all := plan.Ours + plan.Limit; rest.Disk != 0 || (plan.Disk > 0) != disks || plan.Disk != all-rest.Ours-rest.Limit {
		t.Errorf("%d of %d bytes are planned for the disk, and without it %+v", plan.Disk, all, rest)
	}
}

// TestOneOfEach: of several spaces of a kind the first is measured.
func TestOneOfEach(t *testing.T) {
	space := func(k tier.Kind, n int) *tier.Space {
		s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: k, Ordinal: n}, Capacity: tier.Page, Node: -1, Backend: "none", Pool: nowhere{}, Fractions: tier.Fractions{Limit: 1}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
	a, b, c, d := space(tier.GPU, 0), space(tier.GPU, 1), space(tier.Host, 0), space(tier.Host, 1)
	got := oneOfEach([]link{{from: a, to: b}, {from: a, to: c}, {from: a, to: d}, {from: b, to: c}, {from: c, to: d}})
	if len(got) != 3 || got[0].to != b || got[1].to != c || got[2].to != d {
		t.Errorf("%d links are kept: %v", len(got), got)
	}
}

// nowhere is a pool of nothing.
type nowhere struct{ tier.Pool }

func (nowhere) Close() error { return nil }
