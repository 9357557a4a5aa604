// Package browser opens pages in headless Chromium, through its protocol over two pipes, and
// reports what they show. It installs nothing. Without Chromium it skips tests.
package browser

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// timeout limits how long a call to the browser may take on a busy machine.
const timeout = 60 * time.Second

// Browser is a running browser. One goroutine at a time may use it.
type Browser struct {
	t       testing.TB
	to      *os.File
	answers chan message // responses and events
	next    int
	seen    []message // events received so far
}

// message is a request, a response or an event of the protocol.
type message struct {
	ID        int             `json:"id,omitempty"`
	SessionID string          `json:"sessionId,omitempty"`
	Method    string          `json:"method,omitempty"`
	Params    json.RawMessage `json:"params,omitempty"`
	Result    json.RawMessage `json:"result,omitempty"`
	Error     *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// Start starts a browser that ends with the test. It skips the test if there is none.
func Start(t testing.TB) *Browser {
	t.Helper()
	path, err := "", error(nil)
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err = exec.LookPath(name); err == nil {
			break
		}
	}
	if err != nil {
		t.Skip("there is no chromium, chromium-browser or google-chrome in PATH (apt-get install chromium)")
	}
	// The path of a socket may have 108 bytes, for which a test's own directory is too long.
	dir, err := os.MkdirTemp("/tmp", "spillway-chromium-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	theirs, to, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	from, ours, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-breakpad",
		"--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
		"--user-data-dir="+dir+"/profile", "about:blank")
	cmd.ExtraFiles = []*os.File{theirs, ours}
	cmd.Env = append(os.Environ(), "HOME="+dir, "TMPDIR="+dir, "XDG_CONFIG_HOME="+dir, "XDG_CACHE_HOME="+dir)
	output := new(bytes.Buffer) // read only after the browser has ended
	cmd.Stderr = output
	if err := cmd.Start(); err != nil {
		t.Skipf("%s does not start: %v", path, err)
	}
	_, _ = theirs.Close(), ours.Close() // the child has them
	b := &Browser{t: t, to: to, answers: make(chan message, 64)}
	var reading sync.WaitGroup
	reading.Go(func() {
		defer close(b.answers)
		in := bufio.NewReaderSize(from, 1<<20)
		for {
			text, err := in.ReadBytes(0)
			if err != nil {
				return
			}
			var m message
			if json.Unmarshal(text[:len(text)-1], &m) == nil {
				b.answers <- m
			}
		}
	})
	t.Cleanup(func() {
		_ = b.send(message{ID: 1 << 30, Method: "Browser.close"})
		go func() { // so that a full pipe does not block the browser
			for range b.answers {
			}
		}()
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case <-ended:
		case <-time.After(timeout):
			_ = cmd.Process.Kill()
			<-ended
		}
		if t.Failed() {
			t.Logf("the browser printed: %s", output)
		}
		_ = to.Close()
		_ = from.Close()
		reading.Wait()
	})
	return b
}

func (b *Browser) send(m message) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	_, err = b.to.Write(append(text, 0))
	return err
}

// call calls a method and collects the events that arrive before its response.
func (b *Browser) call(session, method string, params, result any) {
	b.t.Helper()
	text, err := json.Marshal(params)
	if err != nil {
		b.t.Fatal(err)
	}
	b.next++
	if err := b.send(message{ID: b.next, SessionID: session, Method: method, Params: text}); err != nil {
		b.t.Fatalf("%s: %v", method, err)
	}
	b.await(method, func(m message) bool {
		if m.ID != b.next {
			return false
		}
		if m.Error != nil {
			b.t.Fatalf("%s: %s", method, m.Error.Message)
		}
		if result != nil {
			if err := json.Unmarshal(m.Result, result); err != nil {
				b.t.Fatalf("%s: %v in %s", method, err, m.Result)
			}
		}
		return true
	})
}

// await receives messages until done returns true for one.
func (b *Browser) await(what string, done func(message) bool) {
	b.t.Helper()
	late := time.NewTimer(timeout)
	defer late.Stop()
	for {
		select {
		case m, ok := <-b.answers:
			if !ok {
				b.t.Fatalf("%s: the browser has ended", what)
			}
			if m.Method != "" {
				b.seen = append(b.seen, m)
			}
			if done(m) {
				return
			}
		case <-late.C:
			b.t.Fatalf("%s: no response from the browser", what)
		}
	}
}

// How configures how to open a page.
type How struct {
	Width, Height int
	Dark          bool
	Print         bool   // as it is printed
	Picture       bool   // take a picture of it
	Until         string // an expression to wait for until it is true; may be empty
}

// Seen is what a page showed and did.
type Seen struct {
	Errors   []string // of its script, and violations of its policy
	Requests []string // URLs other than the page's own
	Plots    int      // canvases
	Bars     int      // of bar charts
	Blank    []string // canvases without ink, and bars without length
	Hidden   []string // tables that are wider than their element, by their first heading
	Unmarked []string // those of Hidden that do not show that they continue
	Labels   []string // of plots, for screen readers
	Clipped  []string // canvases with ink at their right edge, where it is cut off
	Overflow int      // by how many pixels the page is wider than the window
	Text     string   // as read
	Injected bool     // a text became an element or ran
	Picture  []byte   // PNG of the whole page, if asked for
}

