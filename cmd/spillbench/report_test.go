package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/perf/benchfmt"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/test/browser"
)

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A page is a whole document that names what it is about, of each command that has one; on standard
// output it is alone.
func TestHTML(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	dir := t.TempDir()
	for name, args := range map[string][]string{
		"run":       append([]string{"run"}, small...),
		"bandwidth": {"bandwidth", "--sizes=64KiB", "--threads=1", "--pairs=11", "--gpu-memory=1MiB", "--host-memory=1MiB"},
		"compare":   {"compare", "--peer=arrow-ipc", "--rounds=1", "--host-memory=512KiB"},
	} {
		path, result := filepath.Join(dir, name+".html"), filepath.Join(dir, name+".json")
		succeed(t, append(args, "-q", "--html="+path, "--json="+result)...)
		text := readFile(t, path)
		for _, part := range []string{"<!doctype html>", "<title>spillbench " + name, "Content-Security-Policy", "Configuration and machine", "</html>"} {
			if !strings.Contains(text, part) {
				t.Errorf("%s lacks %q", name, part)
			}
		}
		again := succeed(t, "report", result, "--html=-")
		if !strings.HasPrefix(again.stdout, "<!doctype html>") ||
			!strings.Contains(again.stdout, "<title>spillbench "+name) {
			t.Errorf("report of %s: %.100q", name, again.stdout)
		}
	}
	if r := succeed(
		t,
		append([]string{"run", "-q", "--html=-"}, small...)...); !strings.HasPrefix(r.stdout, "<!doctype html>") ||
		strings.Count(r.stdout, "</html>") != 1 {
		t.Errorf("%.200q", r.stdout)
	}
	var doc report.Run
	decode(t, readFile(t, filepath.Join(dir, "run.json")), &doc)
	if doc.Timeline == nil || len(doc.Timeline.Spaces) != 3 || len(doc.Timeline.Waits.Ended) > maxIntervals ||
		len(doc.Limits) == 0 ||
		len(doc.Timeline.Phases) != 3 {
		t.Errorf("%+v, %d limits", doc.Timeline, len(doc.Limits))
	}
	if disk := doc.Spaces[2]; disk.WrittenBytes <= 0 || disk.ReadBytes <= 0 || doc.Config.Disks[0].CapacityGiven {
		t.Errorf("%+v, %+v", disk, doc.Config.Disks)
	}
	for _, e := range doc.Edges {
		moved := int64(0)
		for _, line := range doc.Timeline.Edges {
			if line.From == e.From && line.To == e.To {
				for _, n := range line.Bytes {
					moved += n
				}
			}
		}
		if moved != e.Bytes {
			t.Errorf("%s to %s: %d bytes over time, %d in all", e.From, e.To, moved, e.Bytes)
		}
	}
}

// hollow are documents with nothing but what is always there, by command.
var hollow = map[string]string{
	"run":       `{"schema":"spillway.spillbench/v1","command":"run","env":{"cores":1},"warnings":[],"config":{},"input":{},"verify":{},"spaces":[{}],"edges":[],"waits":{},"phases":[{}],"wall_seconds":0}`,
	"bandwidth": `{"schema":"spillway.spillbench/v1","command":"bandwidth","env":{"cores":1},"warnings":[],"config":{},"rows":[{"error":"x"}],"wall_seconds":0}`,
	"compare": `{"schema":"spillway.spillbench/v1","command":"compare","env":{"cores":1},"warnings":[],"config":{},"input":{},"verify":{},"ours":{},"peer":{},
		"ratio":{"write":1,"read":1},"wall_seconds":0}`,
}

