package main

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/inject"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// machine is an open engine with a description of it and of the machine that it runs on.
type machine struct {
	engine *spillway.Engine
	opened spillway.Config                                 // of engine
	reopen func(context.Context) (*spillway.Engine, error) // opens another engine like it
	env    report.Env
	config report.Config // defaults filled in
	notes  *notes
	faults *inject.Faults
	plan   headroom.Plan // of the process's memory
}

// open opens the engine that the flags describe. The caller must close it.
func (e *engineFlags) open(ctx context.Context) (*machine, error) {
	if err := e.validate(); err != nil {
		return nil, err
	}
	top, err := topology.Discover(ctx, topology.Options{})
	if err != nil {
		return nil, err
	}
	m := e.newMachine(top)
	if err := e.configure(ctx, m); err != nil {
		return nil, err
	}
	m.plan.Apply() // before the engine allocates
	m.reopen = func(ctx context.Context) (*spillway.Engine, error) {
		eng, err := spillway.Open(ctx, m.opened)
		if err != nil {
			return nil, e.explain(ctx, err)
		}
		return eng, nil
	}
	if m.engine, err = m.reopen(ctx); err != nil {
		return nil, err
	}
	m.faults.Arm()
	m.env = report.EngineEnv(top, m.engine)
	for _, s := range m.engine.Spaces() {
		switch s.Kind() {
		case tier.GPU:
			m.config.GPUMemoryBytes += s.Capacity
		case tier.Host:
			m.config.HostMemoryBytes += s.Capacity
		case tier.Disk:
			m.config.Disks[s.ID().Ordinal].CapacityBytes = s.Capacity
		}
	}
	for _, w := range m.engine.Warnings() {
		if w.Cause == causes.Simulated { // its figures must not be mistaken for those of a GPU
			m.notes.add(w.String())
		}
	}
	return m, nil
}

// newMachine returns a machine without an engine.
func (e *engineFlags) newMachine(top *topology.Topology) *machine {
	m := &machine{opened: spillway.Config{Topology: top}, config: e.config, notes: new(notes)}
	m.faults = inject.New(e.faults, e.config.DiskThrottleBytesPerS, e.seed)
	m.config.MonitorPeriodSeconds, m.config.StuckAfterSeconds = e.period.Seconds(), e.stallTimeout.Seconds()
	m.config.Disks, m.config.Faults = []report.Disk{}, []report.Fault{}
	for _, f := range e.faults {
		m.config.Faults = append(m.config.Faults, report.Fault{Spec: f.Text})
	}
	if e.noGPUs {
		m.config.GPU = "none"
	}
	return m
}

