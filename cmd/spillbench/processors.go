package main

import (
	"os"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/histogram"
	"github.com/spillway-db/spillway/internal/thread"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/topology"
)

// processorTimes has the CPU times of the processors and of this process at one moment.
type processorTimes struct {
	cpus map[int]thread.CPUTime // empty without /proc/stat
	own  time.Duration          // CPU time of this process
}

func processorsNow() processorTimes {
	text, _ := os.ReadFile("/proc/stat") // elsewhere than on Linux there are no figures
	return processorTimes{thread.CPUTimes(string(text)), thread.ProcessTime()}
}

// othersShare returns the share of other processes, between two moments, of the processors that this
// process may use. It returns nil if the share is not known: without /proc/stat, under a CPU quota, which
// /proc/stat does not show, and for less than one second of all processors together.
func othersShare(top *topology.Topology, before, after processorTimes) *report.Processors {
	var busy, all int64
	p := new(report.Processors)
	for _, cpu := range top.CPU.Allowed {
		was, known := before.cpus[cpu]
		is, still := after.cpus[cpu]
		if known && still { // otherwise it went offline or online
			p.Count++
			busy += is.Busy - was.Busy
			all += is.Busy - was.Busy + is.Idle - was.Idle
		}
	}
	total := time.Duration(all) * thread.Tick
	if top.Limits.CPUQuota > 0 || total < time.Second {
		return nil
	}
	used := time.Duration(busy)*thread.Tick - (after.own - before.own)
	p.OthersShare = max(0, used.Seconds()/total.Seconds())
	return p
}

// admissions collects how long tasks waited until the engine admitted them. The zero value is empty.
// It is safe for concurrent use.
type admissions struct {
	waits  histogram.Durations
	waited atomic.Int64 // tasks that waited for more than a millisecond
}

// event is for Config.Events.
func (a *admissions) event(e spillway.Event) {
	if e.Kind != events.TaskBegun {
		return
	}
	a.waits.Record(e.Took)
	if e.Took > time.Millisecond {
		a.waited.Add(1)
	}
}

// report returns the part of the document, or nil if there were no tasks.
func (a *admissions) report(stats admission.Stats) *report.Admission {
	if stats.Admitted == 0 {
		return nil
	}
	w := a.waits.Summary()
	return &report.Admission{
		Admitted: stats.Admitted, Waited: a.waited.Load(), Retried: stats.Retried,
		P50: w.P50.Seconds(), P99: w.P99.Seconds(), P999: w.P999.Seconds(), Max: w.Max.Seconds(),
	}
}
