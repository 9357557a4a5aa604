// Package browser opens pages in headless Chromium, through its protocol over two pipes, and reports what
// they show. It installs nothing. Without Chromium the tests are skipped.
package browser

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/base64"
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

// patience bounds a call to the browser, which a busy machine may keep waiting.
const patience = 60 * time.Second

// Browser is a running browser. One goroutine at a time may use it.
type Browser struct {
	t       testing.TB
	to      *os.File
	answers chan message
	next    int
	seen    []message // events that came meanwhile
}

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

// Start starts a browser, which ends with the test. It skips the test where there is none.
func Start(t testing.TB) *Browser {
	t.Helper()
	path := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if found, err := exec.LookPath(name); err == nil {
			path = found
			break
		}
	}
	if path == "" {
		t.Skip("there is no chromium, chromium-browser or google-chrome in PATH (apt-get install chromium)")
	}
	// The path of a socket in it has 108 bytes at most, for which a test's own directory is too long.
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
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--disable-breakpad", "--disable-dev-shm-usage", "--hide-scrollbars",
		"--remote-debugging-pipe", "--user-data-dir="+dir+"/profile", "about:blank")
	cmd.ExtraFiles = []*os.File{theirs, ours}
	cmd.Env = append(os.Environ(), "HOME="+dir, "TMPDIR="+dir, "XDG_CONFIG_HOME="+dir, "XDG_CACHE_HOME="+dir)
	said := new(bytes.Buffer) // read only after the browser has ended
	cmd.Stderr = said
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
		go func() { // so that the browser is not kept by a pipe that is full
			for range b.answers {
			}
		}()
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case <-ended:
		case <-time.After(patience):
			_ = cmd.Process.Kill()
			<-ended
		}
		if t.Failed() {
			t.Logf("the browser said: %s", said)
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

// call calls a method, and collects the events that come before its answer.
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

// await takes messages until one is what is waited for.
func (b *Browser) await(what string, is func(message) bool) {
	b.t.Helper()
	late := time.NewTimer(patience)
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
			if is(m) {
				return
			}
		case <-late.C:
			b.t.Fatalf("%s: the browser does not answer", what)
		}
	}
}

// How says how a page is looked at.
type How struct {
	Width, Height int
	Dark          bool
	Print         bool   // as it is printed
	Picture       bool   // with a picture of it
	Until         string // an expression that is to become true before the page is looked at; may be empty
}

// Seen is what a page showed and did.
type Seen struct {
	Errors   []string // of its script, and what its policy refused
	Requests []string // all that were made, but for the page's own
	Plots    int      // canvases
	Bars     int      // of figures beside each other
	Blank    []string // canvases on which nothing is drawn, and bars that have no length
	Hidden   []string // tables that are wider than their place, by their first heading
	Unmarked []string // those of them that do not show that they go on
	Labels   []string // of plots, as they are read out
	Clipped  []string // canvases with ink at their right edge: what was to be there is cut
	Overflow int      // by how many pixels the page is wider than the window
	Text     string   // as read
	Injected bool     // a text became an element or ran
	Picture  []byte   // PNG of the whole page, if that is asked for
}