// What report cannot read, compare or write is wrong use, and a file of the user's is never replaced
// unless it is named.
func TestReportRefuses(t *testing.T) {
	unlessShort(t)
	t.Chdir(t.TempDir())
	run := writeFile(t, "run.json", hollow["run"])
	band := writeFile(t, "b.json", hollow["bandwidth"])
	endless := "/dev/zero"
	if _, err := os.Stat(endless); err != nil {
		endless = writeFile(t, "endless.json", strings.Repeat(" ", maxResult+1))
	}
	of := func(command, more string) []string {
		return []string{writeFile(t, "o.json", `{"schema":"spillway.spillbench/v1","command":"`+command+`",`+more+`}`)}
	}
	less := func(command, old, new string) []string {
		text := strings.Replace(hollow[command], old, new, 1)
		if text == hollow[command] {
			t.Fatalf("no %s in that of %s", old, command)
		}
		return []string{writeFile(t, "o.json", text)}
	}
	for want, args := range map[string][]string{
		"it has no env":                               of("run", `"warnings":[]`),
		"it has no config":                            less("bandwidth", `"config":{},`, ""),
		"it has no rows":                              less("bandwidth", `[{"error":"x"}]`, "null"),
		"it has no ours":                              less("compare", `"ours":{},`, ""),
		"there is nothing in its env":                 less("run", `{"cores":1}`, "{}"),
		"there is nothing in its phases":              less("run", `"phases":[{}]`, `"phases":[]`),
		"there is nothing in its spaces":              less("run", `"spaces":[{}]`, `"spaces":[]`),
		"there is nothing in its rows":                less("bandwidth", `[{"error":"x"}]`, "[]"),
		"larger than the 64 MiB":                      {endless},
		"its wall_seconds is 1e+300":                  of("run", `"wall_seconds":1e300`),
		"its wall_seconds is -1":                      of("run", `"wall_seconds":-1`),
		"its seconds is 1e-300":                       of("run", `"edges":[{"bytes":1,"seconds":1e-300}]`),
		"its bytes is -5":                             of("run", `"edges":[{"bytes":-5}]`),
		"its bytes is -6":                             of("run", `"edges":[{"Bytes":-6}]`),
		"its bytes is -7":                             of("run", `"edges":[{"bytes":-7}],"edges":[{}]`),
		"its capacity_bytes is 9.223372036854776e+18": of("run", `"spaces":[{"capacity_bytes":9223372036854775807}]`),
		"its interval_seconds is 0":                   of("run", `"timeline":{"waits":{"ended":[1]}}`),
		"has 2 values, and not 1":                     of("run", `"timeline":{"interval_seconds":1,"waits":{"ended":[1]},"edges":[{"bytes":[1,2]}]}`),
		"edges: unexpected string":                    of("run", `"edges":"x"`),
		"its ratio is 0 and 0":                        of("compare", `"ratio":{}`),
		"its ratio is 1e-310 and 1":                   of("compare", `"ratio":{"write":1e-310,"read":1}`),
		"one or two files":                            {},
		"no such file":                                {"none.json"},
		"is no JSON":                                  {writeFile(t, "x.json", "x")},
		`its schema is "other"`:                       {writeFile(t, "s.json", `{"schema":"other"}`)},
		`it is one of "topo"`:                         {writeFile(t, "t.json", `{"schema":"spillway.spillbench/v1","command":"topo"}`)},
		"give two results of one command":             {run, band},
		"a row has 1 samples, and 2 of its limit":     of("bandwidth", `"rows":[{"samples":{"gib_per_s":[1],"limit_gib_per_s":[1,2]}}]`),
		`"json" for "--format" flag: want table, csv`: {run, "--format=json"},
		"--html - wants standard output for itself":   {run, "--format=csv", "--html=-"},
		`"csw" for "--format" flag: want table, csv`:  {run, "--format=csw"},
		"--html no/such/dir/x.html cannot be written": {run, "--html=no/such/dir/x.html"},
	} {
		r := command(t, t.Context(), append([]string{"report"}, args...)...)
		if r.status != 2 || !strings.Contains(r.stderr, want) || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%q: %d, %s", args, r.status, r.stderr)
		}
	}
	if r := command(
		t,
		t.Context(),
		append(
			[]string{"report", "--html=-"},
			less("run", `"spaces":[{}],`, `"error":"no room","spaces":[],`)...)...); r.status != 0 {
		t.Errorf("of a run that failed: %d, %s", r.status, r.stderr)
	}
	if r := command(t, t.Context(), "report", run); r.status != 0 || !strings.Contains(r.stderr, "report.html") {
		t.Errorf("%d, %s", r.status, r.stderr)
	}
	if r := command(t, t.Context(), "report", run); r.status != 0 { // its own page is replaced
		t.Errorf("%d, %s", r.status, r.stderr)
	}
	if err := os.WriteFile(defaultPage, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := command(t, t.Context(), "report", run); r.status != 2 || readFile(t, defaultPage) != "mine" {
		t.Errorf("%d, %s", r.status, r.stderr)
	}
	for _, args := range [][]string{{"run", "--html=-", "--json=-"}, {"run", "--html=-", "--format=csv"}, {"run", "--html="}, {"run", "--listen=8080"}, {"run", "--listen="}} {
		if r := command(t, t.Context(), args...); r.status != 2 || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%q: %d, %s", args, r.status, r.stderr)
		}
	}
}

