package main

import (
	"os"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/system"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/histogram"
	"github.com/spillway-db/spillway/internal/procfs"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/topology"
)

// others measures what other processes use of the processors that this process may use. A nil one
// measures nothing.
type others struct {
	cpus   []int
	before cpuUsage
}

// cpuUsage is what processors have done up to a moment.
type cpuUsage struct {
	cpus map[int]procfs.CPUTime
	own  time.Duration // of this process
}

// watchOthers begins to measure. It returns nil where others cannot be told from this process: without
// /proc/stat, and under a CPU quota, of which /proc/stat knows nothing.
func watchOthers(top *topology.Topology) *others {
	o := &others{cpus: top.CPU.Allowed, before: usageNow()}
	if top.Limits.CPUQuota > 0 || len(o.before.cpus) == 0 || o.before.own == 0 {
		return nil
	}
	return o
}

func usageNow() cpuUsage {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return cpuUsage{}
	}
	return cpuUsage{procfs.CPUTimes(string(text)), system.CPUTime()}
}

// end returns what was used since watchOthers, or nil if it is not known.
func (o *others) end() *report.Processors {
	if o == nil {
		return nil
	}
	return o.since(usageNow())
}

// since returns what was used up to now. It is nil if the processors have counted too little for a
// share of it, less than a second of all of them.
func (o *others) since(now cpuUsage) *report.Processors {
	var busy, all int64
	p := &report.Processors{}
	for _, cpu := range o.cpus {
		was, ok := o.before.cpus[cpu]
		is, still := now.cpus[cpu]
		if !ok || !still { // it went offline or came back
			continue
		}
		p.Count++
		busy += is.Busy - was.Busy
		all += is.Busy - was.Busy + is.Idle - was.Idle
	}
	total := time.Duration(all) * procfs.Tick
	if total < time.Second {
		return nil
	}
	used := time.Duration(busy)*procfs.Tick - (now.own - o.before.own)
	p.OthersShare = max(0, used.Seconds()/total.Seconds())
	return p
}

// admissions collects how long tasks waited until the engine admitted them. The zero value is empty.
// It is safe for concurrent use.
type admissions struct {
	waits  histogram.Durations
	waited atomic.Int64
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
