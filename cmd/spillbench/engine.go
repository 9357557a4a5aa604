package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/inject"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// machine is an open engine with a description of it and of the machine that it runs on.
type machine struct {
	topology *topology.Topology
	engine   *spillway.Engine
	reopen   func(context.Context) (*spillway.Engine, error) // opens another engine like it
	env      report.Env
	config   report.Config
	notes    *notes
	warnings func() []diag.Warning // also when the engine is closed
	faults   *inject.Faults
	plan     headroom.Plan // of the process's memory
	gpuBytes int64         // mean capacity of the GPU spaces; 0: there are none
}

// open opens the engine that the flags describe. The caller must close it.
func (e *engineFlags) open(ctx context.Context, log *notes) (*machine, error) {
	if err := e.validate(); err != nil {
		return nil, err
	}
	top, err := topology.Discover(ctx, topology.Options{})
	if err != nil {
		return nil, err
	}
	cfg, memory, err := e.engineConfig(ctx, top, log)
	if err != nil {
		return nil, err
	}
	faults := e.inject(&cfg)
	plan, err := e.planMemory(ctx, top, memory, cfg.Disks) // before anything is taken
	if err != nil {
		return nil, err
	}
	open := func(ctx context.Context) (*spillway.Engine, error) {
		eng, err := spillway.Open(ctx, cfg)
		if err != nil {
			return nil, e.explain(ctx, err)
		}
		return eng, nil
	}
	eng, err := open(ctx)
	if err != nil {
		return nil, err
	}
	if e.trace != nil {
		e.trace.Begin(cfg.Policy.Name(), eng.Stats().Spaces)
	}
	faults.Arm()
	for _, w := range eng.Warnings() {
		if w.Cause == causes.Simulated { // information, but nobody may take its figures for a GPU's
			log.add(w.String(), w.String())
		}
	}
	m := &machine{
		topology: top, engine: eng, reopen: open, env: report.EngineEnv(top, eng), config: e.describe(eng, cfg.Disks),
		notes: log, warnings: eng.Warnings, faults: faults, plan: plan,
	}
	m.gpuBytes = m.config.GPUMemoryBytes / max(1, int64(len(cfg.GPUs)))
	return m, nil
}

// engineConfig turns the flags into the engine's configuration. It also returns how many bytes of the
// process's memory the GPU and host spaces will take.
func (e *engineFlags) engineConfig(ctx context.Context, top *topology.Topology, log *notes) (
	cfg spillway.Config, memory int64, err error) {

	policy, err := monitor.ByName(e.policy)
	if err != nil {
		return cfg, 0, err
	}
	codec, err := convert.ParseCodec(e.codec)
	if err != nil {
		return cfg, 0, err
	}
	gpus, simulated, err := e.gpuSpaces()
	if err != nil {
		return cfg, 0, err
	}
	hostMemory, err := e.hostMemory.Of(top.Limits.MemoryBytes)
	if err != nil {
		return cfg, 0, fail.Usagef("--host-memory: %w", err)
	}
	disks, err := e.spillDisks(ctx, log)
	if err != nil {
		return cfg, 0, err
	}
	limit, err := quotaSettings()
	if err != nil {
		return cfg, 0, err
	}
	cfg = spillway.Config{
		GPUs: gpus, HostMemory: spillway.Bytes(hostMemory), Disks: disks,
		GPUMarks: e.marks(), HostMarks: e.marks(),
		Policy: policy, Codec: codec,
		Limits:        spillway.Limits{Quota: limit, Permits: permit.Config{Slots: new(e.diskSlots)}},
		MonitorPeriod: e.period, MovesPerEdge: e.movesPerEdge, StuckAfter: e.stuckAfter, WriteAhead: int64(e.ahead),
		Topology: top, Logger: slog.New(log), Events: e.events,
	}
	if e.trace != nil {
		cfg.Events = spillway.Tee(e.events, e.trace.Event)
	}
	if err := cfg.Validate(); err != nil {
		return cfg, 0, fail.Usagef("%w (see --gpu-memory, --host-memory and --disk)", err)
	}
	memory = hostMemory
	for range simulated {
		memory += min(e.gpuMemory.Bytes, math.MaxInt64-memory)
	}
	return cfg, memory, nil
}