// Look opens a page and returns what it shows.
func (b *Browser) Look(url string, how How) (s Seen) {
	b.t.Helper()
	var target struct{ TargetID string }
	b.call("", "Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	b.call("", "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	defer b.call("", "Target.closeTarget", map[string]any{"targetId": target.TargetID}, nil)
	id := attached.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		b.call(id, domain+".enable", map[string]any{}, nil)
	}
	theme := map[bool]string{false: "light", true: "dark"}[how.Dark]
	media := map[bool]string{true: "print"}[how.Print]
	b.call(id, "Emulation.setEmulatedMedia", map[string]any{"media": media, "features": []map[string]string{{"name": "prefers-color-scheme", "value": theme}}}, nil)
	b.call(id, "Emulation.setDeviceMetricsOverride", map[string]any{"width": how.Width, "height": how.Height, "deviceScaleFactor": 1, "mobile": how.Width < 500}, nil)
	b.seen = nil
	b.call(id, "Page.navigate", map[string]any{"url": url}, nil)
	if !slices.ContainsFunc(b.seen, func(m message) bool { return m.Method == "Page.loadEventFired" }) {
		b.await("loading "+url, func(m message) bool { return m.Method == "Page.loadEventFired" && m.SessionID == id })
	}
	eval := func(expression string, into any) {
		b.t.Helper()
		var r struct {
			Result           struct{ Value json.RawMessage }
			ExceptionDetails *struct{ Text string }
		}
		b.call(id, "Runtime.evaluate", map[string]any{"expression": expression, "awaitPromise": true, "returnByValue": true}, &r)
		if r.ExceptionDetails != nil {
			b.t.Fatalf("%s: %s", expression, r.ExceptionDetails.Text)
		}
		if err := json.Unmarshal(r.Result.Value, into); err != nil {
			b.t.Fatalf("%s: %v", r.Result.Value, err)
		}
	}
	var done bool
	// Two frames after that all that was asked to be drawn is drawn.
	eval(fmt.Sprintf(`new Promise(done => {
		const look = () => (%s) ? requestAnimationFrame(() => requestAnimationFrame(() => done(true))) : setTimeout(look, 50);
		look();
	})`, cmp.Or(how.Until, "true")), &done)
	eval(`(() => {
		const blank = [], clipped = [];
		const all = document.querySelectorAll("canvas");
		all.forEach(c => {
			const name = c.closest("figure") ? c.closest("figure").querySelector("figcaption").textContent : "?";
			if (!c.width || !c.height) { blank.push(name); return; }
			const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data, colors = new Set();
			for (let i = 0; i < d.length && colors.size < 4; i += 4) if (d[i+3]) colors.add((d[i] << 16) + (d[i+1] << 8) + d[i+2]);
			if (colors.size < 3) blank.push(name);
			for (let i = 4 * (c.width - 1); i < d.length; i += 4 * c.width) if (d[i+3]) { clipped.push(name); break; }
		});
		const bars = document.querySelectorAll(".bar rect");
		bars.forEach(r => { if (!r.getBoundingClientRect().width) blank.push(r.closest(".bar").textContent); });
		const hidden = [...document.querySelectorAll(".wide")].filter(w => w.scrollWidth > w.clientWidth);
		const unmarked = hidden.filter(w => !getComputedStyle(w).backgroundAttachment.includes("local")).map(w => w.querySelector("th").textContent);
		return {
			Plots: all.length, Bars: bars.length, Blank: blank, Hidden: hidden.map(w => w.querySelector("th").textContent), Unmarked: unmarked, Clipped: clipped,
			Labels: Array.from(document.querySelectorAll(".hold[aria-label]"), e => e.getAttribute("aria-label")), Overflow: Math.max(0, document.documentElement.scrollWidth - document.documentElement.clientWidth),
			Text: document.body.innerText, Injected: window.injected === true || document.querySelector("[data-injected]") !== null,
		};
	})()`, &s)
	if how.Picture {
		var picture struct{ Data string }
		b.call(id, "Page.captureScreenshot", map[string]any{"captureBeyondViewport": true, "format": "png"}, &picture)
		s.Picture, _ = base64.StdEncoding.DecodeString(picture.Data)
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
		case m.Method == "Log.entryAdded" && p.Entry.Level == "error", m.Method == "Runtime.consoleAPICalled" && p.Type == "error":
			s.Errors = append(s.Errors, p.Entry.Text)
		case m.Method == "Network.requestWillBeSent" && p.Request.URL != url && !strings.HasPrefix(p.Request.URL, "data:"):
			s.Requests = append(s.Requests, p.Request.URL)
		}
	}
	return s
}
