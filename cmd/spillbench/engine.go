package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"slices"
	"syscall"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/inject"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// machine is an open engine and what is known of where it runs.
type machine struct {
	topology *topology.Topology
	engine   *spillway.Engine
	env      report.Env
	config   report.Config
	notes    *notes
	warnings func() []diag.Warning // also when the engine is closed
	faults   *inject.Faults
	plan     headroom.Plan // of the process's memory
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
	cfg, err := e.engineConfig(ctx, top, log)
	if err != nil {
		return nil, err
	}
	cfg.Logger = slog.New(log)
	cfg.Events = e.events
	if e.trace != nil {
		cfg.Events = spillway.Tee(e.events, e.trace.Event)
	}
	faults, err := e.inject(&cfg)
	if err != nil {
		return nil, err
	}
	spilled, err := e.fitDisks(ctx, top, &cfg)
	if err != nil {
		return nil, err
	}
	if _, err := e.divide(top, expected(cfg, top)+spilled); err != nil { // before anything is taken
		return nil, err
	}
	eng, err := spillway.Open(ctx, cfg)
	if err != nil {
		return nil, e.explain(ctx, err)
	}
	if e.trace != nil {
		e.trace.Begin(cfg.Policy.Name(), eng.Stats().Spaces)
	}
	plan, err := e.divide(top, taken(eng)+spilled)
	if err != nil {
		return nil, errors.Join(err, eng.Close())
	}
	faults.Arm()
	for _, w := range eng.Warnings() {
		if w.Cause == causes.Simulated { // which is information, but its figures must not be taken for a GPU's
			log.once(w.String())
		}
	}
	m := &machine{topology: top, engine: eng, notes: log, warnings: eng.Warnings, faults: faults, plan: plan, env: report.EngineEnv(top, eng)}
	m.config = e.describe(eng, cfg.Disks)
	return m, nil
}

// engineConfig turns the flags into the engine's configuration.
func (e *engineFlags) engineConfig(ctx context.Context, top *topology.Topology, log *notes) (spillway.Config, error) {
	policy, err := monitor.ByName(e.policy)
	if err != nil {
		return spillway.Config{}, fail.Usagef("%w", err)
	}
	codec, err := convert.ParseCodec(e.codec)
	if err != nil {
		return spillway.Config{}, fail.Usagef("%w", err)
	}
	gpu, err := e.gpuSpace()
	if err != nil {
		return spillway.Config{}, err
	}
	hostMemory, err := e.hostMemory.Of(top.Limits.MemoryBytes)
	if err != nil {
		return spillway.Config{}, fail.Usagef("--host-memory: %w", err)
	}
	disks, err := e.spillDisks(ctx, log)
	if err != nil {
		return spillway.Config{}, err
	}
	for i := range disks {
		disks[i].Encrypt = e.encrypt
	}
	limit, err := quotaSettings()
	if err != nil {
		return spillway.Config{}, err
	}
	cfg := spillway.Config{
		GPUs:          []spillway.GPUConfig{gpu},
		HostMemory:    spillway.Bytes(hostMemory),
		Disks:         disks,
		GPUMarks:      e.marks(),
		HostMarks:     e.marks(),
		Policy:        policy,
		Codec:         codec,
		Limits:        spillway.Limits{Quota: limit, Permits: permit.Config{Slots: new(e.diskSlots)}},
		MonitorPeriod: e.period, MovesPerEdge: e.movesPerEdge, StuckAfter: e.stuckAfter, WriteAhead: int64(e.ahead),
		Topology: top,
	}
	if err := cfg.Validate(); err != nil {
		return cfg, fail.Usagef("%w (see --gpu-memory, --host-memory and --disk)", err)
	}
	return cfg, nil
}

// sealing is how much memory a volume that encrypts maps for what is under way: the requests
// of four transfers.
const sealing = 4 * volumes.DefaultDepth * (volumes.DefaultRequest + tier.Page)

// divide plans the memory of the process, beside spaces of so many bytes, and limits Go's
// heap to what is left.
func (e *engineFlags) divide(top *topology.Topology, spaces int64) (headroom.Plan, error) {
	beside := e.beside
	if e.encrypt {
		beside += sealing * int64(max(1, len(e.disks)))
	}
	plan, err := headroom.Divide(top.Limits, spaces, beside)
	if err == nil {
		plan.Apply()
	}
	return plan, err
}

