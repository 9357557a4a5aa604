package spillway

import (
	"errors"
	"fmt"
	"os"

	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// limits are the quotas that the GPU spaces are under.
type limits struct {
	settings quota.Settings
	quota    *quota.Quota // nil if there is no limit
	leases   []*quota.Lease
	over     func(quota.Over)
}

// readLimits finds out what is wanted.
func (e *Engine) readLimits() error {
	e.limits.over = func(o quota.Over) {
		e.cfg.Logger.Warn("spillway: more GPU memory is in use than its quota allows; batches move down until it is not",
			"quota", o.Quota, "used", o.Used, "limit", o.Limit)
		if e.cfg.QuotaOver != nil {
			e.panics.Do("Config.QuotaOver", func() { e.cfg.QuotaOver(o) })
		}
	}
	if e.cfg.Quota != nil {
		e.limits.settings = *e.cfg.Quota
		return nil
	}
	var err error
	e.limits.settings, err = quota.FromEnv(os.LookupEnv)
	return err
}

// physical is what a device counts as having.
func (l *limits) physical(dev tier.Device) int64 {
	_, total := dev.MemInfo()
	if p := l.settings.Physical; p > 0 {
		total = min(total, p)
	}
	return total
}

// setLimit makes the quota, when it is known what the GPUs have together.
func (e *Engine) setLimit(devices []tier.Device) (err error) {
	l := &e.limits
	if l.quota = e.cfg.SharedQuota; l.quota != nil || len(devices) == 0 {
		return nil
	}
	physical, advertised := int64(0), int64(0)
	for _, dev := range devices {
		p := l.physical(dev)
		a, err := quota.Advertised(p, l.settings.Ratio)
		if err != nil {
			return err
		}
		if physical += p; a > 1<<62-advertised {
			return fmt.Errorf("quota: what is advertised of %d GPUs is above the largest size", len(devices))
		}
		advertised += a
	}
	limit, err := l.settings.Limit.Of(physical)
	if err != nil {
		return fmt.Errorf("quota: %s: %w", l.settings.Source, err)
	}
	name := l.settings.Source
	if name == "" {
		name = "Config.Quota"
	}
	switch {
	case limit == 0 && advertised < physical: // some of each GPU is to stay free
		limit, name = advertised, "what is advertised of the GPUs"
	case limit == 0:
		return nil
	case l.settings.Ratio != nil && limit > advertised:
		return fmt.Errorf("quota: %w", &tier.OutOfBudgetError{
			Budget: "what is advertised of the GPUs, for " + name + ",", Requested: limit, Remaining: advertised, Limit: advertised,
		})
	}
	l.quota, err = quota.New(quota.Config{Limit: limit, Name: name, OnOver: l.over})
	return err
}

// limited returns the device of space i under all quotas that there are for it.
func (e *Engine) limited(dev tier.Device, i int) (tier.Device, error) {
	l := &e.limits
	var over []tier.Quota
	if l.quota != nil {
		over = append(over, l.quota.Member())
	}
	if l.settings.Ledger != "" {
		lease, err := e.join(dev, i)
		if err != nil {
			return nil, err
		}
		e.warnFor(tier.ID{Kind: tier.GPU, Ordinal: i}, lease.Warnings)
		l.leases = append(l.leases, lease)
		over = append(over, lease)
	}
	if len(over) == 0 {
		return dev, nil
	}
	return quota.Under(dev, over...), nil
}

// join takes a lease of a device in the node's ledger.
func (e *Engine) join(dev tier.Device, i int) (*quota.Lease, error) {
	s := &e.limits.settings
	t := quota.Terms{
		Dir: s.Ledger, Device: deviceName(dev, i), Group: s.Group, Physical: e.limits.physical(dev),
		OnBroken: func(b *quota.BrokenError) {
			w := b.Warning()
			w.Space = tier.ID{Kind: tier.GPU, Ordinal: i}.String()
			e.logWarning(w)
		},
		OnOver: e.limits.over,
	}
	var err error
	if t.Advertised, err = quota.Advertised(t.Physical, s.Ratio); err != nil {
		return nil, err
	}
	if e.limits.quota != nil {
		t.Quota = min(e.limits.quota.Limit(), t.Advertised) // it may be for several GPUs together
	}
	return quota.Join(t)
}

// deviceName is what a ledger calls a device: the same in all processes.
func deviceName(dev tier.Device, i int) string {
	info := dev.Info()
	switch {
	case info.UUID != "":
		return info.UUID
	case info.PCI != "":
		return info.PCI
	}
	return fmt.Sprintf("%s-%d", info.Backend, i)
}

func (l *limits) close() error {
	var errs []error
	for _, lease := range l.leases {
		errs = append(errs, lease.Close())
	}
	return errors.Join(errs...)
}

// Quota returns the limit over the engine's GPU spaces, which may be changed while it
// runs; nil if there is none. A raised limit helps up to the size that the spaces were
// opened with.
func (e *Engine) Quota() *quota.Quota { return e.limits.quota }

// Leases returns the engine's parts in the node's ledger, one for each GPU space, in
// their order; none without a ledger.
func (e *Engine) Leases() []*quota.Lease { return append([]*quota.Lease(nil), e.limits.leases...) }
