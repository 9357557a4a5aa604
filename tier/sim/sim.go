// Package sim is a simulated GPU: a tier.Device whose memory is an arena of this process that
// nothing but copies can reach. It is what Spillway runs on where there is no GPU. Figures measured
// with it are labelled "sim".
//
// It behaves like the real thing where programs can see a difference. Its capacity is hard, work is
// asynchronous, and an address that is unknown, freed or of another device is an error. It can be
// as slow as one likes (Config.Latency and the bandwidths). Package tier/faultdev adds faults.
// Closing the device waits for its goroutines.
package sim

import (
	"time"

	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
)

// Config describes a simulated device. The zero value of everything but Memory
// means the default.
type Config struct {
	Memory int64  // bytes; required; rounded down to a multiple of 256
	Name   string // "simulated GPU" if empty
	Node   int    // the NUMA node it claims to be nearest to; -1 for unknown

	// Modelled bandwidth, which the streams share, in bytes per second; 0 is as
	// fast as memory. Copies to a peer go through FromDevice.
	BytesPerSecondToDevice   int64
	BytesPerSecondFromDevice int64
	// Latency is added to each copy between the device and elsewhere.
	Latency time.Duration

	// Touch has the memory's pages touched in the background, ahead of their use, so
	// that first copies do not pay for page faults: the first 64 MiB at once, and as much
	// again as has been used, up to 512 MiB, later.
	Touch bool
}

// New returns a device, which is also a tier.Lender. For tests it has a method
// SetExternal(bytes int64): the device behaves as if others held so much of it. The caller must
// Close it.
func New(cfg Config) (tier.Device, error) { return sim.New(sim.Config(cfg)) }
