package spillway

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/fsinfo"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
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

func (e *Engine) openSpaces(ctx context.Context) error {
	for _, step := range [...]func() error{
		e.readLimits, e.configure, e.chooseGPUs, e.fitsMemory,
		func() error { return e.openGPUs(ctx) },
		e.openHost,
	} {
		if err := step(); err != nil {
			return fmt.Errorf("spillway: %w", err)
		}
	}
	for i, d := range e.cfg.Disks {
		if err := e.openDisk(ctx, i, d); err != nil {
			return fmt.Errorf("spillway: disk:%d: %w", i, err)
		}
	}
	var opened []*volumes.Volume
	for _, s := range e.spaces {
		if v, ok := s.Pool().(*volumes.Volume); ok {
			opened = append(opened, v)
		}
	}
	volumes.WarnOfOthers(opened...)
	e.warnOfMemory()
	return nil
}

// configure does what Configure does, with the GPUs that the driver shows to this process.
func (e *Engine) configure() (err error) {
	if len(e.topo.Nodes) == 0 {
		return errors.New("the topology has no NUMA node: want one of topology.Discover")
	}
	e.machine = newMachine(e.topo)
	var gpus []topology.GPU
	if e.cfg.GPUs == nil {
		gpus = e.shownByDriver()
	}
	e.cfg, err = e.machine.configured(e.cfg, gpus)
	return err
}

// fitsMemory refuses sizes that the machine does not have, for the GPUs that turned out to be
// simulated.
func (e *Engine) fitsMemory() error { return e.machine.together(&e.cfg, e.simulated) }

// gpuMemory is how much a simulated GPU has.
func (e *Engine) gpuMemory(g GPUConfig) int64 { return e.machine.simulatedBytes(&e.cfg, g) }

// openGPUs opens all devices and then the spaces on them: a limit may be a share of
// what they have together.
func (e *Engine) openGPUs(ctx context.Context) error {
	devices := make([]tier.Device, len(e.cfg.GPUs))
	for i, g := range e.cfg.GPUs {
		var err error
		if devices[i], err = e.openDevice(ctx, i, g); err != nil {
			return fmt.Errorf("gpu:%d: %w", i, err)
		}
	}
	e.wrapped = devices
	e.checkPeers()
	if err := e.setLimit(); err != nil {
		return err
	}
	for i, g := range e.cfg.GPUs {
		if err := e.openGPU(devices[i], i, g); err != nil {
			return fmt.Errorf("gpu:%d: %w", i, err)
		}
	}
	return nil
}

func (e *Engine) openGPU(dev tier.Device, i int, g GPUConfig) error {
	free, _ := e.bare[i].MemInfo() // what others have now of a quota or a budget is not gone for good
	dev, err := e.limited(dev, i)
	if err != nil {
		return err
	}
	memory, err := e.spaceOn(dev, free, i, g)
	if err != nil {
		return err
	}
	pool, err := devpool.NewMemory(dev)
	if err != nil {
		return err
	}
	pool.Panics.Logger = e.cfg.Logger
	id := tier.ID{Kind: tier.GPU, Ordinal: i}
	quota, hint := tier.QuotaOf(dev), "a larger GPU memory would help"
	switch {
	case e.limits.quota != nil:
		hint = "a larger GPU memory, or a higher limit by " + e.limits.quota.Stats().Name + ", would help"
	case quota != nil:
		hint = "a larger GPU memory, or a higher limit of its budget, would help"
	}
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: id, Capacity: memory, Fractions: marks(g.Marks, e.cfg.GPUMarks), Node: nodeOr(g.Node, dev.Info().Node),
		Backend: dev.Info().Backend, Pool: pool, Hint: hint,
		Quota: quota, Logger: e.cfg.Logger,
	})
	if err != nil {
		return errors.Join(err, pool.Close())
	}
	e.spaces = append(e.spaces, space)
	e.warnFor(id, func() []diag.Warning { return lossOf(space) })
	streams, err := devpool.NewStreams(dev, defaultStreams)
	if err != nil {
		return err
	}
	e.streams[id] = streams
	return nil
}

