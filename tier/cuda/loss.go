package cuda

import "github.com/spillway-db/spillway/internal/cuda"

// OnLost implements tier.Losable: for a context that was ended by an error. That is noticed when the driver says so,
// of a call or of work.
func (d *Device) OnLost(f func(why error)) (cancel func()) { return d.loss.OnLost(f) }

// suspect is given each error that may be the loss's. Others' contexts have a part in some work, and it may be theirs that is lost; so
// the driver is asked something that is about this one alone.
func (d *Device) suspect(err error) {
	if !cuda.Lost(err) {
		return
	}
	known := d.loss.Err() != nil
	if !known {
		_, _, own := d.driverMemory()
		known = cuda.Lost(own)
	}
	if known {
		d.loss.Lose(err)
	}
}
