// Package httpui shows the work of an engine as a live page of a program's own HTTP server.
//
//	ui := httpui.New()
//	eng, err := spillway.Open(ctx, spillway.Config{Events: ui.Event}) // spillway.Tee joins several functions
//	defer ui.Watch(eng)()
//	http.Handle("/spillway/", ui)
//
// The page shows how full the tiers are over time, the throughput of each edge, waits, the reasons,
// plans and operators of moves, and what to change. It is read-only: the handler answers GET and HEAD.
// The handler ignores the path, so it works behind any prefix. The page makes no requests to other
// hosts, and its policy allows only its own script.
//
// The page has no password, and it contains names of plans, operators, tasks and directories. So the
// handler answers only requests from this machine that name a loopback address or localhost: neither
// other machines nor a page of another site in a local browser can read it. Recorder.Public removes
// this check; then the program must restrict access itself. A proxy on this machine forwards requests
// of others, so the proxy must check them.
//
// The recording takes about 100 KB for an engine with a GPU and a disk, however long it runs: it
// becomes coarser with time. An event costs about 120 ns.
package httpui

import (
	"cmp"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/observe/page"
	"github.com/spillway-db/spillway/observe/timeline"
	"github.com/spillway-db/spillway/tier"
)

// samplePeriod is the time between samples of the spaces. A sample takes about 1 µs for each space.
const samplePeriod = 20 * time.Millisecond

// Recorder records the work of one engine and serves the page. New makes one. It is safe for
// concurrent use.
type Recorder struct {
	// Public serves requests from any host. By default only this machine may connect. Set it before the
	// first request.
	Public bool

	timeline *timeline.Recorder
	began    time.Time

	mu struct {
		sync.Mutex
		engine *spillway.Engine
		over   bool
	}
}

// New returns a Recorder whose recording begins now.
func New() *Recorder { return &Recorder{timeline: timeline.New(), began: time.Now()} }

// Event records an event. Pass it to spillway.Config.Events.
func (r *Recorder) Event(e spillway.Event) { r.timeline.Event(e) }

// Watch starts a goroutine that samples the engine's spaces. The returned function stops it and waits
// for its end; the page keeps the recording. Call it before or after the engine is closed. A second
// Watch has no effect.
func (r *Recorder) Watch(eng *spillway.Engine) (stop func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.engine != nil {
		return func() {}
	}
	r.mu.engine = eng
	end := r.timeline.Watch(eng.Spaces, samplePeriod)
	return func() {
		end()
		r.mu.Lock()
		defer r.mu.Unlock()
		r.mu.over = true
	}
}

// ServeHTTP serves the page. Unless Public is set, it refuses requests from other machines and
// requests that name another host.
func (r *Recorder) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if !r.Public && !page.IsLocal(req) {
		http.Error(w, "only this machine is served, by a loopback address or localhost "+
			"(the program can set httpui.Recorder.Public)", http.StatusForbidden)
		return
	}
	page.Serve(w, req, r.report)
}

// report returns the content of the page.
func (r *Recorder) report() *page.Report {
	r.mu.Lock()
	eng, over := r.mu.engine, r.mu.over
	r.mu.Unlock()
	name := filepath.Base(os.Args[0])
	run := page.Run{
		Name: name, Began: r.began, Level: page.Warn, Timeline: r.timeline.Snapshot(page.Points, page.Numbers),
		Headline: "There is no engine yet: the program has not called Watch.",
		Machine: page.Pairs("process", fmt.Sprintf("%s, pid %d", name, os.Getpid()),
			"cores", runtime.GOMAXPROCS(0), "Go", runtime.Version()),
	}
	run.Seconds = run.Timeline.Seconds
	if eng != nil {
		describe(&run, eng, over)
	}
	return &page.Report{Title: "Spillway in " + name, Live: !over, Runs: []page.Run{run}}
}

// describe sets the parts of the run that an engine reports.
func describe(run *page.Run, eng *spillway.Engine, over bool) {
	stats := eng.Stats()
	run.Headline, run.Level = verdict(stats, over)
	run.Fill(stats)
	slices.SortStableFunc(run.Work, func(a, b page.Work) int { return cmp.Compare(b.DownBytes, a.DownBytes) })
	for i, w := range run.Work {
		run.Work[i].Plan, run.Work[i].Operator = cut(w.Plan), cut(w.Operator)
	}
	for i, t := range run.Tasks {
		run.Tasks[i].Name = cut(t.Name)
	}
	down, up, within := run.Moved()
	facts := []any{
		"recorded", time.Duration(run.Seconds * 1e9).Round(time.Second),
		"moved down", size.Approx(down), "moved up", size.Approx(up), "waits for room", stats.Waits.Count,
		"tasks running", stats.Admission.Running, "tasks waiting", stats.Admission.Waiting,
	}
	if within > 0 {
		facts = append(facts, "moved within a tier", size.Approx(within))
	}
	run.Facts = page.Pairs(facts...)
	fields := map[tier.Kind]string{
		tier.GPU: "GPUs, GPUMarks", tier.Host: "HostMemory, HostMarks", tier.Disk: "Disks, DiskMarks",
	}
	for _, s := range stats.Spaces {
		run.Settings = append(run.Settings, page.Setting{
			Name: s.ID.String(), Field: fields[s.ID.Kind],
			Value: fmt.Sprintf("%s of %s: stop %s, trigger %s, limit %s",
				s.Backend, size.Approx(s.Capacity), size.Approx(s.Stop), size.Approx(s.Trigger), size.Approx(s.Limit)),
		})
	}
	run.Warnings = eng.Warnings()
}

// maxName is the number of bytes of a name that the page shows: some programs name plans by their SQL,
// and a browser fetches the page each second.
const maxName = 200

// cut shortens a name.
func cut(name string) string {
	if len(name) <= maxName {
		return name
	}
	return strings.ToValidUTF8(name[:maxName], "") + "…"
}

// stuckAfter is the age of a wait that the verdict mentions. Moves that make room take less.
const stuckAfter = 10 * time.Second

// verdict returns the state of the engine as a sentence.
func verdict(stats spillway.Stats, over bool) (string, page.Level) {
	var use []string
	for _, s := range stats.Spaces {
		if s.Lost {
			return fmt.Sprintf("%s is lost, with what was in it.", s.ID), page.Bad
		}
		use = append(use, fmt.Sprintf("%s %.0f %%", s.ID, 100*float64(s.Used())/float64(max(1, s.Capacity))))
	}
	full := strings.Join(use, ", ") + "."
	switch {
	case over:
		return "The engine is no longer watched. At the end it was full to: " + full, page.Good
	case stats.Waits.Oldest >= stuckAfter:
		return fmt.Sprintf("%d requests wait for room, the oldest for %s. Full to: %s",
			stats.Waits.Waiting, stats.Waits.Oldest.Round(time.Second), full), page.Warn
	case stats.Monitor.Refused > 0:
		return fmt.Sprintf("%d waiters were refused, because all tiers were full. Full to: %s",
			stats.Monitor.Refused, full), page.Warn
	}
	return "Full to: " + full, page.Good
}
