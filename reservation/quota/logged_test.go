package quota_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// lines collects what is logged.
type lines struct {
	slog.Handler
	buf *bytes.Buffer
}

func newLines(level slog.Level) (*slog.Logger, *lines) {
	var buf bytes.Buffer
	l := &lines{slog.NewJSONHandler(&buf, &slog.HandlerOptions{Level: level}), &buf}
	return slog.New(l), l
}

// Handle checks that nothing is locked.
func (l *lines) Handle(ctx context.Context, r slog.Record) error {
	lockrank.AssertNone("a test's handler is called")
	return l.Handler.Handle(ctx, r)
}

func (l *lines) of(t *testing.T, op string) (out []map[string]any) {
	t.Helper()
	for _, line := range strings.Split(strings.TrimSpace(l.buf.String()), "\n") {
		if line == "" {
			continue
		}
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatal(err)
		}
		if m["op"] == op {
			out = append(out, m)
		}
	}
	return out
}

func TestLoggedOnce(t *testing.T) {
	log, l := newLines(slog.LevelDebug)
	b := newBudget(t, 64*kib)
	d, s := wrap(t, b, quota.Logged(newSim(t, 256*kib), log))
	a, err := d.Alloc(s, 60*kib)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := d.Alloc(s, 5*kib); !errors.Is(err, tier.ErrOutOfBudget) {
			t.Fatal(err)
		}
	}
	if err := d.Free(s, a+256); err == nil {
		t.Fatal("a bogus free passed")
	}
	if err := errors.Join(d.Fill(s, a, 1, 100), d.Free(s, a), s.Sync()); err != nil {
		t.Fatal(err)
	}
	for _, op := range []string{"alloc", "free"} {
		if got := l.of(t, op); len(got) != 1 {
			t.Errorf("%s: %d lines, want 1: %v", op, len(got), got)
		}
	}
	line := l.of(t, "alloc")[0]
	if line["bytes"] != float64(60*kib) || line["device"] != "simulated GPU" || line["stream"] == nil ||
		line["addr"] == nil || line["took"] == nil || line["error"] != nil {
		t.Errorf("%v", line)
	}
	if f := l.of(t, "free")[0]; f["addr"] != line["addr"] || f["stream"] != line["stream"] {
		t.Errorf("%v after %v", f, line)
	}
}

func TestLoggingOverBudgetLogsTheRefusal(t *testing.T) {
	log, l := newLines(slog.LevelDebug)
	inner, s := wrap(t, newBudget(t, 64*kib), newSim(t, 256*kib))
	d := quota.Logged(inner, log)
	if _, err := d.Alloc(s, 65*kib); !errors.Is(err, tier.ErrOutOfBudget) {
		t.Fatal(err)
	}
	got := l.of(t, "alloc")
	if len(got) != 1 || !strings.Contains(got[0]["error"].(string), "65536") || got[0]["addr"] != nil {
		t.Errorf("%v", got)
	}
	a, err := d.Alloc(s, 64*kib)
	if err := errors.Join(err, d.Free(s, a)); err != nil {
		t.Fatal(err)
	}
	if n := len(l.of(t, "alloc")) + len(l.of(t, "free")); n != 3 {
		t.Errorf("%d lines for two more calls: %s", n, l.buf)
	}
}

func TestLoggedPanic(t *testing.T) {
	log, l := newLines(slog.LevelDebug)
	boom := func() error { panic(errFault) }
	sp := &spy{Device: newSim(t, 64*kib), beforeAlloc: boom, beforeFree: boom}
	d, s := wrap(t, newBudget(t, 64*kib), quota.Logged(sp, log))
	if p := panics(func() { _, _ = d.Alloc(s, kib) }); p != errFault {
		t.Errorf("%v", p)
	}
	got := l.of(t, "alloc")
	if len(got) != 1 || got[0]["error"] == nil {
		t.Errorf("%v", got)
	}
}

// TestLoggingDisabledIsCheap: without the level, logging adds no allocation to a call.
func TestLoggingDisabledIsCheap(t *testing.T) {
	log, l := newLines(slog.LevelInfo)
	raw := newSim(t, 64*kib)
	s, err := raw.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	calls := func(d tier.Device) func() {
		return func() {
			a, err := d.Alloc(s, kib)
			if err := errors.Join(err, d.Free(s, a)); err != nil {
				t.Fatal(err)
			}
		}
	}
	with, without := testing.AllocsPerRun(100, calls(quota.Logged(raw, log))), testing.AllocsPerRun(100, calls(raw))
	if with != without {
		t.Errorf("%v allocations, and %v without logging", with, without)
	}
	if l.buf.Len() != 0 {
		t.Errorf("logged: %s", l.buf)
	}
	if err := raw.Close(); err != nil {
		t.Error(err)
	}
}

// TestLoggedPassesOn: a logged device does what the device does, and looks like it to peers.
func TestLoggedPassesOn(t *testing.T) {
	d, peer := quota.Logged(newSim(t, 64*kib), discard), newSim(t, 64*kib)
	ps, err := peer.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	b, err := peer.Alloc(ps, kib)
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	a, err := d.Alloc(s, kib)
	if err != nil {
		t.Fatal(err)
	}
	in, out := []byte("spillway"), make([]byte, 8)
	if err := errors.Join(
		d.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: in}}), d.CopyPeer(s, b, quota.Logged(peer, discard), a, 8),
		s.Sync(), peer.CopyRegions(ps, []tier.Region{{HostDst: out, Src: b}}), ps.Sync(), d.Close(), peer.Close(),
	); err != nil {
		t.Fatal(err)
	}
	if string(out) != "spillway" {
		t.Errorf("%q came back", out)
	}
}
