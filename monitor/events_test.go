package monitor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
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

func TestRefusal(t *testing.T) {
	start := time.Now()
	for _, tt := range []struct {
		name  string
		times int
		after time.Duration
		used  int64
		want  int64
	}{
		{"at once", 1, 0, 100, 8},
		{"nothing has changed", 1, 99 * time.Millisecond, 100, 8},
		{"more is used", 1, 0, 120, 8},
		{"less is used", 1, 0, 99, 0},
		{"when the pause is over", 1, 100 * time.Millisecond, 100, 0},
		{"less is used, the second time", 2, 0, 99, 8},
	} {
		f := refusal{bytes: 8, used: 100, pause: pause{failures: tt.times, until: start.Add(100 * time.Millisecond)}}
		if got := f.bound(start.Add(tt.after), tt.used); got != tt.want {
			t.Errorf("%s: %d are refused, want %d", tt.name, got, tt.want)
		}
	}
	if got := new(refusal).bound(start, 100); got != 0 {
		t.Errorf("%d are refused where nothing was", got)
	}
	for n, want := range map[int]time.Duration{1: 2, 2: 4, 6: 64, 100: 64} {
		p := pause{failures: n - 1}
		p.fail(start, 1, backoffMax)
		if got := p.until.Sub(start); got != want || p.failures != n {
			t.Errorf("after %d failures there is a pause of %d periods, want %d", p.failures, got, want)
		}
	}
}

func TestEventLog(t *testing.T) {
	var out bytes.Buffer
	e := &eventLog{Logger: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{
		Level: slog.LevelDebug,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	}))}
	w := newWorld(t, sizes{gpu0: kib, host0: kib}, nil)
	v, from, to := Victim{ID: 7, Bytes: 4096}, w.mon.spaces[0], w.mon.spaces[1]
	moved := func(err error) { e.moved(v, from, to, decide.Demand, time.Second, err) }
	moved(nil)
	moved(&tier.NoSpaceError{Space: host0})
	moved(errors.New("broken"))
	moved(fmt.Errorf("%w: %w", errEnding, tier.ErrClosed))
	cannot := &batch.UnmovableError{Batch: 7, Err: errors.New("no converter")}
	moved(cannot)
	e.unmovable(Unmovable{Batch: 7, Space: gpu0, To: host0, Form: "mine", Bytes: 4096, Err: cannot})
	gone := fmt.Errorf("moving: %w", tier.ErrLost)
	moved(gone)
	e.lost(Lost{Space: gpu0, Err: gone})
	e.pressure(Pressure{Space: gpu0, Bytes: 9, Capacity: 10, Trigger: 8, Stop: 6, Above: true})
	e.pressure(Pressure{Space: disk0, Bytes: 9, Capacity: 10, Trigger: 8, Stop: 6, Above: true, Lowest: true})
	e.pressure(Pressure{Space: gpu0, Bytes: 6, Capacity: 10, Trigger: 8, Stop: 6})
	e.pressure(Pressure{Space: disk0, Bytes: 8, Capacity: 10, Trigger: 8, Stop: 6, Above: true, Lowest: true})
	e.pressure(Pressure{Space: host0, Bytes: 8, Capacity: 10, Trigger: 8, Stop: 6, Above: true, Lowest: true})
	e.stuck(Stuck{Space: gpu0, Reason: decide.Demand, Need: 1, Used: 9, Limit: 9, Capacity: 10, Waiters: 2, Resting: 5, Below: []Room{{host0, 3}, {disk0, 0}}})
	e.stuck(Stuck{Space: gpu0, Reason: decide.Trigger, Need: 1, Used: 9, Limit: 9, Capacity: 10})
	const want = `level=DEBUG msg="spillway: a move has ended" batch=7 from=gpu:0 to=host:0 bytes=4096 reason=demand took=1s
level=DEBUG msg="spillway: a move failed; the batch stays where it is" batch=7 from=gpu:0 to=host:0 bytes=4096 reason=demand took=1s error="host:0 has no space for 0 bytes: 0 available"
level=WARN msg="spillway: a move failed; the batch stays where it is" batch=7 from=gpu:0 to=host:0 bytes=4096 reason=demand took=1s error=broken
level=DEBUG msg="spillway: a move was broken off; the batch stays where it is" batch=7 from=gpu:0 to=host:0 bytes=4096 reason=demand took=1s error="monitor: the move is not needed any more: closed"
level=DEBUG msg="spillway: a move failed; the batch stays where it is" batch=7 from=gpu:0 to=host:0 bytes=4096 reason=demand took=1s error="batch 7 cannot be converted: no converter"
level=WARN msg="spillway: a batch cannot be converted and stays where it is; others are moved instead" batch=7 space=gpu:0 to=host:0 form=mine bytes=4096 error="batch 7 cannot be converted: no converter"
level=DEBUG msg="spillway: a move failed; the batch stays where it is" batch=7 from=gpu:0 to=host:0 bytes=4096 reason=demand took=1s error="moving: lost"
level=DEBUG msg="spillway: a space is lost" space=gpu:0 error="moving: lost"
level=DEBUG msg="spillway: pressure rose to the trigger" space=gpu:0 bytes=9 capacity=10 trigger=8 stop=6
level=WARN msg="spillway: pressure rose to the trigger, and there is no tier below" space=disk:0 bytes=9 capacity=10 trigger=8 stop=6
level=DEBUG msg="spillway: pressure fell to the stop mark" space=gpu:0 bytes=6 capacity=10 trigger=8 stop=6
level=DEBUG msg="spillway: pressure rose to the trigger, and there is no tier below" space=disk:0 bytes=8 capacity=10 trigger=8 stop=6
level=WARN msg="spillway: pressure rose to the trigger, and there is no tier below" space=host:0 bytes=8 capacity=10 trigger=8 stop=6
level=WARN msg="spillway: room is needed and no batch can be moved down" space=gpu:0 reason=demand need=1 used=9 limit=9 capacity=10 waiters=2 resting=5 below="host:0 has 3, disk:0 has 0"
level=DEBUG msg="spillway: room is needed that only work in progress can free" space=gpu:0 reason=trigger need=1 used=9 limit=9 capacity=10 waiters=0 resting=0 below=""
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", &out, want)
	}
}
