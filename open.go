package spillway

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/fsinfo"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/sim"
	"github.com/spillway-db/spillway/topology"
)

const (
	defaultGPUMemory  = 256 << 20
	defaultStreams    = 16        // lent to one borrower at a time, so that many moves can run
	defaultWriteAhead = 64 << 20  // bytes a second: less than any disk that data is spilled to writes
	stagingChunk      = 512 << 10 // what is in use of it stays in the caches; see host.Staging
	stagingChunks     = 16        // two transfers between device and disk at full depth
	stagingMaxShare   = 8         // staging takes at most 1/8 of a host space
	defaultDiskShare  = 0.5       // of the bytes that are free, without the reserve
)

// openSpaces fills in the configuration as Configure does, but with the GPUs that the driver shows to
// this process, and opens all spaces.
func (e *Engine) openSpaces(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("spillway: %w", err)
		}
	}()
	if len(e.topo.Nodes) == 0 {
		return errors.New("the topology has no NUMA node: want one of topology.Discover")
	}
	e.machine = newMachine(e.topo)
	settings := &e.limits.settings
	if q := e.cfg.Limits.Quota; q != nil {
		*settings = *q
	} else if lookup, err := leases.LookupLimits(os.LookupEnv); err != nil {
		return err
	} else if *settings, err = quota.FromEnv(lookup); err != nil {
		return err
	}
	if settings.Ledger != "" {
		var failed error // joining the ledger returns it, too, if it lasts
		if e.machine.held, failed = leases.Holders(settings.Ledger); failed != nil {
			e.machine.held = nil
			e.cfg.Logger.Debug("spillway: the ledger does not report the load of GPUs", "error", failed)
		}
	}
	var gpus []topology.GPU
	if e.cfg.GPUs == nil {
		gpus = e.loadDriver().gpus
	}
	if e.cfg, err = e.machine.configured(e.cfg, gpus); err != nil {
		return err
	}
	if err := e.chooseGPUs(); err != nil {
		return err
	}
	// Refuse sizes that the machine does not have, for the GPUs that turned out to be simulated.
	if err := e.machine.together(&e.cfg, e.simulated); err != nil {
		return err
	}
	// Open all devices, and then the spaces on them: a limit may be a share of what they have together.
	for i, g := range e.cfg.GPUs {
		dev, err := e.openDevice(ctx, i, g)
		if err != nil {
			return fmt.Errorf("gpu:%d: %w", i, err)
		}
		e.wrapped = append(e.wrapped, dev)
	}
	// A copy tests whether GPUs reach each other's memory, as the driver reports, before any of
	// their memory is in use. If it fails, copies between the two go through pinned host memory.
	cuda.CheckPeers(e.wrapped, func(from, to int, why error) {
		e.warn(causes.Warn(causes.PeerAccess, "the driver promises that gpu:%d and gpu:%d reach each other, but %v: "+
			"copies between them go through pinned host memory, which is slower", from, to, why))
	})
	if err := e.setLimit(); err != nil {
		return err
	}
	for i, g := range e.cfg.GPUs {
		if err := e.openGPU(e.wrapped[i], i, g); err != nil {
			return fmt.Errorf("gpu:%d: %w", i, err)
		}
	}
	if err := e.openHost(); err != nil {
		return err
	}
	var opened []*volumes.Volume
	for i, d := range e.cfg.Disks {
		v, err := e.openDisk(i, d)
		if err != nil {
			return fmt.Errorf("disk:%d: %w", i, err)
		}
		opened = append(opened, v)
	}
	volumes.WarnOfOthers(opened...)
	e.warnOfMemory()
	return nil
}

