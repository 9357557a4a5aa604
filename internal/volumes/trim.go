package volumes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/extent"
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
		v.mu.idle = v.mu.backed.FreeBytes()
		v.mu.Unlock()
		select {
		case <-time.After(v.cfg.Idle):
		case <-v.life.Done():
			return
		}
		v.mu.Lock()
		surplus, free := v.mu.idle, v.mu.backed.FreeBytes()
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

// giveBack gives up to n bytes back.
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

// givePiece gives one piece of at most n bytes back: a hole that it punches, or where the file
// system punches none the free end of the file. It returns 0 and no error if there is none. The
// caller has the change token.
func (v *Volume) givePiece(n int64) (int64, error) {
	var off, given int64
	cuts := v.noPunch.Load()
	v.mu.Lock()
	switch {
	case v.mu.closed || v.mu.backed.FreeBytes() == 0:
	case cuts:
		off, given = v.takeEndLocked(n)
	default:
		given = min(n, punchStep, v.mu.backed.Largest())
		off, _ = v.mu.backed.Alloc(given)
	}
	v.mu.Unlock()
	if given == 0 {
		return 0, nil
	}
	var err error
	if cuts {
		err = v.file.Truncate(off)
	} else {
		err = v.file.Punch(off, given)
	}
	v.mu.Lock()
	if err == nil {
		v.mu.holes.Free(off, given)
	} else {
		v.mu.backed.Free(off, given)
	}
	v.mu.Unlock()
	switch {
	case err == nil:
		return given, nil
	case errors.Is(err, errors.ErrUnsupported) && !cuts:
		v.noPunch.Store(true)
		return v.givePiece(n)
	}
	return 0, fmt.Errorf("%d bytes at %d of %s: %w", given, off, spillName, bare(err))
}

// takeEndLocked takes up to n free bytes off the end of the backed room, if there are some: behind
// them is only a hole.
func (v *Volume) takeEndLocked(n int64) (off, taken int64) {
	end := v.cfg.Capacity
	for at, hole := range v.mu.holes.All() {
		if at+hole == v.cfg.Capacity {
			end = at
		}
	}
	rest := extent.New(v.cfg.Capacity)
	rest.Alloc(v.cfg.Capacity)
	off = end
	for at, free := range v.mu.backed.All() {
		if at+free == end {
			off = max(at, end-n)
			free = off - at
		}
		if free > 0 {
			rest.Free(at, free)
		}
	}
	v.mu.backed = rest
	return off, end - off
}
