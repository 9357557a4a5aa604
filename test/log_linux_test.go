package test

import (
	"bytes"
	"log/slog"
	"strconv"
	"strings"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// TestQuietLog: an engine that works as it should, and spills, has nothing to say to a person.
func TestQuietLog(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	rose := make(chan struct{}, 1)
	cfg := spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}}, HostMemory: spillway.Bytes(4 << 20),
		Disks:  []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
		Events: on(events.PressureRose, func(spillway.Event) {
			select {
			case rose <- struct{}{}:
			default:
			}
		}),
	}
	s := openSpill(t, cfg)
	for i := range 60 {
		rec := numberedRecord(int64(i)<<20, 3000, wordList(1, 20))
		if err := s.repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
			t.Fatal(err)
		}
		rec.Release()
	}
	// The GPU stays above its trigger until the monitor has seen that. Waiters may evict before it does.
	gpu := s.eng.Spaces()[0]
	full, err := s.eng.Reserve(t.Context(), spillway.Specific(gpu.ID()), gpu.State().Room-tier.Page)
	if err != nil {
		t.Fatal(err)
	}
	<-rose
	if err := full.Release(); err != nil {
		t.Fatal(err)
	}
	drained := 0
	for h, err := range s.repo.Drain(t.Context(), 0, tier.GPU) {
		if err != nil {
			t.Fatal(err)
		}
		drained++
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	var moved int64
	for _, e := range s.eng.Stats().Edges {
		moved += e.Bytes
	}
	closeClean(t, s.eng)
	if drained != 60 || moved == 0 {
		t.Fatalf("%d batches, %d bytes moved: nothing was tried", drained, moved)
	}
lines:
	for line := range strings.Lines(log.String()) {
		for _, w := range s.eng.Warnings() { // what the test's machine refuses is no fault of the engine's
			if strings.Contains(line, strconv.Quote("spillway: "+w.What)) && (!w.Info || w.Space != "") {
				continue lines
			}
		}
		t.Errorf("a line in the log: %s", line)
	}
}

// TestNodesOfOthers: if a process may not have the memory of some nodes, that is intended. It is
// worth a line only where a GPU is beside such a node.
func TestNodesOfOthers(t *testing.T) {
	for _, beside := range []bool{false, true} {
		top, err := topology.Discover(t.Context(), topology.Options{})
		if err != nil {
			t.Fatal(err)
		}
		top.Warnings = nil
		last := top.Nodes[len(top.Nodes)-1].ID
		top.Nodes = append(top.Nodes, topology.Node{ID: last + 1, MemoryBytes: 1 << 30})
		top.Limits.MemoryNodes = topology.Set{}
		for _, n := range top.Nodes[:len(top.Nodes)-1] {
			top.Limits.MemoryNodes = append(top.Limits.MemoryNodes, n.ID)
		}
		if beside {
			top.GPUs = append(top.GPUs, topology.GPU{Node: last + 1})
		}
		var log bytes.Buffer
		eng, err := spillway.Open(t.Context(), spillway.Config{
			GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(4 << 20), Disks: []spillway.DiskConfig{}, Topology: top,
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		closeClean(t, eng)
		if s := log.String(); strings.Contains(s, "NUMA nodes") != beside || beside && !strings.Contains(s, "level=WARN") {
			t.Errorf("beside a GPU %v, the log:\n%s", beside, s)
		}
	}
}
