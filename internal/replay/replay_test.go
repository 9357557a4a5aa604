package replay_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/replay"
	"github.com/spillway-db/spillway/internal/trace"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
)

var update = flag.Bool("update", false, "write what the policies do into testdata/policies.txt")

// traces are a hash join in two phases, repeated scans, and skewed accesses. TestRecordTraces of
// package test has recorded them.
var traces = []string{"join", "scan", "skew"}

func read(t *testing.T, name string) *trace.Trace {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name+".trace"))
	if err != nil {
		t.Fatal(err)
	}
	tr, err := trace.Read(bytes.NewReader(data))
	if err != nil || tr.CutOff || tr.Lost > 0 {
		t.Fatal(name, err)
	}
	return tr
}

func run(t *testing.T, tr *trace.Trace, s replay.Setting) *replay.Result {
	t.Helper()
	r, err := replay.Run(t.Context(), tr, s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// lruOn returns a trace without events of an engine with these spaces.
func lruOn(spaces ...trace.Space) *trace.Trace {
	return &trace.Trace{Header: trace.Header{Policy: "lru", Spaces: spaces}}
}

// space has its trigger at four fifths and its stop mark at two.
func space(id tier.ID, capacity int64) trace.Space {
	return trace.Space{ID: id, Node: -1, Capacity: capacity, Limit: capacity, Trigger: capacity / 5 * 4, Stop: capacity / 5 * 2}
}

// TestPolicies: no policy moves more, or takes longer, than testdata/policies.txt says. A policy
// that has become better, or is new, gets its figures with -update.
func TestPolicies(t *testing.T) {
	const file = "testdata/policies.txt"
	var now strings.Builder
	fmt.Fprintln(&now, "trace  policy         bytes      time")
	text, err := os.ReadFile(file)
	if err != nil && !*update {
		t.Fatal(err)
	}
	limits := make(map[string][2]int64)
	for _, line := range strings.Split(string(text), "\n")[1:] {
		var name, policy, took string
		var bytes int64
		if _, err := fmt.Sscan(line, &name, &policy, &bytes, &took); err == nil {
			d, _ := time.ParseDuration(took)
			limits[name+" "+policy] = [2]int64{bytes, int64(d)}
		}
	}
	for _, name := range traces {
		tr := read(t, name)
		for _, policy := range monitor.Names() {
			p, err := monitor.ByName(policy)
			if err != nil {
				t.Fatal(err)
			}
			r := run(t, tr, replay.Setting{Policy: p})
			fmt.Fprintf(&now, "%-6s %-14s %-10d %v\n", name, policy, r.Bytes(), r.Took.Round(time.Microsecond))
			most, known := limits[name+" "+policy]
			switch {
			case *update:
			case !known:
				t.Errorf("%s has no figures for %s: run the test with -update", file, policy)
			case r.Bytes() > most[0] || int64(r.Took) > most[1]+most[1]/50:
				t.Errorf("%s: %s moves %d bytes in %v, at most %d in %v before", name, policy, r.Bytes(), r.Took, most[0], time.Duration(most[1]))
			}
		}
	}
	if *update {
		if err := os.WriteFile(file, []byte(now.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCostAwareMovesLeast: no policy moves fewer bytes in a join or in skewed accesses, nor in scans
// beyond 3 %. It never takes longer than the others, beyond 1 %.
func TestCostAwareMovesLeast(t *testing.T) {
	for name, slack := range map[string]float64{"join": 1, "scan": 1.03, "skew": 1} {
		tr := read(t, name)
		aware := run(t, tr, replay.Setting{Policy: monitor.CostAware()})
		for _, p := range []monitor.Policy{monitor.PlanOrder(), monitor.LRU(), monitor.LargestFirst()} {
			other := run(t, tr, replay.Setting{Policy: p})
			if float64(aware.Bytes()) > slack*float64(other.Bytes()) || float64(aware.Took) > 1.01*float64(other.Took) {
				t.Errorf("%s: %d bytes in %v, %s %d in %v", name, aware.Bytes(), aware.Took, p.Name(), other.Bytes(), other.Took)
			}
		}
	}
}

// TestDeterministic: a replay ends the same each time.
func TestDeterministic(t *testing.T) {
	for _, name := range traces {
		tr := read(t, name)
		first := run(t, tr, replay.Setting{})
		for range 5 {
			if again := run(t, tr, replay.Setting{}); !reflect.DeepEqual(first, again) {
				t.Errorf("%s: %+v, and then %+v", name, first, again)
			}
		}
	}
}

// TestRecorded: a replay in the setting of the trace moves what was moved then, and takes as long.
func TestRecorded(t *testing.T) {
	for _, name := range traces {
		tr := read(t, name)
		r, m := run(t, tr, replay.Setting{}), replay.Measured(tr)
		if !near(float64(r.Bytes()), float64(m.Bytes()), 0.02) || !near(r.Took.Seconds(), m.Took.Seconds(), 0.15) || r.Accesses != m.Accesses {
			t.Errorf("%s: %d bytes in %v and %d accesses were replayed, %d in %v and %d recorded", name, r.Bytes(), r.Took, r.Accesses, m.Bytes(), m.Took, m.Accesses)
		}
	}
}

func near(a, b, share float64) bool { return a-b <= share*b && b-a <= share*b }

// TestSettings: more memory moves less, a slower disk takes longer, and what has no room is stuck.
func TestSettings(t *testing.T) {
	tr := read(t, "scan")
	plain := run(t, tr, replay.Setting{})
	if r := run(t, tr, replay.Setting{Capacity: map[tier.Kind]int64{tier.GPU: 1 << 30}}); r.Bytes() != 0 || r.Found != r.Accesses {
		t.Errorf("with a large GPU %d bytes are moved, and %d of %d batches found", r.Bytes(), r.Found, r.Accesses)
	}
	if r := run(t, tr, replay.Setting{Capacity: map[tier.Kind]int64{tier.Host: 1 << 30}}); r.Bytes() == 0 || r.Bytes() >= plain.Bytes() {
		t.Errorf("with much host memory %d bytes are moved, %d else", r.Bytes(), plain.Bytes())
	}
	slow := replay.Edge{From: tier.ID{Kind: tier.Disk}, To: tier.ID{Kind: tier.GPU}}
	r := run(t, tr, replay.Setting{Speed: map[replay.Edge]float64{slow: 50 << 20}})
	for _, m := range r.Moves {
		if m.From == slow.From && r.Took < time.Duration(float64(m.Bytes)/(50<<20)*1e9) {
			t.Errorf("%d bytes from a disk of 50 MiB/s take %v", m.Bytes, r.Took)
		}
	}
	if _, err := replay.Run(t.Context(), tr, replay.Setting{Capacity: map[tier.Kind]int64{tier.Disk: 8 << 20}}); !errors.Is(err, replay.ErrStuck) {
		t.Errorf("with a small disk: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := replay.Run(ctx, tr, replay.Setting{}); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
}

// TestIncomplete: a trace that lacks its end, or events from its middle, is replayed as far as that
// goes, or ends with an error.
func TestIncomplete(t *testing.T) {
	for _, name := range traces {
		tr := read(t, name)
		all := tr.Events
		for n := 0; n < len(all); n += 1 + len(all)/8 {
			tr.Events = all[:n]
			if _, err := replay.Run(t.Context(), tr, replay.Setting{}); err != nil {
				t.Errorf("%s: the first %d events: %v", name, n, err)
			}
			tr.Events = append(append([]trace.Event{}, all[:n]...), all[min(n+30, len(all)):]...)
			if _, err := replay.Run(t.Context(), tr, replay.Setting{}); err != nil && !errors.Is(err, replay.ErrStuck) {
				t.Errorf("%s without 30 events from the %dth: %v", name, n, err)
			}
		}
	}
}

// TestOps: tasks, subscriptions, batches that were there before, and such that are opened where
// they lie, are replayed.
func TestOps(t *testing.T) {
	gpu, host := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Host}
	at := time.Duration(0)
	state := func(id batch.ID, s batch.State, pending, active, subscribers int, space tier.ID) trace.Event {
		at += time.Millisecond
		return trace.Event{Kind: trace.State, At: at, Batch: id, State: s, Pending: pending, Active: active, Subscribers: subscribers, Space: space, Bytes: 4096, Body: 4096}
	}
	below := space(host, 40960)
	below.Held = 4096
	tr := lruOn(space(gpu, 40960), below)
	tr.Events = []trace.Event{
		state(1, batch.Idle, 0, 0, 0, gpu), // it is there
		state(1, batch.TaskCreated, 2, 0, 0, gpu),
		state(1, batch.TaskCreated, 1, 0, 0, gpu), // one is cancelled
		state(1, batch.TaskCreated, 1, 0, 2, gpu),
		state(1, batch.TaskCreated, 1, 0, 0, gpu),
		state(1, batch.Processing, 0, 1, 0, gpu), // opened in place, for the task
		state(1, batch.Processing, 0, 2, 0, gpu),
		state(1, batch.Idle, 0, 0, 0, gpu),
		{Kind: trace.Open, At: at + 1, Batch: 1, To: []tier.ID{host}},
		state(1, batch.Processing, 0, 1, 0, host),
		{Kind: trace.End, At: at + 1, OK: true},
		state(1, batch.Released, 0, 1, 0, host),
		{Kind: trace.Gone, At: at + 1, Batch: 1},
		state(2, batch.Idle, 0, 0, 0, host),
		{Kind: trace.Bring, At: at + 1, Batch: 2, To: []tier.ID{gpu}},
		{Kind: trace.End, At: at + 2, OK: true},
		state(2, batch.Idle, 0, 0, 0, gpu),
		{Kind: trace.Put, At: at + 1, Bytes: 4096, To: []tier.ID{gpu}},
		{Kind: trace.End, At: at + 2},
		state(2, batch.Released, 0, 0, 0, gpu),
	}
	r := run(t, tr, replay.Setting{})
	if len(r.Moves) != 2 || r.Bytes() != 8192 || r.Accesses != 3 || r.Found != 2 {
		t.Errorf("%+v", r)
	}
	if m := replay.Measured(tr); m.Accesses != 3 {
		t.Errorf("measured: %+v", m)
	}
}

// TestPauses: what takes hours is not stuck, neither a program's work while others wait for room, nor
// a move.
func TestPauses(t *testing.T) {
	gpu, host := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Host}
	tr := lruOn(space(gpu, 40960), space(host, 819200))
	state := func(at time.Duration, stream uint64, id batch.ID, s batch.State, active int, space tier.ID) trace.Event {
		return trace.Event{Kind: trace.State, At: at, Stream: stream, Batch: id, State: s, Active: active, Space: space, Bytes: 28672, Body: 28672}
	}
	tr.Events = []trace.Event{
		state(1, 1, 1, batch.Idle, 0, gpu),
		state(2, 1, 2, batch.Idle, 0, host),
		state(3, 1, 1, batch.Processing, 1, gpu),
		{Kind: trace.Open, At: 4, Stream: 2, Batch: 2, To: []tier.ID{gpu}}, // waits
		state(time.Hour, 1, 1, batch.Idle, 0, gpu),
		{Kind: trace.Moved, At: time.Hour + 1, Stream: 3, Batch: 1, From: gpu, Space: host, Bytes: 28672, Took: 1, Reason: "demand"},
		state(time.Hour+1, 3, 1, batch.Idle, 0, host),
		{Kind: trace.Moved, At: time.Hour + 2, Stream: 2, Batch: 2, From: host, Space: gpu, Bytes: 28672, Took: 1, Reason: "work"},
		state(time.Hour+2, 2, 2, batch.Processing, 1, gpu),
		{Kind: trace.End, At: time.Hour + 2, Stream: 2, OK: true},
	}
	if r := run(t, tr, replay.Setting{}); r.Bytes() != 2*28672 || r.Took < time.Hour-time.Second || r.Took > time.Hour+time.Second {
		t.Errorf("with a pause of an hour: %+v", r)
	}
	slow := replay.Setting{Speed: map[replay.Edge]float64{{From: gpu, To: host}: 1}}
	if r := run(t, tr, slow); r.Took < 28672*time.Second {
		t.Errorf("with a byte a second: %+v", r)
	}
}

// TestVainMoves: a replay in which the monitor tries a move again and again for which there is never
// room, because the batch is larger on disk, is stuck.
func TestVainMoves(t *testing.T) {
	gpu, disk := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Disk}
	tr := lruOn(space(gpu, 40960), space(disk, 262144))
	state := func(at time.Duration, id batch.ID, space tier.ID, bytes int64) trace.Event {
		return trace.Event{Kind: trace.State, At: at, Batch: id, State: batch.Idle, Space: space, Bytes: bytes, Body: 28672}
	}
	tr.Events = []trace.Event{
		state(1, 1, gpu, 28672),
		state(2, 1, disk, 300000),
		{Kind: trace.Put, At: 3, Bytes: 28672, To: []tier.ID{gpu}},
		{Kind: trace.End, At: 4, OK: true},
		state(5, 2, gpu, 28672),
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := replay.Run(ctx, tr, replay.Setting{}); !errors.Is(err, replay.ErrStuck) {
		t.Error(err)
	}
}

// TestNeverFits: what has no room in a setting at all is no prediction, but an error that says so.
func TestNeverFits(t *testing.T) {
	tr := read(t, "scan")
	_, err := replay.Run(t.Context(), tr, replay.Setting{Capacity: map[tier.Kind]int64{tier.GPU: 1 << 19}})
	if !errors.Is(err, replay.ErrStuck) || !strings.Contains(err.Error(), "never fits in [gpu:0]") {
		t.Errorf("with half a batch: %v", err)
	}
}

// TestNoSetting: a setting that the trace's engine cannot have is refused.
func TestNoSetting(t *testing.T) {
	tr := read(t, "scan")
	gpu, disk := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Disk}
	bare := *tr
	bare.Spaces = bare.Spaces[:1]
	for _, test := range []struct {
		tr   *trace.Trace
		s    replay.Setting
		want string
	}{
		{tr, replay.Setting{Capacity: map[tier.Kind]int64{tier.GPU: 1}}, "gpu:0"},
		{tr, replay.Setting{Capacity: map[tier.Kind]int64{tier.Host: 1 << 19}}, "host:0 of 524288 bytes has no room for the engine's own 2097152"},
		{&bare, replay.Setting{Capacity: map[tier.Kind]int64{tier.Disk: 1 << 30}}, "no disk space"},
		{tr, replay.Setting{Speed: map[replay.Edge]float64{{From: disk, To: tier.ID{Kind: tier.GPU, Ordinal: 1}}: 1}}, "gpu:1"},
		{tr, replay.Setting{Speed: map[replay.Edge]float64{{From: gpu, To: gpu}: 1}}, "gpu:0 to itself"},
	} {
		if _, err := replay.Run(t.Context(), test.tr, test.s); !errors.Is(err, replay.ErrSetting) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v, want %q", err, test.want)
		}
	}
}

// BenchmarkReplay is what an event costs.
func BenchmarkReplay(b *testing.B) {
	data, err := os.ReadFile(filepath.Join("testdata", "scan.trace"))
	if err != nil {
		b.Fatal(err)
	}
	tr, err := trace.Read(bytes.NewReader(data))
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := replay.Run(b.Context(), tr, replay.Setting{}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(tr.Events)), "ns/event")
}
