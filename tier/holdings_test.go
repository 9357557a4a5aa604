package tier_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/tier"
)

// named is an owner.
type named string

func (n named) Name() string { return string(n) }

// owned reserves n bytes for an owner.
func owned(t testing.TB, s *tier.Space, n int64, owner any, moves bool) *books.Promise {
	t.Helper()
	p := &books.Promise{By: books.By{Owner: owner, Moves: moves}}
	if ok, _, _ := s.Books.Reserve(p, n, 0); !ok {
		t.Fatal("no room")
	}
	return p
}

// holdings checks that the parts are what is used, and returns them.
func holdings(t testing.TB, s *tier.Space, batches func(add func(tier.Holder, any, int64))) tier.Holdings {
	t.Helper()
	all := s.Holdings(batches)
	sum := all.Engine + all.Retired + all.Others
	for _, h := range slices.Concat(all.Holders, all.Batches) {
		sum += h.Bytes
	}
	if sum != all.Used || all.Used != s.State().Used() || all.Limit != s.State().Limit || all.Space != s.ID() {
		t.Errorf("the parts are %d bytes of %d: %+v", sum, s.State().Used(), all)
	}
	return all
}

// lacks reports which of the texts the holdings lack.
func lacks(t testing.TB, all tier.Holdings, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if !strings.Contains(all.String(), text) {
			t.Errorf("%q lacks %q", all, text)
		}
	}
}

// TestHoldersOfPromises: by owner, drawn or not; those of moves, and memory that was there before,
// apart.
func TestHoldersOfPromises(t *testing.T) {
	s := newSpace(t, 10_000, &fakePool{})
	me := owned(t, s, 1000, named("me"), false)
	second := owned(t, s, 200, named("me"), false)
	nobodys := owned(t, s, 30, nil, false)
	move := owned(t, s, 68, nil, true)
	moved, err := drawFrom(s, move, 64)
	ok(t, err)
	before, err := s.Occupy(8)
	ok(t, err)
	s.Hold(8)
	b, err := drawFrom(s, me, 512)
	ok(t, err)
	all := holdings(t, s, nil)
	want := []tier.Holder{
		{What: "reservation", Owner: "me", Bytes: 1200},
		{What: "reservation", Bytes: 30},
	}
	if !slices.Equal(all.Holders, want) || all.Others != 68 || all.Reserved != 730 || all.Engine != 8 {
		t.Errorf("got %+v, want %+v", all, want)
	}
	lacks(t, all, "7694 of 9000 bytes are available, 730 promised, 8 the engine's own",
		`reservations, owner "me": 1200 bytes`, "reservations: 30 bytes", "68 promised to moves")
	ok(t, s.Release(me))
	s.Hold(-8)
	ok(t, s.Release(before))
	want = []tier.Holder{
		{What: "buffer", Bytes: 512},
		{What: "reservation", Owner: "me", Bytes: 200},
		{What: "reservation", Bytes: 30},
	}
	if all = holdings(t, s, nil); !slices.Equal(all.Holders, want) {
		t.Errorf("with the reservation released: %+v, want %+v", all.Holders, want)
	}
	lacks(t, all, "buffers: 512 bytes")
	leaks := s.Leaks()
	var bytes []int64
	for _, l := range leaks {
		if bytes = append(bytes, l.Bytes); l.Promise != (l.Bytes != 512) || l.Space != s.ID() ||
			strings.Contains(l.Stack, "owned") != (invariantsBuild && l.Promise) {
			t.Errorf("%+v", l)
		}
	}
	if !slices.Equal(bytes, []int64{512, 200, 68, 30}) || leaks[1].Holders[0].String() != `reservation, owner "me"` {
		t.Errorf("%+v", leaks)
	}
	ok(t, b.Release())
	ok(t, moved.Release())
	for _, p := range []*books.Promise{second, nobodys, move} {
		ok(t, s.Release(p))
	}
	if leaks := s.Leaks(); len(leaks) != 0 {
		t.Errorf("%+v", leaks)
	}
	lacks(t, holdings(t, s, nil), "9000 of 9000 bytes are available, nothing is held")
}