// TestReportFormats: a stored result is printed as its command prints it, and of two what differs, or
// the figures of both for benchstat. There is a page only if it is asked for, too.
func TestReportFormats(t *testing.T) {
	unlessShort(t)
	t.Chdir(t.TempDir())
	for name, args := range map[string][]string{
		"run":       append([]string{"run", "--format=markdown"}, small...),
		"compare":   {"compare", "--format=csv", "--peer=arrow-ipc", "--rounds=1", "--host-memory=512KiB"},
		"bandwidth": append([]string{"bandwidth", "--format=benchfmt", "--sizes=64KiB", "--threads=1"}, narrow(t)[1:]...),
	} {
		file := name + ".json"
		printed := command(t, t.Context(), append(args, "--json="+file)...).stdout
		if again := succeed(
			t,
			"report",
			file,
			args[1],
		).stdout; withoutNotes(again) != withoutNotes(printed) ||
			printed == "" {
			t.Errorf("%s of %s: report prints\n%s\nand the command\n%s", args[1], name, again, printed)
		}
		for _, format := range []string{"table", "csv", "markdown", "benchfmt"} {
			succeed(
				t,
				"report",
				writeFile(t, "bare.json", hollow[name]),
				"--format="+format,
			) // what is missing deeper down is nothing
			succeed(t, "report", file, "--format="+format)
		}
		both := succeed(t, "report", file, writeFile(t, "other.json", readFile(t, file)), "--format=benchfmt").stdout
		lines := map[string]int{}
		for r := benchfmt.NewReader(strings.NewReader(both), name); r.Scan(); {
			if rec, ok := r.Result().(*benchfmt.Result); ok {
				lines[filepath.Base(rec.GetConfig("result"))]++
			} else if rec, ok := r.Result().(*benchfmt.SyntaxError); ok {
				t.Error(rec)
			}
		}
		if len(lines) != 2 || lines[file] == 0 || lines[file] != lines["other.json"] {
			t.Errorf("%s: the lines of each are %v in\n%s", name, lines, both)
		}
	}
	slow := writeFile(
		t,
		"slow.json",
		strings.Replace(
			readFile(t, "run.json"),
			`"disk_throttle_bytes_per_s": 0`,
			`"disk_throttle_bytes_per_s": 1048576`,
			1,
		),
	)
	const differs = "\nconfiguration,,\"the disk was slowed to 1.0 MiB/s in B, not in A (--disk-throttle).\"\n"
	if r := succeed(
		t,
		"report",
		"run.json",
		slow,
		"--format=csv",
		"-q",
	); !strings.HasPrefix(r.stdout, "about,b_is,text\n") ||
		!strings.Contains(r.stdout, differs) {
		t.Errorf("what differs is\n%s", r.stdout)
	}
	if r := succeed(
		t,
		"report",
		"run.json",
		"run.json",
		"--format=table",
	); !strings.Contains(
		r.stdout,
		"Both took about as long",
	) {
		t.Errorf("what differs is\n%s", r.stdout)
	}
	if _, err := os.Stat(defaultPage); err == nil {
		t.Error("a page was written")
	}
	if r := command(
		t,
		t.Context(),
		"report",
		"run.json",
		"--format=csv",
		"--html=page.html",
	); r.status != 0 || !strings.HasPrefix(r.stdout, "name,seconds") || !strings.Contains(r.stderr, "page.html") ||
		!strings.Contains(readFile(t, "page.html"), "</html>") {
		t.Errorf("%q, %q", r.stdout, r.stderr)
	}
}

