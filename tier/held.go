package tier

// Held returns how many bytes stay in use for as long as the space is open; see
// Hold. Room()+Held() is how many may be in use at once.
func (s *Space) Held() int64 { return s.held.Load() }
