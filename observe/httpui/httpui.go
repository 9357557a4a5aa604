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
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/observe/page"
	"github.com/spillway-db/spillway/observe/timeline"
	"github.com/spillway-db/spillway/tier"
)

// samplePeriod is the time between samples of the spaces. A sample takes about 1 µs for each space.
const samplePeriod = 20 * time.Millisecond

// maxRows is the number of operators, and of tasks, that the page shows.
const maxRows = 50

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
	ended := make(chan struct{})
	var done sync.WaitGroup
	r.sample(eng)
	done.Go(func() {
		labels.Report.Set()
		tick := time.NewTicker(samplePeriod)
		defer tick.Stop()
		for {
			select {
			case <-ended:
				return
			case <-tick.C:
				r.sample(eng)
			}
		}
	})
	return sync.OnceFunc(func() {
		close(ended)
		done.Wait()
		r.sample(eng)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.mu.over = true
	})
}

func (r *Recorder) sample(eng *spillway.Engine) {
	spaces := eng.Spaces()
	states := make([]timeline.State, len(spaces))
	for i, s := range spaces {
		states[i] = timeline.StateOf(s)
	}
	r.timeline.Sample(time.Now(), states)
}

// ServeHTTP serves the page, to other machines only if Public is set.
func (r *Recorder) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if !r.Public && !page.IsLocal(req) {
		const refused = "only this machine is served, by a loopback address or localhost (the program can set httpui.Recorder.Public)"
		http.Error(w, refused, http.StatusForbidden)
		return
	}
	page.Serve(w, req, r.report)
}

// report returns the content of the page.
func (r *Recorder) report() *page.Report {
	r.mu.Lock()
	eng, over := r.mu.engine, r.mu.over
	r.mu.Unlock()
	pair := func(name, value string) page.Pair { return page.Pair{Name: name, Value: value} }
	name := filepath.Base(os.Args[0])
	run := page.Run{
		Name: name, Began: r.began, Level: page.Warn, Timeline: r.timeline.Snapshot(page.Points, page.Numbers),
		Headline: "There is no engine yet: the program has not called Watch.",
		Machine: []page.Pair{
			pair("process", fmt.Sprintf("%s, pid %d", name, os.Getpid())), pair("cores", strconv.Itoa(runtime.GOMAXPROCS(0))), pair("Go", runtime.Version()),
		},
	}
	run.Seconds = run.Timeline.Seconds
	if eng == nil {
		return &page.Report{Title: "Spillway in " + name, Live: !over, Runs: []page.Run{run}}
	}
	stats := eng.Stats()
	run.Headline, run.Level = verdict(stats, over)
	for _, s := range stats.Spaces {
		run.Spaces = append(run.Spaces, page.Space{ID: s.ID.String(), Backend: s.Backend, Capacity: s.Capacity, Peak: s.Peak, End: s.Used(), Now: true})
	}
	moved := make(map[int]int64) // by direction: -1 down, 1 up, 0 within a tier, as from one GPU to another
	for _, e := range stats.Edges {
		moved[cmp.Compare(e.From.Kind, e.To.Kind)] += e.Bytes
		run.Edges = append(run.Edges, page.Edge{
			From: e.From.String(), To: e.To.String(), Batches: e.Batches, Bytes: e.Bytes, Copies: e.Copies, Unmoved: e.Unmoved,
			Ahead: e.Ahead, AheadUsed: e.AheadUsed, AheadInVain: e.AheadInVain, ByReason: e.ByReason,
			Seconds: e.Busy.Seconds(), P50: e.P50.Seconds(), P99: e.P99.Seconds(), Longest: e.Longest.Seconds(),
		})
	}
	slices.SortStableFunc(stats.Work, func(a, b convert.WorkStats) int { return cmp.Compare(b.Down.Bytes, a.Down.Bytes) })
	for _, w := range stats.Work[:min(len(stats.Work), maxRows)] {
		run.Work = append(run.Work, page.Work{
			Plan: cut(w.Plan), Operator: cut(w.Operator), Port: w.Port, Down: w.Down.Bytes, Up: w.Up.Bytes, Unread: w.Unread,
		})
	}
	for _, b := range stats.Blocked[:min(len(stats.Blocked), maxRows)] {
		run.Tasks = append(run.Tasks, page.Task{
			Name: cut(b.Owner), Waits: b.Waits, Total: b.Total.Seconds(), Longest: b.Longest.Seconds(), Waiting: b.Waiting, SoFar: b.SoFar.Seconds(),
		})
	}
	w := stats.Waits
	run.Waits = page.Waits{
		Count: w.Count, P50: w.P50.Seconds(), P99: w.P99.Seconds(), Max: w.Max.Seconds(), Waiting: w.Waiting, Oldest: w.Oldest.Seconds(),
	}
	run.Facts = []page.Pair{
		pair("recorded", time.Duration(run.Seconds*1e9).Round(time.Second).String()),
		pair("moved down", size.Approx(moved[-1])), pair("moved up", size.Approx(moved[1])),
		pair("waits for room", strconv.FormatInt(w.Count, 10)),
		pair("tasks running", strconv.Itoa(stats.Admission.Running)), pair("tasks waiting", strconv.Itoa(stats.Admission.Waiting)),
	}
	if moved[0] > 0 {
		run.Facts = append(run.Facts, pair("moved within a tier", size.Approx(moved[0])))
	}
	for _, s := range stats.Spaces {
		run.Settings = append(run.Settings, page.Setting{
			Name: s.ID.String(),
			Value: fmt.Sprintf("%s of %s: stop %s, trigger %s, limit %s",
				s.Backend, size.Approx(s.Capacity), size.Approx(s.Stop), size.Approx(s.Trigger), size.Approx(s.Limit)),
			Field: map[tier.Kind]string{tier.GPU: "GPUs, GPUMarks", tier.Host: "HostMemory, HostMarks", tier.Disk: "Disks, DiskMarks"}[s.ID.Kind],
		})
	}
	for _, w := range eng.Warnings() {
		run.Warnings = append(run.Warnings, page.Warning{What: w.What, Remedy: w.Remedy, Info: w.Info})
	}
	return &page.Report{Title: "Spillway in " + name, Live: !over, Runs: []page.Run{run}}
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
	var full []string
	for _, s := range stats.Spaces {
		if s.Lost {
			return fmt.Sprintf("%s is lost, with what was in it.", s.ID), page.Bad
		}
		full = append(full, fmt.Sprintf("%s %.0f %%", s.ID, 100*float64(s.Used())/float64(max(1, s.Capacity))))
	}
	text := strings.Join(full, ", ")
	switch {
	case over:
		return "The engine is no longer watched. At the end it was full to: " + text + ".", page.Good
	case stats.Waits.Oldest >= stuckAfter:
		return fmt.Sprintf("%d requests wait for room, the oldest for %s. Full to: %s.",
			stats.Waits.Waiting, stats.Waits.Oldest.Round(time.Second), text), page.Warn
	case stats.Monitor.Refused > 0:
		return fmt.Sprintf("%d waiters were refused, because all tiers were full. Full to: %s.", stats.Monitor.Refused, text), page.Warn
	}
	return "Full to: " + text + ".", page.Good
}
