package tier

// UnreserveBelow is UnreserveAt with another mark, which is called between the look at the state
// and the parking.
func (s *Space) UnreserveBelow(at uint32, n int64, below func() int64) { s.unreserveAt(at, n, below) }