// gpuSpaces returns the GPU spaces that the flags ask for, and how many of them will be simulated:
// a space on each GPU that the driver shows, --gpus at most, or --gpus simulated ones.
func (e *engineFlags) gpuSpaces() (spaces []spillway.GPUConfig, simulated int, err error) {
	if e.noGPUs {
		return []spillway.GPUConfig{}, 0, nil
	}
	if e.gpuMemory.Share == 0 && e.gpuMemory.Bytes < tier.Page {
		return nil, 0, fail.Usagef("--gpu-memory %s is less than any batch takes (give at least 4KiB)", e.gpuMemory)
	}
	space := spillway.GPUConfig{Memory: e.gpuMemory}
	if e.gpu != "auto" {
		space.Backend = spillway.Backend(e.gpu)
	}
	found, count := 0, max(1, e.gpus)
	if space.Backend != spillway.Sim {
		found = realGPUs()
	}
	switch {
	case space.Backend == spillway.Sim:
		simulated = count
	case found == 0 && space.Backend == spillway.CUDA:
		count = 1 // opening it fails with the reason
	case count > max(1, found):
		return nil, 0, &fail.Error{
			Status: fail.Environment, Err: fmt.Errorf("--gpus %d: NVIDIA's driver shows %d GPUs", e.gpus, found),
			Fix: "give a smaller number, or simulate GPUs with --gpu sim",
		}
	case found == 0:
		simulated = count
	case e.gpus == 0:
		count = found
	}
	return slices.Repeat([]spillway.GPUConfig{space}, count), simulated, nil
}

// realGPUs returns how many GPUs NVIDIA's driver shows to the process, 0 without a driver.
func realGPUs() int {
	driver, err := cuda.Load("")
	if err != nil {
		return 0
	}
	gpus, err := driver.Devices()
	if err != nil {
		return 0
	}
	return len(gpus)
}

// inject puts the faults and the rates of --fault and --disk-throttle into the configuration.
func (e *engineFlags) inject(cfg *spillway.Config) *inject.Faults {
	faults := inject.New(e.faults, e.throttle.Bytes, e.seed)
	for i := range cfg.Disks {
		cfg.Disks[i].FS = faults.Volume()
		if cfg.Disks[i].FS == nil && e.watch != nil {
			cfg.Disks[i].FS = e.watch(i)
		}
	}
	for i := range cfg.GPUs {
		cfg.GPUs[i].Wrap = func(dev tier.Device) (tier.Device, error) { return faults.Device(dev), nil }
	}
	return faults
}

// blame names the fault of --fault that may have caused err, and gives err the status of wrong data:
// the fault was not survived.
func (m *machine) blame(ctx context.Context, err error) error {
	fault := m.faults.Blame()
	if err == nil || fault == "" || ctx.Err() != nil || fail.Status(err) == fail.Usage {
		return err
	}
	return &fail.Error{Status: fail.Wrong, Err: err, Fix: fault}
}

// settle adds the hits of faults to the notes and the configuration.
func (m *machine) settle() {
	for i, n := range m.faults.Hits() {
		m.config.Faults[i].Hits = n
	}
	for _, line := range m.faults.Told() {
		m.notes.add(line, line)
	}
}

// explain adds the flag to change to an error of opening an engine.
func (e *engineFlags) explain(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, spillway.ErrShareOfSimulated):
		return &fail.Error{
			Status: fail.Usage, Err: fmt.Errorf("--gpu-memory %s: %w", e.gpuMemory, err), Fix: "give a size, such as 512MiB",
		}
	case errors.Is(err, tier.ErrNotSupported) && e.gpu == "cuda":
		return &fail.Error{
			Status: fail.Environment, Err: err,
			Fix: "install NVIDIA's driver and start containers with --gpus; or use --gpu sim for the simulated one",
		}
	case errors.Is(err, tier.ErrNoSpace), ctx.Err() != nil:
		return err
	}
	return &fail.Error{Status: fail.Environment, Err: err, Fix: "see --gpu-memory, --host-memory and --disk"}
}

// describe returns the configuration of an engine, defaults filled in.
func (e *engineFlags) describe(eng *spillway.Engine, disks []spillway.DiskConfig) report.Config {
	c := report.Config{
		GPU: e.gpu, Limit: e.limit, Trigger: e.trigger, Stop: e.stop,
		Policy: e.policy, Codec: e.codec, Encrypt: e.encrypt,
		MonitorPeriodSeconds: e.period.Seconds(), StuckAfterSeconds: e.stuckAfter.Seconds(),
		WriteAheadBytesPerS: max(0, int64(e.ahead)), MovesPerEdge: e.movesPerEdge, DiskSlots: e.diskSlots,
		DiskThrottleBytesPerS: e.throttle.Bytes, Disks: []report.Disk{}, Faults: []report.Fault{},
	}
	if e.noGPUs {
		c.GPU = "none"
	}
	for _, f := range e.faults {
		c.Faults = append(c.Faults, report.Fault{Spec: f.Text})
	}
	for _, s := range eng.Spaces() {
		switch s.Kind() {
		case tier.GPU:
			c.GPUMemoryBytes += s.Capacity()
		case tier.Host:
			c.HostMemoryBytes += s.Capacity()
		case tier.Disk:
			dir := disks[s.ID().Ordinal].Dir
			given := slices.ContainsFunc(e.disks, func(f diskFlag) bool { return f.dir == dir && !f.capacity.IsZero() })
			c.Disks = append(c.Disks, report.Disk{Dir: dir, CapacityBytes: s.Capacity(), CapacityGiven: given})
		}
	}
	return c
}
