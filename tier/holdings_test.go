package tier_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/holds"
	"github.com/spillway-db/spillway/tier"
)

// named is an owner.
type named string

func (n named) Name() string { return string(n) }

// owned reserves n bytes for an owner.
func owned(t testing.TB, s *tier.Space, n int64, owner any, moves bool) *books.Promise {
	t.Helper()
	p, _ := s.Books().Promise(n, 0, owner, moves)
	if p == nil {
		t.Fatal("no room")
	}
	return p
}

// adds up checks that the parts are what is used, and returns them without the space's own numbers.
func holdings(t testing.TB, s *tier.Space, batches func(add func(tier.Holder, any, int64))) tier.Holdings {
	t.Helper()
	all := s.Holdings(batches)
	sum := all.Engine + all.Retired + all.Others
	for _, h := range slices.Concat(all.Holders, all.Batches) {
		sum += h.Bytes
	}
	if sum != all.Used || all.Used != s.Used() || all.Limit != s.Limit() || all.Space != s.ID() {
		t.Errorf("the parts are %d bytes of %d: %+v", sum, s.Used(), all)
	}
	return all
}

// TestHoldersOfPromises: by owner; the buffers of moves, and memory that was there before, apart.
func TestHoldersOfPromises(t *testing.T) {
	s := newSpace(t, 10_000, &fakePool{})
	me := owned(t, s, 1000, named("me"), false)
	owned(t, s, 200, named("me"), false)
	owned(t, s, 30, nil, false)
	move := owned(t, s, 68, nil, true)
	_, err := drawFrom(s, move, 64)
	ok(t, err)
	lent, err := s.Occupy(8)
	ok(t, err)
	b, err := drawFrom(s, me, 512)
	ok(t, err)
	all := holdings(t, s, nil)
	want := []tier.Holder{
		{What: "reservation", Owner: "me", Count: 2, Bytes: 688},
		{What: "buffer", Owner: "me", Count: 1, Bytes: 512},
		{What: "reservation", Count: 2, Bytes: 34},
	}
	if !slices.Equal(all.Holders, want) || all.Others != 72 || all.Reserved != 730 {
		t.Errorf("got %+v, want %+v", all, want)
	}
	for _, text := range []string{
		"7694 of 9000 bytes are available, 730 promised", `2 reservations, owner "me": 688 bytes`,
		`1 buffer, owner "me": 512 bytes`, "reservations without an owner: 34 bytes", "72 being moved or changing hands",
	} {
		if !strings.Contains(all.String(), text) {
			t.Errorf("%q lacks %q", all, text)
		}
	}
	ok(t, s.Release(me))
	ok(t, s.Release(lent))
	all = holdings(t, s, nil)
	if want := (tier.Holder{What: "buffer", Count: 1, Bytes: 512}); all.Holders[0] != want {
		t.Errorf("with the reservation released: %+v, want %+v", all.Holders[0], want)
	}
	leaks := s.PromiseLeaks()
	sum := int64(0)
	for _, l := range leaks {
		if sum += l.Bytes; !l.Promise || l.Space != s.ID() || strings.Contains(l.Stack, "owned") != invariantsBuild {
			t.Errorf("%+v", l)
		}
	}
	if sum != 234 || len(leaks) < 2 || len(leaks[0].Holders) != 1 || leaks[0].Holders[0].Owner != "me" {
		t.Errorf("%+v", leaks)
	}
	if n := len(s.Leaks()); n != 2 {
		t.Errorf("%d leaks of buffers", n)
	}
	ok(t, b.Release())
	if n := len(s.Leaks()); n != 1 {
		t.Errorf("%d leaks of buffers", n)
	}
}

