package spillway

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// Limits bound what an engine takes, in addition to the sizes of its spaces. The zero value has the
// quota that the environment asks for, and else the defaults.
//
// A byte of GPU memory counts in all limits that apply to it. Data for which one of them has no
// room goes to a slower tier, or waits. They nest around each device, and a space charges all of
// them for what it promises:
//
//	quota, ledger ▶ Budgets[0] ▶ Budgets[1] … ▶ what GPUConfig.Wrap returns ▶ the device
type Limits struct {
	// Quota limits the GPU memory that the engine's spaces take together, and sets whether other
	// processes count. Nil means the settings that quota.FromEnv finds in the environment; an
	// invalid variable there makes Open fail. A pointer to the zero value means no limit, whatever
	// the environment has.
	//
	// Each engine is limited by itself, unless they join a ledger. Engines of one process that
	// share one limit are given the same SharedQuota. If a limit is lowered below the bytes in use,
	// Config.Events gets events.QuotaExceeded.
	Quota *quota.Settings
	// SharedQuota, if set, limits the spaces in place of a quota of the engine's own. Quota must
	// not set a limit then. Each engine under it emits its own events.QuotaExceeded.
	SharedQuota *quota.Quota

	// Budgets limit what is allocated and promised on all of the engine's GPUs together. Engines
	// that are given the same budget share it: each takes what the others leave. Memory that an
	// engine leaks on a GPUConfig.Device that is not its own stays charged until it is released.
	Budgets []*quota.Budget

	// Permits limits the transfers with disks that are under way: their bytes of host memory, and
	// how many write at once (slots). It needs a budget permit.Host. The monitor takes free slots.
	// While all are taken, one of its moves at a time writes without a slot.
	Permits permit.Config
	// PermitPool, if set, is used instead of a pool of the engine's own, under the same
	// terms, so that several engines share one limit; Permits must not be set then. The
	// engine does not close it, and it must be open for as long as the engine is.
	PermitPool *permit.Pool
	// Admission says which tasks may start; its zero fields mean the defaults.
	Admission admission.Rules
}

func (l *Limits) check() error {
	pool, err := l.PermitPool, error(nil)
	switch p := &l.Permits; {
	case pool == nil:
		pool, err = permit.New(*p)
	case p.Budgets != nil || p.Slots != nil || p.Bypass != 0:
		err = errors.New("permits: there are both a pool and a configuration of one")
	}
	if err == nil {
		nothing, closed := pool.TryAcquire(permit.Request{})
		if closed != nil {
			err = fmt.Errorf("permits: %w", closed)
		} else if _, ok := pool.Total(permit.Host); !ok { // no transfer with a disk could begin
			err = fmt.Errorf("permits: there is no budget %q, which transfers with disks take from", permit.Host)
		} else {
			err = nothing.Release()
		}
	}
	errs := []error{err, l.Admission.Validate()}
	if l.Quota != nil {
		errs = append(errs, l.Quota.Validate())
		if l.SharedQuota != nil && (!l.Quota.Limit.IsZero() || l.Quota.Ratio != nil) {
			errs = append(errs,
				errors.New("quota: there are both a quota that is shared and a limit of the engine's own"))
		}
	}
	if i := slices.Index(l.Budgets, nil); i >= 0 {
		errs = append(errs, fmt.Errorf("limits: Budgets[%d] is nil", i))
	}
	return errors.Join(errs...)
}

// limits are the quotas and budgets of the GPU spaces.
type limits struct {
	settings quota.Settings
	quota    *quota.Quota // nil if there is no limit
	unwatch  func()       // ends the calls of Engine.quotaExceeded by quota; nil without a quota
	leases   []*leases.Lease
}

// physical is what a device counts as having.
func (l *limits) physical(dev tier.Device) int64 {
	_, total, _ := dev.MemInfo()
	if p := l.settings.Physical; p > 0 {
		total = min(total, p)
	}
	return total
}

