package spillway

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math"
	"path"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// Warnings lists what the machine refused or does not report, and what to do about each: what the
// topology could not find out, and what the arenas and volumes do without. There may be more of
// them later: a disk may begin to fail, or a GPU be lost. Each is logged once: when the engine is
// opened, for a lost GPU at once, and for other late ones when the engine is closed. The level is
// warning if it needs an action, and information or debug otherwise. It is safe for concurrent use,
// and works after Close. docs/machine.md has all causes.
func (e *Engine) Warnings() []diag.Warning {
	all := slices.Clone(e.warnings)
	for _, s := range e.warners {
		for _, w := range s.list() {
			w.Space = s.space.String()
			all = append(all, w)
		}
	}
	return all
}

// warner is what a space's memory warns of.
type warner struct {
	space tier.ID
	list  func() []diag.Warning
}

// warn adds a warning that does not come from a space's memory; Open alone calls it.
func (e *Engine) warn(w diag.Warning) {
	if !slices.Contains(e.warnings, w) {
		e.warnings = append(e.warnings, w)
		e.logWarnings()
	}
}

// warnFor adds what a space's memory warns of, now and later; Open alone calls it.
func (e *Engine) warnFor(space tier.ID, list func() []diag.Warning) {
	e.warners = append(e.warners, warner{space, list})
	e.logWarnings()
}

// logWarnings logs those that were not.
func (e *Engine) logWarnings() {
	for _, w := range e.Warnings() {
		e.logWarning(w)
	}
}

// logWarning logs w, unless it was. It may be called while the engine is opened, too.
//
// It is at warning level if it needs an action, and at information level if a person should read it
// once. Facts that every start on such a machine meets, and that nobody can change, are at debug
// level.
func (e *Engine) logWarning(w diag.Warning) {
	if _, logged := e.logged.LoadOrStore(w, true); logged {
		return
	}
	level := slog.LevelWarn
	if w.Info {
		level = slog.LevelInfo
		switch w.Cause {
		case causes.ExcludedNode, causes.HiddenProc, causes.HiddenSys, causes.UnknownPlace, causes.System:
			level = slog.LevelDebug
		}
	}
	var attrs []any
	if w.Space != "" {
		attrs = append(attrs, "space", w.Space)
	}
	if w.Remedy != "" {
		attrs = append(attrs, "remedy", w.Remedy)
	}
	// The text is the message, and not an attribute. So a log that keeps each message once keeps
	// all.
	e.cfg.Logger.Log(context.Background(), level, "spillway: "+w.What, attrs...)
}

// costs are what an engine loses by something that the topology does not know.
var costs = map[diag.Cause]string{
	causes.UnknownLimits: "the engine may take more memory than the process may have, " +
		"and the kernel then ends the process",
	causes.UnknownPlace:   "spaces may be bound to a node that is further away",
	causes.Driver:         "GPUs may be left out, or their defaults be worse for it",
	causes.VisibleDevices: "GPUs may be left out",
}

// warnOfMachine reports what the topology does not know, and memory that the process may not take.
// The latter is intended, except if a GPU is next to that memory.
func (e *Engine) warnOfMachine() {
	for _, w := range e.topo.Warnings {
		w.What = fmt.Sprintf("the machine does not report everything: %s: %s",
			w.What, cmp.Or(costs[w.Cause], "the defaults may be worse for it"))
		e.warn(w)
	}
	allowed := e.topo.Limits.MemoryNodes
	var lost int64
	excluded := topology.Set{}
	for _, n := range e.topo.Nodes {
		if n.MemoryBytes > 0 && len(allowed) > 0 && !allowed.Contains(n.ID) {
			excluded = append(excluded, n.ID)
			lost += n.MemoryBytes
		}
	}
	if len(excluded) == 0 {
		return
	}
	w := causes.Warn(causes.ExcludedNode, "the process may not take the memory of NUMA nodes %s, %d bytes: "+
		"host spaces are on others", excluded, lost)
	i := slices.IndexFunc(e.topo.GPUs, func(g topology.GPU) bool { return excluded.Contains(g.Node) })
	if i >= 0 {
		g := e.topo.GPUs[i]
		w.Info = false
		w.What += fmt.Sprintf(", and GPU %d on node %d is slower to reach from there", g.Index, g.Node)
	}
	e.warn(w)
}

// besideShare is the part of a container's memory that neither the spaces nor Go's heap have:
// for code, stacks, page tables and what the kernel keeps for the process.
const besideShare = 16

// warnOfMemory reports that Go's heap may grow beyond what the engine's spaces leave of the
// process's cgroup limit. The engine has touched or locked its part. So the kernel cannot take it
// back, and would end the process. The same goes for files in memory that hold spilled data. A heap
// without a limit of its own grows to about twice of what is in use, so it should have at least
// half of the memory.
func (e *Engine) warnOfMemory() {
	limit, source := e.topo.Limits.MemoryBytes, e.topo.Limits.MemorySource
	if limit == 0 || !strings.HasPrefix(path.Base(source), "memory.") {
		return // the machine's own, which has swap and a page cache to give
	}
	what, how := "host spaces and simulated GPUs", "locked and ahead of use"
	inMemory := make(map[string]bool)
	for _, w := range e.Warnings() {
		if w.Cause == causes.MemoryFileSystem {
			inMemory[w.Space] = true
			what = "host spaces, simulated GPUs and spill directories in memory"
			how = "locked, ahead of use or in files"
		}
	}
	var taken int64
	for _, s := range e.spaces {
		if s.Kind().IsMemory() || s.Backend == "sim" || inMemory[s.ID().String()] {
			taken += s.Capacity
		}
	}
	heap, left := debug.SetMemoryLimit(-1), max(0, limit-taken)
	room := max(0, left-limit/besideShare)
	bound := fmt.Sprintf("may grow to %d bytes (GOMEMLIMIT)", heap)
	if heap == math.MaxInt64 {
		bound = "has no limit (GOMEMLIMIT)"
	}
	if heap <= room || heap == math.MaxInt64 && left >= limit/2 {
		return
	}
	e.warn(causes.Warn(causes.MemoryLimit,
		"%s take %d of the %d bytes of %s, %s: "+
			"what is left, %d bytes, is for everything else, and Go's heap, which can have %d of them, %s: "+
			"the kernel ends the process when all is used up",
		what, taken, limit, source, how, left, room, bound))
}

// swapped adds to warnings of memory that is not locked whether that matters today.
func (e *Engine) swapped(list []diag.Warning) []diag.Warning {
	m := e.topo.Memory
	for i, w := range list {
		switch {
		case w.Cause != causes.LockLimit || m.TotalBytes == 0:
		case m.SwapBytes == 0:
			list[i].What += "; the machine has no swap now"
		default:
			list[i].What += fmt.Sprintf("; the machine has %d bytes of swap", m.SwapBytes)
		}
	}
	return list
}
