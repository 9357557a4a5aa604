package quota

import (
	"cmp"
	"slices"
)

// Load is how much one GPU has to carry.
type Load struct {
	UUID  string
	Bytes int64 // promised on it
	Count int   // holders on it
}

// LeastLoaded returns the loads ordered by who should be chosen first: fewest bytes,
// then fewest holders, then by UUID, so that all who look at the same loads choose
// alike. It is a pure function: loads stays as it is.
func LeastLoaded(loads []Load) []Load {
	out := slices.Clone(loads)
	slices.SortStableFunc(out, func(a, b Load) int {
		return cmp.Or(cmp.Compare(a.Bytes, b.Bytes), cmp.Compare(a.Count, b.Count), cmp.Compare(a.UUID, b.UUID))
	})
	return out
}
