package bandwidth

import (
	"context"
	"errors"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Limits measures the raw limits alone, within a second or so on a machine with one GPU and one disk:
// the best of a few transfers by one thread. It moves no batch. files returns the file system of a raw
// file, as Config.Files does.
func Limits(ctx context.Context, eng *spillway.Engine, files func() disk.FS) (all []report.Limit, err error) {
	const turns, bytes = 3, 8 << 20
	cfg := Config{Engine: eng, Files: files}
	room, err := newRegions(ctx, bytes)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, room.close()) }()
	best := make(map[[2]*tier.Space][2]float64) // rates back and there
	for _, k := range cfg.edges() {
		b, of := bench{cfg: &cfg, load: load{bytes, 1}, room: room}, [2]*tier.Space{k.from, k.to}
		switch {
		case k.limit == diskIO:
			of[0] = nil // a disk has one limit for all memories
		case k.inSpaces:
			b.load.bytes = max(tier.Page, min(bytes, k.from.Capacity/4, k.to.Capacity/4)/tier.Page*tier.Page)
		}
		rates, known := best[of]
		if !known {
			move, free, err := b.raw(ctx, k)
			if err != nil {
				return nil, err
			}
			for i := 0; err == nil && i < turns; i++ {
				var took []float64
				took, err = b.turn(ctx, move, oneWay)
				for j, seconds := range took {
					rates[j%2] = max(rates[j%2], float64(b.load.bytes)/(1<<30)/seconds)
				}
			}
			if err = errors.Join(err, free()); err != nil {
				return nil, err
			}
			best[of] = rates
		}
		from, to := k.from.ID().String(), k.to.ID().String()
		all = append(all, report.Limit{From: from, To: to, GiBPerS: rates[1], LimitOf: k.limit},
			report.Limit{From: to, To: from, GiBPerS: rates[0], LimitOf: k.limit})
	}
	return all, nil
}
