package decide

// Habits are how all batches of an engine are used, as far as that was observed. A use of a batch
// belongs to one of three kinds: its first, its second, or a later one. Times are in nanoseconds.
type Habits struct {
	Gap   float64    // between two uses of any batches; 0 before the second use
	Count [3]int     // the batches whose next use is of each kind
	share [3]float64 // of each kind in the uses
	seen  int        // uses
	last  int64      // the time of the last use
}

// recentUses is about how many uses Habits remember. For the gap it is as many as there are batches.
const recentUses = 64

// kindOf returns the kind of the next use of a batch that had so many.
func kindOf(uses uint8) int { return int(min(uses, 2)) }

// Enter adds a batch that had so many uses.
func (h *Habits) Enter(uses uint8) { h.Count[kindOf(uses)]++ }

// Leave removes a batch that had so many uses.
func (h *Habits) Leave(uses uint8) { h.Count[kindOf(uses)]-- }

// Use notes a use of a batch that had so many before.
func (h *Habits) Use(uses uint8, at int64) {
	if h.seen == 0 {
		h.share[0] = 1
	}
	part := max(1./recentUses, 1/float64(h.seen+2))
	for i := range h.share {
		h.share[i] *= 1 - part
	}
	h.share[kindOf(uses)] += part
	among := min(max(recentUses, h.batches()), float64(h.seen+2)) // a task may use all batches at once
	if gap := float64(max(1, at-h.last)); h.seen == 1 {
		h.Gap = gap
	} else if h.seen > 1 {
		h.Gap += (min(gap, 4*among*h.Gap) - h.Gap) / among // a long pause is no habit
	}
	h.seen, h.last = h.seen+1, max(h.last, at)
}

// LongestRest is the longest time that Rest returns: some days.
const LongestRest = 1e15

// Rest returns how long a batch will not be used that was used so often, never or once, with before
// as many such batches that are needed later.
func (h *Habits) Rest(uses, before int) float64 {
	const none = 1e-9
	of := none // kinds of which there are batches
	for i, n := range h.Count {
		if n > 0 {
			of += h.share[i]
		}
	}
	n := float64(max(1, h.Count[uses]-before))
	return max(1, min(LongestRest*n/float64(max(1, h.Count[uses])), n*h.Gap*of/(h.share[uses]+none)))
}

// batches returns how many there are.
func (h *Habits) batches() float64 { return float64(h.Count[0] + h.Count[1] + h.Count[2]) }

// Round returns how long it takes to use as many batches as there are.
func (h *Habits) Round() float64 { return max(1, h.batches()*h.Gap) }

// patience is for how many times the expected gap between uses a batch may have been unused before
// it counts as unneeded.
const patience = 4

// Stale reports whether a batch seems to be unneeded that was used last at a time and whose next use
// was expected at another. Gaps that were short by chance do not make it so: as many uses count, too,
// as there are batches.
func (h *Habits) Stale(next, last, now int64) bool {
	return next > last && float64(now-last)/patience > max(float64(next-last), h.Round())
}