// withoutNotes leaves out the notes: a warning may be in the result, and not yet in the log, of which the
// command takes what it prints.
func withoutNotes(text string) string {
	return regexp.MustCompile(`(?m)^note: .*\n\n?`).ReplaceAllString(text, "")
}

// The page of a real run, that of it beside one with a slow disk, and those of measurements are drawn in
// a browser without an error or a request. The second says in words what changed.
func TestReportInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("needs seconds and Chromium: run without -short")
	}
	b := browser.Start(t)
	dir := t.TempDir()
	file := func(name string) string { return filepath.Join(dir, name) }
	// Enough is spilled that a slow disk matters, whatever this one does.
	args := []string{"run", "-q", "--gpu-memory=8MiB", "--host-memory=8MiB", "--codec=none"}
	succeed(t, append(args, "--json="+file("fast.json"), "--html="+file("fast.html"))...)
	succeed(
		t,
		append(
			args,
			"--json="+file("slow.json"),
			"--html="+file("slow.html"),
			"--disk-throttle=100MiB",
			"--fault=op=write,kind=slow:20,p=0.5",
		)...)
	succeed(t, "report", "-q", file("fast.json"), file("slow.json"), "--html="+file("both.html"))
	succeed(
		t,
		"bandwidth",
		"-q",
		"--sizes=64KiB",
		"--threads=1",
		"--gpu-memory=1MiB",
		"--host-memory=1MiB",
		"--html="+file("bandwidth.html"),
	)
	succeed(t, append(briefly, "-q", "--html="+file("compare.html"))...)
	for name, page := range map[string]struct {
		bars int
		text []string
	}{
		"bandwidth.html": {2 * 6, []string{"Of 6 rows ", "host:0 → disk:0", "64KiB, rewritten", "the limit, which varies by", "memmove", "disk I/O"}},
		"compare.html":   {5 + 4, []string{"With the same 1.0 MiB of memory Spillway wrote", "write ratio", "Reading", "arrow-ipc, warm"}},
	} {
		for _, how := range []browser.How{{Width: 1160, Height: 900}, {Width: 900, Height: 700, Dark: true}, {Width: 380, Height: 800}, {Width: 720, Height: 1000, Print: true}} {
			s := b.Look("file://"+file(name), how)
			if len(s.Errors)+len(s.Requests)+len(s.Blank) > 0 || s.Overflow > 0 || s.Bars != page.bars ||
				how.Width > 380 && len(s.Hidden) > 0 {
				t.Errorf(
					"%s at %+v: errors %q, requests %q, blank %q, %d pixels too wide, hidden parts of %q, %d bars",
					name,
					how,
					s.Errors,
					s.Requests,
					s.Blank,
					s.Overflow,
					s.Hidden,
					s.Bars,
				)
			}
			for _, part := range page.text {
				if !strings.Contains(s.Text, part) {
					t.Errorf("%s at %+v lacks %q", name, how, part)
				}
			}
		}
	}
	for _, how := range []browser.How{{Width: 1160, Height: 900}, {Width: 1160, Height: 900, Dark: true}, {Width: 380, Height: 800}} {
		for _, name := range []string{"fast.html", "both.html"} {
			s := b.Look("file://"+file(name), how)
			if len(s.Errors)+len(s.Requests)+len(s.Blank) > 0 || s.Overflow > 0 || s.Plots < 3+3+2+1 {
				t.Errorf(
					"%s at %+v: errors %q, requests %q, blank %q, %d pixels too wide, %d plots",
					name,
					how,
					s.Errors,
					s.Requests,
					s.Blank,
					s.Overflow,
					s.Plots,
				)
			}
			want := []string{"came back as they were loaded", "What to change", "gpu:0", "Waits for room"}
			if name == "both.html" {
				want = append(
					want,
					"What differs",
					"the disk was slowed to 100.0 MiB/s in B, not in A (--disk-throttle)",
					"faults: op=write,kind=slow:20,p=0.5",
					"was slowed to 100.0 MiB/s on purpose",
				)
			}
			for _, part := range want {
				if !strings.Contains(s.Text, part) {
					t.Errorf("%s at %+v lacks %q", name, how, part)
				}
			}
			if slower := regexp.MustCompile(
				`→ (disk|gpu|host):0 got [0-9.]+ times slower: a move ran at`,
			); name == "both.html" &&
				!slower.MatchString(s.Text) {
				t.Errorf("%s at %+v does not say which edge got slower:\n%s", name, how, s.Text)
			}
		}
	}
}

