// Package httpui shows what an engine does, live, as a page of a program's own HTTP server.
//
//	ui := httpui.New()
//	eng, err := spillway.Open(ctx, spillway.Config{Events: ui.Event}) // spillway.Tee, if there are others
//	defer ui.Watch(eng)()
//	http.Handle("/spillway/", ui)
//
// The page shows how full the tiers are over time, the throughput of each edge, waits, why bytes moved,
// for which plans and operators, and what to change. It reads alone: it answers GET and HEAD, and
// changes nothing. It ignores the path, and works behind any prefix. It asks nothing of other hosts, and
// its policy allows its own script alone.
//
// It has no password, and names plans, operators, tasks and directories. So it answers only this
// machine, asked by a loopback address or as localhost: neither other machines, nor a page of another
// site that has a browser ask. Recorder.Public lifts that; then serve it where only those come who
// should see it. A proxy on this machine passes on what others ask: it has to check them.
//
// What is recorded is bounded: some 100 KB for an engine with a GPU and a disk, however long it runs.
// An older recording is coarser. An event costs some 120 ns.
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

// sampled is how often is looked how full the spaces are. A look takes a microsecond or so a space.
const sampled = 20 * time.Millisecond

// mostTasks is how many tasks are shown that waited for room.
const mostTasks = 50

// Recorder records what an engine does, and serves the page about it. New makes one; it is for one
// engine. All its methods may be called by several goroutines at once.
type Recorder struct {
	// Public has it answer all who reach it, and not this machine alone. It is set before requests come.
	Public bool

	timeline *timeline.Recorder
	began    time.Time

	mu struct {
		sync.Mutex // a leaf
		engine     *spillway.Engine
		over       bool
	}
}

// New returns a Recorder whose recording begins now.
func New() *Recorder { return &Recorder{timeline: timeline.New(), began: time.Now()} }

// Event records an event. It is for spillway.Config.Events.
func (r *Recorder) Event(e spillway.Event) { r.timeline.Event(e) }

