package volumes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spillway-db/spillway/internal/causes"
)

// punchStep is how much is given back at a time. It takes a millisecond or two, for which an Alloc
// that needs fresh room waits.
const punchStep = 4 << 20

// trimIdle gives room back that nothing needs. Freed room stays written, because it is twice as fast
// to write again as fresh room, but a volume that was full once must not keep the disk full. So each
// Config.Idle the room goes that was free since the last look: room that a query frees and allocates
// in turn stays, and the rest goes within two periods after its end. While the file system has less
// free space than the reserve, all free room goes.
func (v *Volume) trimIdle() {
	for {
		v.mu.Lock()
		v.mu.idle = v.mu.free
		v.mu.Unlock()
		select {
		case <-time.After(v.cfg.Idle):
		case <-v.life.Done():
			return
		}
		v.mu.Lock()
		surplus, free := v.mu.idle, v.mu.free
		v.mu.Unlock()
		if free == 0 {
			continue
		}
		if u, err := v.cfg.FS.Usage(v.dir); err == nil && u.Free < v.cfg.Reserve {
			surplus = free
		}
		if _, err := v.giveBack(v.life, surplus); err != nil && v.life.Err() == nil {
			v.warn(causes.DiskFails, "giving room back: %v", err)
		}
	}
}

// Trim gives all room that is not allocated back to the file system and returns how many bytes that
// were. It ends early, with ctx's error, between two pieces of 4 MiB.
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

// givePiece gives one piece of at most n bytes back: a hole that it punches, or where the file system
// punches none a segment without allocated room. It returns 0 and no error if there is none. The
// caller has the change token.
func (v *Volume) givePiece(n int64) (int64, error) {
	whole := v.noPunch.Load()
	v.mu.Lock()
	i := len(v.mu.segments) - 1
	for ; i >= 0; i-- {
		s := v.mu.segments[i]
		if free := s.backed.FreeBytes(); free > 0 && (!whole || s.used == 0 && free <= n) {
			break
		}
	}
	if i < 0 || v.mu.closed {
		v.mu.Unlock()
		return 0, nil
	}
	s := v.mu.segments[i]
	if whole {
		n = s.backed.FreeBytes()
	} else {
		n = min(n, punchStep, s.backed.Largest())
		off, _ := s.backed.Alloc(n)
		v.mu.Unlock()
		err := s.file.Punch(off, n) // only the owner of the token sets the file
		v.mu.Lock()
		if err != nil {
			s.backed.Free(off, n)
			v.mu.Unlock()
			if errors.Is(err, errors.ErrUnsupported) {
				v.noPunch.Store(true)
				return v.givePiece(v.cfg.SegmentSize)
			}
			return 0, fmt.Errorf("%d bytes at %d of %s: %w", n, off, s.name, bare(err))
		}
		s.holes.Free(off, n)
		whole = s.holes.FreeBytes() == s.size
	}
	v.mu.free -= n
	f := s.file
	if whole {
		s.file = nil
		s.reset()
	}
	v.mu.Unlock()
	if whole {
		if err := v.closeSegment(s.name, f); err != nil {
			v.warn(causes.DiskFails, "closing %s: %v", s.name, err)
		}
	}
	return n, nil
}
