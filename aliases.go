package spillway

import "github.com/spillway-db/spillway/tier"

// Amount says how large something is: a number of bytes, or a share of what there is.
type Amount = tier.Amount

// Bytes is an Amount of n bytes.
func Bytes(n int64) Amount { return Amount{Bytes: n} }

// Share is an Amount of a share above 0, up to 1, of what there is.
func Share(of float64) Amount { return Amount{Share: of} }
