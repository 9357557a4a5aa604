package volumes

import "github.com/spillway-db/spillway/tier"

const (
	// togetherPerSecond is how often a second what is written together could be written: whoever
	// waits for one of the batches waits for all of them.
	togetherPerSecond = 500
	// togetherLeast is written together on a disk however slow: one of those that need as long for
	// any request.
	togetherLeast = 64 << 10
)

// Together returns how many bytes, in one piece, are best written at once and then split; 0 where
// memory is encrypted or persists one by one. They are no more than there is room for. While a fifth
// of the files or more is free, these are not made longer for the sake of one piece.
func (v *Volume) Together() int64 {
	if v.sealer != nil || v.cfg.Persist {
		return 0
	}
	pace := v.disk.Stats()
	n := v.cfg.Request
	if pace.Bandwidth > 0 {
		n = min(n, max(pace.Bandwidth/togetherPerSecond, togetherLeast))
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.mu.closed {
		return 0
	}
	largest := source{v}.Largest()
	if largest < n && !pace.Ailing && v.mu.free-n <= v.mu.used/4 {
		for _, seg := range v.mu.segments {
			largest = max(largest, seg.holes.Largest())
		}
	}
	return min(n, largest)
}

// Split makes several memories of m, with what is in it: of so many bytes each, in order. They are
// whole pages, and add up to all of it. Nothing may be under way in m, which is gone then. Split
// returns nil, and m is as it was, if m is not in one piece, or is encrypted or persists.
func (v *Volume) Split(m tier.Memory, sizes []int64) []tier.Memory {
	e := m.(*extents)
	if e.sealed != nil || v.cfg.Persist || len(e.pieces) != 1 {
		return nil
	}
	v.disk.Settle(max(0, e.size-e.written.Load()))
	parts := make([]tier.Memory, len(sizes))
	at := e.pieces[0].At
	for i, n := range sizes {
		part := &extents{v: v, size: n, uses: 1}
		part.written.Store(n) // nothing of it is in the backlog
		part.pieces = append(part.one[:0], piece{Len: n, At: at})
		parts[i] = part
		at.off += n
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	e.freed, e.uses = true, 0
	return parts
}
