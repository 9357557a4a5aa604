package page

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/observe/timeline"
	"github.com/spillway-db/spillway/test/browser"
	"github.com/spillway-db/spillway/tier"
)

// hostile is a text that would do something if it were taken for HTML or script.
const hostile = `</script><script data-injected>window.injected=true</script><img data-injected src=x onerror="window.injected=true">'"` + "\u2028{{.Title}}"

// long is a run of so many seconds on a machine with eight GPUs, in which much happens.
func long(seconds int, name string) Run {
	rec, began := timeline.New(), time.Now()
	var ids []tier.ID
	for i := range 8 {
		ids = append(ids, tier.ID{Kind: tier.GPU, Ordinal: i})
	}
	for i := range 2 {
		ids = append(ids, tier.ID{Kind: tier.Host, Ordinal: i}, tier.ID{Kind: tier.Disk, Ordinal: i})
	}
	run := Run{Name: name, Command: "spillbench run " + name, Began: began, Headline: "All is well with " + name, Level: Good, Seconds: float64(seconds)}
	for i := range 20 * seconds {
		at := began.Add(time.Duration(i) * 50 * time.Millisecond)
		from, to := ids[i%len(ids)], ids[(i*7+3)%len(ids)]
		if from != to {
			rec.Event(events.Event{Kind: events.MoveEnded, At: at, From: from, To: to, Bytes: int64(i%97) << 20, Took: 30 * time.Millisecond, Reason: []string{"trigger", "demand", "work", "ahead", name}[i%5]})
		}
		rec.Event(events.Event{Kind: events.WaitEnded, At: at, To: to, Took: time.Duration(i%50) * time.Millisecond})
		if i%40 == 0 {
			rec.Event(events.Event{Kind: events.DiskSlow, At: at, To: to, Text: name, Origin: events.Origin{Plan: name, Task: name}})
			rec.Event(events.Event{Kind: events.TaskBegun, At: at})
		}
		var states []timeline.State
		for k, id := range ids {
			states = append(states, timeline.State{ID: id.String(), Capacity: 80 << 30, Limit: 72 << 30, Trigger: 68 << 30, Stop: 52 << 30, Used: int64(i*(k+1)%61) << 30, Reserved: 1 << 30, Copies: int64(i%7) << 30, Foreign: 1 << 28})
		}
		rec.Sample(at, states)
		if i%1000 == 0 {
			rec.Phase(at, fmt.Sprintf("pass-%d", i/1000))
		}
	}
	run.Timeline = rec.Snapshot(Points, Numbers)
	for _, e := range run.Timeline.Edges {
		run.Edges = append(run.Edges, Edge{From: e.From, To: e.To, Batches: 1000, Bytes: 1 << 40, Seconds: 700, P50: 0.001, P99: 0.1, Longest: 1, ByReason: map[string]int64{"work": 1 << 39, name: 1 << 39}, Limit: 20})
	}
	for i := range 200 {
		run.Work = append(run.Work, Work{
			Plan: name, Operator: name, Port: i, DownBytes: 1 << 40, UpBytes: 1 << 39, Unread: 1 << 38,
		})
		run.Tasks = append(run.Tasks, Task{Name: name, Waits: 3, Total: 1, Longest: 0.7})
	}
	for _, id := range ids {
		run.Spaces = append(run.Spaces, Space{
			ID: id.String(), Backend: name, CapacityBytes: 80 << 30, PeakBytes: 60 << 30,
		})
	}
	run.Settings = []Setting{{Name: name, Value: name, Flag: "--" + name, Field: name}, {Name: "disk slowed to", Value: "100.0 MiB/s", Flag: "--disk-throttle"}}
	run.Machine = []Pair{{name, name}}
	run.Warnings = []diag.Warning{{What: name, Remedy: name}}
	run.Waits = Waits{Count: 100, P50: 0.01, P99: 0.2, Max: 1}
	bars := []Bar{{Name: name, Value: 1}, {Name: name, Value: 2, Other: true}}
	run.Figures = []Figure{{Title: name, Name: name, Unit: name, Bars: bars}}
	run.Facts = []Pair{{name, name}}
	return run
}

// A page of an hour on a large machine takes 2 MB at most, also one of two runs.
func TestAnHourIsSmall(t *testing.T) {
	run := long(3600, "hour")
	perInterval := 4*len(run.Timeline.Spaces) + len(run.Timeline.Edges) + 2*len(run.Timeline.Causes) + 6
	if n := perInterval * len(run.Timeline.Waits.Ended); n > Numbers || len(run.Timeline.Waits.Ended) < 50 || run.Timeline.Seconds < 3500 {
		t.Errorf("%d numbers, %d intervals of %v s", n, len(run.Timeline.Waits.Ended), run.Timeline.Seconds)
	}
	for n := 1; n <= 2; n++ {
		var b bytes.Buffer
		if err := Write(&b, &Report{Title: "hour", Runs: []Run{run, run}[:n]}); err != nil {
			t.Fatal(err)
		}
		t.Logf("%d runs of an hour: %d bytes", n, b.Len())
		if b.Len() > 2_000_000 {
			t.Errorf("the page of %d runs has %d bytes", n, b.Len())
		}
	}
}

