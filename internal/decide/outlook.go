package decide

import (
	"math"
	"slices"
)

// Held reports whether some of the space is neither a batch's at rest nor the engine's for good.
// While batches are moved, that cannot be told.
func (s *Space) Held() bool {
	return s.Moving == 0 && s.Coming() == 0 && s.Used > s.Rest+s.Base
}

// FullForGood reports for each space whether nothing will be free there unless batches at rest are
// dropped. That is so if all that is used there is theirs, or the engine's for good, and nothing is
// on its way out. None of them can go down either, because each slower space is full too and has no
// room for even the smallest. It is a pure function.
func FullForGood(s Snapshot) []bool {
	full := make([]bool, len(s.Spaces))
	for i := len(s.Spaces) - 1; i >= 0; i-- { // slower spaces first
		sp := &s.Spaces[i]
		full[i] = sp.Moving == 0 && sp.Coming() == 0 && !sp.Held()
		for _, e := range sp.Down {
			if to := &s.Spaces[e.To]; !e.Broken && e.Smallest > 0 { // else there is none to go there
				need := to.Charged(e.Smallest)
				fits := need <= to.lasting()-to.Keep(need)
				full[i] = full[i] && full[e.To] && !fits
			}
		}
	}
	return full
}

// lasting is the room that would be there without waiters. A refusal counts only if it was not for
// the sake of waiters.
func (s *Space) lasting() int64 {
	if s.Waiting > 0 || s.Wanted > 0 {
		return s.Room()
	}
	return s.Unrefused(s.Room())
}

// Missing returns how many more bytes space to would need for the victim of the faster spaces, from
// the first on, that needs least there; 0 or less if there is room for it, or none may go there.
func (s *Snapshot) Missing(first, to int) (bytes int64) {
	t := &s.Spaces[to]
	least := int64(math.MaxInt64)
	for _, sp := range s.Spaces[first:to] {
		if !slices.ContainsFunc(sp.Down, func(e Edge) bool { return e.To == to }) {
			continue
		}
		for _, v := range sp.Victims {
			if need := t.Charged(v.Bytes); !v.Not.Has(t.ID.Kind) {
				least = min(least, need+t.Keep(need))
			}
		}
	}
	if least == math.MaxInt64 {
		return 0
	}
	return least - t.Unrefused(t.Room())
}

// Relief reports of each space whether bytes may leave it without a release: they are on their
// way already, a move was chosen, or a skipped batch will be tried again. A batch that is held back
// until a slower space is relieved counts while anything moves at all.
func Relief(s Snapshot, d Decision) []bool {
	o := make([]bool, len(s.Spaces))
	for _, c := range d.Moves {
		o[c.From] = true
	}
	busy := len(d.Moves) > 0
	for i := range s.Spaces {
		sp := &s.Spaces[i]
		o[i] = o[i] || sp.Moving > 0 || sp.Coming() > 0 || sp.Aside > 0
		busy = busy || o[i]
	}
	for i := range o {
		o[i] = o[i] || d.Held && busy && len(s.Spaces[i].Victims) > 0
	}
	return o
}