// setLimit makes the engine's own quota, if the settings limit the GPUs, once the memory of all is known.
// It watches that quota, or the one that engines share.
func (e *Engine) setLimit() (err error) {
	l, s := &e.limits, &e.limits.settings
	if l.quota = e.cfg.Limits.SharedQuota; l.quota == nil && len(e.bare) > 0 {
		physical, advertised := int64(0), int64(0)
		for _, dev := range e.bare {
			p := l.physical(dev)
			a, err := leases.Advertised(p, s.Ratio)
			if err != nil {
				return err
			}
			if physical += p; a > 1<<62-advertised {
				return fmt.Errorf("quota: what is advertised of %d GPUs is above the largest size", len(e.bare))
			}
			advertised += a
		}
		limit, err := s.Limit.Of(physical)
		name := cmp.Or(s.Source, "Limits.Quota")
		switch {
		case err != nil:
			return fmt.Errorf("quota: %s: %w", s.Source, err)
		case s.Ratio != nil && limit > advertised:
			return fmt.Errorf("quota: %w", &tier.OutOfBudgetError{
				Budget:    "what is advertised of the GPUs, for " + name + ",",
				Requested: limit, Remaining: advertised, Limit: advertised,
			})
		case limit == 0 && advertised < physical: // some of each GPU is to stay free
			limit, name = advertised, "what is advertised of the GPUs"
		case limit == 0:
			return nil
		}
		if l.quota, err = quota.New(quota.Config{Limit: limit, Name: name}); err != nil {
			return err
		}
	}
	if l.quota == nil {
		return nil
	}
	var only tier.ID // the GPU, if there is a single one
	if len(e.bare) == 1 {
		only = tier.ID{Kind: tier.GPU}
	}
	l.unwatch = l.quota.OnOver(func(o quota.Over) { e.quotaExceeded(only, o) })
	return nil
}

// limited returns the device of space i under all quotas that there are for it.
func (e *Engine) limited(dev tier.Device, i int) (tier.Device, error) {
	l := &e.limits
	var over []tier.Quota
	if l.quota != nil {
		over = append(over, l.quota.Member())
	}
	if s := &l.settings; s.Ledger != "" {
		id, bare := tier.ID{Kind: tier.GPU, Ordinal: i}, e.bare[i]
		info := bare.Info()
		name := cmp.Or(info.UUID, info.PCI, fmt.Sprintf("%s-%d", info.Backend, i)) // the same in all processes
		broken := causes.Warn(causes.Ledger, "files of the ledger in %s were removed while processes use it: "+
			"for a moment they did not see each other, and may hold more of %s than they should", s.Ledger, name)
		t := leases.Terms{
			Dir: s.Ledger, Device: name, Group: s.Group, Physical: l.physical(bare),
			OnBroken: func() {
				w := broken
				w.Space = id.String()
				e.logWarning(w)
			},
			OnOver: func(o quota.Over) { e.quotaExceeded(id, o) },
		}
		var err error
		if t.Advertised, err = leases.Advertised(t.Physical, s.Ratio); err != nil {
			return nil, err
		}
		if l.quota != nil {
			t.Quota = min(l.quota.Stats().Limit, t.Advertised) // it may be for several GPUs together
		}
		lease, err := leases.Join(t)
		if err != nil {
			return nil, err
		}
		e.warnFor(id, func() []diag.Warning {
			if lease.Lost() == 0 {
				return nil
			}
			return []diag.Warning{broken}
		})
		l.leases = append(l.leases, lease)
		over = append(over, lease)
	}
	if len(over) == 0 {
		return dev, nil
	}
	return quota.Under(dev, over...), nil
}

// Quota returns the limit over the engine's GPU spaces, which may be changed while it
// runs; nil if there is none. A raised limit helps up to the size that the spaces were
// opened with.
func (e *Engine) Quota() *quota.Quota { return e.limits.quota }

// Leases returns the engine's parts in the node's ledger, one for each GPU space, in
// their order; none without a ledger.
func (e *Engine) Leases() []quota.Lease {
	all := make([]quota.Lease, len(e.limits.leases))
	for i, l := range e.limits.leases {
		all[i] = l
	}
	return all
}