// fitDisks finds room in the process's memory for the spill directories whose files are in
// memory. Those without a size of their own share what is left; one that does not fit is refused.
// It returns how many bytes they take together at most.
func (e *engineFlags) fitDisks(ctx context.Context, top *topology.Topology, cfg *spillway.Config) (spilled int64, err error) {
	for i := range cfg.Disks {
		d := &cfg.Disks[i]
		where, err := e.locate(ctx, d.Dir)
		if err != nil {
			return 0, err
		}
		if !where.InMemory() {
			continue
		}
		plan, err := e.divide(top, expected(*cfg, top)+spilled)
		if err != nil {
			return 0, err
		}
		left := int64(math.MaxInt64)
		if plan.Heap > 0 {
			left = (plan.Heap - headroom.LeastHeap) / tier.Page * tier.Page
		}
		refuse := func(what string) error {
			return &fail.Error{Status: fail.Environment, Fix: "name a directory on a disk with --disk DIR, or give the process more memory",
				Err: fmt.Errorf("the spill directory %s is in memory (%s), of which %s: the process may have %s (%s)",
					d.Dir, where.FileSystem, what, size.Approx(top.Limits.MemoryBytes), top.Limits.MemorySource)}
		}
		switch {
		case left < tier.Page:
			return 0, refuse("nothing is left")
		case d.Capacity.Bytes > left:
			have, want := size.Apart(left, d.Capacity.Bytes)
			return 0, refuse(fmt.Sprintf("%s are left, and not %s", have, want))
		case d.Capacity.IsZero() && where.FreeBytes >= 0:
			d.Capacity.Bytes = min(where.FreeBytes/2, left/int64(len(cfg.Disks)-i)) / tier.Page * tier.Page
		}
		spilled += d.Capacity.Bytes
	}
	return spilled, nil
}

// locate returns what a directory is on.
func (e *engineFlags) locate(ctx context.Context, dir string) (topology.Location, error) {
	if e.diskOf != nil {
		return e.diskOf(ctx, dir, topology.Options{})
	}
	return topology.DiskOf(ctx, dir, topology.Options{})
}

// expected is how much of the process's memory the spaces of an engine will take. Where a
// GPU may be a real one, it is taken to be one.
func expected(cfg spillway.Config, top *topology.Topology) int64 {
	sum := cfg.HostMemory.Bytes
	for _, g := range cfg.GPUs {
		if g.Backend == spillway.Sim || g.Backend == spillway.Auto && len(top.GPUs) == 0 {
			sum += min(g.Memory.Bytes, math.MaxInt64-sum)
		}
	}
	return sum
}

// taken is how much of the process's memory the spaces of an engine take.
func taken(eng *spillway.Engine) (sum int64) {
	for _, s := range eng.Spaces() {
		if s.Kind() == tier.Host || s.Backend() == "sim" {
			sum += s.Capacity()
		}
	}
	return sum
}

// gpuSpace is the GPU space that the flags ask for.
func (e *engineFlags) gpuSpace() (g spillway.GPUConfig, err error) {
	switch e.gpu {
	case "sim":
		g.Backend = spillway.Sim
	case "cuda":
		g.Backend = spillway.CUDA
	}
	g.Memory = e.gpuMemory
	if g.Memory.Share == 0 && g.Memory.Bytes < tier.Page {
		return g, fail.Usagef("--gpu-memory %s is less than any batch takes (give at least 4KiB)", e.gpuMemory)
	}
	return g, nil
}

// inject puts the faults and the rates that were asked for into the configuration.
func (e *engineFlags) inject(cfg *spillway.Config) (*inject.Faults, error) {
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
	return faults, nil
}

// blame gives an error that a fault on purpose may be the reason of the status that such
// a one has: the data is not what it should be, whatever the machine can.
func (m *machine) blame(ctx context.Context, err error) error {
	fault := m.faults.Blame()
	if err == nil || fault == "" || ctx.Err() != nil || fail.Status(err) == fail.Usage {
		return err
	}
	return &fail.Error{Status: fail.Wrong, Err: err, Fix: fault}
}

// settle adds to the notes and the configuration what became of the faults.
func (m *machine) settle() {
	for i, n := range m.faults.Hits() {
		m.config.Faults[i].Hits = n
	}
	for _, line := range m.faults.Told() {
		m.notes.add(line, line)
	}
}

// spillDisks checks the spill directories and works out their sizes. One without room is
// left out, and noted, if another has some.
func (e *engineFlags) spillDisks(ctx context.Context, log *notes) ([]spillway.DiskConfig, error) {
	if len(e.disks) == 0 {
		dir := os.TempDir()
		if err := e.usableDir(dir); err != nil {
			return nil, fail.Environmentf("the temp directory %s: %w (name another with --disk DIR)", dir, err)
		}
		return []spillway.DiskConfig{{Dir: dir}}, nil
	}
	var out []spillway.DiskConfig
	var full []error
	for _, f := range e.disks {
		d, err := e.spillDisk(ctx, f)
		switch {
		case err == nil:
			out = append(out, d)
		case errors.Is(err, errNoRoom):
			full = append(full, err)
		default:
			return nil, err
		}
	}
	if len(out) == 0 {
		return nil, full[0]
	}
	for _, err := range full {
		log.once("left out: " + err.Error())
	}
	return out, nil
}

