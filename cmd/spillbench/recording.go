package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/bandwidth"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/perfetto"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/page"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/timeline"
)

// sampled is how often is looked how full the spaces are: as often as a short run has intervals.
const sampled = 5 * time.Millisecond

// inDocument is how many intervals the timeline of a JSON document has at most.
const inDocument = 240

// recording is what happens in a run, over time. A nil one records nothing.
type recording struct {
	timeline *timeline.Recorder
	trace    *perfetto.Writer // of single events; may be nil
	file     *stream          // that it is written to
	to       *destination     // which that is

	stop chan struct{} // nil: not watching
	done sync.WaitGroup
}

// record returns a recording of what the flags want to show; nil if they want none. The caller must
// call finish.
func (f *runFlags) record() (*recording, error) {
	o := &f.output
	if o.json == "" && o.html == "" && o.printed() != report.JSON && f.listen == "" && f.perfetto == "" {
		return nil, nil
	}
	r := &recording{timeline: timeline.New()}
	if f.perfetto == "" {
		return r, nil
	}
	var err error
	if r.to, err = newDestination("--perfetto", f.perfetto); err != nil {
		return nil, err
	}
	if r.file, err = r.to.stream(); err != nil {
		return nil, errors.Join(fail.Environmentf("%s: %w", r.to.flag, pathless(err)), r.to.close())
	}
	r.trace = perfetto.New(r.file, perfetto.Most)
	return r, nil
}

// finish ends the recording, and puts the trace in its place if it is to be kept. Nothing may happen
// in the engine any more. A second call does nothing.
func (r *recording) finish(keep bool, log *notes) error {
	r.end()
	if r == nil || r.file == nil {
		return nil
	}
	file := r.file
	r.file = nil
	defer r.to.close()
	if !keep {
		return file.drop()
	}
	left, err := r.trace.Close()
	if err != nil {
		return errors.Join(fail.Environmentf("writing %s: %w", r.to.flag, pathless(err)), file.drop())
	}
	if left > 0 {
		log.add("trace is full", fmt.Sprintf("of the trace %d events were left out: it has %s at most", left, size.Approx(perfetto.Most)))
	}
	if err := file.keep(); err != nil {
		return fail.Environmentf("writing %s: %w", r.to.flag, pathless(err))
	}
	return nil
}

// event is for Config.Events.
func (r *recording) event(e spillway.Event) {
	r.timeline.Event(e)
	if r.trace != nil {
		r.trace.Event(e)
	}
}

// events is event, or nil if there is nothing to record.
func (r *recording) events() func(spillway.Event) {
	if r == nil {
		return nil
	}
	return r.event
}

// watch begins to look at the engine's spaces, until end is called.
func (r *recording) watch(eng *spillway.Engine) {
	if r == nil {
		return
	}
	r.sample(eng)
	r.stop = make(chan struct{})
	r.done.Go(func() {
		tick := time.NewTicker(sampled)
		defer tick.Stop()
		for {
			select {
			case <-r.stop:
				return
			case <-tick.C:
				r.sample(eng)
			}
		}
	})
}

func (r *recording) sample(eng *spillway.Engine) {
	spaces := eng.Spaces()
	now, states := time.Now(), make([]timeline.State, len(spaces))
	for i, s := range spaces {
		states[i] = timeline.StateOf(s)
	}
	r.timeline.Sample(now, states)
	if r.trace != nil {
		r.trace.Sample(now, states)
		_ = r.trace.Flush() // an error stays, and is told at the end
	}
}

// end ends watch. It may be called again.
func (r *recording) end() {
	if r == nil || r.stop == nil {
		return
	}
	close(r.stop)
	r.done.Wait()
	r.stop = nil
}

// snapshot is the timeline for a document; nil of no recording.
func (r *recording) snapshot() *timeline.Timeline {
	if r == nil {
		return nil
	}
	return r.timeline.Snapshot(inDocument, page.Numbers)
}

// phased tells a recording of the phases, too.
type phased struct {
	job.Progress
	of *recording
}

// Begin starts a phase.
func (p phased) Begin(phase string, steps int64) {
	p.Progress.Begin(phase, steps)
	p.of.timeline.Phase(time.Now(), phase)
}

// progress returns a progress that the recording gets the phases of.
func (r *recording) progress(p job.Progress) job.Progress {
	if r == nil {
		return p
	}
	return phased{p, r}
}

// limits measures what the machine does without the engine, which is idle. Where that cannot be done,
// for lack of room, it is noted.
func (m *machine) limits(ctx context.Context, seed uint64) []report.Limit {
	all, err := bandwidth.Limits(ctx, m.engine, seed, m.faults.Slow)
	if err != nil && !errors.Is(err, context.Canceled) {
		m.notes.add("no limits", "the raw limits were not measured: "+err.Error())
	}
	var out []report.Limit
	for _, l := range all {
		out = append(out, report.Limit{From: l.From.String(), To: l.To.String(), GiBPerS: l.GiBPerS, LimitOf: string(l.LimitOf)})
	}
	return out
}
