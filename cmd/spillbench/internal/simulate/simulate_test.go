package simulate_test

import (
	"compress/gzip"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/simulate"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
)

var update = flag.Bool("update", false, "write the figures of the policies into testdata/policies.txt")

var (
	gpu  = tier.ID{Kind: tier.GPU}
	gpu1 = tier.ID{Kind: tier.GPU, Ordinal: 1}
	disk = tier.ID{Kind: tier.Disk}
)

// recorded are the traces in testdata: see workloads.
var recorded = []string{"join", "scan", "skew"}

func read(t testing.TB, name string) *simulate.Trace {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name+".trace.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	plain, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	tr, err := simulate.Read(plain)
	if err != nil || tr.CutOff {
		t.Fatal(name, err)
	}
	return tr
}

func run(t testing.TB, tr *simulate.Trace, s simulate.Setting) *simulate.Result {
	t.Helper()
	r, err := simulate.Run(t.Context(), tr, s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestPolicies: no policy moves more bytes, or stalls for longer, than testdata/policies.txt has. A
// policy that is better now, or new, gets its figures with -update.
func TestPolicies(t *testing.T) {
	const file = "testdata/policies.txt"
	var now strings.Builder
	fmt.Fprintln(&now, "trace  policy         bytes      stalled")
	text, err := os.ReadFile(file)
	if err != nil && !*update {
		t.Fatal(err)
	}
	limits := make(map[string][2]int64)
	for _, line := range strings.Split(string(text), "\n")[1:] {
		var name, policy, stalled string
		var bytes int64
		if _, err := fmt.Sscan(line, &name, &policy, &bytes, &stalled); err == nil {
			d, _ := time.ParseDuration(stalled)
			limits[name+" "+policy] = [2]int64{bytes, int64(d)}
		}
	}
	for _, name := range recorded {
		tr := read(t, name)
		for _, policy := range monitor.Names() {
			r := run(t, tr, simulate.Setting{Policy: policy})
			fmt.Fprintf(&now, "%-6s %-14s %-10d %v\n", name, policy, r.Bytes, r.Stalled.Round(time.Microsecond))
			limit, known := limits[name+" "+policy]
			switch {
			case *update:
			case !known:
				t.Errorf("%s has no figures for %s: run the test with -update", file, policy)
			case r.Bytes > limit[0] || int64(r.Stalled) > limit[1]+limit[1]/50:
				t.Errorf(
					"%s: %s moves %d bytes and stalls for %v, at most %d and %v before",
					name,
					policy,
					r.Bytes,
					r.Stalled,
					limit[0],
					time.Duration(limit[1]),
				)
			}
		}
	}
	if *update {
		if err := os.WriteFile(file, []byte(now.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCostAwareMovesLeast: no policy moves fewer bytes than the default by more than 4 %.
func TestCostAwareMovesLeast(t *testing.T) {
	for _, name := range recorded {
		tr := read(t, name)
		aware := run(t, tr, simulate.Setting{Policy: monitor.CostAware().Name()})
		for _, p := range []monitor.Policy{monitor.PlanOrder(), monitor.LRU(), monitor.LargestFirst()} {
			other := run(t, tr, simulate.Setting{Policy: p.Name()})
			if float64(aware.Bytes) > 1.04*float64(other.Bytes) {
				t.Errorf(
					"%s: %d bytes, stalled for %v; %s %d, %v",
					name,
					aware.Bytes,
					aware.Stalled,
					p.Name(),
					other.Bytes,
					other.Stalled,
				)
			}
		}
	}
}

// TestDeterministic: all runs of a trace have the same result.
func TestDeterministic(t *testing.T) {
	for _, name := range recorded {
		tr := read(t, name)
		first := run(t, tr, simulate.Setting{})
		for range 5 {
			if again := run(t, tr, simulate.Setting{}); !reflect.DeepEqual(first, again) {
				t.Errorf("%s: %+v, and then %+v", name, first, again)
			}
		}
	}
}

// TestRecorded: with the settings of its engine a trace moves what the engine moved.
func TestRecorded(t *testing.T) {
	for _, name := range recorded {
		tr := read(t, name)
		r, m := run(t, tr, simulate.Setting{}), simulate.Measured(tr)
		diff := r.Bytes - m.Bytes
		if diff*50 > m.Bytes || -diff*50 > m.Bytes || r.Accesses != m.Accesses || r.Found != m.Found {
			t.Errorf(
				"%s: %d bytes, %d of %d uses found; recorded: %d bytes, %d of %d",
				name,
				r.Bytes,
				r.Found,
				r.Accesses,
				m.Bytes,
				m.Found,
				m.Accesses,
			)
		}
	}
}

// TestSettings: more memory moves less, a slower disk stalls for longer, and a small one is an error.
func TestSettings(t *testing.T) {
	tr := read(t, "scan")
	plain := run(t, tr, simulate.Setting{})
	if r := run(t, tr, simulate.Setting{Capacity: map[tier.Kind]int64{tier.GPU: 1 << 30}}); r.Bytes != 0 ||
		r.Found != r.Accesses ||
		r.Stalled != 0 {
		t.Errorf("with a large GPU: %+v", r)
	}
	if r := run(t, tr, simulate.Setting{Capacity: map[tier.Kind]int64{tier.Host: 1 << 30}}); r.Bytes == 0 ||
		r.Bytes >= plain.Bytes {
		t.Errorf("with much host memory %d bytes are moved, %d without", r.Bytes, plain.Bytes)
	}
	slow := run(t, tr, simulate.Setting{Bandwidth: map[simulate.Edge]float64{{From: disk, To: gpu}: 50 << 20}})
	for _, m := range slow.Moves {
		if want := time.Duration(float64(m.Bytes) / (50 << 20) * 1e9); m.From == disk &&
			(m.Busy < want-time.Millisecond || slow.Stalled < want) {
			t.Errorf("%d bytes from a disk of 50 MiB/s take %v and stall for %v", m.Bytes, m.Busy, slow.Stalled)
		}
	}
	small := simulate.Setting{Capacity: map[tier.Kind]int64{tier.Disk: 8 << 20}}
	if _, err := simulate.Run(t.Context(), tr, small); !errors.Is(err, simulate.ErrStuck) {
		t.Errorf("with a small disk: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := simulate.Run(ctx, tr, simulate.Setting{}); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
}

// TestNoSetting: settings that the recorded engine cannot have, and batches that never fit, are
// errors.
func TestNoSetting(t *testing.T) {
	tr := read(t, "scan")
	bare := *tr
	bare.Spaces = bare.Spaces[:1]
	own := *tr
	own.Policy = "a program's own"
	for _, test := range []struct {
		tr   *simulate.Trace
		s    simulate.Setting
		is   error
		want string
	}{
		{tr, simulate.Setting{Capacity: map[tier.Kind]int64{tier.Host: 1 << 19}}, simulate.ErrSetting,
			"host:0 of 524288 bytes has no room for the engine's own 2097152"},
		{&bare, simulate.Setting{Capacity: map[tier.Kind]int64{tier.Disk: 1 << 30}}, simulate.ErrSetting,
			"no disk space"},
		{tr, simulate.Setting{Bandwidth: map[simulate.Edge]float64{{From: disk, To: gpu1}: 1}}, simulate.ErrSetting,
			"gpu:1"},
		{tr, simulate.Setting{Bandwidth: map[simulate.Edge]float64{{From: gpu, To: gpu}: 1}}, simulate.ErrSetting,
			"gpu:0 to gpu:0"},
		{&own, simulate.Setting{}, simulate.ErrSetting, "a program's own"},
		{tr, simulate.Setting{Capacity: map[tier.Kind]int64{tier.GPU: 1 << 19}}, simulate.ErrStuck,
			"never fits in gpu:0"},
	} {
		if _, err := simulate.Run(t.Context(), test.tr, test.s); !errors.Is(err, test.is) ||
			!strings.Contains(err.Error(), test.want) {
			t.Errorf("%v, want %q", err, test.want)
		}
	}
}

// made returns a trace of puts and uses on a GPU of two batches, host memory of two, and a disk. The
// puts are a second apart, and so are the uses after them.
func made(t *testing.T, lines ...string) *simulate.Trace {
	t.Helper()
	header := `{"trace":"spillway.trace/2","policy":"lru","start":1000,"spaces":[` +
		`{"space":"gpu:0","capacity":200,"limit":200,"trigger":201,"stop":200},` +
		`{"space":"host:0","capacity":200,"limit":200,"trigger":201,"stop":200},` +
		`{"space":"disk:0","capacity":1000,"limit":1000,"trigger":1001,"stop":1000}]}`
	for i, line := range lines {
		lines[i] = fmt.Sprintf(`{"at":%d,%s}`, (i+1)*int(time.Second), line)
	}
	tr, err := simulate.Read(strings.NewReader(header + "\n" + strings.Join(lines, "\n") + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func put(id int) string {
	return fmt.Sprintf(`"kind":"batch put","batch":%d,"to":"gpu:0","bytes":100`, id)
}
func use(id int) string {
	return fmt.Sprintf(`"kind":"batch used","batch":%d,"to":"gpu:0","bytes":100`, id)
}
func drop(id int) string {
	return fmt.Sprintf(`"kind":"batch dropped","batch":%d,"to":"gpu:0"`, id)
}
func hint(id int, next int64) string {
	return fmt.Sprintf(`"kind":"batch hinted","batch":%d,"hint":%d`, id, next)
}

// TestSmallTraces: what a few puts and uses move, and how long they stall, at 100 bytes a second.
func TestSmallTraces(t *testing.T) {
	aware := monitor.CostAware().Name()
	for _, tt := range []struct {
		name    string
		policy  string
		lines   []string
		moves   string
		found   int64
		stalled time.Duration
	}{
		{"they fit", "", []string{put(1), put(2), use(1), use(2)}, "", 2, 0},
		{"one too many", "", []string{put(1), put(2), put(3), use(3)}, "gpu:0-host:0 100", 1, time.Second},
		{"the least recently used goes", "", []string{put(1), put(2), use(1), put(3), use(1)},
			"gpu:0-host:0 100", 2, time.Second},
		{"and comes back", "", []string{put(1), put(2), put(3), use(1)},
			"gpu:0-host:0 200, host:0-gpu:0 100", 0, 3 * time.Second},
		{"after its fetch it is found", "", []string{put(1), put(2), put(3), use(1), use(1)},
			"gpu:0-host:0 200, host:0-gpu:0 100", 1, 3 * time.Second},
		{"what waits for its fetch stays where it is", "", []string{put(1), put(2), put(3), put(4), use(1)},
			"gpu:0-host:0 300, host:0-gpu:0 100, host:0-disk:0 100", 0, 5 * time.Second},
		{"what was dropped leaves room", "", []string{put(1), put(2), drop(1), put(3), use(2)}, "", 1, 0},
		{"what was dropped is not used", "", []string{put(1), drop(1), use(1)}, "", 0, 0},
		{"a hint", aware, []string{put(1), put(2), use(1), use(2), use(1), hint(2, 1<<63-1), put(3), use(1)},
			"gpu:0-host:0 100", 4, time.Second},
		{"another", aware, []string{put(1), put(2), use(1), use(2), use(1), hint(1, 1<<63-1), put(3), use(2)},
			"gpu:0-host:0 100", 4, time.Second},
		{"a copy needs no move, without host memory", "", []string{put(1), put(2), put(3), use(1), use(2), use(3)},
			"gpu:0-disk:0 300 and 1 copies, disk:0-gpu:0 300", 0, 6 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tr := made(t, tt.lines...)
			if strings.Contains(tt.name, "without host memory") {
				tr.Spaces = slices.Delete(tr.Spaces, 1, 2)
			}
			speeds := make(map[simulate.Edge]float64)
			for _, from := range tr.Spaces {
				for _, to := range tr.Spaces {
					if from != to {
						speeds[simulate.Edge{From: from.ID, To: to.ID}] = 100
					}
				}
			}
			r := run(t, tr, simulate.Setting{Policy: tt.policy, Bandwidth: speeds})
			var moves []string
			for _, m := range r.Moves {
				text := fmt.Sprintf("%s-%s %d", m.From, m.To, m.Bytes)
				if m.Copies > 0 {
					text += fmt.Sprintf(" and %d copies", m.Copies)
				}
				moves = append(moves, text)
			}
			if got := strings.Join(moves, ", "); got != tt.moves || r.Found != tt.found || r.Stalled != tt.stalled {
				t.Errorf(
					"%s; %d found, stalled for %v; want %s; %d, %v",
					got,
					r.Found,
					r.Stalled,
					tt.moves,
					tt.found,
					tt.stalled,
				)
			}
		})
	}
}

// TestRead: text that is not a trace is an error, and a last line that is not whole is left out.
func TestRead(t *testing.T) {
	const header = `{"trace":"spillway.trace/2","policy":"lru","start":1}` + "\n"
	const late, early = `{"at":2,"kind":"batch put","batch":1}` + "\n", `{"at":1,"kind":"batch put","batch":2}` + "\n"
	for text, want := range map[string]string{
		"":                                  "empty",
		"a,b\n1,2\n":                        "the first line",
		`{"trace":"spillway.trace/3"}`:      "the first line",
		header + "what\n" + late:            "line 2",
		header + `{"at":1,"bytes":-1}`:      "below 0",
		header + strings.Repeat("x", 2<<20): "longer than",
	} {
		if _, err := simulate.Read(strings.NewReader(text)); !errors.Is(err, simulate.ErrFormat) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: %v, want %q", text, err, want)
		}
	}
	for n := range len(late) {
		tr, err := simulate.Read(strings.NewReader(header + late + early + late[:n]))
		whole := n == len(late)-1 // without the newline it can be read
		if err != nil || tr.CutOff != (n > 0 && !whole) || len(tr.Events) < 2 || tr.Events[0].Batch != 2 ||
			whole != (len(tr.Events) == 3) {
			t.Errorf("%d bytes of the last line: %+v, %v", n, tr, err)
		}
	}
}

// failing is a writer that fails after some writes.
type failing struct {
	strings.Builder
	left int
}

var errFull = errors.New("the disk is full")

func (f *failing) Write(p []byte) (int, error) {
	if f.left--; f.left < 0 {
		return 0, errFull
	}
	return f.Builder.Write(p)
}

// TestRecorder: each write has whole lines, and after one that fails there is none.
func TestRecorder(t *testing.T) {
	event := events.Event{
		Kind:   events.BatchHinted,
		At:     time.Now(),
		Batch:  7,
		Hint:   -5,
		Err:    errFull,
		Origin: events.Origin{Plan: "p", Operator: "o", Port: 1, Partition: 2, Task: "t", TaskID: 3},
	}
	for writes := range 5 {
		w := &failing{left: writes}
		r := simulate.NewRecorder(w)
		r.Event(event)
		if w.Len() > 0 {
			t.Error("an event was written before the header")
		}
		r.Begin("lru", nil)
		for range 1000 {
			r.Event(event)
		}
		err := r.Close()
		if writes < 4 && !errors.Is(err, errFull) || writes == 4 && err != nil {
			t.Errorf("%d writes: %v", writes, err)
		}
		if text := w.String(); text != "" && !strings.HasSuffix(text, "}\n") {
			t.Errorf("%d writes: the text ends with %q", writes, text[len(text)-20:])
		}
		if writes < 4 {
			continue
		}
		tr, err := simulate.Read(strings.NewReader(w.String()))
		if err != nil || len(tr.Events) != 1001 || tr.CutOff {
			t.Fatalf("%d events, %v", len(tr.Events), err)
		}
		e := tr.Events[0]
		e.At = 0
		want := simulate.Event{
			Kind: "batch hinted", Batch: 7, Hint: -5, Error: "the disk is full",
			Origin: simulate.Origin{Plan: "p", Operator: "o", Port: 1, Partition: 2, Task: "t", TaskID: 3},
		}
		if e != want {
			t.Errorf("%+v, want %+v", e, want)
		}
	}
	r := simulate.NewRecorder(&failing{})
	r.Event(event)
	if err := r.Close(); err != nil {
		t.Errorf("an engine that was not opened: %v", err)
	}
}

// FuzzRead: no text makes Read or Run panic.
func FuzzRead(f *testing.F) {
	f.Add(`{"trace":"spillway.trace/2","policy":"lru","spaces":[{"space":"gpu:0","capacity":10,"limit":10}]}` + "\n" +
		`{"at":1,"kind":"batch put","batch":1,"to":"gpu:0","bytes":5}` + "\n" +
		`{"at":2,"kind":"batch used","batch":1,"to":"gpu:0"}`)
	f.Fuzz(func(t *testing.T, text string) {
		if tr, err := simulate.Read(strings.NewReader(text)); err == nil {
			simulate.Measured(tr)
			_, _ = simulate.Run(t.Context(), tr, simulate.Setting{})
		}
	})
}

// BenchmarkRun is what an event costs.
func BenchmarkRun(b *testing.B) {
	tr := read(b, "scan")
	for b.Loop() {
		run(b, tr, simulate.Setting{})
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(tr.Events)), "ns/event")
}

// BenchmarkRecorder is what recording an event costs.
func BenchmarkRecorder(b *testing.B) {
	r := simulate.NewRecorder(io.Discard)
	r.Begin("lru", nil)
	e := events.Event{
		Kind:   events.MoveEnded,
		At:     time.Now(),
		Batch:  7,
		From:   gpu,
		To:     disk,
		Bytes:  1 << 20,
		Took:   time.Millisecond,
		Reason: "demand",
		Origin: events.Origin{Plan: "plan", Operator: "operator", Partition: 2},
	}
	for b.Loop() {
		r.Event(e)
	}
}
