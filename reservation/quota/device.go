package quota

import (
	"fmt"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/ledger"
	"github.com/spillway-db/spillway/tier"
)

// device is a device under quotas.
type device struct {
	tier.Device
	quota tier.Quota
}

var (
	_ tier.Device   = (*device)(nil)
	_ tier.Computer = (*device)(nil)
	_ tier.Limited  = (*device)(nil)
)

// Under returns dev under all of those quotas. A tier.Space over it charges them for what it
// promises, before it allocates. MemInfo shows the least of what the quotas allow and of what the
// device has. All else is the device's own. It counts nothing by itself: allocations that are made
// through it without a space are not limited.
func Under(dev tier.Device, quotas ...tier.Quota) tier.Device {
	return &device{Device: dev, quota: tier.Quotas(quotas...)}
}

// Unwrap returns the device that is under the quotas.
func (d *device) Unwrap() tier.Device { return d.Device }

// Quota implements tier.Limited.
func (d *device) Quota() tier.Quota { return d.quota }

// MemInfo implements tier.Device.
func (d *device) MemInfo() (free, total int64) {
	free, total = d.Device.MemInfo()
	if d.quota == nil {
		return free, total
	}
	return memInfo(d.quota, free, total)
}

// Digest implements tier.Computer: ErrNotSupported if the device does not compute.
func (d *device) Digest(s tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	c, ok := d.Device.(tier.Computer)
	if !ok {
		return fmt.Errorf("quota: %s does not compute: %w", d.Info().Name, tier.ErrNotSupported)
	}
	return c.Digest(s, src, size, first, out)
}

// Member returns a quota that charges q and knows how much of it is its own: each
// space should have one. When a limit is lowered below what is in use, a member's
// Remaining says how much of the excess it should give up: its share.
func (q *Quota) Member() tier.Quota { return &member{quota: q} }

type member struct {
	quota *Quota
	used  atomic.Int64
}

func (m *member) Charge(n int64) error {
	err := m.quota.charge(n)
	if err == nil {
		m.used.Add(n)
	}
	return err
}

func (m *member) Credit(n int64) {
	m.used.Add(-n)
	m.quota.credit(n)
}

func (m *member) Remaining() int64 {
	return ledger.Left(m.quota.limit.Load(), m.quota.used.Load(), m.used.Load())
}

func (m *member) Limit() int64 { return m.quota.limit.Load() }

func (m *member) Subscribe(f func()) (cancel func()) { return m.quota.subscribers.Add(f) }
