package volumes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/topology"
)

const (
	// slowRequest is after how long a request counts as slow: four times the time that requests in
	// progress take together on a disk of constant speed.
	slowRequest = time.Second

	// A file system is nearly full when the volume may take more than it has, and less than
	// 1/nearlyFull of the volume's capacity is left. It has room again with half as much more.
	nearlyFull = 10

	// maxWarnings bounds the warnings of a volume.
	maxWarnings = 32

	// overlay is the name of a container's own layer.
	overlay = "overlayfs"
)

// request is what a volume requests from its file system.
type request int

const (
	reading request = iota
	writing
	takingRoom
	requests
)

// notices is the last event of each kind, so that no state is reported twice. Lack of room is counted
// for writes and for taking room separately, because a write in room that was taken before succeeds
// on a full disk. Each ends when such a request succeeds. A refusal to take room also ends when the
// file system reports enough free space, unless it was for a quota, which statfs does not include.
type notices struct {
	lockrank.Mutex[lockrank.Device]
	failing [requests]bool
	noRoom  [requests]error // the last refusal for lack of room
	full    bool            // according to the file system's free space
}

func (n *notices) isFullLocked() bool {
	return n.full || n.noRoom[writing] != nil || n.noRoom[takingRoom] != nil
}

// emit calls Config.Events, which is not nil.
func (v *Volume) emit(e events.Event) {
	e.At, e.To = time.Now(), v.cfg.Space
	lockrank.AssertNone("an event is emitted")
	v.cfg.Events(e)
}

// watch reports a request that takes too long: once while it does, and when the returned function is
// called with the request's error. Config.Events is not nil.
func (v *Volume) watch(ctx context.Context, file string, off, n int64, what request) (end func(error)) {
	begun, verb := time.Now(), [...]string{reading: "reading", writing: "writing"}[what]
	slow := func(how string) {
		v.emit(events.Event{
			Kind: events.DiskSlow, Context: ctx, Origin: events.From(ctx), Bytes: n, Took: time.Since(begun),
			Text: fmt.Sprintf("%s %s at %d %s", verb, file, off, how),
		})
	}
	emitted := make(chan struct{})
	timer := time.AfterFunc(slowRequest, func() {
		labels.SlowDisk.Set()
		defer close(emitted)
		slow("is not over yet")
	})
	return func(err error) {
		if !timer.Stop() {
			<-emitted // so that no event is emitted after the volume is closed
			slow("is over")
		}
		v.ended(ctx, what, err)
	}
}

// ended reports when requests begin to fail, and when one succeeds again. Altered bytes are no sign of
// a failing disk, and neither is lack of room.
func (v *Volume) ended(ctx context.Context, what request, err error) {
	if errors.Is(err, tier.ErrAltered) {
		return
	}
	noRoom, n := err != nil && isOf(errsFull, err), &v.notices
	n.Lock()
	failed, wasFull := n.failing[what], n.isFullLocked()
	if !noRoom {
		n.failing[what] = err != nil
	}
	if noRoom || err == nil {
		n.noRoom[what] = err
	}
	fails, full := n.failing[what], n.isFullLocked()
	n.Unlock()
	succeeds := [requests]string{"reads succeed again", "writes succeed again", "room can be taken again"}
	refused := [requests]string{writing: "a write found no room", takingRoom: "no room could be taken"}
	switch {
	case fails && !failed:
		v.emit(events.Event{Kind: events.DiskFailing, Context: ctx, Err: err})
	case failed && !fails:
		v.emit(events.Event{Kind: events.DiskWell, Context: ctx, Text: succeeds[what]})
	}
	switch {
	case full && !wasFull:
		v.emit(events.Event{Kind: events.DiskNearlyFull, Context: ctx, Text: refused[what], Err: err})
	case wasFull && !full:
		v.emit(events.Event{Kind: events.DiskWell, Context: ctx, Text: "it has room again"})
	}
}

// LookAtRoom reports when the file system has become nearly full, and when it has room again. It asks
// the file system. Without Config.Events it does nothing.
func (v *Volume) LookAtRoom() {
	if v.cfg.Events == nil {
		return
	}
	n := &v.notices
	n.Lock()
	refused := n.noRoom[takingRoom]
	n.Unlock()
	u, err := v.cfg.FS.Usage(v.dir)
	if err != nil {
		return // transfers will fail, too
	}
	left, s := max(0, u.Free-v.cfg.Reserve), v.Stats()
	isNearlyFull := func(was bool) bool {
		enough := s.Capacity / nearlyFull
		if was {
			enough += enough / 2
		}
		return left < s.Capacity-s.Backed && left < enough
	}
	n.Lock()
	wasFull, wasShort := n.isFullLocked(), n.full
	n.full = isNearlyFull(wasShort)
	// A refusal that the free space does not explain ends only when that changes: otherwise each look
	// would end it, and the next refusal would begin it. One since the file system was asked is more
	// recent than its answer.
	over := wasShort && !n.full && !errors.Is(refused, syscall.EDQUOT)
	if short, ok := errors.AsType[*shortError](refused); ok {
		over = left >= short.need && !isNearlyFull(true)
	}
	if over && refused == n.noRoom[takingRoom] {
		n.noRoom[takingRoom] = nil
	}
	full := n.isFullLocked()
	n.Unlock()
	switch {
	case full && !wasFull:
		text := fmt.Sprintf("%s may take %d bytes more than it has (free room there, or lower DiskConfig.Capacity)",
			v.cfg.Dir, s.Capacity-s.Backed)
		v.emit(events.Event{Kind: events.DiskNearlyFull, Bytes: left, Text: text})
	case wasFull && !full:
		v.emit(events.Event{Kind: events.DiskWell, Bytes: left, Text: "the file system has room again"})
	}
}

// warn adds a warning, once.
func (v *Volume) warn(c diag.Cause, format string, args ...any) {
	v.addWarning(causes.Warn(c, format, args...))
}

func (v *Volume) addWarning(w diag.Warning) {
	w.Space, w.What = v.cfg.Space.String(), fmt.Sprintf("volume %s: %s", v.cfg.Dir, w.What)
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.mu.warnings) < maxWarnings && !slices.Contains(v.mu.warnings, w) {
		v.mu.warnings = append(v.mu.warnings, w)
	}
}

// Warnings lists what was requested and the file system does not have.
func (v *Volume) Warnings() []diag.Warning {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.mu.warnings)
}

// warnOfFileSystem warns of a directory in memory or in a container's layer.
func (v *Volume) warnOfFileSystem(u disk.Usage) {
	memory := u.Memory
	if u.FileSystem == overlay && !memory { // an overlay that writes to memory, as far as topology finds out
		l, err := topology.DiskOf(context.Background(), v.dir, topology.Options{})
		memory = err == nil && l.FileSystem == "overlay" && l.InMemory()
	}
	switch {
	case memory:
		v.warn(causes.MemoryFileSystem, "the directory is on %s: what is spilled there stays in memory", u.FileSystem)
	case u.FileSystem == overlay:
		w := causes.Warn(causes.Overlay, "the directory is on %s, a container's own layer: "+
			"it shares its room, and goes with the container", overlay)
		if v.cfg.Persist {
			w.What, w.Info = w.What+" together with what persists", false
		}
		v.addWarning(w)
	}
}
