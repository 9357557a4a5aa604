package monitor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/tier"
)

func TestKindOf(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want outcome
	}{
		{nil, moved},
		{&tier.NoSpaceError{Space: host0}, noRoom},
		{fmt.Errorf("writing: %w", &tier.NoSpaceError{}), noRoom},
		{&tier.NoSpaceError{Space: disk0}, failed}, // something that the move needed beside its target
		{errors.Join(&batch.StateError{}, nil), busy},
		{fmt.Errorf("copying: %w", context.Canceled), failed}, // whose context that was is not said
		{fmt.Errorf("%w: %w", errEnding, errors.New("copying")), cancelled},
		{&batch.UnmovableError{Err: errors.New("no converter")}, unmovable},
		{&batch.UnmovableError{Err: &batch.StateError{}}, unmovable},
		{errors.Join(tier.ErrLost, &batch.UnmovableError{Err: errors.New("panicked")}), failed},
		{fmt.Errorf("moving: %w", &batch.UnmovableError{Err: fmt.Errorf("a device of the program's: %w", tier.ErrLost)}), unmovable},
		{errors.New("input/output error"), failed},
	} {
		if got := kindOf(tt.err, host0); got != tt.want {
			t.Errorf("%v is %d, want %d", tt.err, got, tt.want)
		}
	}
}

func TestEdgeRefuses(t *testing.T) {
	start := time.Now()
	const pausing = 100 * time.Millisecond
	for _, tt := range []struct {
		name     string
		refuses  int64
		failures int
		after    time.Duration
		used     int64
		want     int64
	}{
		{"at once", 8, 1, 0, 100, 8},
		{"nothing has changed", 8, 1, pausing - 1, 100, 8},
		{"more is used", 8, 1, 0, 120, 8},
		{"less is used", 8, 1, 0, 99, 0},
		{"when the pause is over", 8, 1, pausing, 100, 0},
		{"less is used, the second time", 8, 2, 0, 99, 8},
		{"one failure", everything, 1, 0, 100, 0},
		{"two failures", everything, 2, 0, 99, everything},
		{"two failures, when the pause is over", everything, 2, pausing, 100, 0},
	} {
		e := edge{refuses: tt.refuses, used: 100, pause: pause{failures: tt.failures, until: start.Add(pausing)}}
		if got := e.refused(start.Add(tt.after), tt.used); got != tt.want {
			t.Errorf("%s: %d are refused, want %d", tt.name, got, tt.want)
		}
	}
	if got := new(edge).refused(start, 100); got != 0 {
		t.Errorf("%d are refused where nothing was", got)
	}
	e := new(edge)
	for range 5 { // a space that was full is no space to which moves fail
		e.fail(start, pausing, 8, 100, nil)
	}
	if e.fail(start, pausing, everything, 0, errors.New("broken")); e.failures != 1 {
		t.Errorf("after one failure and five refusals, %d moves have failed", e.failures)
	}
	for n, want := range map[int]time.Duration{1: 2, 2: 4, 6: 64, 100: 64} {
		p := pause{failures: n - 1}
		p.fail(start, 1, backoffMax)
		if got := p.until.Sub(start); got != want || p.failures != n {
			t.Errorf("after %d failures there is a pause of %d periods, want %d", p.failures, got, want)
		}
	}
}

// textLogger returns a logger that writes all lines to out, without their times.
func textLogger(out *bytes.Buffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{
		Level: slog.LevelDebug,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))
}

// TestLogOfMoves: what is logged of the end of a move, and at which level.
func TestLogOfMoves(t *testing.T) {
	const stays = "a move failed; the batch stays where it is"
	for _, tt := range []struct {
		err              error
		cancels          bool
		level, text, end string
	}{
		{level: "DEBUG", text: "a move has ended"},
		{&tier.NoSpaceError{Space: host0}, false, "DEBUG", stays, ` error="host:0 has no space for 0 bytes: 0 available"`},
		{errors.New("broken"), false, "WARN", stays, " error=broken"},
		{tier.ErrClosed, true, "DEBUG", "a move was broken off; the batch stays where it is",
			` error="monitor: the move is not needed any more: closed"`},
		{&batch.UnmovableError{Batch: 7, Err: errors.New("no converter")}, false, "DEBUG", stays,
			` error="batch 7 cannot be converted: no converter"`},
		{fmt.Errorf("moving: %w", tier.ErrLost), false, "DEBUG", stays, ` error="moving: lost"`},
	} {
		bubble(t, fmt.Sprint(tt.err), func(t *testing.T) {
			var out bytes.Buffer
			w := newWorld(t, sizes{gpu0: 10 * kib, host0: 10 * kib}, func(c *Config, w *world) {
				c.Logger = textLogger(&out)
				w.mover.bytesA = time.Second / 4
			})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			w.mover.fault = func(*batch.Batch, tier.ID, tier.ID) error {
				if tt.cancels {
					cancel()
				}
				return tt.err
			}
			b := w.put(gpu0, 4*kib, seq(1))
			j := &job{
				m: w.mon, from: w.mon.byID[gpu0], to: w.mon.byID[host0], reason: decide.Demand, goal: -1,
				until: time.Now().Add(time.Hour), left: []Victim{{Batch: b, ID: b.ID(), Bytes: 4 * kib}},
			}
			j.work(ctx)
			want := fmt.Sprintf("level=%s msg=%q batch=%d from=gpu:0 to=host:0 bytes=4096 took=1s reason=demand%s",
				tt.level, "spillway: "+tt.text, b.ID(), tt.end)
			if got, _, _ := bytes.Cut(out.Bytes(), []byte("\n")); string(got) != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			w.end(b)
		})
	}
}

