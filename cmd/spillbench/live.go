package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/bandwidth"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/observe/page"
	"github.com/spillway-db/spillway/observe/timeline"
)

// live serves the report of a run in progress. A nil live serves nothing.
type live struct {
	server *http.Server
	at     net.Listener
	done   sync.WaitGroup // the server's accept loop
	local  bool           // only this machine may connect
	silent sync.Map       // connections without a request yet, by net.Conn

	mu     sync.Mutex
	report func() *page.Report // the content of the page; called with mu held
	asked  time.Time           // the time of the latest request for data
	final  func()              // ends the wait of end, as a page has the result; nil before
}

// openFor is how long a page counts as open after its latest request: it requests data each second. The
// end of a run waits as long for an open page.
const openFor = 1500 * time.Millisecond

// serve begins to serve at the address of --listen, and prints the address of the page. Without a host
// only this machine can connect.
func (f *runFlags) serve(stderr io.Writer) (*live, error) {
	if f.listen == "" {
		return nil, nil
	}
	host, port, err := net.SplitHostPort(f.listen)
	if err != nil {
		return nil, fail.Usagef("--listen %s: want HOST:PORT, such as 127.0.0.1:0", f.listen)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(cmp.Or(host, "127.0.0.1"), port))
	if err != nil {
		return nil, fail.Usagef("--listen %s: %w (give another address, such as 127.0.0.1:0 for any free port)",
			f.listen, err)
	}
	at, reach := listener.Addr().(*net.TCPAddr), ""
	l := newLive(listener, at.IP.IsLoopback())
	if !l.local {
		reach = "; other machines reach it by this one's name or address, without a password"
	}
	address := at.String()
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

// show changes the content of the page to what report returns. ServeHTTP calls report with mu held, so
// report may only take locks of the engine.
func (l *live) show(report func() *page.Report) {
	if l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.report = report
	}
}

// end shows the result. If a page is open, it waits until the page has requested the result.
func (l *live) end(ctx context.Context, doc *report.Run, c call) {
	if l == nil {
		return
	}
	doc.Stamp(c.args, c.began)
	result := &page.Report{Title: "spillbench run", Runs: []page.Run{report.PageOf(doc)}}
	ctx, cancel := context.WithTimeout(ctx, openFor)
	defer cancel()
	l.mu.Lock()
	l.report, l.final = func() *page.Report { return result }, cancel
	open := time.Since(l.asked) < openFor
	l.mu.Unlock()
	if open {
		<-ctx.Done()
	}
}

// close ends the serving. It finishes answers, for a second at most and until ctx ends. It first closes
// connections without a request, which browsers open early: they would delay the end.
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

// now returns the report of a run in progress.
func (f *runFlags) now(m *machine, rec *timeline.Recorder, sources []string, c call) *page.Report {
	doc := f.document(m, sources, job.Result{})
	doc.Stamp(c.args, c.began)
	doc.Timeline, doc.WallSeconds = rec.Snapshot(page.Points, page.Numbers), time.Since(c.began).Seconds()
	phase := "beginning"
	for _, p := range doc.Timeline.Phases {
		doc.Phases = append(doc.Phases, report.Phase{Name: p.Name, Seconds: p.End - p.Begin})
		phase = p.Name
	}
	run := report.PageOf(doc)
	run.Headline = fmt.Sprintf("Under way since %.1f s, in phase %s.", doc.WallSeconds, phase)
	return &page.Report{Title: "spillbench run", Runs: []page.Run{run}, Live: true}
}

// limits measures the machine's raw limits while the engine is idle. It adds a note if that fails, for
// example for lack of room.
func (m *machine) limits(ctx context.Context) []report.Limit {
	all, err := bandwidth.Limits(ctx, m.engine, m.faults.Slow)
	if err != nil && !errors.Is(err, context.Canceled) {
		m.notes.add("the raw limits were not measured: " + err.Error())
	}
	return all
}
