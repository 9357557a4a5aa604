package main

import (
	"testing"
	"time"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/peer"
	"github.com/spillway-db/spillway/diag"
)

// TestRunWithoutPasses: what was not checked is not said to be, and a peak is what was in
// use and not what there is.
func TestRunWithoutPasses(t *testing.T) {
	doc := runJSON(t, append(small, "--passes=0")...)
	if doc.Verify.Checked || doc.Verify.Batches != 0 {
		t.Errorf("nothing was checked: %+v", doc.Verify)
	}
	for _, s := range doc.Spaces {
		if s.ID == "disk:0" && (s.PeakBytes <= 0 || s.PeakBytes >= s.CapacityBytes) {
			t.Errorf("%+v", s)
		}
	}
}

// TestRatios: writing is compared with writing, and reading with reading.
func TestRatios(t *testing.T) {
	var f compareFlags
	m := &machine{warnings: func() []diag.Warning { return nil }}
	doc := f.document(m, nil, peer.Result{
		Bytes:     1 << 30,
		Ours:      []peer.Times{{Write: 1 * time.Second, Read: 2 * time.Second}},
		Rewritten: []peer.Times{{Write: 1 * time.Second, Read: 4 * time.Second}},
		Put:       []time.Duration{3 * time.Second},
		Peer:      []peer.Times{{Write: 5 * time.Second, Read: 8 * time.Second}},
		Warm:      []peer.Times{{Write: 2 * time.Second, Read: 1 * time.Second}},
	})
	if r := doc.Ratio; r.Write != 5 || r.WriteMin != 5 || r.WriteMax != 5 || r.Read != 4 || r.ReadMin != 4 || r.ReadMax != 4 {
		t.Errorf("%+v", r)
	}
	if o := doc.Ours; o.WriteGiBPerS != 1 || o.ReadGiBPerS != 0.5 || o.Rewritten.ReadGiBPerS != 0.25 || o.PutWriteGiBPerS != 0.25 {
		t.Errorf("%+v", o)
	}
	if p := doc.Peer; p.WriteGiBPerS != 0.2 || p.ReadGiBPerS != 0.125 || p.Warm.WriteGiBPerS != 0.5 || p.Warm.ReadGiBPerS != 1 {
		t.Errorf("%+v", p)
	}
}