// TestReportFromStandardInput: - is standard input, once.
func TestReportFromStandardInput(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs a child process, which is Linux's")
	}
	json := succeed(t, append([]string{"--json=-", "-q"}, small...)...).stdout
	other := writeFile(t, "b.json", json)
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"-"}, 0, "came back as they were loaded"},
		{[]string{"-", other}, 0, "standard input"},
		{[]string{"-", "-"}, 2, "standard input can be read once"},
	} {
		cmd := exec.Command(os.Args[0], append([]string{"report", "--html=-"}, c.args...)...)
		cmd.Env = append(os.Environ(), commandChild+"=plain "+t.TempDir())
		cmd.Stdin = strings.NewReader(json)
		out, err := cmd.CombinedOutput()
		if status := cmd.ProcessState.ExitCode(); status != c.status || !strings.Contains(string(out), c.want) {
			t.Errorf("%q ended with %d (%v): %.300s", c.args, status, err, out)
		}
	}
}

// TestAddresses: the printed address can be opened, and the line tells whether other machines can, too.
func TestAddresses(t *testing.T) {
	t.Parallel()
	for listen, want := range map[string]string{
		"127.0.0.1:0": `^spillbench: the report is at http://127\.0\.0\.1:[1-9][0-9]*/ while the run lasts\n$`,
		":0":          `^spillbench: the report is at http://127\.0\.0\.1:[1-9][0-9]*/ while the run lasts\n$`,
		"0.0.0.0:0":   `^spillbench: the report is at http://localhost:[1-9][0-9]*/ while the run lasts; other machines reach it .*\n$`,
	} {
		var stderr strings.Builder
		l, err := (&runFlags{listen: listen}).serve(&stderr)
		if err != nil {
			t.Fatal(err)
		}
		l.close(t.Context())
		if !regexp.MustCompile(want).MatchString(stderr.String()) {
			t.Errorf("%s: printed %q", listen, &stderr)
		}
	}
}

// lines is a standard error from which a test reads where the report is.
type lines struct {
	mu    sync.Mutex
	text  strings.Builder
	first chan string
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.text.Len() == 0 {
		l.first <- string(p)
	}
	return l.text.Write(p)
}

// While a run lasts its report is served: to this machine, for reading, and its end to who is looking.
func TestListen(t *testing.T) {
	t.Parallel()
	stderr := &lines{first: make(chan string, 1)}
	status := make(chan int, 1)
	passes := fmt.Sprint("--passes=", testseed.Rounds(30, 6))
	go func() {
		status <- Main(t.Context(),
			append([]string{"run", "-q", "--listen=127.0.0.1:0", passes}, small...), io.Discard, stderr)
	}()
	url := regexp.MustCompile(`http://127\.0\.0\.1:[0-9]+/`).FindString(<-stderr.first)
	if url == "" {
		t.Fatal("no address")
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	ask := func(method, query, host string) (int, string) {
		req, err := http.NewRequest(method, url+query, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		answer, err := client.Do(req)
		if err != nil {
			return 0, "" // the run is over
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Error(err)
		}
		return answer.StatusCode, string(text)
	}
	if code, text := ask("GET", "", ""); code != 200 || !strings.Contains(text, "spillbench run") {
		t.Errorf("%d, %.200s", code, text)
	}
	if code, _ := ask("POST", "", ""); code != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", code)
	}
	if code, _ := ask("GET", "", "evil.example"); code != http.StatusForbidden {
		t.Errorf("by another name: %d", code)
	}
	// Who asks until the end gets the result.
	for last := ""; ; {
		code, text := ask("GET", "?data", "")
		if code == 0 {
			if !strings.Contains(last, "came back as they were loaded") || strings.Contains(last, `"live":true`) {
				t.Errorf("the last was %.300s", last)
			}
			break
		}
		last = text
	}
	if got := <-status; got != 0 {
		t.Errorf("%d, %s", got, &stderr.text)
	}
}
