package tier

// Quota limits what several spaces, or several processes, take together, beside
// the limit of each space. A space that has one charges it for every byte that it
// reserves and credits it when the byte is free again. A Quota is safe for
// concurrent use, and calls its subscribers with no lock held.
type Quota interface {
	// Charge takes n > 0 bytes, or returns an OutOfBudgetError that names the quota
	// and changes nothing. The check and the charge are one step.
	Charge(n int64) error
	// Credit gives n bytes back that were charged.
	Credit(n int64)
	// Remaining is how many bytes could be charged now; it may be out of date when it
	// returns. Below 0, it says how many of the caller's bytes are above a limit that was
	// lowered: they stay charged, but should be given back.
	Remaining() int64
	// Limit is how many bytes could be charged if nobody held any.
	Limit() int64
	// Subscribe calls f, which must be quick and must not block, whenever something
	// was credited or the limit changed. The returned function ends that; a call that
	// has begun may still be running when it returns.
	Subscribe(f func()) (cancel func())
}