// TestHoldersOfBuffers: a buffer counts once, with the first that claims it.
func TestHoldersOfBuffers(t *testing.T) {
	pool := &fakePool{keep: true}
	s := newSpace(t, 1<<20, pool)
	var bufs [5]*tier.Buffer
	for i := range bufs {
		bufs[i] = draw(t, s, 100)
	}
	staging := draw(t, s, 1000)
	s.HoldBuffer(staging)
	var first, second holds.Hold
	first.Begin(s.Holds(), holds.View{Kind: holds.Handle, Memory: several(bufs[:2]), Owner: named("a")})
	second.Begin(s.Holds(), holds.View{Kind: holds.Record, Memory: bufs[0], Owner: named("b")})
	defer first.End()
	defer second.End()
	batches := func(add func(tier.Holder, any, int64)) {
		add(tier.Holder{What: "batch", Plan: "q", Operator: "op", Batch: 7}, several(bufs[1:3]), 0)
		add(tier.Holder{What: "batch", Plan: "q", Operator: "op", Batch: 5}, bufs[2], 0)
	}
	ok(t, bufs[4].Release())
	all := holdings(t, s, batches)
	want := []tier.Holder{
		{What: "handle", Owner: "a", Count: 1, Bytes: 256},
		{What: "buffer", Count: 1, Bytes: 128},
		{What: "record", Owner: "b", Count: 1, Shared: 128},
	}
	wantBatches := []tier.Holder{
		{What: "batch", Plan: "q", Operator: "op", Count: 2, Bytes: 128, Shared: 128, Batch: 5},
	}
	if !slices.Equal(all.Holders, want) || !slices.Equal(all.Batches, wantBatches) ||
		all.Retired != 128 || all.Engine != 1024 || all.Others != 0 {
		t.Errorf("got %+v", all)
	}
	for _, text := range []string{
		"1024 the engine's own, 128 freed and not yet back", `1 handle, owner "a": 256 bytes`,
		`1 record, owner "b": 0 bytes, and 128 that others of these hold, too`,
		`2 batches of plan "q", operator op:0 (batch 5 and others): 128 bytes`,
	} {
		if !strings.Contains(all.String(), text) {
			t.Errorf("%q lacks %q", all, text)
		}
	}
	leaks := s.Leaks()
	if len(leaks) != 4 {
		t.Errorf("%+v", leaks)
	}
	held := 0
	for _, l := range leaks {
		held += len(l.Holders)
	}
	if held != 3 {
		t.Errorf("%d holders of leaks, want 3: %+v", held, leaks)
	}
	if d := s.Describe(&s.Holds().Append(nil)[0]); d.Kind != holds.Record || d.Owner != "b" {
		t.Errorf("the record is described as %+v", d)
	}
}

// several is memory that lists its buffers.
type several []*tier.Buffer

func (m several) Buffers() []*tier.Buffer { return m }

// TestHoldersOfOpaqueMemory: memory that does not list its buffers is counted once: it is taken to
// be in the buffers of its size that nobody claims, or in the largest, and best in those without an
// owner.
func TestHoldersOfOpaqueMemory(t *testing.T) {
	s := newSpace(t, 1<<20, &fakePool{})
	r := owned(t, s, 1024, named("me"), false)
	_, err := drawFrom(s, r, 256)
	ok(t, err)
	_, err = drawFrom(s, r, 512)
	ok(t, err)
	draw(t, s, 512)
	draw(t, s, 128)
	opaque := [3]int{}
	for _, c := range []struct {
		bytes []int64
		want  []tier.Holder
	}{
		{[]int64{512}, []tier.Holder{{Owner: "me", Count: 2, Bytes: 768}, {Count: 1, Bytes: 128}}},
		{[]int64{512, 256, 128}, []tier.Holder{{Owner: "me", Count: 1, Bytes: 512}}},
		{[]int64{640}, []tier.Holder{{Owner: "me", Count: 2, Bytes: 768}}},
		{[]int64{1024, 128}, []tier.Holder{{Owner: "me", Count: 1, Bytes: 256}}},
	} {
		all := holdings(t, s, func(add func(tier.Holder, any, int64)) {
			for i, n := range c.bytes {
				add(tier.Holder{What: "batch"}, &opaque[i], n)
				add(tier.Holder{What: "batch"}, &opaque[i], n) // the same once more
			}
		})
		got := slices.DeleteFunc(all.Holders, func(h tier.Holder) bool { return h.What != "buffer" })
		for i := range c.want {
			c.want[i].What = "buffer"
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%v bytes: the other buffers are %+v, want %+v", c.bytes, got, c.want)
		}
	}
}

// TestHoldersWhileBuffersAreFreed: other code frees buffers while Holdings counts.
func TestHoldersWhileBuffersAreFreed(t *testing.T) {
	const n = 3000
	s := newSpace(t, n<<10, &fakePool{})
	r := owned(t, s, n*64, named("me"), false)
	bufs := make([]*tier.Buffer, n)
	for i := range bufs {
		var err error
		bufs[i], err = drawFrom(s, r, 64)
		ok(t, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, b := range bufs[n/3:] {
			if err := b.Release(); err != nil {
				t.Error(err)
			}
		}
	}()
	for going := true; going; {
		select {
		case <-done:
			going = false
		default:
		}
		for _, h := range s.Holdings(nil).Holders {
			if h.What == "buffer" && (h.Bytes != int64(h.Count)*64 || h.Count < n/3) {
				t.Errorf("%+v", h)
			}
		}
	}
	if all := holdings(t, s, nil); len(all.Holders) != 2 || all.Holders[0].Bytes != n/3*2*64 || all.Others != 0 {
		t.Errorf("then %+v", all)
	}
}