// openDevice returns the device of a GPU space with all that is to stand over it.
// What the engine is to close is in its list, also if this fails.
func (e *Engine) openDevice(ctx context.Context, i int, g GPUConfig) (dev tier.Device, err error) {
	own := g.Own
	switch {
	case g.Device != nil:
		dev = g.Device
	case g.Open != nil:
		dev, err = openWith(ctx, g)
		if err == nil && dev == nil {
			err = errors.New("the factory returned neither a device nor an error")
		}
		own = true
	case e.gpus[i].real:
		dev, err = e.openCUDA(i, g)
		own = true
	default:
		dev, err = sim.New(sim.Config{Memory: e.gpuMemory(g), Node: e.nodeOf(i), Touch: true})
		own = true
	}
	if err != nil {
		return nil, err
	}
	if own {
		e.devices = append(e.devices, dev)
	}
	if g.Wrap != nil {
		wrapped, err := wrapWith(g, dev)
		if err == nil && wrapped == nil {
			err = errors.New("the decorator returned neither a device nor an error")
		}
		if err != nil {
			return nil, err
		}
		dev = wrapped
	}
	if g.Device != nil || g.Open != nil || g.Wrap != nil {
		dev = devpool.Guarded(dev)
	}
	e.bare = append(e.bare, dev)
	if dev, err = e.underBudgets(dev); err == nil && own {
		e.devices[len(e.devices)-1] = dev
	}
	return dev, err
}

// openWith calls the factory of a device, and makes its panic an error.
func openWith(ctx context.Context, g GPUConfig) (dev tier.Device, err error) {
	defer guard.Error(&err, "GPUConfig.Open")
	return g.Open(ctx, g.Memory.Bytes)
}

// wrapWith calls the decorator of a device, and makes its panic an error.
func wrapWith(g GPUConfig, dev tier.Device) (wrapped tier.Device, err error) {
	defer guard.Error(&err, "GPUConfig.Wrap")
	return g.Wrap(dev)
}

// spaceOn returns the size of the space on a device: at most what the device, its budgets and its
// quota have. A larger space would promise memory that it cannot give, and would never reach its
// marks. spaceOn warns if the space gets less than was asked for. It does not warn of less than a
// page or the device's granule: devices round their memory to those.
func (e *Engine) spaceOn(dev tier.Device, free int64, i int, g GPUConfig) (int64, error) {
	total := e.limits.physical(dev)
	size := g.Memory.Bytes
	switch {
	case e.simulated(i):
		if size = e.gpuMemory(g); size != g.Memory.Bytes { // the program did not ask for this size
			size = min(size, total)
		}
	case size == 0:
		size = min(free, total)
	}
	if size-total >= max(tier.Page, dev.Charge(1)) {
		w := causes.Warn(causes.GPUSize, "%d bytes were asked for, more than its device, its budget or its quota has: "+
			"the space has %d bytes", size, total)
		w.Space = tier.ID{Kind: tier.GPU, Ordinal: i}.String()
		e.warn(w)
	}
	size = min(size, total)
	if size < tier.Page {
		return 0, fmt.Errorf(
			"%s has no memory free for a page of %d bytes, of %d bytes: %w",
			dev.Info().Name,
			tier.Page,
			total,
			tier.ErrNoSpace,
		)
	}
	return size, nil
}

// openHost opens the pinned host spaces.
func (e *Engine) openHost() error {
	pinners := e.pinners()
	for i, h := range e.cfg.Hosts {
		bind := h.Node
		if len(e.machine.nodes) == 1 {
			bind = -1
		}
		capacity := h.Memory.Bytes / tier.Page * tier.Page
		arena, err := host.NewArena(
			host.Config{Capacity: capacity, Node: bind, Lock: len(pinners) == 0, Touch: true, Huge: true},
		)
		if err != nil {
			return fmt.Errorf("host:%d: %w", i, err)
		}
		id := tier.ID{Kind: tier.Host, Ordinal: i}
		e.pin(id, arena, pinners)
		e.warnFor(id, func() []diag.Warning { return e.swapped(arena.Stats().Warnings) })
		space, err := tier.NewSpace(tier.SpaceConfig{
			ID: id, Capacity: capacity, Fractions: marks(h.Marks, e.cfg.HostMarks), Node: h.Node,
			Backend: "host", Pool: arena, Hint: "more host memory would help", Logger: e.cfg.Logger,
		})
		if err != nil {
			return errors.Join(err, arena.Close())
		}
		e.spaces = append(e.spaces, space)
	}
	return nil
}

// paired reports whether b is a host space that is set apart for the GPU space a, or the
// other way round.
func (e *Engine) paired(a, b tier.ID) bool {
	if a.Kind == tier.Host {
		a, b = b, a
	}
	return a.Kind == tier.GPU && b.Kind == tier.Host && slices.Contains(e.cfg.Hosts[b.Ordinal].GPUs, a.Ordinal)
}

// nodeOr returns the node that is configured, or the other if none is.
func nodeOr(configured *int, other int) int {
	if configured != nil {
		return *configured
	}
	return other
}

