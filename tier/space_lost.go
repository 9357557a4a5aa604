package tier

// Lost returns nil, or the *LostError that says why nothing can be done in the space any more: its
// device is lost. Then reservations pass the space by, its Limit is 0, and buffers there can only
// be released. It does not come back.
func (s *Space) Lost() error {
	if lost := s.lost.Load(); lost != nil {
		return lost
	}
	return nil
}

// lose is told by the pool. The listeners hear of a limit that has become 0: so those who wait for
// room here are told, or go on waiting for others.
func (s *Space) lose(why error) {
	if !s.loseOnce(&LostError{Space: s.cfg.ID, Bytes: s.Used(), Cause: why}) {
		return
	}
	s.ledger.LimitsChanged()
	s.notify(Released)
}

func (s *Space) loseOnce(lost *LostError) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost.Load() != nil {
		return false
	}
	s.lost.Store(lost) // first, so that whoever is refused for the limit finds the reason
	s.limit.Store(0)
	return true
}

// refusal is the error of n bytes that cannot be promised.
func (s *Space) refusal(n int64, cause error) error {
	if err := s.Lost(); err != nil {
		return err
	}
	return &NoSpaceError{Space: s.cfg.ID, Requested: n, Available: s.Available(), Hint: s.cfg.Hint, Cause: cause}
}