// settle is a script that waits until the expression %s is true and the page has drawn all that it
// requested by then, which takes two frames.
const settle = `new Promise(done => {
	const look = () => (%s)
		? requestAnimationFrame(() => requestAnimationFrame(() => done(true)))
		: setTimeout(look, 50);
	look();
})`

// inspect is a script that returns a Seen.
const inspect = `(() => {
	const blank = [], clipped = [];
	const all = document.querySelectorAll("canvas");
	all.forEach(c => {
		const name = c.closest("figure") ? c.closest("figure").querySelector("figcaption").textContent : "?";
		if (!c.width || !c.height) { blank.push(name); return; }
		const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data, colors = new Set();
		for (let i = 0; i < d.length && colors.size < 4; i += 4)
			if (d[i+3]) colors.add((d[i] << 16) + (d[i+1] << 8) + d[i+2]);
		if (colors.size < 3) blank.push(name);
		for (let i = 4 * (c.width - 1); i < d.length; i += 4 * c.width)
			if (d[i+3]) { clipped.push(name); break; }
	});
	const bars = document.querySelectorAll(".bar rect");
	bars.forEach(r => {
		if (!r.getBoundingClientRect().width) blank.push(r.closest(".bar").textContent);
	});
	const root = document.documentElement;
	const heading = w => w.querySelector("th").textContent;
	const hidden = [...document.querySelectorAll(".wide")].filter(w => w.scrollWidth > w.clientWidth);
	const unmarked = hidden.filter(w => !getComputedStyle(w).backgroundAttachment.includes("local"));
	return {
		Plots: all.length, Bars: bars.length, Blank: blank, Clipped: clipped,
		Hidden: hidden.map(heading), Unmarked: unmarked.map(heading),
		Labels: Array.from(document.querySelectorAll(".hold[aria-label]"), e => e.getAttribute("aria-label")),
		Overflow: Math.max(0, root.scrollWidth - root.clientWidth),
		Text: document.body.innerText,
		Injected: window.injected === true || document.querySelector("[data-injected]") !== null,
	};
})()`

// Look opens a page and returns what it shows.
func (b *Browser) Look(url string, how How) (s Seen) {
	b.t.Helper()
	type params map[string]any
	var target struct{ TargetID string }
	b.call("", "Target.createTarget", params{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	b.call("", "Target.attachToTarget", params{"targetId": target.TargetID, "flatten": true}, &attached)
	defer b.call("", "Target.closeTarget", params{"targetId": target.TargetID}, nil)
	id := attached.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		b.call(id, domain+".enable", params{}, nil)
	}
	theme := map[bool]string{false: "light", true: "dark"}[how.Dark]
	b.call(id, "Emulation.setEmulatedMedia", params{
		"media":    map[bool]string{true: "print"}[how.Print],
		"features": []params{{"name": "prefers-color-scheme", "value": theme}},
	}, nil)
	b.call(id, "Emulation.setDeviceMetricsOverride", params{
		"width": how.Width, "height": how.Height, "deviceScaleFactor": 1, "mobile": how.Width < 500,
	}, nil)
	loaded := func(m message) bool { return m.Method == "Page.loadEventFired" && m.SessionID == id }
	b.seen = nil
	b.call(id, "Page.navigate", params{"url": url}, nil)
	if !slices.ContainsFunc(b.seen, loaded) {
		b.await("loading "+url, loaded)
	}
	eval := func(expression string, into any) {
		b.t.Helper()
		var r struct {
			Result           struct{ Value json.RawMessage }
			ExceptionDetails *struct{ Text string }
		}
		evaluate := params{"expression": expression, "awaitPromise": true, "returnByValue": true}
		b.call(id, "Runtime.evaluate", evaluate, &r)
		if r.ExceptionDetails != nil {
			b.t.Fatalf("%s: %s", expression, r.ExceptionDetails.Text)
		}
		if err := json.Unmarshal(r.Result.Value, into); err != nil {
			b.t.Fatalf("%s: %v", r.Result.Value, err)
		}
	}
	var done bool
	eval(fmt.Sprintf(settle, cmp.Or(how.Until, "true")), &done)
	eval(inspect, &s)
	if how.Picture {
		var picture struct{ Data []byte }
		b.call(id, "Page.captureScreenshot", params{"captureBeyondViewport": true, "format": "png"}, &picture)
		s.Picture = picture.Data
	}
	for _, m := range b.seen {
		if m.SessionID != id {
			continue
		}
		var p struct {
			Request          struct{ URL string }
			Entry            struct{ Level, Text string }
			ExceptionDetails struct {
				Text      string
				Exception struct{ Description string }
			}
			Type string
		}
		_ = json.Unmarshal(m.Params, &p) // other events have other fields
		switch {
		case m.Method == "Runtime.exceptionThrown":
			s.Errors = append(s.Errors, p.ExceptionDetails.Text+" "+p.ExceptionDetails.Exception.Description)
		case m.Method == "Log.entryAdded" && p.Entry.Level == "error",
			m.Method == "Runtime.consoleAPICalled" && p.Type == "error":
			s.Errors = append(s.Errors, p.Entry.Text)
		case m.Method == "Network.requestWillBeSent":
			if to := p.Request.URL; to != url && !strings.HasPrefix(to, "data:") {
				s.Requests = append(s.Requests, to)
			}
		}
	}
	return s
}
