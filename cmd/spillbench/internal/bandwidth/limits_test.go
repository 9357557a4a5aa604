package bandwidth

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/inject"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/tier/disk"
)

// Limits are those of all pairs of spaces, name what they are, and take nothing of the engine's.
func TestLimits(t *testing.T) {
	eng := engine(t)
	before, moved := used(eng), eng.Stats().Edges
	all, err := Limits(t.Context(), eng, disk.OS)
	if err != nil {
		t.Fatal(err)
	}
	testLimits(t, eng, all)
	if !slices.Equal(used(eng), before) || len(eng.Stats().Edges) != len(moved) {
		t.Error("the engine's memory or figures have changed")
	}
	eng = several(t)
	if all, err = Limits(t.Context(), eng, disk.OS); err != nil {
		t.Fatal(err)
	}
	testLimits(t, eng, all)
}

func testLimits(t *testing.T, eng *spillway.Engine, all []report.Limit) {
	t.Helper()
	n := len(eng.Spaces())
	if len(all) != n*(n-1) {
		t.Errorf("%d limits of %d spaces", len(all), n)
	}
	for _, l := range all {
		want := memmove
		if strings.Contains(l.From+l.To, "disk") {
			want = diskIO
		}
		if strings.Count(l.From+l.To, "gpu") == 2 {
			want = peerCopy
		}
		if l.GiBPerS <= 0 || l.LimitOf != want {
			t.Errorf("%+v", l)
		}
	}
}

// A slow disk is slow for its limit, and one that ends with its context leaves nothing.
func TestLimitsOfSlowDisk(t *testing.T) {
	eng := engine(t)
	slow := inject.New(nil, 64<<20, 1)
	all, err := Limits(t.Context(), eng, slow.Slow)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range all {
		if l.To == "disk:0" && l.GiBPerS > 0.125 {
			t.Errorf("%+v of a disk of 64 MiB/s", l)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := Limits(ctx, eng, func() disk.FS { cancel(); return disk.OS() }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// What a driver copies has the limit of its copies.
func TestLimitsOfDriver(t *testing.T) {
	eng := emulated(t, 1, emulator(t))
	before := used(eng)
	all, err := Limits(t.Context(), eng, disk.OS)
	if err != nil {
		t.Fatal(err)
	}
	driver := 0
	for _, l := range all {
		if l.LimitOf == driverCopy {
			driver++
		}
	}
	if driver < 2 || !slices.Equal(used(eng), before) {
		t.Errorf("%+v", all)
	}
}
