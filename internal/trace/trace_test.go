package trace

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

var (
	gpu0   = tier.ID{Kind: tier.GPU}
	disk7  = tier.ID{Kind: tier.Disk, Ordinal: 7}
	header = Header{Policy: "lru", Period: time.Second, MovesPerEdge: 3, Spaces: []Space{{ID: gpu0, Node: -1, Capacity: 9, Limit: 8, Trigger: 7, Stop: 6, Held: 1}, {ID: disk7}}}
)

// samples has an event of each kind, with the largest values.
func samples() []Event {
	return []Event{
		{Kind: Put, Bytes: 1 << 40, To: []tier.ID{gpu0, disk7}},
		{Kind: Moved, Space: gpu0, Bytes: 5, Took: time.Hour},
		{Kind: End, OK: true},
		{Kind: State, Batch: 1 << 60, State: batch.TaskCreated, Pending: 1, Active: 2, Subscribers: 3, Space: disk7, Bytes: 4, Body: 5},
		{Kind: Place, Batch: 2, Place: batch.Place{Plan: 3, Rank: -4, Last: true, Seq: 1 << 50}},
		{Kind: Bring, Batch: 3, To: []tier.ID{disk7}},
		{Kind: End},
		{Kind: Open, Batch: 3, To: []tier.ID{gpu0}},
		{Kind: Consume, Batch: 3, To: []tier.ID{gpu0}},
		{Kind: Moved, Batch: 3, From: disk7, Space: gpu0, Bytes: 6, Took: 1, Reason: "work", Copy: true},
		{Kind: Looked, Took: 7},
		{Kind: Began, Took: 8, Others: 9},
		{Kind: Gone, Batch: 3},
	}
}

// record records events, a millisecond apart.
func record(t testing.TB, w io.Writer, events []Event) error {
	t.Helper()
	at := time.Duration(0)
	r := newRecorder(w, header, func() time.Duration { at += time.Millisecond; return at })
	for _, e := range events {
		r.append(e)
	}
	return r.Close()
}

// TestRoundTrip: what is recorded is read.
func TestRoundTrip(t *testing.T) {
	var file bytes.Buffer
	want := samples()
	if err := record(t, &file, want); err != nil {
		t.Fatal(err)
	}
	got, err := Read(&file)
	if err != nil || got.CutOff || got.Lost > 0 {
		t.Fatal(err, got)
	}
	for i := range want {
		want[i].At = time.Duration(i+1) * time.Millisecond
	}
	if !reflect.DeepEqual(got.Header, header) || !reflect.DeepEqual(got.Events, want) {
		t.Errorf("got\n%+v\n%+v, want\n%+v\n%+v", got.Header, got.Events, header, want)
	}
}

// TestCutOff: of a file that was cut off anywhere, what is before that is read. Where a byte is
// another one, at most the chunks before it are.
func TestCutOff(t *testing.T) {
	var file bytes.Buffer
	var events []Event
	for range 3 * chunkBytes / 50 {
		events = append(events, samples()...)
	}
	if err := record(t, &file, events); err != nil {
		t.Fatal(err)
	}
	whole, err := Read(bytes.NewReader(file.Bytes()))
	if err != nil || len(whole.Events) != len(events) {
		t.Fatal(err, len(whole.Events))
	}
	sizes := map[int]bool{}
	check := func(data []byte, what string) {
		got, err := Read(bytes.NewReader(data))
		if errors.Is(err, ErrFormat) {
			return
		}
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if !got.CutOff && len(got.Events) != len(events) && len(data) == file.Len() || !reflect.DeepEqual(got.Events, whole.Events[:len(got.Events):len(got.Events)]) && len(got.Events) > 0 {
			t.Fatalf("%s: %d events, cut off: %v", what, len(got.Events), got.CutOff)
		}
		sizes[len(got.Events)] = true
	}
	for n := 0; n < file.Len(); n += 1 + n/8 {
		check(file.Bytes()[:n], fmt.Sprintf("%d of %d bytes", n, file.Len()))
		damaged := bytes.Clone(file.Bytes())
		damaged[n] ^= 0x10
		if n > 300 { // in the header another number may be as good
			check(damaged, fmt.Sprintf("byte %d is damaged", n))
		}
	}
	if len(sizes) < 3 {
		t.Errorf("only %v events were read: the test shows too little", sizes)
	}
}

// slow is a writer that waits to be told to go on.
type slow chan struct{}

func (s slow) Write(p []byte) (int, error) {
	<-s
	return len(p), nil
}

// TestSlowWriter: events never wait for the writer. Those that it has no room for are counted.
func TestSlowWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var file bytes.Buffer
		gate := make(slow)
		r := NewRecorder(io.MultiWriter(gate, &file), header)
		const n = (chunksWaiting + 8) * chunkBytes / 8
		for i := range n {
			r.append(Event{Kind: Gone, Batch: batch.ID(1<<40 + i)})
		}
		close(gate)
		synctest.Wait()
		r.append(Event{Kind: Gone}) // a chunk that says what was lost
		time.Sleep(2 * chunkAge)
		r.append(Event{Kind: Gone})
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		got, err := Read(&file)
		if err != nil {
			t.Fatal(err)
		}
		if got.Lost == 0 || got.Lost+int64(len(got.Events)) != n+2 {
			t.Errorf("%d events were read and %d lost, of %d", len(got.Events), got.Lost, n+2)
		}
	})
}

