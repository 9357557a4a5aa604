package bandwidth

import (
	"context"
	"errors"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Limit is what the machine does between two spaces without the engine: the best of a few transfers
// by one thread.
type Limit struct {
	From, To tier.ID
	GiBPerS  float64
	LimitOf  string // as in report.BandwidthRow
}

// What Limits spends: so many bytes a transfer, and on each limit no new transfer after so long. A
// first transfer warms up.
const (
	limitBytes    = 8 << 20
	limitPatience = 60 * time.Millisecond
	limitTimes    = 4
)

// Limits measures the raw limits alone, within a second or so on a machine with one GPU and one disk.
// It moves no batch. files returns the file system of a raw file, as Config.Files does.
func Limits(ctx context.Context, eng *spillway.Engine, files func() disk.FS) (all []Limit, err error) {
	room, err := newRegions(ctx, limitBytes)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, room.close()) }()
	cfg := Config{Engine: eng, Files: files}
	// A disk has one limit for all memories, and memmove between regions does not depend on the space.
	known := make(map[[2]*tier.Space][]float64)
	for _, k := range cfg.edges() {
		of, bytes := [2]*tier.Space{k.from, k.to}, int64(limitBytes)
		switch {
		case k.limit == diskIO:
			of[0] = nil
		case k.inSpaces():
			bytes = min(bytes, k.from.Capacity()/4, k.to.Capacity()/4) / tier.Page * tier.Page
		default:
			clear(of[:])
		}
		if _, ok := known[of]; !ok && bytes > 0 {
			b := &bench{cfg: &cfg, load: load{bytes, 1}, room: room}
			if known[of], err = b.best(ctx, k); err != nil {
				return nil, err
			}
		}
		if rates := known[of]; rates != nil {
			all = append(all,
				Limit{k.from.ID(), k.to.ID(), rates[1], k.limit}, Limit{k.to.ID(), k.from.ID(), rates[0], k.limit})
		}
	}
	return all, nil
}

// best returns the highest rates of a few raw transfers back and there, in GiB/s.
func (b *bench) best(ctx context.Context, k link) (_ []float64, err error) {
	raw, _, free, err := b.raw(ctx, k)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, free()) }()
	steps := []step{{first: there}, {first: back, timed: true}, {first: there, timed: true}}
	rates, begun := make([]float64, 2), time.Now()
	for i := 0; i < limitTimes && (i < 2 || time.Since(begun) < limitPatience); i++ {
		took, err := b.turn(ctx, raw, steps)
		if err != nil {
			return nil, err
		}
		for j := range rates {
			rates[j] = max(rates[j], float64(b.load.bytes)/(1<<30)/took[j])
		}
	}
	return rates, nil
}