// errNoRoom reports that a spill directory's file system is full.
var errNoRoom = errors.New("there is no room")

// spillDisk is one of the flags. It is errNoRoom if the directory's file system is full.
func (e *engineFlags) spillDisk(ctx context.Context, f diskFlag) (d spillway.DiskConfig, err error) {
	noRoom := func(why any) error {
		return &fail.Error{Status: fail.Environment, Err: fmt.Errorf("--disk %s: %w: %v", f.dir, errNoRoom, why), Fix: "make room there, or name another directory"}
	}
	err = e.usableDir(f.dir)
	switch {
	case errors.Is(err, syscall.EDQUOT):
		return d, &fail.Error{Status: fail.Environment, Err: fmt.Errorf("--disk %s: %w: %w", f.dir, errNoRoom, syscall.EDQUOT), Fix: quotaFix}
	case errors.Is(err, syscall.ENOSPC):
		return d, noRoom(syscall.ENOSPC)
	case err != nil:
		return d, fail.Usagef("--disk %s: %w (name a directory that you may write to)", f.dir, err)
	}
	where, err := e.locate(ctx, f.dir)
	if err != nil {
		return d, err
	}
	if where.FreeBytes >= 0 && where.FreeBytes < leastDisk {
		return d, noRoom(fmt.Sprintf("%d bytes are free", where.FreeBytes))
	}
	d = spillway.DiskConfig{Dir: f.dir}
	if d.Capacity.Bytes, err = f.capacity.Of(where.FreeBytes); err != nil {
		return d, fail.Usagef("--disk %s: %w", f.dir, err)
	}
	if !f.capacity.IsZero() && d.Capacity.Bytes < tier.Page {
		return d, fail.Usagef("--disk %s=%s is less than any batch takes (give at least 4KiB)", f.dir, f.capacity)
	}
	return d, nil
}

const (
	// leastDisk is what must be free in a spill directory: the engine takes a half.
	leastDisk = 2 * tier.Page
	quotaFix  = "have your disk quota raised, make room within it, or name another directory"
)

// usableDir checks that files can be made in dir.
func (e *engineFlags) usableDir(dir string) error {
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errors.New("no such directory")
	case err != nil:
		return pathless(err)
	case !info.IsDir():
		return errors.New("not a directory")
	}
	probe := e.probe
	if probe == nil {
		probe = probeDir
	}
	if err := probe(dir); err != nil {
		return fmt.Errorf("not writable: %w", pathless(err))
	}
	return nil
}

// pathless drops the operation and path of an error: the path is named already.
func pathless(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// explain adds to an error of opening which flag would help.
func (e *engineFlags) explain(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, spillway.ErrShareOfSimulated):
		return &fail.Error{Status: fail.Usage, Err: fmt.Errorf("--gpu-memory %s: %w", e.gpuMemory, err), Fix: "give a size, such as 512MiB"}
	case errors.Is(err, tier.ErrNotSupported) && e.gpu == "cuda":
		return &fail.Error{Status: fail.Environment, Err: err, Fix: "install NVIDIA's driver and start containers with --gpus; or use --gpu sim for the simulated one"}
	case errors.Is(err, tier.ErrNoSpace), ctx.Err() != nil:
		return err
	}
	return &fail.Error{Status: fail.Environment, Err: err, Fix: "see --gpu-memory, --host-memory and --disk"}
}

// describe is what the engine was opened with, defaults filled in.
func (e *engineFlags) describe(eng *spillway.Engine, disks []spillway.DiskConfig) report.Config {
	c := report.Config{
		GPU: e.gpu, Limit: e.limit, Trigger: e.trigger, Stop: e.stop,
		Policy: e.policy, Codec: e.codec, Encrypt: e.encrypt, MonitorPeriodSeconds: e.period.Seconds(), StuckAfterSeconds: e.stuckAfter.Seconds(), WriteAheadBytesPerS: max(0, int64(e.ahead)), MovesPerEdge: e.movesPerEdge, DiskSlots: e.diskSlots, Disks: []report.Disk{}, Faults: []report.Fault{}, DiskThrottleBytesPerS: e.throttle.Bytes,
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
