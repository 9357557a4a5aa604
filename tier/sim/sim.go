// Package sim is a simulated GPU: a tier.Device whose memory is an arena of this process that
// nothing but copies can reach. It is what Spillway runs on where there is no GPU. Figures measured
// with it are labelled "sim".
//
// It behaves like the real thing where programs can tell the difference. Its capacity is hard, work
// is asynchronous, and an address that is unknown, freed or of another device is an error. It can be
// as slow as one likes (Config.Latency and the bandwidths). Faults are put over it with
// tier/faultdev. Closing the device waits for its goroutines.
package sim

import (
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
)

// Config describes a simulated device.
type Config = sim.Config

// New returns a device, which is also a tier.Computer and a tier.Lender. For tests it has a method
// SetForeign(bytes int64): the device behaves as if others held so much of it. The caller must
// Close it.
func New(cfg Config) (tier.Device, error) { return sim.New(cfg) }