// Watch begins to look how full the engine's spaces are. The function that it returns ends that, and
// waits until it has; the page shows what was recorded until then. Call it before the engine is
// closed, or after. A second Watch has no effect.
func (r *Recorder) Watch(eng *spillway.Engine) (stop func()) {
	r.mu.Lock()
	first := r.mu.engine == nil
	if first {
		r.mu.engine = eng
	}
	r.mu.Unlock()
	if !first {
		return func() {}
	}
	ended := make(chan struct{})
	var done sync.WaitGroup
	r.sample(eng)
	done.Go(func() {
		labels.Report.Set()
		tick := time.NewTicker(sampled)
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

// ServeHTTP serves the page; to others than this machine only if Public is set.
func (r *Recorder) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if !r.Public && !page.IsLocal(req) {
		http.Error(w, "only this machine is served, by a loopback address or localhost (the program can set httpui.Recorder.Public)", http.StatusForbidden)
		return
	}
	page.Serve(w, req, func() *page.Report {
		r.mu.Lock()
		eng, over := r.mu.engine, r.mu.over
		r.mu.Unlock()
		return r.report(eng, over)
	})
}

// report is what the page shows. The engine may be nil.
func (r *Recorder) report(eng *spillway.Engine, over bool) *page.Report {
	name := filepath.Base(os.Args[0])
	run := page.Run{
		Name: name, Began: r.began, Level: page.Good, Timeline: r.timeline.Snapshot(page.Points, page.Numbers),
		Machine: []page.Pair{{Name: "process", Value: name + ", pid " + strconv.Itoa(os.Getpid())}, {Name: "cores", Value: strconv.Itoa(runtime.GOMAXPROCS(0))}, {Name: "Go", Value: runtime.Version()}},
	}
	run.Seconds = run.Timeline.Seconds
	out := &page.Report{Title: "Spillway in " + name, Live: !over}
	if eng == nil {
		run.Headline, run.Level = "There is no engine yet: the program has not called Watch.", page.Warn
		out.Runs = []page.Run{run}
		return out
	}
	stats := eng.Stats()
	run.Headline, run.Level = verdict(stats, over)
	var down, up, within int64
	for _, s := range stats.Spaces {
		run.Spaces = append(run.Spaces, page.Space{ID: s.ID.String(), Backend: s.Backend, Capacity: s.Capacity, Peak: s.Peak, End: s.Used(), Now: true})
	}
	for _, e := range stats.Edges {
		run.Edges = append(run.Edges, page.Edge{
			From: e.From.String(), To: e.To.String(), Batches: e.Batches, Bytes: e.Bytes, Copies: e.Copies, Unmoved: e.Unmoved, Ahead: e.Ahead,
			AheadUsed: e.AheadUsed, AheadInVain: e.AheadInVain, Seconds: e.Busy.Seconds(), P50: e.P50.Seconds(), P99: e.P99.Seconds(), Longest: e.Longest.Seconds(), ByReason: e.ByReason,
		})
		switch cmp.Compare(e.From.Kind, e.To.Kind) {
		case -1:
			down += e.Bytes
		case 1:
			up += e.Bytes
		default: // as from one GPU to another
			within += e.Bytes
		}
	}
	slices.SortStableFunc(stats.Work, func(a, b convert.WorkStats) int { return cmp.Compare(b.Down.Bytes, a.Down.Bytes) })
	for _, w := range stats.Work[:min(len(stats.Work), mostTasks)] {
		run.Work = append(run.Work, page.Work{Plan: cut(w.Plan), Operator: cut(w.Operator), Port: w.Port, Down: w.Down.Bytes, Up: w.Up.Bytes, Unread: w.Unread})
	}
	for _, b := range stats.Blocked[:min(len(stats.Blocked), mostTasks)] {
		run.Tasks = append(run.Tasks, page.Task{Name: cut(b.Owner), Waits: b.Waits, Total: b.Total.Seconds(), Longest: b.Longest.Seconds(), Waiting: b.Waiting, SoFar: b.SoFar.Seconds()})
	}
	run.Waits = page.Waits{Count: stats.Waits.Count, P50: stats.Waits.P50.Seconds(), P99: stats.Waits.P99.Seconds(), Max: stats.Waits.Max.Seconds(), Waiting: stats.Waits.Waiting, Oldest: stats.Waits.Oldest.Seconds()}
	run.Facts = []page.Pair{
		{Name: "recorded", Value: time.Duration(run.Seconds * 1e9).Round(time.Second).String()}, {Name: "moved down", Value: size.Approx(down)}, {Name: "moved up", Value: size.Approx(up)},
		{Name: "waits for room", Value: strconv.FormatInt(stats.Waits.Count, 10)}, {Name: "tasks running", Value: strconv.Itoa(stats.Admission.Running)}, {Name: "tasks waiting", Value: strconv.Itoa(stats.Admission.Waiting)},
	}
	if within > 0 {
		run.Facts = append(run.Facts, page.Pair{Name: "moved within a tier", Value: size.Approx(within)})
	}
	for _, s := range eng.Spaces() {
		mark := fmt.Sprintf("%s of %s: stop %s, trigger %s, limit %s", s.Backend(), size.Approx(s.Capacity()), size.Approx(s.Stop()), size.Approx(s.Trigger()), size.Approx(s.Limit()))
		field := map[tier.Kind]string{tier.GPU: "GPUs, GPUMarks", tier.Host: "HostMemory, HostMarks", tier.Disk: "Disks, DiskMarks"}[s.Kind()]
		run.Settings = append(run.Settings, page.Setting{Name: s.ID().String(), Value: mark, Field: field})
	}
	for _, w := range eng.Warnings() {
		run.Warnings = append(run.Warnings, page.Warning{What: w.What, Remedy: w.Remedy, Info: w.Info})
	}
	out.Runs = []page.Run{run}
	return out
}

// longestName is how many bytes of a name are shown: some programs name plans by their SQL, and the page is
// sent anew each second.
const longestName = 200

// cut returns a name that is not too long.
func cut(name string) string {
	if len(name) <= longestName {
		return name
	}
	return strings.ToValidUTF8(name[:longestName], "") + "…"
}

// stuckAfter is how long a wait takes before the verdict says so. Moves that make room are over by then.
const stuckAfter = 10 * time.Second

// verdict says in a sentence how the engine is.
func verdict(stats spillway.Stats, over bool) (string, page.Level) {
	for _, s := range stats.Spaces {
		if s.Lost {
			return fmt.Sprintf("%s is lost, with what was in it.", s.ID), page.Bad
		}
	}
	text := ""
	for i, s := range stats.Spaces {
		if i > 0 {
			text += ", "
		}
		text += fmt.Sprintf("%s %.0f %%", s.ID, 100*float64(s.Used())/float64(max(1, s.Capacity)))
	}
	switch {
	case over:
		return "The engine is no longer watched. At the end it was full to: " + text + ".", page.Good
	case stats.Waits.Oldest >= stuckAfter:
		return fmt.Sprintf("%d requests wait for room, the oldest for %s. Full to: %s.", stats.Waits.Waiting, stats.Waits.Oldest.Round(time.Second), text), page.Warn
	case stats.Monitor.Refused > 0:
		return fmt.Sprintf("%d waiters were refused, because all tiers were full. Full to: %s.", stats.Monitor.Refused, text), page.Warn
	}
	return "Full to: " + text + ".", page.Good
}