// broken fails after some writes.
type broken struct {
	left   int
	panics bool
}

var errBroken = errors.New("the disk is full")

func (b *broken) Write(p []byte) (int, error) {
	if b.left--; b.left >= 0 {
		return len(p), nil
	}
	if b.panics {
		panic("the writer is broken")
	}
	return 0, errBroken
}

// TestBrokenWriter: Close says what the writer said, once.
func TestBrokenWriter(t *testing.T) {
	for left := range 6 {
		if err := record(t, &broken{left: left}, samples()); left < 5 && !errors.Is(err, errBroken) || left == 5 && err != nil {
			t.Errorf("after %d writes: %v", left, err)
		}
		if err := record(t, &broken{left: left, panics: true}, samples()); left < 5 && (err == nil || !strings.Contains(err.Error(), "the writer is broken")) {
			t.Errorf("after %d writes: %v", left, err)
		}
	}
	var none *Recorder
	none.State(batch.Info{})
	none.Begin(Put, 0, 0, nil)
	none.End(nil)
	if err := none.Close(); err != nil {
		t.Error(err)
	}
	r := NewRecorder(io.Discard, header)
	if err := errors.Join(r.Close()); err != nil {
		t.Error(err)
	}
	r.Gone(1)
	if err := r.Close(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("a second Close: %v", err)
	}
}

// TestPlaces: the place of a batch is recorded when it changes, and not while it is in transit.
func TestPlaces(t *testing.T) {
	var file bytes.Buffer
	r := NewRecorder(&file, header)
	info := batch.Info{ID: 5, Place: batch.Place{Plan: 1, Seq: 2}}
	r.State(info)
	r.State(info)
	info.State = batch.InTransit
	r.State(info)
	info.State, info.Place.Seq = batch.Idle, 3
	r.State(info)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := Read(&file)
	if err != nil {
		t.Fatal(err)
	}
	var kinds []Kind
	for _, e := range got.Events {
		kinds = append(kinds, e.Kind)
	}
	if want := []Kind{State, Place, State, State, Place}; !reflect.DeepEqual(kinds, want) {
		t.Errorf("%v was recorded, want %v", kinds, want)
	}
}

// TestOutOfOrder: of changes that come out of order the last one recorded is the newest.
func TestOutOfOrder(t *testing.T) {
	var file bytes.Buffer
	r := NewRecorder(&file, header)
	for _, v := range []uint64{1, 2, 5, 4, 3, 5, 7, 6} {
		r.State(batch.Info{ID: 5, Version: v, State: batch.Processing, Active: int(v)})
		r.State(batch.Info{ID: 6, Version: 9 - v, Active: int(v)})
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := Read(&file)
	if err != nil {
		t.Fatal(err)
	}
	seen := make(map[batch.ID][]int)
	for _, e := range got.Events {
		if e.Kind == State {
			seen[e.Batch] = append(seen[e.Batch], e.Active)
		}
	}
	if want := []int{1, 2, 5, 5, 7}; !reflect.DeepEqual(seen[5], want) || !reflect.DeepEqual(seen[6], []int{1}) {
		t.Errorf("%v was recorded, want %v and the first of the other", seen, want)
	}
}

// TestNoTrace: what is no trace is said as it is.
func TestNoTrace(t *testing.T) {
	for data, want := range map[string]string{
		"": `begins with "", want`, "spill": `begins with "spill", want`, "spillway trace 2\n{}": `begins with "spillway trace 2\n", want`, magic: "EOF", magic + "\x05{": "EOF",
	} {
		if _, err := Read(strings.NewReader(data)); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", data, err, want)
		}
	}
}

// FuzzRead: no bytes make Read panic or take all memory.
func FuzzRead(f *testing.F) {
	var file bytes.Buffer
	if err := record(f, &file, samples()); err != nil {
		f.Fatal(err)
	}
	f.Add(file.Bytes())
	f.Add(file.Bytes()[:file.Len()-3])
	f.Add([]byte(magic + "\x02{}\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if tr, err := Read(bytes.NewReader(data)); err == nil && len(tr.Events) > len(data) {
			t.Errorf("%d events of %d bytes", len(tr.Events), len(data))
		}
	})
}

// BenchmarkRecord is what an event costs who makes it.
func BenchmarkRecord(b *testing.B) {
	r := NewRecorder(io.Discard, header)
	info := batch.Info{ID: 5, State: batch.Processing, Active: 1, Space: gpu0, Bytes: 1 << 20, Place: batch.Place{Plan: 1, Seq: 2}}
	for b.Loop() {
		r.State(info)
	}
	if err := r.Close(); err != nil {
		b.Fatal(err)
	}
}
