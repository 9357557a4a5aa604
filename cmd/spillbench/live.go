package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/bandwidth"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/observe/page"
	"github.com/spillway-db/spillway/observe/timeline"
)

// live serves the report of a run while it lasts. A nil live serves nothing.
type live struct {
	server *http.Server
	at     net.Listener
	done   sync.WaitGroup // the server's accept loop
	local  bool           // only this machine may connect
	silent sync.Map       // connections without a request yet, by net.Conn

	mu     sync.Mutex
	report func() *page.Report // the content of the page; called with mu held
	asked  time.Time           // the time of the latest request for data
	final  func()              // reports to end that a page has the result; nil before end
}

// lookedAt is how long after its last request a page counts as open: it asks each second. The end of a
// run waits as long for an open page.
const lookedAt = 1500 * time.Millisecond

// listenAddress returns the address that --listen means. Without a host, only this machine reaches it.
func listenAddress(text string) (string, error) {
	if text == "" {
		return "", nil
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return "", fail.Usagef("--listen %s: want HOST:PORT, such as 127.0.0.1:0", text)
	}
	if host == "" {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port), nil
}

// serve begins to serve at the address that --listen gives, and prints where.
func (f *runFlags) serve(stderr io.Writer) (*live, error) {
	address, err := listenAddress(f.listen)
	if address == "" || err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fail.Usagef("--listen %s: %w (give another address, such as 127.0.0.1:0 for any free port)",
			f.listen, err)
	}
	at, reach := listener.Addr().(*net.TCPAddr), ""
	l := newLive(listener, at.IP.IsLoopback())
	if !l.local {
		reach = "; other machines reach it by this one's name or address, without a password"
	}
	address = at.String()
	if at.IP.IsUnspecified() { // a browser can't open that
		address = net.JoinHostPort("localhost", strconv.Itoa(at.Port))
	}
	fmt.Fprintf(stderr, "spillbench: the report is at http://%s/ while the run lasts%s\n", address, reach)
	return l, nil
}

// newLive begins to serve the connections of a listener.
func newLive(at net.Listener, local bool) *live {
	l := &live{at: at, local: local}
	l.show(func() *page.Report { return &page.Report{Title: "spillbench run", Live: true} })
	l.server = &http.Server{
		Handler: l, ConnState: l.note,
		ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 1 << 16,
	}
	l.done.Go(func() { _ = l.server.Serve(at) }) // it ends with close
	return l
}

// note keeps the connections without a request yet in l.silent.
func (l *live) note(conn net.Conn, state http.ConnState) {
	if state == http.StateNew {
		l.silent.Store(conn, nil)
	} else {
		l.silent.Delete(conn)
	}
}

// ServeHTTP serves the page. If only this machine may connect, it refuses requests to another name: a
// page of another site could make a browser send them, and read the answer.
func (l *live) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if l.local && !page.IsLocal(req) {
		http.Error(w, "only this machine is served", http.StatusForbidden)
		return
	}
	page.Serve(w, req, func() *page.Report {
		l.mu.Lock()
		defer l.mu.Unlock()
		if req.URL.RawQuery == "data" {
			l.asked = time.Now()
			if l.final != nil {
				l.final()
			}
		}
		return l.report()
	})
}

// show changes the content of the page. The lock that is held while report is called may be followed
// only by those of the engine.
func (l *live) show(report func() *page.Report) {
	if l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.report = report
	}
}

// hold keeps the content of the page as it is.
func (l *live) hold() {
	if l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		last := l.report()
		l.report = func() *page.Report { return last }
	}
}

// end shows the result, and waits a moment if a page is open that will ask for it.
func (l *live) end(ctx context.Context, doc *report.Run, c call) {
	if l == nil {
		return
	}
	doc.Stamp(c.args, c.began)
	result := &page.Report{Title: "spillbench run", Runs: []page.Run{report.PageOf(doc)}}
	ctx, cancel := context.WithTimeout(ctx, lookedAt)
	defer cancel()
	l.mu.Lock()
	l.report, l.final = func() *page.Report { return result }, cancel
	open := time.Since(l.asked) < lookedAt
	l.mu.Unlock()
	if open {
		<-ctx.Done()
	}
}

// close ends serving. It finishes answers, for a second at most and until ctx ends. Connections without
// a request, which browsers open ahead, would delay that.
func (l *live) close(ctx context.Context) {
	if l == nil {
		return
	}
	_ = l.at.Close()
	l.done.Wait() // for no more connections
	l.silent.Range(func(conn, _ any) bool {
		_ = conn.(net.Conn).Close()
		return true
	})
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := l.server.Shutdown(ctx); err != nil {
		_ = l.server.Close()
	}
}

// now returns the report of a run under way.
func (f *runFlags) now(m *machine, rec *recording, sources []string, start time.Time, args []string) *page.Report {
	doc := f.document(m, sources, job.Result{})
	doc.Stamp(args, start)
	doc.Timeline, doc.WallSeconds = rec.timeline.Snapshot(page.Points, page.Numbers), time.Since(start).Seconds()
	phase := "beginning"
	for _, p := range doc.Timeline.Phases {
		doc.Phases = append(doc.Phases, report.Phase{Name: p.Name, Seconds: p.End - p.Begin})
		phase = p.Name
	}
	run := report.PageOf(doc)
	run.Headline = fmt.Sprintf("Under way since %.1f s, in phase %s.", doc.WallSeconds, phase)
	return &page.Report{Title: "spillbench run", Runs: []page.Run{run}, Live: true}
}

// sampled is the period at which a recording samples the spaces: that of the intervals of a short run.
const sampled = 5 * time.Millisecond

// inDocument is the largest number of intervals in the timeline of a JSON document.
const inDocument = 240

// recording collects the timeline of a run.
type recording struct {
	timeline *timeline.Recorder
	stop     func() // ends watch
}

func (f *runFlags) record() *recording { return &recording{timeline.New(), func() {}} }

// events returns the function for Config.Events.
func (r *recording) events() func(spillway.Event) { return r.timeline.Event }

// watch samples the engine's spaces until end is called.
func (r *recording) watch(eng *spillway.Engine) { r.stop = r.timeline.Watch(eng.Spaces, sampled) }

// end stops watch. Later calls do nothing.
func (r *recording) end() { r.stop() }

// snapshot returns the timeline for a document.
func (r *recording) snapshot() *timeline.Timeline {
	return r.timeline.Snapshot(inDocument, page.Numbers)
}

// progress returns p, extended to record the phases.
func (r *recording) progress(p job.Progress) job.Progress { return phased{p, r.timeline} }

// phased is a job.Progress that also records the phases.
type phased struct {
	job.Progress
	timeline *timeline.Recorder
}

// Begin starts a phase.
func (p phased) Begin(phase string, steps int64) {
	p.Progress.Begin(phase, steps)
	p.timeline.Phase(time.Now(), phase)
}

// limits measures the machine's raw limits while the engine is idle. If there is no room to do so, it
// adds a note.
func (m *machine) limits(ctx context.Context) []report.Limit {
	all, err := bandwidth.Limits(ctx, m.engine, m.faults.Slow)
	if err != nil && !errors.Is(err, context.Canceled) {
		m.notes.add("the raw limits were not measured: " + err.Error())
	}
	var out []report.Limit
	for _, l := range all {
		out = append(out, report.Limit{
			From: l.From.String(), To: l.To.String(), GiBPerS: l.GiBPerS, LimitOf: string(l.LimitOf),
		})
	}
	return out
}