func (e *Engine) openDisk(ctx context.Context, i int, d DiskConfig) error {
	capacity := d.Capacity.Bytes
	if capacity == 0 {
		free, err := e.freeFor(ctx, i)
		if err != nil {
			return err
		}
		share := d.Capacity
		if share.IsZero() {
			share.Share = defaultDiskShare
		}
		if capacity = pagesOf(free-d.Reserve, share); capacity == 0 {
			return fmt.Errorf("%s has %d bytes free and a reserve of %d: %s of the rest is less than %d bytes: %w",
				d.Dir, free, d.Reserve, share, tier.Page, tier.ErrNoSpace)
		}
	}
	volume, err := volumes.Open(volumes.Config{
		Dir:      d.Dir,
		Capacity: capacity,
		Reserve:  d.Reserve,
		FS:       d.FS,
		Encrypt:  d.Encrypt,
		Key:      d.Key,
		Persist:  d.Persist,
		Space:    tier.ID{Kind: tier.Disk, Ordinal: i},
		Stripe:   &e.stripe,
		Events:   e.sayer(),
	})
	e.cfg.Disks[i].Key = nil // the caller's, and not to be kept
	if err != nil {
		return err
	}
	e.warnFor(tier.ID{Kind: tier.Disk, Ordinal: i}, volume.Warnings)
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{
			Kind:    tier.Disk,
			Ordinal: i,
		},
		Capacity:  capacity,
		Fractions: marks(d.Marks, e.cfg.DiskMarks),
		Node:      nodeOr(d.Node, topology.Unknown),
		Backend:   "disk",
		Pool:      volume,
		Hint:      fmt.Sprintf("a larger disk capacity of %s would help", d.Dir),
		Logger:    e.cfg.Logger,
	})
	if err != nil {
		return errors.Join(err, volume.Close())
	}
	e.spaces = append(e.spaces, space)
	if !d.Persist {
		return nil
	}
	e.recorder.Add(space)
	return e.found.Add(space)
}

// pagesOf returns a share of n bytes in whole pages; 0 if there is not one.
func pagesOf(n int64, share Amount) int64 {
	part, err := share.Of(n)
	if err != nil { // less than a byte
		return 0
	}
	return part / tier.Page * tier.Page
}

// freeFor returns how many bytes disk i may count as free. Disks on one file system, which are those
// whose directories have the same device, share the bytes that are left without the capacities in
// bytes of other disks there.
func (e *Engine) freeFor(ctx context.Context, i int) (free int64, err error) {
	defer guard.Error(&err, "DiskConfig.FS")
	device := func(d DiskConfig) (id uint64, known bool) {
		files := d.FS
		if files == nil {
			files = disk.OS()
		}
		info, err := files.Stat(d.Dir)
		if err != nil {
			return 0, false // to open the disk will fail
		}
		return fsinfo.Device(info)
	}
	d := e.cfg.Disks[i]
	if free, err = freeIn(ctx, d); err != nil {
		return 0, err
	}
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

// freeIn returns how many bytes are free where d's files are to lie.
func freeIn(ctx context.Context, d DiskConfig) (free int64, err error) {
	defer guard.Error(&err, "DiskConfig.FS")
	if d.FS != nil { // what topology knows is the machine's own
		u, err := d.FS.Usage(d.Dir)
		return u.Free, err
	}
	where, err := topology.DiskOf(ctx, d.Dir, topology.Options{})
	if err != nil {
		return 0, err
	}
	return where.FreeBytes, nil
}

// openStaging takes the pinned chunks, through which transfers between device
// and disk go, out of one host space on each node.
func (e *Engine) openStaging() error {
	for _, s := range e.reservations.Spaces().InTier(tier.Host) {
		if e.staging[s.Node()] != nil {
			continue // of several spaces on a node one has the chunks for all
		}
		share := s.Limit() / stagingMaxShare
		chunk := max(tier.Page, min(int64(stagingChunk), share/2/tier.Page*tier.Page))
		count := max(1, min(int64(stagingChunks), share/chunk))
		r, err := e.reservations.TryReserve(reservation.Specific(s.ID()), chunk*count)
		if err != nil {
			return err
		}
		buf, err := r.Alloc(chunk * count)
		if err := errors.Join(err, r.Release()); err != nil {
			return err
		}
		s.Hold(buf.Charge())
		e.staging[s.Node()] = host.NewStaging(buf, chunk)
	}
	return nil
}

// nodeOf returns the NUMA node of the simulated GPU i: spread over the nodes,
// as GPUs are on real machines.
func (e *Engine) nodeOf(i int) int { return e.machine.nodes[i%len(e.machine.nodes)] }