// Whatever texts say, the page has the elements that it has, and its data is JSON.
func TestTextsAreEscaped(t *testing.T) {
	r := &Report{Title: hostile, Runs: []Run{long(2, hostile), long(2, hostile)}}
	var b bytes.Buffer
	if err := Write(&b, r); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	if strings.Contains(text, "<img") || strings.Contains(text, "<script data-injected") || strings.Count(text, "<script") != 2 || strings.Count(text, "</script") != 2 {
		t.Error("a text became an element")
	}
	if strings.Contains(text, " onerror=") && strings.Contains(text, "<img") || strings.Contains(text, "ZgotmplZ") {
		t.Error("a text became an attribute, or was refused")
	}
	_, rest, _ := strings.Cut(text, `id="data">`)
	data, _, _ := strings.Cut(rest, "</script>")
	var d struct{ Runs []struct{ Name string } }
	if err := json.Unmarshal([]byte(data), &d); err != nil || len(d.Runs) != 2 || d.Runs[0].Name != hostile {
		t.Errorf("%v: %q", err, d)
	}
	for _, sink := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("} {
		if strings.Contains(ownScript, sink) {
			t.Errorf("page.js uses %s", sink)
		}
	}
}

// The page's policy allows its own script and style by their hashes, and nothing else.
func TestPolicy(t *testing.T) {
	var b bytes.Buffer
	if err := Write(&b, &Report{Title: "t"}); err != nil {
		t.Fatal(err)
	}
	for element, directive := range map[string]string{"style": "style-src", "script": "script-src"} {
		begin := strings.LastIndex(b.String(), "<"+element+">") + len(element) + 2
		end := strings.LastIndex(b.String(), "</"+element+">")
		sum := sha256.Sum256(b.Bytes()[begin:end])
		want := directive + " 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
		if !strings.Contains(fixed().header, want) {
			t.Errorf("%q lacks %s", fixed().header, want)
		}
	}
	if strings.Contains(fixed().header, "unsafe") || !strings.HasPrefix(fixed().header, "default-src 'none';") {
		t.Error(fixed().header)
	}
	if strings.Contains(htmlText, "style=") || strings.Contains(htmlText, " on") && strings.Contains(htmlText, "onclick") || strings.Contains(htmlText, "http:") || strings.Contains(htmlText, "https:") {
		t.Error("the page has styles, handlers or addresses of its own")
	}
}

// Only reading is allowed, and each answer has headers that make it safe.
func TestServe(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		Serve(w, r, func() *Report { return &Report{Title: "served", Runs: []Run{{Headline: "here"}}, Live: true} })
	}))
	defer server.Close()
	for _, method := range []string{"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} {
		for _, path := range []string{"/", "/?data", "/any/prefix/", "/any/prefix?data"} {
			req, err := http.NewRequest(method, server.URL+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			answer, err := server.Client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(answer.Body)
			answer.Body.Close()
			if err != nil {
				t.Fatal(err)
			}
			read := method == "GET" || method == "HEAD"
			if (answer.StatusCode == 200) != read || !read && answer.StatusCode != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: %s", method, path, answer.Status)
			}
			for name, want := range map[string]string{"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"} {
				if !strings.Contains(answer.Header.Get(name), want) {
					t.Errorf("%s %s: %s is %q", method, path, name, answer.Header.Get(name))
				}
			}
			if isData := strings.HasSuffix(path, "data"); method == "GET" && (json.Valid(text) != isData || !strings.Contains(string(text), "here")) || method == "HEAD" && (len(text) > 0 || answer.ContentLength <= 0) {
				t.Errorf("%s %s: %.100s", method, path, text)
			}
		}
	}
}

// The page is what it should be in a browser: without an error or a request, with all plots drawn, as
// wide as the window, whatever the texts are.
func TestInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("needs seconds and Chromium: run without -short")
	}
	b := browser.Start(t)
	for name, r := range map[string]*Report{
		"one": {Title: hostile, Runs: []Run{long(60, hostile)}},
		"two": {Title: "two", Runs: []Run{long(60, "a.json"), long(30, "b.json")}},
	} {
		path := filepath.Join(t.TempDir(), name+".html")
		var page bytes.Buffer
		if err := Write(&page, r); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, page.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, how := range []browser.How{{Width: 1200, Height: 900}, {Width: 1200, Height: 900, Dark: true}, {Width: 380, Height: 800, Dark: name == "two"}, {Width: 760, Height: 1000, Print: true}} {
			s := b.Look("file://"+path, how)
			if len(s.Errors)+len(s.Requests)+len(s.Blank) > 0 || s.Overflow > 0 || s.Injected {
				t.Errorf("%s at %+v: errors %q, requests %q, blank %q, %d pixels too wide, injected %v", name, how, s.Errors, s.Requests, s.Blank, s.Overflow, s.Injected)
			}
			if s.Plots < 12+12+2+1+1 {
				t.Errorf("%s at %+v: %d plots", name, how, s.Plots)
			}
			for _, part := range []string{"How full each memory was", "gpu:7", "Why bytes moved", "What to change"} {
				if !strings.Contains(s.Text, part) {
					t.Errorf("%s at %+v lacks %q", name, how, part)
				}
			}
		}
	}
}

