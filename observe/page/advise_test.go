package page

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/observe/timeline"
)

// TestIncompleteTimeline: a page's script gets a list where a document had null or nothing.
func TestIncompleteTimeline(t *testing.T) {
	r := &Report{Runs: []Run{{Timeline: &timeline.Timeline{
		IntervalSeconds: 1, Waits: timeline.Waits{Ended: []int64{0, 1}}, Spaces: []timeline.Space{{ID: "gpu:0"}}, Edges: []timeline.Edge{{}}, Causes: []timeline.Cause{{}},
	}}, {Timeline: &timeline.Timeline{}}}}
	text, err := json.Marshal(r.data())
	if err != nil || strings.Contains(string(text), "null") || strings.Count(string(text), "[0,0]") != 4+1+2+2+3 {
		t.Errorf("%s, %v", text, err)
	}
	if r.Runs[0].Timeline.Spaces[0].Used != nil {
		t.Error("the timeline was changed")
	}
}

// spilled is a run of which half came back from a disk that did little.
func spilled() *Run {
	return &Run{
		Seconds: 10,
		Spaces: []Space{
			{ID: "host:0", CapacityBytes: 50 << 30, PeakBytes: 40 << 30},
			{ID: "disk:0", CapacityBytes: 1 << 40, PeakBytes: 35 << 30},
		},
		Edges: []Edge{
			{From: "host:0", To: "disk:0", Bytes: 35 << 30, Limit: 5},
			{From: "disk:0", To: "host:0", Bytes: 35 << 30, Limit: 5},
		},
		Timeline: &timeline.Timeline{
			Seconds: 10, IntervalSeconds: 10, Edges: []timeline.Edge{{From: "host:0", To: "disk:0", Bytes: []int64{10 << 30}}},
		},
	}
}

func find(r *Run, text string) *Advice {
	for _, a := range advise(r) {
		if strings.Contains(a.What+a.Change, text) {
			return &a
		}
	}
	return nil
}

// TestAdviceOnHostMemory: the memory that would be enough is what has room for the data below the
// trigger, which is what the run had; of a table that grows with the memory nothing is said.
func TestAdviceOnHostMemory(t *testing.T) {
	const text = "nothing would have to go to disk"
	for want, change := range map[string]func(*Run){
		"with 100.0 GiB of host memory": func(*Run) {},
		"with 170.0 GiB of host memory": func(r *Run) { r.Settings = []Setting{{Flag: "--trigger", Value: "0.5"}} },
		"with 340.0 GiB of host memory": func(r *Run) {
			r.Timeline.Spaces = []timeline.Space{{ID: "host:0", Capacity: 100, Trigger: 25}}
		},
	} {
		r := spilled()
		change(r)
		if a := find(r, text); a == nil || !strings.Contains(a.Change, want) {
			t.Errorf("%s: %+v", want, a)
		}
		r.Follows = true
		if a := find(r, text); a != nil {
			t.Errorf("of a generated table: %+v", a)
		}
	}
}

// TestAdviceOnFailingDisk: a device that is full, or fails on purpose, is not one to be replaced.
func TestAdviceOnFailingDisk(t *testing.T) {
	const broken, full = "replace the device, or leave it out", moreRoom
	for _, c := range []struct{ kind, text, fault, change, flag string }{
		{"disk failing", "write: input/output error", Off, broken, "--disk DIR"},
		{"corruption found", "", "", broken, "--disk DIR"},
		{"disk failing", "write: no space left on device", "", full, "--disk DIR=SIZE"},
		{"disk failing", "write: disk quota exceeded", "", full, "--disk DIR=SIZE"},
		{"disk nearly full", "", "", full, "--disk DIR=SIZE"},
		{"waiters refused", "", "", full, "--disk DIR=SIZE"},
		{"disk failing", "write: input/output error", "op=write (hits: 3)", "leave the flag out: the fault was made on purpose", "--fault"},
		{"corruption found", "", "op=read (hits: 1)", "leave the flag out: the fault was made on purpose", "--fault"},
	} {
		for _, failed := range []bool{false, true} {
			r := spilled()
			r.Failed = failed
			r.Settings = append(r.Settings, Setting{Flag: "--fault", Value: c.fault})
			r.Timeline.Notes = []timeline.Note{{Kind: c.kind, Space: "disk:0", Text: c.text, At: 1}}
			if a := advise(r)[0]; a.Change != c.change || a.Flag != c.flag {
				t.Errorf("%+v: %+v", c, a)
			}
		}
	}
}

// TestAdviceOnMoves: the flag sets the field that is beside it.
func TestAdviceOnMoves(t *testing.T) {
	a := find(spilled(), "do more at once")
	if a == nil || a.Flag != "--moves-per-edge" || a.Field != "MovesPerEdge" {
		t.Fatalf("%+v", a)
	}
	if _, ok := reflect.TypeFor[spillway.Config]().FieldByName(a.Field); !ok {
		t.Errorf("there is no %s", a.Field)
	}
}

// TestDifferOfNothing: a figure of 0 is not said to be so many times slower.
func TestDifferOfNothing(t *testing.T) {
	a, b := &Run{Figures: []Figure{{Name: "x"}}}, &Run{Figures: []Figure{{Name: "x", Value: 1}}}
	if all := append(Differ(a, b), Differ(b, a)...); len(all) > 0 {
		t.Errorf("%+v", all)
	}
}

// TestAdviceOnCompressedBytes: what a disk does is compared with what was written to it, which is less
// than what the engine moved, and both have one unit. Where it is not known nothing is said.
func TestAdviceOnCompressedBytes(t *testing.T) {
	const gigabyte = 1 << 30
	for _, c := range []struct {
		name          string
		codec         string
		written, read int64
		limit         float64
		want          string // empty: none
	}{
		{"half of it", "auto", 17 * gigabyte, 17 * gigabyte, 2, "writing to disk:0 bounds the run: 1.70 GiB/s on average after compression, of the 2.00 GiB/s that the disk can do"},
		{"processors compress as the engine finds best", "auto", 3 * gigabyte, 3 * gigabyte, 5, ""},
		{"so little that the disk has time", "zstd", 3 * gigabyte, 3 * gigabyte, 5, "host:0 → disk:0 reached 0.086 GiB/s at most after compression, of the 5.00 GiB/s that the disk can do (2 %)"},
		{"not known", "auto", 0, 0, 4, ""},
		{"not compressed", "none", 0, 0, 4, "writing to disk:0 bounds the run: 3.50 GiB/s on average, of the 4.00 GiB/s that the disk can do"},
	} {
		r := spilled()
		r.Settings = []Setting{{Flag: "--codec", Value: c.codec}}
		r.Spaces[1].WrittenBytes, r.Spaces[1].ReadBytes = c.written, c.read
		for i := range r.Edges {
			r.Edges[i].Limit = c.limit
		}
		a := find(r, "that the disk can do")
		if a == nil && c.want != "" || a != nil && a.What != c.want {
			t.Errorf("%s: %+v, want %q", c.name, a, c.want)
		}
	}
}
