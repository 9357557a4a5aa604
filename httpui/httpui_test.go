package httpui_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/httpui"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/page/pagetest"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

const plan = `</script><img data-injected src=x onerror="window.injected=true">`

// spill opens an engine that a recorder listens to, and spills some batches of a plan.
func spill(t *testing.T, ui *httpui.Recorder) *spillway.Engine {
	t.Helper()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}}, HostMemory: spillway.Bytes(1 << 20),
		Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}}, Logger: slog.New(slog.DiscardHandler), Events: ui.Event,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := eng.Close(); err != nil {
			t.Error(err)
		}
	})
	return eng
}

func work(t *testing.T, eng *spillway.Engine) {
	t.Helper()
	p, err := eng.Plan(plan)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	repo, err := p.Repository("join", 0)
	if err != nil {
		t.Fatal(err)
	}
	var rec arrow.RecordBatch = arrowgen.Flights(1, 3000)
	defer rec.Release()
	for range 16 {
		if err := repo.Put(t.Context(), 0, rec); err != nil {
			t.Fatal(err)
		}
	}
	for h, err := range repo.Drain(t.Context(), 0, tier.GPU) {
		if err != nil {
			t.Fatal(err)
		}
		h.Close()
	}
}

func get(t *testing.T, h http.Handler, method, target string) *http.Response {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, target, nil))
	return w.Result()
}

func text(t *testing.T, r *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// The page shows what the engine did, before it is watched, while it is, and after; nothing can be
// changed by it.
func TestRecorder(t *testing.T) {
	ui := httpui.New()
	if got := text(t, get(t, ui, "GET", "/")); !strings.Contains(got, "has not called Watch") {
		t.Errorf("%.300s", got)
	}
	eng := spill(t, ui)
	stop := ui.Watch(eng)
	ui.Watch(eng)() // a second one does nothing
	work(t, eng)
	got := text(t, get(t, ui, "GET", "/spillway/"))
	for _, part := range []string{"→ gpu:0", "join:0", "Full to: gpu:0", `"live":true`, "GPUs, GPUMarks"} {
		if !strings.Contains(got, part) {
			t.Errorf("the page lacks %q", part)
		}
	}
	if strings.Contains(got, "<img") {
		t.Error("a plan's name became an element")
	}
	for _, method := range []string{"POST", "PUT", "DELETE"} {
		if r := get(t, ui, method, "/spillway/?data"); r.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("%s: %s", method, r.Status)
		}
	}
	stop()
	stop()
	if got := text(t, get(t, ui, "GET", "/?data")); !strings.Contains(got, `"live":false`) || !strings.Contains(got, "no longer watched") {
		t.Errorf("%.300s", got)
	}
}

// A request that waits is seen while it waits, and who waits.
func TestWaiting(t *testing.T) {
	ui := httpui.New()
	eng := spill(t, ui)
	defer ui.Watch(eng)()
	held, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), 600_000)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		r, err := eng.Reserve(reservation.NewOwner("sort").Context(t.Context()), reservation.AnyInTier(tier.GPU), 600_000)
		done <- errors.Join(err, r.Release())
	}()
	for eng.Stats().Waits.Waiting == 0 {
		runtime.Gosched()
	}
	got := text(t, get(t, ui, "GET", "/"))
	for _, part := range []string{"No wait for room is over.", "1 wait now, the oldest for ", `<th scope="row">sort</th><td class="n">0</td>`} {
		if !strings.Contains(got, part) {
			t.Errorf("the page lacks %q", part)
		}
	}
	if err := errors.Join(held.Release(), <-done); err != nil {
		t.Error(err)
	}
}

// The page of an engine works in a browser, behind a prefix, and asks its own address alone.
func TestInBrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("needs seconds and Chromium: run without -short")
	}
	b := pagetest.Start(t)
	ui := httpui.New()
	eng := spill(t, ui)
	stop := ui.Watch(eng)
	work(t, eng)
	mux := http.NewServeMux()
	mux.Handle("/debug/spillway/", http.StripPrefix("/debug/spillway", ui))
	server := httptest.NewServer(mux)
	defer server.Close()
	stop()
	s := b.Look(server.URL+"/debug/spillway/", pagetest.How{Width: 380, Height: 700})
	if len(s.Errors)+len(s.Requests)+len(s.Blank) > 0 || s.Overflow > 0 || s.Injected || s.Plots < 5 || !strings.Contains(s.Text, plan) {
		t.Errorf("errors %q, requests %q, blank %q, %d pixels too wide, injected %v, %d plots", s.Errors, s.Requests, s.Blank, s.Overflow, s.Injected, s.Plots)
	}
}

func ExampleNew() {
	ctx := context.Background()
	ui := httpui.New()
	eng, err := spillway.Open(ctx, spillway.Config{Events: ui.Event})
	if err != nil {
		return
	}
	defer eng.Close()
	defer ui.Watch(eng)()
	http.Handle("/spillway/", ui) // GET http://localhost:…/spillway/ shows the page
}
