package volumes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spillway-db/spillway/internal/causes"
)

// punchStep is how much is given back at a time: it takes a millisecond or two, because
// which an Alloc that needs fresh room waits.
const punchStep = 4 << 20

// trimIdle gives back what nothing needs. Freed room stays written, because it is twice as fast to
// write again as fresh room. But a volume that was full once must not hold the disk for ever. So
// every Config.Idle as much goes as was free all the time since the last look: what a query frees
// and takes in turn stays, what is left when it has ended goes within two periods. While the file
// system has less free than the reserve, all that is free goes.
func (v *Volume) trimIdle() {
	ctx := v.life
	for {
		select {
		case <-v.freed:
		case <-ctx.Done():
			return
		}
		for v.lookAgain() > 0 {
			select {
			case <-time.After(v.cfg.Idle):
			case <-ctx.Done():
				return
			}
			if _, err := v.giveBack(ctx, v.surplus()); err != nil && ctx.Err() == nil {
				v.warn(causes.DiskFails, "giving room back: %v", err)
				break // tried again when more is freed
			}
		}
	}
}

// lookAgain begins a period: all that is free now counts as not needed until it is.
func (v *Volume) lookAgain() int64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.idle = v.mu.free
	return v.mu.idle
}

// surplus is what trimIdle gives back now.
func (v *Volume) surplus() int64 {
	u, err := v.cfg.FS.Usage(v.dir)
	scarce := err == nil && u.Free < v.cfg.Reserve
	v.mu.Lock()
	defer v.mu.Unlock()
	if scarce {
		return v.mu.free
	}
	return v.mu.idle
}

// Trim gives all room that is not handed out back to the file system and returns how
// many bytes that were. It ends early, with ctx's error, between two pieces of
// 4 MiB.
func (v *Volume) Trim(ctx context.Context) (int64, error) {
	n, err := v.giveBack(ctx, v.cfg.Capacity)
	if err != nil {
		return n, fmt.Errorf("disk: volume %s: giving room back: %w", v.cfg.Dir, err)
	}
	return n, nil
}

// giveBack gives up to n bytes back, from the highest segment down.
func (v *Volume) giveBack(ctx context.Context, n int64) (given int64, err error) {
	for given < n {
		select {
		case v.change <- struct{}{}:
		case <-ctx.Done():
			return given, context.Cause(ctx)
		}
		g, err := v.givePiece(n - given)
		<-v.change
		given += g
		v.given.Add(g)
		if err != nil || g == 0 {
			return given, err
		}
		if ctx.Err() != nil {
			return given, context.Cause(ctx)
		}
	}
	return given, nil
}

// givePiece gives one piece of at most n bytes back; 0 and no error if there is none.
// The change token is held.
func (v *Volume) givePiece(n int64) (int64, error) {
	if v.noPunch.Load() {
		return v.giveSegment(n)
	}
	s, off, n := v.takeBacked(n)
	if n == 0 {
		return 0, nil
	}
	err := s.file.Punch(off, n) // only holders of the token set the file
	if err == nil {
		v.putHole(s, off, n)
		return n, nil
	}
	v.mu.Lock()
	s.backed.Free(off, n)
	v.mu.free += n
	v.mu.Unlock()
	if errors.Is(err, errors.ErrUnsupported) {
		v.noPunch.Store(true)
		return v.giveSegment(v.cfg.SegmentSize)
	}
	return 0, fmt.Errorf("%d bytes at %d of %s: %w", n, off, s.name, bare(err))
}

// takeBacked takes a free piece, of the highest segment, to punch a hole for it.
func (v *Volume) takeBacked(most int64) (s *segment, off, n int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.mu.closed {
		return nil, 0, 0
	}
	for _, s := range slices.Backward(v.mu.segments) {
		if n := min(most, punchStep, s.backed.Largest()); n > 0 {
			off, _ := s.backed.Alloc(n)
			v.mu.free -= n
			return s, off, n
		}
	}
	return nil, 0, 0
}

// giveSegment closes the highest segment that nothing is handed out of: all that can
// be done where the file system punches no holes.
func (v *Volume) giveSegment(most int64) (int64, error) {
	v.mu.Lock()
	for _, s := range slices.Backward(v.mu.segments) {
		n := s.backed.FreeBytes()
		if v.mu.closed || s.used > 0 || n == 0 || n > most {
			continue
		}
		f := s.file
		s.file = nil
		s.reset()
		v.mu.free -= n
		v.mu.Unlock()
		if err := v.closeSegment(s.name, f); err != nil {
			return n, fmt.Errorf("closing %s: %w", s.name, err)
		}
		return n, nil
	}
	v.mu.Unlock()
	return 0, nil
}