func (e *Engine) openGPU(dev tier.Device, i int, g GPUConfig) error {
	// Others may return what they now use of a quota or a budget, so ask the device itself.
	free, _, _ := e.bare[i].MemInfo() // 0 after an error
	dev, err := e.limited(dev, i)
	if err != nil {
		return err
	}
	// The space gets at most what the device, its budgets and its quota have. A larger one would
	// promise memory that it cannot give, and would never reach its marks.
	id := tier.ID{Kind: tier.GPU, Ordinal: i}
	total, memory := e.limits.physical(dev), g.Memory.Bytes
	switch {
	case e.simulated(i):
		if memory = e.machine.simulatedBytes(&e.cfg, g); memory != g.Memory.Bytes { // not the program's choice
			memory = min(memory, total)
		}
	case memory == 0:
		memory = min(free, total)
	}
	// Devices round their memory to pages or to their granule: less than that is no loss.
	if memory-total >= max(tier.Page, dev.Charge(1)) {
		w := causes.Warn(causes.GPUSize, "%d bytes were asked for, more than its device, its budget or its quota has: "+
			"the space has %d bytes", memory, total)
		w.Space = id.String()
		e.warn(w)
	}
	if memory = min(memory, total); memory < tier.Page {
		return fmt.Errorf("%s has no memory free for a page of %d bytes, of %d bytes: %w",
			dev.Info().Name, tier.Page, total, tier.ErrNoSpace)
	}
	pool, err := devpool.NewMemory(dev)
	if err != nil {
		return err
	}
	pool.Panics.Logger = e.cfg.Logger
	quota, hint := tier.QuotaOf(dev), "a larger GPU memory would help"
	switch {
	case e.limits.quota != nil:
		hint = "a larger GPU memory, or a higher limit by " + e.limits.quota.Stats().Name + ", would help"
	case quota != nil:
		hint = "a larger GPU memory, or a higher limit of its budget, would help"
	}
	space, err := e.addSpace(tier.SpaceConfig{
		ID: id, Capacity: memory, Marks: marks(g.Marks, e.cfg.GPUMarks), Node: nodeOr(g.Node, dev.Info().Node),
		Backend: dev.Info().Backend, Pool: pool, Hint: hint, Quota: quota,
	})
	if err != nil {
		return err
	}
	e.warnFor(id, func() []diag.Warning {
		lost, ok := errors.AsType[*tier.LostError](space.Lost())
		if !ok {
			return nil
		}
		return []diag.Warning{causes.Warn(causes.GPULost, "the GPU is lost, with %d bytes in use there: %v: "+
			"what has no other place is gone, and other spaces are used", lost.Bytes, lost.Cause)}
	})
	streams, err := devpool.NewStreams(dev, defaultStreams)
	if err != nil {
		return err
	}
	e.streams[id] = streams
	return nil
}

// addSpace makes a space of the engine's, which closes the pool from then on, also after an error.
func (e *Engine) addSpace(c tier.SpaceConfig) (*tier.Space, error) {
	c.Logger = e.cfg.Logger
	space, err := tier.NewSpace(c)
	if err != nil {
		return nil, errors.Join(err, c.Pool.Close())
	}
	e.spaces = append(e.spaces, space)
	return space, nil
}

// openDevice returns the device of a GPU space with all that is to stand over it. Devices that the
// engine is to close are in its list, also if this fails.
func (e *Engine) openDevice(ctx context.Context, i int, g GPUConfig) (dev tier.Device, err error) {
	switch gpu := e.gpus[i]; {
	case g.Device != nil:
		dev = g.Device
	case g.Open != nil:
		dev, err = deviceOf("GPUConfig.Open", func() (tier.Device, error) { return g.Open(ctx, g.Memory.Bytes) })
	case gpu != nil:
		dev, err = e.driver.Open(cuda.Config{Ordinal: gpu.Index, Node: gpu.Node, Memory: g.Memory.Bytes})
	default: // spread over the nodes, as GPUs are on real machines
		memory, nodes := e.machine.simulatedBytes(&e.cfg, g), e.machine.nodes
		dev, err = sim.New(sim.Config{Memory: memory, Node: nodes[i%len(nodes)], Touch: true})
	}
	if err != nil {
		return nil, err
	}
	own := g.Own || g.Device == nil
	if own {
		e.devices = append(e.devices, dev)
	}
	if g.Wrap != nil {
		inner := dev
		if dev, err = deviceOf("GPUConfig.Wrap", func() (tier.Device, error) { return g.Wrap(inner) }); err != nil {
			return nil, err
		}
	}
	if g.Device != nil || g.Open != nil || g.Wrap != nil {
		dev = devpool.Guarded(dev)
	}
	e.bare = append(e.bare, dev)
	for _, b := range slices.Backward(e.cfg.Limits.Budgets) { // the first is outermost
		if dev, err = b.Wrap(dev); err != nil {
			return nil, err
		}
	}
	if own {
		e.devices[len(e.devices)-1] = dev
	}
	return dev, nil
}

// deviceOf calls a function of the configuration that makes a device.
func deviceOf(what string, f func() (tier.Device, error)) (dev tier.Device, err error) {
	defer guard.Error(&err, what)
	if dev, err = f(); err == nil && dev == nil {
		err = fmt.Errorf("%s returned neither a device nor an error", what)
	}
	return dev, err
}

// openHost opens the pinned host spaces.
func (e *Engine) openHost() error {
	var pinners []tier.Pinner // one for each GPU: devices of one driver pin memory once for all
	for _, d := range e.wrapped {
		if p, ok := tier.As[tier.Pinner](d); ok {
			pinners = append(pinners, p)
		}
	}
	for i, h := range e.cfg.Hosts {
		bind := h.Node
		if len(e.machine.nodes) == 1 {
			bind = -1
		}
		id, capacity := tier.ID{Kind: tier.Host, Ordinal: i}, wholePages(h.Memory.Bytes)
		arena, err := host.NewArena(
			host.Config{Capacity: capacity, Node: bind, Lock: len(pinners) == 0, Touch: true, Huge: true},
		)
		if err != nil {
			return fmt.Errorf("host:%d: %w", i, err)
		}
		e.pin(id, arena, pinners)
		e.warnFor(id, func() []diag.Warning { return e.swapped(arena.Stats().Warnings) })
		if _, err := e.addSpace(tier.SpaceConfig{
			ID: id, Capacity: capacity, Marks: marks(h.Marks, e.cfg.HostMarks), Node: h.Node,
			Backend: "host", Pool: arena, Hint: "more host memory would help",
		}); err != nil {
			return err
		}
	}
	return nil
}

