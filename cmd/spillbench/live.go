package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/observe/page"
)

// live serves the report of a run while it lasts. A nil one serves nothing.
type live struct {
	server *http.Server
	done   sync.WaitGroup
	local  bool // only this machine reaches it

	mu struct {
		sync.Mutex
		report func() *page.Report
		asked  time.Time     // when a page asked for data last
		final  chan struct{} // closed when a page has got the end
		ended  bool
		silent map[net.Conn]bool // connections that have asked for nothing yet; nil: they are closed at once
	}
}

// lookedAt is how long ago a page may have asked for data and still be open: it asks each second. So
// long, too, the end of a run waits for it.
const lookedAt = 1500 * time.Millisecond

// listenAddress returns where --listen wants to be reached. Without a host that is this machine alone.
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
	at, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fail.Usagef("--listen %s: %w (give another address, such as 127.0.0.1:0 for any free port)", f.listen, err)
	}
	l := newLive(at, at.Addr().(*net.TCPAddr).IP.IsLoopback())
	fmt.Fprintf(stderr, "spillbench: the report is at http://%s/ while the run lasts%s\n", reachable(at.Addr().(*net.TCPAddr)), l.reach())
	return l, nil
}

// newLive begins to serve those who come to at.
func newLive(at net.Listener, local bool) *live {
	l := &live{local: local}
	l.mu.final, l.mu.silent = make(chan struct{}), make(map[net.Conn]bool)
	l.mu.report = func() *page.Report { return &page.Report{Title: "spillbench run", Live: true} }
	l.server = &http.Server{Handler: l, ConnState: l.note, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 1 << 16}
	l.done.Go(func() { _ = l.server.Serve(at) }) // which ends with close
	return l
}

// reachable is an address that a browser on this machine can open: one that stands for all addresses
// is none.
func reachable(at *net.TCPAddr) string {
	if at.IP.IsUnspecified() {
		return net.JoinHostPort("localhost", strconv.Itoa(at.Port))
	}
	return at.String()
}

// reach says who else can ask.
func (l *live) reach() string {
	if l.local {
		return ""
	}
	return "; other machines reach it by this one's name or address, without a password"
}

// ServeHTTP serves the page. Where only this machine may ask, a name that leads here from another
// site's page is refused: that site would read the answer.
func (l *live) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if l.local && !page.IsLocal(req) {
		http.Error(w, "only this machine is served", http.StatusForbidden)
		return
	}
	page.Serve(w, req, func() *page.Report {
		l.mu.Lock()
		defer l.mu.Unlock()
		if req.URL.RawQuery == "data" {
			l.mu.asked = time.Now()
			if l.mu.ended {
				l.mu.ended = false
				defer close(l.mu.final)
			}
		}
		return l.mu.report()
	})
}

// show changes what is shown. The function is called with a lock held that is a leaf but for the
// engine's own.
func (l *live) show(report func() *page.Report) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.report = report
}

// hold keeps what is shown as it is.
func (l *live) hold() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	last := l.mu.report()
	l.mu.report = func() *page.Report { return last }
}

// end shows the result, and waits a moment if a page is open that will ask for it.
func (l *live) end(ctx context.Context, doc *report.Run, c call) {
	if l == nil {
		return
	}
	doc.Stamp(c.args, c.began)
	final := &page.Report{Title: "spillbench run", Runs: []page.Run{report.PageOf(doc)}}
	l.mu.Lock()
	open := time.Since(l.mu.asked) < lookedAt
	l.mu.report, l.mu.ended = func() *page.Report { return final }, open
	l.mu.Unlock()
	if !open {
		return
	}
	wait := time.NewTimer(lookedAt)
	defer wait.Stop()
	select {
	case <-l.mu.final:
	case <-wait.C:
	case <-ctx.Done():
	}
}

// note keeps which connections have asked for nothing. Browsers open some ahead, and the server would
// wait seconds for each to ask.
func (l *live) note(conn net.Conn, state http.ConnState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case state != http.StateNew:
		delete(l.mu.silent, conn)
	case l.mu.silent == nil:
		_ = conn.Close()
	default:
		l.mu.silent[conn] = true
	}
}

// hush closes the connections that have asked for nothing, and those that are still to come.
func (l *live) hush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for conn := range l.mu.silent {
		_ = conn.Close()
	}
	l.mu.silent = nil
}

// close ends serving; what is being answered is finished, unless ctx ends.
func (l *live) close(ctx context.Context) {
	if l == nil {
		return
	}
	l.hush()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := l.server.Shutdown(ctx); err != nil {
		_ = l.server.Close()
	}
	l.done.Wait()
}

// now is the report of a run under way.
func (f *runFlags) now(m *machine, rec *recording, sources []string, start time.Time, args []string) *page.Report {
	doc := f.document(m, sources, job.Result{})
	doc.Stamp(args, start)
	line := rec.timeline.Snapshot(page.Points, page.Numbers)
	doc.Timeline, doc.WallSeconds = line, time.Since(start).Seconds()
	for _, p := range line.Phases {
		doc.Phases = append(doc.Phases, report.Phase{Name: p.Name, Seconds: p.End - p.Begin})
	}
	run := report.PageOf(doc)
	phase := "beginning"
	if n := len(line.Phases); n > 0 {
		phase = line.Phases[n-1].Name
	}
	run.Headline = fmt.Sprintf("Under way since %.1f s, in phase %s.", doc.WallSeconds, phase)
	for i := range run.Phases {
		run.Phases[i].Bytes = 0 // not known yet
	}
	for i := range run.Spaces {
		run.Spaces[i].Now = true
	}
	kept := run.Facts[:0]
	for _, fact := range run.Facts {
		if fact.Name != "data" && fact.Name != "batches" && fact.Name != "verified" {
			kept = append(kept, fact)
		}
	}
	run.Facts = kept
	return &page.Report{Title: "spillbench run", Runs: []page.Run{run}, Live: true}
}
