package cuda

import "github.com/spillway-db/spillway/internal/cuda"

// OnLost implements tier.Losable: for a context that was ended by an error. That is noticed when
// the driver says so, of a call or of work.
func (d *gpu) OnLost(f func(why error)) (cancel func()) { return d.loss.OnLost(f) }

// suspect is given each error that may be the loss's, and says whether it is. Others' contexts have
// a part in some work, and it may be theirs that is lost; and some errors may mean anything. So the
// driver is asked something that is about this context alone.
func (d *gpu) suspect(err error) (lost bool) {
	if !cuda.Lost(err) && !cuda.MaybeLost(err) {
		return false
	}
	if d.loss.Err() == nil {
		if _, _, own := d.driverMemory(); !cuda.Lost(own) && !cuda.MaybeLost(own) {
			return false
		}
		d.loss.Lose(err)
	}
	return true
}

// refused is suspect for calls that are about this context alone: one that is refused because a
// context is lost tells of this one.
func (d *gpu) refused(err error) (lost bool) {
	if !cuda.Lost(err) {
		return d.suspect(err)
	}
	d.loss.Lose(err)
	return true
}
