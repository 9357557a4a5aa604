package main

import (
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation/permit"
)

// What follows is what tune prints, so that it is compiled. TestGoCompilesAndOpens writes it.

// The verdict.
// Work it with 8 goroutines, on 4 partitions, in batches of 50 rows.
var tunedConfig = spillway.Config{
	GPUs:          []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(3 << 20)}},
	HostMemory:    spillway.Bytes(5000000),
	Disks:         []spillway.DiskConfig{{Encrypt: true}},
	GPUMarks:      spillway.Fractions{Limit: 0.9, Trigger: 0.9, Stop: 0.8},
	HostMarks:     spillway.Fractions{Limit: 0.9, Trigger: 0.9, Stop: 0.8},
	Policy:        monitor.PlanOrder(),
	Codec:         convert.CodecBitpack,
	MonitorPeriod: 10 * time.Millisecond,
	MovesPerEdge:  4,
	WriteAhead:    -1, // off
	Limits:        spillway.Limits{Permits: permit.Config{Slots: new(4)}},
}

// The verdict.
// Work it with 8 goroutines, on 4 partitions.
var tunedToDefaults = spillway.Config{
	GPUs:       []spillway.GPUConfig{{Backend: spillway.Auto, Memory: spillway.Share(0.25)}},
	HostMemory: spillway.Bytes(64 << 20),
	Disks: []spillway.DiskConfig{
		{Dir: "/spill/a"},
		{Dir: "/spill/b", Capacity: spillway.Bytes(9 << 30)},
	},
	GPUMarks:      spillway.Fractions{Limit: 0.9, Trigger: 0.85, Stop: 0.65},
	HostMarks:     spillway.Fractions{Limit: 0.9, Trigger: 0.85, Stop: 0.65},
	Policy:        monitor.CostAware(),
	Codec:         convert.CodecAuto,
	MonitorPeriod: 1500 * time.Microsecond,
	MovesPerEdge:  2,
	WriteAhead:    67108864, // 64MiB
	StuckAfter:    60 * time.Second,
	Limits:        spillway.Limits{Permits: permit.Config{Slots: new(16)}},
}