// TestLog: what is logged of spaces, and of batches that cannot be moved, and at which level.
func TestLog(t *testing.T) {
	bubble(t, "all kinds", func(t *testing.T) {
		var out bytes.Buffer
		w := newWorld(t, sizes{gpu0: 10 * kib, host0: 4 * kib}, func(c *Config, w *world) {
			c.Logger = textLogger(&out)
		})
		gpu, host := w.mon.spaces[0], w.mon.spaces[1]
		cannot := &batch.UnmovableError{Batch: 7, Err: errors.New("no converter")}
		for _, full := range []sizes{{gpu0: 9 * kib, host0: 4 * kib}, {gpu0: 6 * kib}, {host0: 4 * kib}} {
			var all []*batch.Batch
			for id, n := range full {
				all = append(all, w.put(id, n, seq(0)))
			}
			w.mon.step(t.Context())
			synctest.Wait() // nothing has room below
			for _, b := range all {
				if err := b.Drop(); err != nil {
					t.Error(err)
				}
			}
		}
		b := w.put(gpu0, 9*kib, seq(1))
		now := time.Now()
		step := func(resting int64) {
			gpu.dry.Store(&dryList{resting: resting})
			now = now.Add(defaultPeriod)
			w.mon.reportStuck(now, gpu, nil)
		}
		end := b.Subscribe()
		for range 3 {
			step(0)
		}
		end()
		before := out.Len()
		if step(0); out.Len() != before {
			t.Error("a batch that came to rest after the last list of moves is reported as one that cannot be moved")
		}
		for range 2 {
			step(9 * kib)
		}
		w.mon.noted(Victim{Batch: b, ID: b.ID()}, gpu, host, cannot)
		w.pools[gpu0].Lose(errors.New("gone"))
		w.mon.step(t.Context())
		want := `level=DEBUG msg="spillway: pressure rose to the trigger" to=gpu:0 bytes=9216 capacity=10240 trigger=8192 stop=6144
level=WARN msg="spillway: pressure rose to the trigger" to=host:0 bytes=4096 text="there is no slower tier" capacity=4096 trigger=3276 stop=2457
level=DEBUG msg="spillway: pressure fell to the stop mark" to=gpu:0 bytes=6144 capacity=10240 trigger=8192 stop=6144
level=DEBUG msg="spillway: pressure fell to the stop mark" to=host:0 capacity=4096 trigger=3276 stop=2457
level=DEBUG msg="spillway: pressure rose to the trigger" to=host:0 bytes=4096 text="there is no slower tier" capacity=4096 trigger=3276 stop=2457
level=DEBUG msg="spillway: room is needed that only work in progress can free" to=gpu:0 bytes=1025 reason=trigger text="0 wait, 9216 bytes are used of 10240, 0 of them in batches at rest, host:0 has 4096" capacity=10240
level=WARN msg="spillway: room is needed and no batch can be moved down" to=gpu:0 bytes=1025 reason=trigger text="0 wait, 9216 bytes are used of 10240, 9216 of them in batches at rest, host:0 has 4096" capacity=10240
level=WARN msg="spillway: a batch cannot be converted and stays where it is; others are moved instead" batch=5 from=gpu:0 to=host:0 bytes=9216 text=image error="batch 7 cannot be converted: no converter"
`
		want += fmt.Sprintf("level=DEBUG msg=\"spillway: a space is lost\" to=gpu:0 error=%q\n", gpu.Lost())
		want += "level=DEBUG msg=\"spillway: pressure fell to the stop mark\" to=host:0 " +
			"capacity=4096 trigger=3276 stop=2457\n"
		if out.String() != want {
			t.Errorf("got\n%s\nwant\n%s", &out, want)
		}
		w.end(b)
	})
}