// TestFitsInBrowser: on a desktop no table of the configuration is cut, on a phone one that is shows
// that it goes on, nothing at the right edge of a plot is cut, and a limit that is off the scale has its
// number there.
func TestFitsInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("needs seconds and Chromium: run without -short")
	}
	run := long(60, "a.json")
	for i := range run.Edges {
		run.Edges[i].Limit = 1000
	}
	run.Timeline.Seconds = 60                // so that the last tick is at the end
	run.Spaces[0].PeakBytes = 79<<30 + 1<<29 // more than was seen
	run.Settings = []Setting{
		{Name: "spill directories", Value: "/mnt/nvme0/spill (421.4 GiB), /mnt/nvme1/spill (421.4 GiB)", Flag: "--disk", Field: "Disks"},
		{Name: "encryption", Value: "no", Flag: "--encrypt", Field: "Disks[].Encrypt"}, {Name: "monitor period", Value: "50ms", Flag: "--monitor-period", Field: "MonitorPeriod"},
		{Name: "monitor of all that moves", Value: "cost-aware", Flag: "--policy-of-the-monitor", Field: "Monitor.Policy.CostAware.Moves"},
		{Name: "transfers with disks", Value: "16", Flag: "--disk-slots", Field: "Limits.Permits.Slots"}, {Name: "faults", Value: "op=write,kind=slow:5,p=0.5 (35 hits)", Flag: "--fault"},
	}
	run.Machine = []Pair{{"processor", "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"}, {"kernel", "Linux 6.18.44-generic-long"}, {"commit", strings.Repeat("0123456789", 4) + "+dirty"}}
	path := filepath.Join(t.TempDir(), "fits.html")
	var page bytes.Buffer
	if err := Write(&page, &Report{Title: "fits", Runs: []Run{run}}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, page.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	b := browser.Start(t)
	for _, width := range []int{1200, 900, 380} {
		s := b.Look("file://"+path, browser.How{Width: width, Height: 900})
		if len(s.Clipped)+len(s.Unmarked) > 0 || s.Overflow > 0 {
			t.Errorf("%d: cut are %q, cut without a sign %q, %d pixels too wide", width, s.Clipped, s.Unmarked, s.Overflow)
		}
		if width == 1200 && (slices.Contains(s.Hidden, "setting") || slices.Contains(s.Hidden, "machine")) {
			t.Errorf("%d: too wide are %q", width, s.Hidden)
		}
		if width == 380 && len(s.Hidden) == 0 {
			t.Errorf("%d: no table is too wide, so this says nothing", width)
		}
		has := func(part string) bool {
			return slices.ContainsFunc(s.Labels, func(l string) bool { return strings.Contains(l, part) })
		}
		if !has("gpu:0: at most 79.5 GiB of 80 GiB") || !has(", raw limit 1000 GiB/s (off the scale)") {
			t.Errorf("%d: plots are read out as %q", width, s.Labels)
		}
	}
}

// A live page asks its own address for what is new, behind any prefix, and shows it.
func TestLiveInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("needs seconds and Chromium: run without -short")
	}
	b := browser.Start(t)
	run, asked := long(5, "live"), 0
	mux := http.NewServeMux()
	mux.Handle("/debug/spillway/", http.StripPrefix("/debug", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		Serve(w, r, func() *Report {
			if asked++; asked > 2 {
				run.Headline = "Now it is other"
			}
			return &Report{Title: "live", Runs: []Run{run}, Live: asked < 4}
		})
	})))
	server := httptest.NewServer(mux)
	defer server.Close()
	s := b.Look(server.URL+"/debug/spillway/", browser.How{Width: 900, Height: 700, Until: `document.getElementById("live").textContent === "ended"`})
	if len(s.Errors)+len(s.Blank) > 0 || s.Plots == 0 || !strings.Contains(s.Text, "Now it is other") {
		t.Errorf("errors %q, blank %q, %d plots, %.200s", s.Errors, s.Blank, s.Plots, s.Text)
	}
	own := server.URL + "/debug/spillway/?data"
	if len(s.Requests) == 0 || slices.ContainsFunc(s.Requests, func(u string) bool { return u != own }) {
		t.Errorf("requests %q", s.Requests)
	}
}
