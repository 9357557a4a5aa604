package permit

// Limits of a pool.
const (
	DefaultBypass = defaultBypass
	MaxBudgets    = maxBudgets
)
