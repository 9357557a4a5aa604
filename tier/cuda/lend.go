package cuda

import (
	"sync"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/tier"
)

// Lend implements tier.Lender. After Close the context stays, too, without a thread: who calls the
// last back gives it up, on the thread that it is called by. A context of the program's
// (Config.Context) must be there until then.
func (d *gpu) Lend() (back func() error, err error) {
	if !d.gate.Enter() {
		return nil, tier.ErrClosed
	}
	defer d.gate.Leave()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.lent++
	return sync.OnceValue(d.takeBack), nil
}

// isLent says, while the device is being closed, whether memory is lent. Then the device counts
// among those who need it until detach.
func (d *gpu) isLent() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.lent == 0 {
		return false
	}
	d.mu.lent++
	return true
}

// detach ends the device's thread and leaves the rest to those who need it.
func (d *gpu) detach() error {
	rest, err := d.dev.Detach()
	d.mu.Lock()
	d.mu.rest = rest
	d.mu.Unlock()
	return firstOf([]error{err, d.takeBack()})
}

// takeBack ends one need of the memory; the last after Close gives up what is left.
func (d *gpu) takeBack() error {
	d.mu.Lock()
	d.mu.lent--
	var rest *cuda.Rest
	if d.mu.lent == 0 {
		rest = d.mu.rest
	}
	d.mu.Unlock()
	if rest == nil {
		return nil
	}
	return rest.End(d.giveBackShared)
}
