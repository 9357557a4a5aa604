package bandwidth

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Limit is what the machine does between two spaces without the engine: the best of a few transfers,
// by one thread.
type Limit struct {
	From, To tier.ID
	GiBPerS  float64
	LimitOf  LimitOf
}

// What Limits spends: so many bytes a transfer, and on each limit no new transfer after so long. A
// first transfer warms up.
const (
	limitBytes    = 8 << 20
	limitPatience = 60 * time.Millisecond
	limitTimes    = 4
)

// Limits measures the raw limits alone, within a second or so on a machine with one GPU and one disk.
// It moves no batch, and takes no memory of the engine's but for copies of a driver. Files returns the
// file system of a raw file, as Config.Files does.
func Limits(ctx context.Context, eng *spillway.Engine, seed uint64, files func() disk.FS) (all []Limit, err error) {
	room, err := newRegions(ctx, seed, limitBytes)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, room.close()) }()
	l := load{limitBytes, 1}
	memory, err := best(ctx, l, rawMemory(room, l))
	if err != nil {
		return nil, err
	}
	type way struct{ there, back float64 }
	disks, gpus := make(map[tier.ID]way), make(map[tier.ID]way)
	cfg := Config{Engine: eng, Files: files}
	for _, s := range eng.Spaces() {
		if v, ok := s.Pool().(*volumes.Volume); ok {
			raw := cfg.newRawFiles(s.ID(), v, room, l)
			rates, err := best(ctx, l, raw[0].side())
			if err = errors.Join(err, raw.close()); err != nil {
				return nil, err
			}
			disks[s.ID()] = rates
		}
		if driven(s) {
			rates, err := cfg.ofDriver(ctx, s)
			if err != nil {
				return nil, err
			}
			gpus[s.ID()] = rates
		}
	}
	for _, from := range eng.Spaces() {
		for _, to := range eng.Spaces() {
			one := Limit{From: from.ID(), To: to.ID()}
			switch {
			case from == to:
				continue
			case to.Kind() == tier.Disk:
				one.GiBPerS, one.LimitOf = disks[to.ID()].there, RequestsOfDisk
			case from.Kind() == tier.Disk:
				one.GiBPerS, one.LimitOf = disks[from.ID()].back, RequestsOfDisk
			case driven(from) && to.Kind() == tier.Host:
				one.GiBPerS, one.LimitOf = gpus[from.ID()].there, CopyOfDriver
			case driven(to) && from.Kind() == tier.Host:
				one.GiBPerS, one.LimitOf = gpus[to.ID()].back, CopyOfDriver
			case !driven(from) && !driven(to):
				one.GiBPerS, one.LimitOf = memory.there, Memmove
			}
			if one.GiBPerS > 0 {
				all = append(all, one)
			}
		}
	}
	return all, nil
}

// ofDriver measures copies of a GPU's driver from there to host memory, and back; 0 without host
// memory.
func (c Config) ofDriver(ctx context.Context, gpu *tier.Space) (rates struct{ there, back float64 }, err error) {
	i := slices.IndexFunc(c.Engine.Spaces(), func(s *tier.Space) bool { return s.Kind() == tier.Host })
	if i < 0 {
		return rates, nil
	}
	host := c.Engine.Spaces()[i]
	l := load{min(limitBytes, gpu.Capacity()/4, host.Capacity()/4) / tier.Page * tier.Page, 1}
	if l.bytes == 0 {
		return rates, nil
	}
	lanes, err := (&bench{cfg: c, load: l}).newLanes(ctx, gpu, host)
	if err != nil {
		return rates, err
	}
	defer func() { err = errors.Join(err, lanes.close()) }()
	return best(ctx, l, side{
		there: func(ctx context.Context) error { return lanes.copyAll(ctx, true) },
		back:  func(ctx context.Context) error { return lanes.copyAll(ctx, false) },
	})
}

// best returns the highest rates of a few transfers there and back, in GiB/s.
func best(ctx context.Context, l load, s side) (rates struct{ there, back float64 }, err error) {
	if s.prepare != nil {
		if err := s.prepare(ctx); err != nil {
			return rates, err
		}
	}
	begun := time.Now()
	for i := range limitTimes {
		for _, one := range []struct {
			move transfer
			rate *float64
		}{{s.there, &rates.there}, {s.back, &rates.back}} {
			start := time.Now()
			if err := one.move(ctx); err != nil {
				return rates, err
			}
			*one.rate = max(*one.rate, float64(l.bytes)/(1<<30)/time.Since(start).Seconds())
		}
		if i > 0 && time.Since(begun) > limitPatience {
			break
		}
	}
	return rates, nil
}
