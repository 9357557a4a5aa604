package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/bandwidth"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/page"
	"github.com/spillway-db/spillway/internal/timeline"
)

// sampled is the period at which a recording samples the spaces: that of the intervals of a short run.
const sampled = 5 * time.Millisecond

// inDocument is the largest number of intervals in the timeline of a JSON document.
const inDocument = 240

// recording collects the timeline of a run. A nil recording records nothing.
type recording struct {
	timeline *timeline.Recorder
	stop     func() // ends watch; nil: not watching
}

// record returns a recording, or nil if nothing that the flags ask for shows one.
func (f *runFlags) record() *recording {
	o := &f.output
	if o.json == "" && o.html == "" && o.printed() != report.JSON && f.listen == "" {
		return nil
	}
	return &recording{timeline: timeline.New()}
}

// events returns the function for Config.Events, or nil if there is nothing to record.
func (r *recording) events() func(spillway.Event) {
	if r == nil {
		return nil
	}
	return r.timeline.Event
}

// watch samples the engine's spaces until end is called.
func (r *recording) watch(eng *spillway.Engine) {
	if r == nil {
		return
	}
	sample := func() {
		var states []timeline.State
		for _, s := range eng.Spaces() {
			states = append(states, timeline.StateOf(s))
		}
		r.timeline.Sample(time.Now(), states)
	}
	sample()
	stop := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(sampled)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				sample()
			}
		}
	})
	r.stop = sync.OnceFunc(func() {
		close(stop)
		done.Wait()
	})
}

// end stops watch. Later calls do nothing.
func (r *recording) end() {
	if r != nil && r.stop != nil {
		r.stop()
	}
}

// snapshot returns the timeline for a document, or nil if r is nil.
func (r *recording) snapshot() *timeline.Timeline {
	if r == nil {
		return nil
	}
	return r.timeline.Snapshot(inDocument, page.Numbers)
}

// phased is a job.Progress that also records the phases.
type phased struct {
	job.Progress
	of *recording
}

// Begin starts a phase.
func (p phased) Begin(phase string, steps int64) {
	p.Progress.Begin(phase, steps)
	p.of.timeline.Phase(time.Now(), phase)
}

// progress returns p, extended to record the phases.
func (r *recording) progress(p job.Progress) job.Progress {
	if r == nil {
		return p
	}
	return phased{p, r}
}

// limits measures the machine's raw limits while the engine is idle. If there is no room to do so, it
// adds a note.
func (m *machine) limits(ctx context.Context, seed uint64) []report.Limit {
	all, err := bandwidth.Limits(ctx, m.engine, seed, m.faults.Slow)
	if err != nil && !errors.Is(err, context.Canceled) {
		m.notes.add("no limits", "the raw limits were not measured: "+err.Error())
	}
	var out []report.Limit
	for _, l := range all {
		out = append(out, report.Limit{
			From: l.From.String(), To: l.To.String(), GiBPerS: l.GiBPerS, LimitOf: string(l.LimitOf),
		})
	}
	return out
}
