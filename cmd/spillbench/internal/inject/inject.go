// Package inject makes the faults that --fault asks for, and the slow disks of --disk-throttle.
//
//	Parse ─▶ Spec ─┐
//	               ▼
//	            Faults ─▶ Volume: the file system of a spill volume, with its rate and faults
//	               │   ─▶ Device: a device with faults
//	               └───── Arm: the faults begin; Hits: how many operations had each
//
// The code that opens the engine owns a Faults, which needs no closing. It calls Volume and Device
// before Arm. All other methods are safe for concurrent use, at any time. The package has no locks of
// its own.
package inject

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// Faults makes the file systems and devices of an engine.
type Faults struct {
	specs    []Spec
	throttle int64 // bytes a second; 0: no limit
	seed     uint64

	files   *faultfs.FS // below all volumes, so that it counts their operations together; nil without faults in it
	devices []*faultdev.Device
	hits    []atomic.Int64 // of each spec
	before  []int          // operations before Arm, for each spec
}

// New returns the faults that specs describe, in volumes that read and write at most throttle bytes a
// second, 0 for no limit. The seed makes chance repeatable, provided that operations have the same
// order.
func New(specs []Spec, throttle int64, seed uint64) *Faults {
	f := &Faults{specs: specs, throttle: throttle, seed: seed}
	f.hits, f.before = make([]atomic.Int64, len(specs)), make([]int, len(specs))
	if slices.ContainsFunc(specs, Spec.onDisk) {
		f.files = faultfs.New(disk.OS(), seed)
	}
	return f
}

// onDisk reports whether the fault is one of files, and not of devices.
func (s Spec) onDisk() bool { return operations[s.Op].onDisk }

// Volume returns the file system of one more volume. It returns nil, for the operating system's, if
// there are neither faults nor rates.
func (f *Faults) Volume() disk.FS {
	switch {
	case f.files != nil:
		return f.slow(f.files)
	case f.throttle != 0:
		return f.Slow()
	}
	return nil
}

// Slow returns a file system with the rate of a volume, and without faults.
func (f *Faults) Slow() disk.FS { return f.slow(disk.OS()) }

func (f *Faults) slow(inner disk.FS) disk.FS {
	if f.throttle == 0 {
		return inner
	}
	return faultfs.New(inner, f.seed, faultfs.Rule{
		Ops: []string{"read", "write"}, Effect: faultfs.Throttle(f.throttle),
	})
}

// Device returns dev with faults, or dev itself if no spec is for devices.
func (f *Faults) Device(dev tier.Device) tier.Device {
	if !slices.ContainsFunc(f.specs, func(s Spec) bool { return !s.onDisk() }) {
		return dev
	}
	d := faultdev.New(dev, f.seed)
	f.devices = append(f.devices, d)
	return d
}

// Arm begins to inject faults and to count operations. Opening an engine takes a number of operations
// that depends on the machine, so they do not count.
func (f *Faults) Arm() {
	for i, s := range f.specs {
		f.before[i] = f.count(s)
		e := effects[s.Kind]
		if s.Kind == "slow" {
			e = effect{faultfs.Slow(s.Delay), faultdev.Slow(s.Delay)}
		}
		ops, skip := []string{operations[s.Op].pattern}, max(0, s.At-1)
		if s.onDisk() {
			f.files.Add(faultfs.Rule{
				Ops: ops, Path: s.Path, Skip: skip, Times: s.Times, Probability: s.Probability,
				Hit: func(string, string) { f.hits[i].Add(1) }, Effect: e.file,
			})
			continue
		}
		for _, d := range f.devices {
			d.Add(faultdev.Rule{
				Ops: ops, Skip: skip, Times: s.Times, Probability: s.Probability,
				Hit: func(string, int64) { f.hits[i].Add(1) }, Effect: e.device,
			})
		}
	}
}

// count returns the number of operations that a spec is about, since the engine was opened.
func (f *Faults) count(s Spec) (n int) {
	op := operations[s.Op]
	if op.onDisk {
		return f.files.Count(op.pattern)
	}
	for _, d := range f.devices {
		n += d.Count(op.pattern)
	}
	return n
}

// Hits returns how many operations each spec hit, in the order of New.
func (f *Faults) Hits() (all []int64) {
	for i := range f.hits {
		all = append(all, f.hits[i].Load())
	}
	return all
}

// Told returns a line for each spec, with the number of its hits.
func (f *Faults) Told() (lines []string) {
	for i, s := range f.specs {
		lines = append(lines, fmt.Sprintf("--fault %s, hits: %d of %d operations",
			s.Text, f.hits[i].Load(), f.count(s)-f.before[i]))
	}
	return lines
}

// Blame returns the first spec that can have caused an error, with the number of its hits, or "" if
// none can. Delays and short transfers cause no errors.
func (f *Faults) Blame() string {
	for i, s := range f.specs {
		if n := f.hits[i].Load(); n > 0 && s.Kind != "slow" && s.Kind != "short" {
			return fmt.Sprintf("--fault %s, hits: %d", s.Text, n)
		}
	}
	return ""
}
