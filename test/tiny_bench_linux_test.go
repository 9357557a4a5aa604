package test

import (
	"fmt"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/tier"
)

// BenchmarkTinySpill is what it takes the monitor to move batches to a disk, from host memory and
// from a GPU, for a request for all of it: time of the processor, of all cores together, and time
// that passes. Of batches that are larger there are fewer.
func BenchmarkTinySpill(b *testing.B) {
	for _, from := range []tier.Kind{tier.Host, tier.GPU} {
		for _, c := range []struct {
			size int64
			n    int
		}{{4 << 10, 20_000}, {16 << 10, 8000}, {64 << 10, 2000}, {128 << 10, 1000}, {1 << 20, 128}} {
			b.Run(fmt.Sprintf("%s/%dKiB", from, c.size>>10), func(b *testing.B) { tinySpill(b, from, c.size, c.n) })
		}
	}
}

func tinySpill(b *testing.B, from tier.Kind, size int64, n int) {
	total := int64(n) * (size + tier.Page) * 5 / 4
	room := map[tier.Kind]int64{tier.GPU: 8 << 20, tier.Host: 8 << 20}
	room[from] = total
	eng, plan := benchEngine(b, room[tier.GPU], room[tier.Host], 2*total, handsOutAll, func(c *spillway.Config) { c.WriteAhead = -1 })
	rec := zeros(size / 8)
	defer rec.Release()
	at := tier.ID{Kind: from}
	if from == tier.GPU { // what leaves it finds no room in host memory
		full, err := eng.Reserve(b.Context(), spillway.Specific(tier.ID{Kind: tier.Host}), 7<<20)
		if err != nil {
			b.Fatal(err)
		}
		defer full.Release()
	}
	space := eng.Spaces()[0]
	if from == tier.Host {
		space = eng.Spaces()[1]
	}
	var cores, passed time.Duration
	rounds := 0
	for b.Loop() {
		repo, err := plan.Repository("operator", rounds)
		if err != nil {
			b.Fatal(err)
		}
		for range n {
			if err := repo.Put(b.Context(), 0, rec, repository.WithPlacement(spillway.Specific(at))); err != nil {
				b.Fatal(err)
			}
		}
		before, begin := worked(b), time.Now()
		r, err := eng.Reserve(b.Context(), spillway.Specific(at), space.State().Room)
		if err != nil {
			b.Fatal(err)
		}
		cores += worked(b) - before
		passed += time.Since(begin)
		if err := r.Release(); err != nil {
			b.Fatal(err)
		}
		if err := repo.Close(b.Context()); err != nil {
			b.Fatal(err)
		}
		rounds++
	}
	all := float64(n * rounds)
	b.ReportMetric(cores.Seconds()*1e6/all, "cpu-us/batch")
	b.ReportMetric(passed.Seconds()*1e6/all, "us/batch")
	b.ReportMetric(all*float64(size)/passed.Seconds()/(1<<20), "MiB/s")
	b.ReportMetric(all*float64(size)/cores.Seconds()/(1<<20), "MiB/core-s")
}
