// Package inject makes the faults that --fault asks for, and the slow disks of
// --disk-throttle.
//
//	Parse ─▶ Spec ─┐
//	               ▼
//	            Faults ─▶ Volume: a file system for each spill volume, rates and faults in it
//	               │   ─▶ Device: a device with faults
//	               └───── Arm: from here on; Told: how often each hit
//
// The code that opens the engine owns a Faults, which needs no closing. Volume and Device come
// before Arm. All other methods may be called at any time, by several goroutines. It takes no locks
// of its own.
package inject

import (
	"fmt"
	"sync/atomic"
	"syscall"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// Faults are what an engine is opened with.
type Faults struct {
	specs    []Spec
	throttle int64 // bytes a second; 0 for none
	seed     uint64

	files   *faultfs.FS // that of all volumes, so that their operations are counted together; nil if it has no faults
	devices []*faultdev.Device
	hits    []atomic.Int64 // by spec
	before  map[string]int // operations while the engine was opened
}

// New returns faults that happen as the specs say and volumes whose reads and writes
// pass at a rate in bytes a second, 0 for no limit. seed makes chance repeatable, as far
// as the order of operations is.
func New(specs []Spec, throttle int64, seed uint64) *Faults {
	f := &Faults{
		specs:    specs,
		throttle: throttle,
		seed:     seed,
		hits:     make([]atomic.Int64, len(specs)),
		before:   make(map[string]int),
	}
	for _, s := range specs {
		if s.onDisk() && f.files == nil {
			f.files = faultfs.New(disk.OS(), seed)
		}
	}
	return f
}

// Volume returns the file system of one more volume; nil is the machine's own, if there are neither
// faults nor rates.
func (f *Faults) Volume() disk.FS {
	switch {
	case f.files != nil:
		return f.slow(f.files)
	case f.throttle != 0:
		return f.Slow()
	}
	return nil
}

// Slow returns a file system as slow as those of the volumes, without faults.
func (f *Faults) Slow() disk.FS { return f.slow(disk.OS()) }

func (f *Faults) slow(inner disk.FS) disk.FS {
	if f.throttle == 0 {
		return inner
	}
	return faultfs.New(inner, f.seed, faultfs.Rule{
		Ops: []string{"read", "write"}, Effect: faultfs.Throttle(f.throttle),
	})
}

// Device puts faults over a device, if there are any for devices.
func (f *Faults) Device(dev tier.Device) tier.Device {
	for _, s := range f.specs {
		if !s.onDisk() {
			d := faultdev.New(dev, f.seed)
			f.devices = append(f.devices, d)
			return d
		}
	}
	return dev
}

// Arm lets faults happen from here on: what an engine does while it is opened is not
// what is counted, and depends on the machine.
func (f *Faults) Arm() {
	for _, s := range f.specs {
		f.before[s.Op] = f.count(s.Op)
	}
	for i, s := range f.specs {
		skip := max(0, s.At-1)
		if s.onDisk() {
			f.files.Add(faultfs.Rule{
				Ops: []string{s.Op}, Path: s.Path, Skip: skip, Times: s.Times, Probability: s.Probability,
				Hit: func(string, string) { f.hits[i].Add(1) }, Effect: s.onFile(),
			})
			continue
		}
		for _, d := range f.devices {
			d.Add(faultdev.Rule{
				Ops: deviceOps(s.Op), Skip: skip, Times: s.Times, Probability: s.Probability,
				Hit: func(string, int64) { f.hits[i].Add(1) }, Effect: s.onDevice(),
			})
		}
	}
}

func (s *Spec) onFile() faultfs.Effect {
	switch s.Kind {
	case "enospc":
		return faultfs.Fail(syscall.ENOSPC)
	case "short":
		return faultfs.Short()
	case "bitflip":
		return faultfs.BitFlip()
	case "slow":
		return faultfs.Slow(s.Delay)
	}
	return faultfs.Fail(syscall.EIO)
}

func (s *Spec) onDevice() faultdev.Effect {
	switch s.Kind {
	case "oom":
		return faultdev.OutOfMemory()
	case "bitflip":
		return faultdev.BitFlip()
	case "slow":
		return faultdev.Slow(s.Delay)
	}
	return faultdev.FailWork(syscall.EIO) // as real devices fail: when the work comes to be done
}

func deviceOps(op string) []string {
	if op == "copy" {
		return []string{"copy-*"}
	}
	return []string{"alloc"}
}

// count returns how many operations of a kind there were.
func (f *Faults) count(op string) (n int) {
	if op == "read" || op == "write" {
		return f.files.Count(op)
	}
	for _, d := range f.devices {
		n += d.Count(deviceOps(op)...)
	}
	return n
}

// Hits returns how many operations each spec hit, in their order.
func (f *Faults) Hits() []int64 {
	out := make([]int64, len(f.hits))
	for i := range f.hits {
		out[i] = f.hits[i].Load()
	}
	return out
}

// Told reports in words what hit, and what did not, a line for each spec.
func (f *Faults) Told() []string {
	var lines []string
	for i, s := range f.specs {
		hits := f.hits[i].Load()
		lines = append(
			lines,
			fmt.Sprintf("--fault %s, hits: %d of %d operations", s.Text, hits, f.count(s.Op)-f.before[s.Op]),
		)
	}
	return lines
}

// Blame returns the first spec that can be the reason of an error, with how often it hit;
// empty if none is. Delays and short transfers are no reason.
func (f *Faults) Blame() string {
	for i, s := range f.specs {
		if n := f.hits[i].Load(); n > 0 && s.Kind != "slow" && s.Kind != "short" {
			return fmt.Sprintf("--fault %s, hits: %d", s.Text, n)
		}
	}
	return ""
}