// image is memory that shares dictionaries with others.
type image struct{ shared []*tier.Buffer }

func (m *image) EachShared(f func(*tier.Buffer)) {
	for _, b := range m.shared {
		f(b)
	}
}

// TestHoldersOfBuffers: memory counts once, with the oldest hold or else the first batch, and so does
// a dictionary that several share.
func TestHoldersOfBuffers(t *testing.T) {
	pool := &fakePool{keep: true}
	s := newSpace(t, 1<<20, pool)
	dict, retired := draw(t, s, 300), draw(t, s, 100)
	for range 4 {
		draw(t, s, 100)
	}
	s.Hold(draw(t, s, 1000).Charge())
	one, two := &image{[]*tier.Buffer{dict}}, &image{[]*tier.Buffer{dict}}
	var first, second, third books.Hold
	first.Begin(s.Books, books.HoldView{Kind: books.Handle, Memory: one, Bytes: 128, Owner: named("a")})
	second.Begin(s.Books, books.HoldView{Kind: books.Handle, Memory: one, Bytes: 128, Owner: named("a")})
	third.Begin(s.Books, books.HoldView{Kind: books.Record, Memory: one, Bytes: 128, Owner: named("b")})
	batches := func(add func(tier.Holder, any, int64)) {
		add(tier.Holder{What: "batch", Plan: "q", Operator: "op", Batch: 7}, two, 128)
		add(tier.Holder{What: "batch", Plan: "q", Operator: "op", Batch: 5}, new(int), 128)
	}
	ok(t, retired.Release())
	all := holdings(t, s, batches)
	want := []tier.Holder{
		{What: "handle", Owner: "a", Count: 2, Bytes: 128 + 320},
		{What: "buffer", Bytes: 128},
		{What: "record", Owner: "b", Count: 1},
	}
	wantBatches := []tier.Holder{{What: "batch", Plan: "q", Operator: "op", Count: 2, Bytes: 256, Batch: 7}}
	if !slices.Equal(all.Holders, want) || !slices.Equal(all.Batches, wantBatches) ||
		all.Retired != 128 || all.Engine != 1024 || all.Others != 0 {
		t.Errorf("got %+v", all)
	}
	lacks(t, all, "1024 the engine's own, 128 freed and not yet back", `2 handles, owner "a": 448 bytes`,
		`1 record, owner "b": 0 bytes`, `2 batches of plan "q", operator op:0 (batch 7 and others): 256 bytes`)
	s.Hold(-1024)
	var fourth books.Hold
	fourth.Begin(s.Books, books.HoldView{Kind: books.Handle, Memory: two, Bytes: 128, Owner: named("c")})
	leaks := s.Leaks()
	if len(leaks) != 3 || leaks[0].Bytes != 2*128+1024 || len(leaks[0].Holders) != 0 ||
		leaks[2].Bytes != 128 || len(leaks[2].Holders) != 1 ||
		leaks[1].Bytes != 448 || len(leaks[1].Holders) != 3 || leaks[1].Holders[2].Kind != books.Record ||
		leaks[1].Holders[2].Owner != "b" || leaks[1].Holders[0].Bytes != 448 {
		t.Errorf("the leaks are %+v", leaks)
	}
	for _, h := range []*books.Hold{&first, &second, &third, &fourth} {
		h.End()
	}
	if leaks = s.Leaks(); len(leaks) != 1 || leaks[0].Bytes != s.State().Live {
		t.Errorf("the leaks are %+v", leaks)
	}
}

// TestHoldersOfMemoryThatGoCannotCompare: a program's own payload of such a type counts like any other.
func TestHoldersOfMemoryThatGoCannotCompare(t *testing.T) {
	s := newSpace(t, 1<<20, &fakePool{})
	b := draw(t, s, 100)
	all := holdings(t, s, func(add func(tier.Holder, any, int64)) {
		add(tier.Holder{What: "batch"}, []int{1}, b.Charge())
	})
	if len(all.Batches) != 1 || all.Batches[0].Bytes != b.Charge() || all.Batches[0].Count != 1 {
		t.Errorf("%+v", all)
	}
	ok(t, b.Release())
}