// paired reports whether b is a host space that is set apart for the GPU space a, or the
// other way round.
func (e *Engine) paired(a, b tier.ID) bool {
	if a.Kind.IsMemory() {
		a, b = b, a
	}
	return a.Kind.IsDevice() && b.Kind.IsMemory() && slices.Contains(e.cfg.Hosts[b.Ordinal].GPUs, a.Ordinal)
}

// nodeOr returns the node that is configured, or the other if none is.
func nodeOr(configured *int, other int) int {
	if configured != nil {
		return *configured
	}
	return other
}

func (e *Engine) openDisk(i int, d DiskConfig) (*volumes.Volume, error) {
	capacity := d.Capacity.Bytes
	if capacity == 0 {
		free, err := e.freeFor(i)
		if err != nil {
			return nil, err
		}
		share := d.Capacity
		if share.IsZero() {
			share.Share = defaultDiskShare
		}
		n, _ := share.Of(free - d.Reserve) // an error is less than a byte
		if capacity = wholePages(n); capacity == 0 {
			return nil, fmt.Errorf("%s has %d bytes free and a reserve of %d: %s of the rest is less than %d bytes: %w",
				d.Dir, free, d.Reserve, share, tier.Page, tier.ErrNoSpace)
		}
	}
	id := tier.ID{Kind: tier.Disk, Ordinal: i}
	volume, err := volumes.Open(volumes.Config{
		Dir: d.Dir, Capacity: capacity, Reserve: d.Reserve, FS: d.FS, Encrypt: d.Encrypt,
		Key: d.Key, Persist: d.Persist,
		Space: id, Stripe: &e.stripe, Events: e.cfg.Events,
	})
	e.cfg.Disks[i].Key = nil // the caller's, and not to be kept
	if err != nil {
		return nil, err
	}
	e.warnFor(id, volume.Warnings)
	space, err := e.addSpace(tier.SpaceConfig{
		ID: id, Capacity: capacity, Marks: marks(d.Marks, e.cfg.DiskMarks), Node: nodeOr(d.Node, topology.Unknown),
		Backend: "disk", Pool: volume, Hint: fmt.Sprintf("a larger disk capacity of %s would help", d.Dir),
	})
	if err != nil || !d.Persist {
		return volume, err
	}
	e.recorder.Add(space)
	return volume, e.found.Add(space)
}

// freeFor returns how many bytes disk i may count as free. Disks on one file system, which are those
// whose directories have the same device, share the bytes that are left without the capacities in
// bytes of other disks there.
func (e *Engine) freeFor(i int) (free int64, err error) {
	defer guard.Error(&err, "DiskConfig.FS")
	on := func(d DiskConfig) disk.FS {
		if d.FS != nil {
			return d.FS
		}
		return disk.OS()
	}
	device := func(d DiskConfig) (id uint64, known bool) {
		info, err := on(d).Stat(d.Dir)
		if err != nil {
			return 0, false // to open the disk will fail
		}
		return fsinfo.Device(info)
	}
	d := e.cfg.Disks[i]
	usage, err := on(d).Usage(d.Dir)
	if d.FS == nil && errors.Is(err, fs.ErrNotExist) {
		return math.MaxInt64, nil // to open the disk will fail, with advice
	}
	if err != nil {
		return 0, err
	}
	free = usage.Free
	mine, known := device(d)
	sharers := int64(1)
	for j, other := range e.cfg.Disks {
		if id, ok := device(other); j == i || !known || !ok || id != mine {
			continue
		}
		if free -= other.Capacity.Bytes; other.Capacity.Bytes == 0 {
			sharers++
		}
	}
	return max(0, free) / sharers, nil
}

// openStaging takes the pinned chunks, through which transfers between device
// and disk go, out of one host space on each node.
func (e *Engine) openStaging() error {
	for _, s := range e.reservations.Spaces().InTier(tier.Host) {
		if e.staging[s.Node] != nil {
			continue // of several spaces on a node one has the chunks for all
		}
		share := s.State().Limit / stagingMaxShare
		chunk := max(tier.Page, min(int64(stagingChunk), wholePages(share/2)))
		count := max(1, min(int64(stagingChunks), share/chunk))
		r, err := e.reservations.TryReserve(reservation.Specific(s.ID()), chunk*count, nil)
		if err != nil {
			return err
		}
		buf, err := r.Alloc(chunk * count)
		if err := errors.Join(err, r.Release()); err != nil {
			return err
		}
		s.Hold(buf.Charge())
		e.staging[s.Node] = host.NewStaging(buf, chunk)
	}
	return nil
}