// configure makes the engine's configuration, with the faults and the rate of m.faults, adds the disks
// to m.config, and divides the memory of the process in m.plan.
func (e *engineFlags) configure(ctx context.Context, m *machine) error {
	total := m.opened.Topology.Limits.MemoryBytes
	if e.share > 0 && total > 0 {
		e.buffers = 2 * total / e.share
		most := total / e.share / tier.Page * tier.Page
		if !e.given("gpu-memory") {
			e.gpuMemory.Bytes = min(e.gpuMemory.Bytes, most)
		}
		if !e.given("host-memory") {
			e.hostMemory.Bytes = min(e.hostMemory.Bytes, most)
		}
	}
	memory, err := e.hostMemory.Of(total)
	if err != nil {
		return fail.Usagef("--host-memory: %w", err)
	}
	cfg := &m.opened
	cfg.HostMemory, cfg.GPUMarks, cfg.HostMarks = spillway.Bytes(memory), e.marks(), e.marks()
	cfg.MonitorPeriod, cfg.StallTimeout, cfg.Events, cfg.Logger = e.period, e.stallTimeout, e.events, slog.New(m.notes)
	cfg.MovesPerEdge, cfg.Limits.Permits.Slots = e.config.MovesPerEdge, new(e.config.DiskSlots)
	cfg.WriteAhead = cmp.Or(e.config.WriteAheadBytesPerS, -1) // 0 would be the engine's default
	if cfg.Policy, err = monitor.ByName(e.config.Policy); err != nil {
		return err
	}
	if cfg.Codec, err = convert.ParseCodec(e.config.Codec); err != nil {
		return err
	}
	if cfg.Limits.Quota, err = quotaSettings(); err != nil {
		return err
	}

	// There is a space on each GPU that the driver shows, --gpus at most, or there are --gpus simulated ones.
	cfg.GPUs = []spillway.GPUConfig{} // nil would be the engine's default
	simulated := 0
	if !e.noGPUs {
		found, gpu := 0, spillway.GPUConfig{
			Memory: e.gpuMemory,
			Wrap:   func(dev tier.Device) (tier.Device, error) { return m.faults.Device(dev), nil },
		}
		if e.config.GPU != "auto" {
			gpu.Backend = spillway.Backend(e.config.GPU)
		}
		if gpu.Backend != spillway.Sim {
			found = realGPUs()
		}
		count := cmp.Or(e.gpus, found, 1)
		switch {
		case e.gpuMemory.Share == 0 && e.gpuMemory.Bytes < tier.Page:
			return fail.Usagef("--gpu-memory %s is less than any batch takes (give at least 4KiB)", e.gpuMemory)
		case gpu.Backend != spillway.Sim && count > max(1, found):
			return fail.Environmentf("--gpus %d: NVIDIA's driver shows %d GPUs "+
				"(give a smaller number, or simulate GPUs with --gpu sim)", e.gpus, found)
		case gpu.Backend != spillway.CUDA && found == 0: // with CUDA, opening the engine fails with the reason
			simulated = count
		}
		cfg.GPUs = slices.Repeat([]spillway.GPUConfig{gpu}, count)
	}
	for range simulated {
		memory += min(e.gpuMemory.Bytes, math.MaxInt64-memory)
	}
	if err := e.addDisks(ctx, m, memory); err != nil {
		return err
	}
	if err := cfg.Validate(); err != nil {
		return fail.Usagef("%w (see --gpu-memory, --host-memory and --disk)", err)
	}
	return nil
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

// explain adds the flag to change to an error of opening an engine.
func (e *engineFlags) explain(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, spillway.ErrShareOfSimulated):
		return fail.Usagef("--gpu-memory %s: %w (give a size, such as 512MiB)", e.gpuMemory, err)
	case errors.Is(err, tier.ErrNotSupported) && e.config.GPU == "cuda":
		return fail.Environmentf("%w (install NVIDIA's driver and start containers with --gpus; "+
			"or use --gpu sim for the simulated one)", err)
	case errors.Is(err, tier.ErrNoSpace), ctx.Err() != nil:
		return err
	}
	return fail.Environmentf("%w (see --gpu-memory, --host-memory and --disk)", err)
}

// header returns the beginning of a document. It also works when the engine is closed.
func (m *machine) header(command string) report.Header {
	return report.NewHeader(command, m.env, m.engine.Warnings())
}

// settle adds the hits of faults to the configuration and to the notes, and returns err. If a fault can
// have caused err, settle adds the fault and the exit status of wrong data to it.
func (m *machine) settle(ctx context.Context, err error) error {
	for i, n := range m.faults.Hits() {
		m.config.Faults[i].Hits = n
	}
	for _, line := range m.faults.Told() {
		m.notes.add(line)
	}
	fault := m.faults.Blame()
	if err == nil || fault == "" || ctx.Err() != nil || fail.Status(err) == fail.Usage {
		return err
	}
	return &fail.Error{Status: fail.Wrong, Err: err, Fix: fault}
}

// finish shows the document with the notes. wrong is the error of wrong data in it; nil if there is
// none. It comes first in the error that finish returns, because it decides the exit status.
func (m *machine) finish(out *output, doc report.Document, wrong error) error {
	lines := m.notes.lines()
	err := errors.Join(wrong, out.show(doc, lines))
	if err == nil {
		out.warn(lines)
	}
	return err
}
