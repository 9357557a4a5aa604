package sim

import (
	"unsafe"

	"github.com/spillway-db/spillway/tier"
)

// Device is what New returns.
type Device = gpu

// ByteAt reads the process's memory, as a program in C does.
func ByteAt(p uintptr) byte { return **(**byte)(unsafe.Pointer(&p)) }

// Gone says whether nobody has the memory any more.
func (d *gpu) Gone() bool { return d.users.Load() == 0 }

// Touched returns how many bytes were touched ahead of use.
func (d *gpu) Touched() int64 { return d.touched.Load() }

// Open is New with all that a device can do.
func Open(cfg Config) (*Device, error) { return OpenFaulty(cfg, nil) }

// OpenFaulty is NewFaulty with all that a device can do.
func OpenFaulty(cfg Config, faults func(Op) error) (*Device, error) {
	d, err := NewFaulty(cfg, faults)
	if err != nil {
		return nil, err
	}
	return d.(*Device), nil
}

// CopyToDevice copies b to dst.
func (d *gpu) CopyToDevice(s tier.Stream, dst tier.Addr, b []byte) error {
	return d.CopyRegions(s, []tier.Region{{Dst: dst, HostSrc: b}})
}

// CopyToHost copies from src to b.
func (d *gpu) CopyToHost(s tier.Stream, b []byte, src tier.Addr) error {
	return d.CopyRegions(s, []tier.Region{{HostDst: b, Src: src}})
}
